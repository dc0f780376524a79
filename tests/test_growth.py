"""Analyses take time that grows with a trace, whatever it repeats."""

import shutil

import pytest
from builders import many
from builders.fault_tools import in_time, run
from builders.growth import MOST, growth

COMMANDS = {
    "metrics": ("--full",),
    "kernels": (),
    "critical-path": (),
    "ingest": ("--output",),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder, after all commands have run once: the first call of a kernel takes longer."""
    folder = tmp_path_factory.mktemp("many")
    analyze(many.write(folder / "first", "names", 3), folder)
    return folder


def analyze(traces, folder):
    for command, options in COMMANDS.items():
        output = [folder / "store"] if command == "ingest" else []
        code, said = run(command, traces, *options, *output)
        assert code == 0, said
    shutil.rmtree(folder / "store")


# Each of these costs most by itself: fewer of them show as well how time grows.
COSTLY = ("groups", "steps")
SIZES = [(name, 1000 if name in COSTLY else 2000) for name in many.REPEATED]


@pytest.mark.parametrize(
    ("name", "size"),
    [*SIZES, *(pytest.param(name, 2000, marks=pytest.mark.soak) for name in COSTLY)],
)
def test_time_grows_with_what_a_trace_repeats(place, name, size):
    def traces(count):
        return many.write(place / f"{name}-{count}", name, count)

    with in_time(120):
        assert growth(lambda path: analyze(path, place), traces, size, times=1) < MOST
