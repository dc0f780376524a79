"""Runs of which a quantity is zero or absent are measured, or refused with a clear error."""

import json
import re

import pytest
from builders import zero_runs
from builders.fault_tools import run
from builders.zero_runs import ABSENT, QUANTITIES, ZERO
from hypothesis import example, given
from hypothesis import strategies as st

COMMANDS = [
    ("metrics", "--json", "--link-bandwidth", "400Gbit/s"),
    ("metrics", "--full"),
    ("report", "--html"),
    ("kernels", "--json"),
    ("kernels", "--by", "operator"),
    ("critical-path", "--json"),
    ("critical-path",),
    ("what-if", "--scale", "comm=0.5", "--remove", "gaps", "--json"),
    ("what-if", "--scale", "compute=0", "--remove", "launches"),
    ("what-if", "--json"),
]
# What Python writes for a number that is not finite.
NOT_FINITE = re.compile(r"(?<![\w.])-?(nan|NaN|inf|Infinity)(?![\w.-])")
PROGRAM = re.compile("<script>.*?</script>", re.DOTALL)  # of a page


def usual(**other):
    plan = {"ranks": 4, "steps": 3, "operations": {"DP"}, "slow": -1, "faults": {}}
    return {**plan, **other}


def check(folder, plan, commands=COMMANDS):
    """Run commands on a plan; each prints finite numbers, or an error of one line."""
    for path in folder.iterdir():
        path.unlink()
    zero_runs.write(plan, folder)
    for name, *options in commands:
        page = folder.parent / "page.html"
        more = [page] if name == "report" else []
        code, said = run(name, folder, *options, *more)
        text = page.read_text() if name == "report" and code == 0 else said
        if code:
            assert said.count("Error: ") == 1, said
        elif "--json" in options:
            json.loads(said[said.index("{") : said.rindex("}") + 1], parse_constant=pytest.fail)
        else:
            assert not NOT_FINITE.search(PROGRAM.sub("", text))
        yield name, code, said


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero") / "run"
    folder.mkdir()
    return folder


@given(plan=zero_runs.runs(), commands=st.permutations(COMMANDS).map(lambda some: some[:3]))
@example(
    plan=usual(faults={"steps": (ABSENT, {0}), "compute": (ABSENT, {1, 2, 3})}),
    commands=COMMANDS,
)
@example(
    plan=usual(
        operations={"DP", "EP"},
        faults={"communication": (ABSENT, {1, 2, 3}), "compute": (ABSENT, {1, 2, 3})}
        | {"steps": (ABSENT, {0}), "operators": (ABSENT, {0, 2, 3})},
    ),
    commands=COMMANDS,
)
def test_a_quantity_that_is_zero_or_absent_gives_finite_numbers_or_an_error(
    traces, plan, commands
):
    for _ in check(traces, plan, commands):
        pass


@pytest.mark.parametrize("kind", [ZERO, ABSENT])
@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("ranks", [{0}, {1, 2}, {0, 1, 2}], ids=["one", "others", "all"])
def test_each_quantity_may_be_zero_or_absent_on_one_rank_or_all(traces, quantity, kind, ranks):
    # Groups of experts have two ranks and one.
    plan = usual(ranks=3, steps=2, faults={quantity: (kind, ranks)}, operations={"DP", "EP"})
    commands = [COMMANDS[1], ("critical-path", "--json")]
    codes = {name: code for name, code, _ in check(traces, plan, commands)}
    if quantity not in ("steps", "clock", "communication"):
        assert codes["metrics"] == 0


def test_a_rank_that_computes_alone_is_named_without_a_ratio_to_its_peers(traces):
    plan = usual(faults={"compute": (ABSENT, {1, 2, 3})})
    said = {name: said for name, _, said in check(traces, plan, COMMANDS[1:2])}
    assert "Rank 0 is a straggler: its peers compute nothing, +300 us" in said["metrics"]
