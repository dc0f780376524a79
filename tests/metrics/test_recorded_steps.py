"""Test runs whose ranks recorded different steps, on clocks apart, with other numbers."""

import gzip
import json

import pytest
from builders.commands import invoke
from builders.shared_data import needs, path_of

CASE = path_of("cases") / "03-ranks-recorded-in-different-steps" / "run"
pytestmark = needs("cases")
STEP = "ProfilerStep#"
GROUP = ("Process Group Name", "Process Group Description", "Process Group Ranks", "Group size")


def events(rank):
    data = json.loads(gzip.decompress((CASE / f"rank{rank}.json.gz").read_bytes()))
    return data, data["traceEvents"]


def renumbered(rows, by):
    for row in rows:
        if (name := row.get("name", "")).startswith(STEP):
            row["name"] = f"{STEP}{int(name.removeprefix(STEP)) + by}"


def communication(rows):
    return [row for row in rows if row.get("cat") == "kernel" and "nccl" in row["name"]]


def numbered(rows, first):
    """Number the collectives, by their order, from `first` on."""
    for place, row in enumerate(sorted(communication(rows), key=lambda row: row["ts"])):
        row["args"]["Seq"] = first + place


def without_group(rows):
    for row in communication(rows):
        for key in GROUP:
            row["args"].pop(key, None)


def written(folder, marks=0, clock=0, seq=None, groups=True):
    """Write both ranks; of rank 1, marks and clock are ahead, by steps and ns.

    `seq` has the numbers of the first collective of either rank.
    """
    for rank in (0, 1):
        data, rows = events(rank)
        if rank:
            renumbered(rows, marks)
            data["baseTimeNanoseconds"] += clock
        if seq is not None:
            numbered(rows, seq[rank])
        if not groups:
            without_group(rows)
            data["distributedInfo"].pop("pg_config", None)
        (folder / f"rank{rank}.json").write_text(json.dumps(data))
    return folder


def measured(folder):
    data = json.loads(invoke("metrics", folder, "--json").stdout)
    skew = [row for row in data["skew"] if row["op"] == "AllReduce"]
    return data, skew


def is_right(row, offset, clock):
    """Whether a row of skew and the offset of rank 1 are those of the job."""
    return (
        row["count"] == 80
        and row["skew_mean_ns"] == pytest.approx(75_000, rel=0.03)
        and row["transfer_mean_ns"] == pytest.approx(100_000, rel=0.03)
        and offset == pytest.approx(clock, abs=5_000)
    )


def check(folder, clock, *, is_known):
    """The run is measured right, or, if it need not be known, not at all, with a reason."""
    data, skew = measured(folder)
    offset = data["clocks"]["offsets"][1]["offset_ns"]
    if skew or is_known:
        assert is_right(skew[0], offset, clock), (skew, offset)
    else:
        assert offset is None
        assert data["matching"]["note"]


CLOCKS = [0, 40_000_000, -10_000_000, 7_300_000, 10**9, -(10**12)]


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("marks", [0, -1, -2, 1, 3, -12])
def test_marks_and_clocks_do_not_join_different_steps(tmp_path, marks, clock, groups):
    folder = written(tmp_path, marks, clock, groups=groups)
    check(folder, clock, is_known=groups and (marks == 0 or (clock == 0 and marks != -12)))


# Of both ranks, the first collective is the first of step 10, and of step 12.
RIGHT, ANEW = (200, 240), (0, 0)


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("marks", [0, -2, 1])
def test_right_sequence_numbers_decide_whatever_marks_and_clocks_say(tmp_path, marks, clock):
    check(written(tmp_path, marks, clock, RIGHT), clock, is_known=True)


@pytest.mark.parametrize("seq", [ANEW, (0, 20), (7, 0)])
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("marks", [0, -2, 1])
def test_sequence_numbers_that_ends_contradict_join_nothing_wrong(tmp_path, marks, clock, seq):
    check(written(tmp_path, marks, clock, seq), clock, is_known=False)
