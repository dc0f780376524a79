"""Test the scanner of uniform traces against a JSON library."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.compat.dpro import rules, trial, uniform
from fastcomm.compat.dpro.statistics import statistics
from fastcomm.errors import TraceFileError

NAMES = ("FW.a", "BW.a.b.c", "Comm.0+1.SEND", "UPDATE_0", "I/O", 'FW.é"\\x', "END")


@st.composite
def rows(draw):
    name = draw(st.sampled_from(NAMES))
    args = {"name": name + draw(st.sampled_from(("", "~>0_1_2_3", "~>a::b::1")))}
    if draw(st.booleans()):
        args = {}
    if draw(st.booleans()):
        args["step"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        args |= dict(
            zip(("loopId", "channelId", "chunkId", "sliceId"), (1, 0, 2, 1), strict=True)
        )
    if draw(st.booleans()):
        args["input0"] = "FW.before"
    return {
        "name": name,
        "ph": "X",
        "ts": draw(st.integers(-5, 50) | st.decimals(0, 9, places=3).map(float)),
        "dur": draw(st.integers(0, 9)),
        "pid": draw(st.sampled_from(("host0.rank0", "host1.rank0", 7))),
        "tid": draw(st.sampled_from(("operator0", "Comm", 3))),
        "cat": draw(st.sampled_from(("operator", "Comm", "debug"))),
        "args": args,
    }


def assert_same(found, wanted):
    for name in ("keys", "names", "key_pid", "pids"):
        assert getattr(found, name) == getattr(wanted, name)
    for name in ("key", "start", "dur", "step", "cnt", "counts"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist()
    lanes = [[each.lanes[k] for k in each.lane.tolist()] for each in (found, wanted)]
    assert lanes[0] == lanes[1]


@given(st.lists(rows(), min_size=1, max_size=8), st.booleans())
def test_the_scanner_and_the_json_library_agree(tmp_path_factory, events, bare):
    path = tmp_path_factory.mktemp("uniform") / "all.json"
    path.write_text(json.dumps(events if bare else {"traceEvents": events, "all_prefix": []}))
    assert_same(uniform.scan(path), uniform.read(path))


@pytest.mark.parametrize(
    "odd", [{"ph": "i"}, {"ph": "M"}, {"dur": None}, {"ph": None}], ids=str
)
def test_other_event_types_are_read_by_the_slow_reader_equally(tmp_path, odd):
    event = {"name": "FW.a", "ph": "X", "ts": 1, "dur": 2, "pid": "p", "tid": "t", "args": {}}
    other = {key: value for key, value in (event | odd).items() if value is not None}
    path = tmp_path / "all.json"
    path.write_text(json.dumps([event, other]))
    assert_same(uniform.scan(path), uniform.read(path))


def test_an_event_without_a_process_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "all.json"
    path.write_text('[{"name": "FW.a", "ph": "X", "ts": 1, "dur": 2}]')
    with pytest.raises(TraceFileError, match="event 0"):
        uniform.scan(path)
    path.write_text("no trace")
    with pytest.raises(TraceFileError, match=r"all\.json"):
        trial.read_input(path, whole=False)


def test_statistics_do_not_depend_on_the_reader(tmp_path):
    event = {"name": "FW.a", "ph": "X", "ts": 1, "dur": 2, "pid": "p", "tid": "t", "args": {}}
    path = tmp_path / "all.json"
    path.write_text(json.dumps([at(event, k) for k in range(50)]))
    found, wanted = (statistics(read(path)) for read in (uniform.scan, uniform.read))
    assert rules.operations(found) == rules.operations(wanted)


def at(event, k):
    return event | {"name": f"FW.{k % 3}", "ts": k * 10, "dur": k}
