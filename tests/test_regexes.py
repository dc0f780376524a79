"""Regular expressions take time that grows with the names, whoever wrote either."""

import re

import pyarrow as pa
import pytest
from builders import kineto_text as k
from builders.fault_tools import in_time, refused, run
from builders.growth import MOST, growth
from hypothesis import given
from hypothesis import strategies as st

from fastcomm import regexes
from fastcomm.errors import ConfigError

NAMES = st.text("ab_1 :#\n", max_size=12)
PLAIN = [
    "a",
    "^a",
    "b$",
    r"(\d+)",
    r"a(b)?",
    "(?i)A+",
    "a|(b_)",
    r"#(\w*)",
    "",
    r"(a*)(b)",
    "(?P<n>1)",
]
BEYOND = [r"a(?!b)", r"(?<=a)(b)", r"(a)\1", "a{,2}b"]
# Expressions whose time in Python grows exponentially.
ENDLESS = ["(a+)+$", "(a|a)*b$", "(a|aa)+$", r"^(\w+_?)*$"]


@given(names=st.lists(NAMES), regex=st.sampled_from(PLAIN + BEYOND))
def test_users_expressions_match_as_python_does(names, regex):
    # Python's $ matches before a line break at the end, too, and RE2's does not.
    names = sorted({name.rstrip("\n") for name in names})
    found = {name: re.search(regex, name) for name in names}
    flags = regexes.matches(pa.array(names, pa.string()), regex).to_pylist()
    assert flags == [found[name] is not None for name in names]
    assert flags == [regexes.is_match(regex, name) for name in names]
    groups = {
        name: (match[1] or None) if match.re.groups else None
        for name, match in found.items()
        if match
    }
    measured = regexes.first_groups(regex, names)
    assert {name: group or None for name, group in measured.items()} == groups


@pytest.mark.parametrize("regex", ENDLESS)
def test_endless_expressions_take_time_that_grows_with_the_name(regex):
    def names(count):
        return pa.array(["a" * count + "!"])

    with in_time(20):
        assert growth(lambda array: regexes.matches(array, regex), names, 100_000) < MOST
        assert regexes.first_groups(regex, ["a" * 5000 + "!"]) == {}


@pytest.mark.parametrize("regex", BEYOND)
def test_a_file_has_no_expression_beyond_re2(tmp_path, regex):
    with pytest.raises(ConfigError, match="RE2"):
        regexes.check_of_file("here", regex)
    trace = k.write(tmp_path / "rank0.json", [k.kernel("gemm", 5, 30), k.all_reduce(20, 40)])
    for text in (
        f"[[kernels]]\npattern = '{regex}'\nop = 'AllReduce'\n",
        f"[iterations]\nregex = '{regex}'\n",
    ):
        (tmp_path / "config.toml").write_text(text)
        said = refused("metrics", trace, "--config", tmp_path / "config.toml")
        assert "a file may have only regular expressions that RE2 knows" in said
    (tmp_path / "edits.toml").write_text(f"remove = ['kernel:/{regex}/']\n")
    assert "RE2" in refused("what-if", trace, "--edits", tmp_path / "edits.toml")


def test_expressions_of_a_file_are_used(tmp_path):
    events = [k.mark("step 5 of 9", 0, 100), k.kernel("my_sum", 5, 30), k.kernel("gemm", 40, 9)]
    trace = k.write(tmp_path / "rank0.json", events)
    (tmp_path / "config.toml").write_text(
        "[[kernels]]\npattern = '^my_(sum)'\nop = 'AllReduce'\n"
        "[iterations]\nregex = 'step (.)'\n"
    )
    code, said = run("critical-path", trace, "--config", tmp_path / "config.toml", "--step", 5)
    assert code == 0, said
    said = run("metrics", trace, "--config", tmp_path / "config.toml")[1]
    assert "1 of 1 communication events have no known size" in said


# Names that match the beginning of fastcomm's patterns over and over.
WORDS = [
    *("mscclpp::", "kuserbuffers_", "deep_ep::", "1dispatchKernelI", "Memcpy", "data_loader"),
    *("cutlass::device_kernel<", "nn.Module: a_1", "dp_shard_", "("),
]


def events(word, count):
    """Events of every kind whose names are one word again and again."""
    name = word * (count // len(word))
    yield k.mark("ProfilerStep#3", 0, 100)
    yield k.mark(name, 1, 90)
    yield k.event(name, "python_function", 1, 80, pid=100, tid=1)
    yield k.event(name, "cpu_op", 1, 4, pid=100, tid=1)
    yield k.event(name, "cuda_runtime", 2, 2, pid=100, tid=1, correlation=9)
    yield k.kernel(name, 5, 30, correlation=9)
    yield k.kernel(f"^_Z{name}", 40, 3, correlation=9)
    yield k.all_reduce(45, 40, Process_Group_Description=name, Collective_name=name)


@pytest.mark.parametrize("word", WORDS)
def test_time_grows_with_the_length_of_names_of_any_kind(folder, word):
    def trace(count):
        return k.write(folder / "rank0.json", list(events(word, count)))

    def measure(path):
        for command in ("metrics", "kernels", "critical-path"):
            run(command, path)

    with in_time(60):
        assert growth(measure, trace, 20_000) < MOST
