"""Test the reader of flight-recorder dumps: it reads what they need, and executes nothing."""

import gzip
import json
import pickle
import pickletools
import struct
from contextlib import suppress

import numpy as np
import pytest
from builders.shared_data import needs, path_of
from hypothesis import example, given
from hypothesis import strategies as st

from fastcomm.errors import TraceFileError
from fastcomm.formats.flight_recorder import NoDumpError, arguments, frames, rank_of, read
from fastcomm_kernels.arrays import NULL

CALL = {
    "record_id": 0,
    "pg_id": 0,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 1,
    "p2p_seq_id": 0,
    "op_id": 1,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1_700_000_000_000_000_000,
    "time_discovered_started_ns": None,
    "time_discovered_completed_ns": None,
    "input_sizes": [[4, 8], [2]],
    "output_sizes": [[34]],
    "input_dtypes": ["Float", "Half"],
    "output_dtypes": ["Float"],
    "state": "scheduled",
    "retired": False,
    "is_p2p": False,
    "timeout_ms": 600_000,
    "frames": [{"name": "step", "filename": "train.py", "line": 7}],
}
GROUP = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}


def dump(*calls, **more):
    return {"version": "2.10", "pg_config": {"0": GROUP}, "entries": [*calls], **more}


def written(folder, content, name="rank_3"):
    path = folder / name
    path.write_bytes(content)
    return path


def test_stacks_are_those_of_their_own_dump_after_others_were_read(tmp_path):
    paths = [
        written(
            tmp_path,
            pickle.dumps(dump({**CALL, "frames": [{**CALL["frames"][0], "line": line}]}), 2),
            f"rank_{line}",
        )
        for line in range(3)
    ]
    dumps = [read(path) for path in paths]
    assert [frames(each.path, 0) for each in dumps] == [
        [f"step (train.py:{at})"] for at in range(3)
    ]
    assert frames(dumps[1].path, 0) == ["step (train.py:1)"]


def test_a_pickle_is_read_as_it_was_written(tmp_path):
    second = {**CALL, "record_id": 1, "collective_seq_id": 2, "state": "completed"}
    got = read(written(tmp_path, pickle.dumps(dump(CALL, second), 2)))
    assert (got.rank, got.version, got.config[0].ranks) == (3, "2.10", (0, 1))
    assert got.calls.record.tolist() == [0, 1]
    assert got.calls.sequence.tolist() == [1, 2]
    assert got.calls.state.tolist() == [0, 2]
    assert got.calls.started.tolist() == [NULL, NULL]
    assert arguments(got.path, 0) == ([[4, 8], [2]], [[34]], ["Float", "Half"], ["Float"])
    assert [column.tolist() for column in got.calls.elements] == [[34, 34], [34, 34]]
    assert frames(got.path, 1) == ["step (train.py:7)"]


def test_items_that_are_appended_one_by_one_are_those_of_one_list(tmp_path):
    content = pickletools.optimize(pickle.dumps(dump(CALL), 2))
    grown = content.replace(b"](K\x04K\x08e", b"]K\x04aK\x08a")
    assert grown != content
    one, two = (
        read(written(tmp_path, text, f"rank_{rank}"))
        for rank, text in enumerate((content, grown))
    )
    assert arguments(two.path, 0) == arguments(one.path, 0)
    assert two.calls.shapes[0].tolist() == one.calls.shapes[0].tolist()


def test_more_calls_and_texts_than_one_piece_of_a_pickle_has_are_read(tmp_path):
    names = [f"nccl:operation_{at}" for at in range(300)]
    many = [{**CALL, "record_id": at, "profiling_name": names[at % 300]} for at in range(2500)]
    got = read(written(tmp_path, pickle.dumps(dump(*many), 2)))
    assert got.calls.record.tolist() == list(range(2500))
    assert [got.calls.names[at] for at in got.calls.name] == [
        names[at % 300] for at in range(2500)
    ]


def test_long_lists_of_ranks_are_those_of_their_own_dump(tmp_path):
    for size in (2000, *range(2000, 2070), 2000):
        group = {**GROUP, "ranks": str([*range(size)])}
        path = written(tmp_path, pickle.dumps(dump(CALL, pg_config={"0": group}), 2))
        assert len(read(path).config[0].ranks) == size


def test_a_call_whose_items_lie_apart_is_the_same_call(tmp_path):
    content = pickletools.optimize(pickle.dumps(dump(CALL, CALL), 2))
    key = b"X\x0b\x00\x00\x00input_sizes"
    apart = content.replace(key, b"u(" + key).replace(
        b"X\x05\x00\x00\x00state", b"u(X\x05\x00\x00\x00state"
    )
    one, two = (
        read(written(tmp_path, text, f"rank_{rank}"))
        for rank, text in enumerate((content, apart))
    )
    assert len(apart) > len(content)
    assert np.array_equal(one.calls.columns, two.calls.columns)
    assert arguments(one.path, 0) == arguments(two.path, 0)


NAMES = st.sampled_from(["nccl:all_reduce", "gloo:barrier", "nccl:send 0->1"])
SHAPES = st.lists(st.lists(st.integers(0, 1 << 40), max_size=3), max_size=3)


@st.composite
def calls(draw):
    return {
        **CALL,
        "record_id": draw(st.integers(0, 1 << 62)),
        "profiling_name": draw(NAMES),
        "input_sizes": draw(SHAPES),
        "output_sizes": draw(SHAPES),
        "input_dtypes": draw(st.lists(st.text(max_size=20), max_size=2)),
        "retired": draw(st.booleans()),
        "time_created_ns": draw(st.integers(1, 1 << 60)),
    }


SUM_OF_2_63 = [[641_777_480], [1_039_561_624, 8_872_366_797]]


@given(st.lists(calls(), max_size=6), st.sampled_from([2, 4]))
@example([{**CALL, "output_sizes": SUM_OF_2_63}], 2)
def test_pickle_and_json_have_the_same_columns(tmp_path_factory, made, protocol):
    folder = tmp_path_factory.mktemp("dumps")
    one = read(written(folder, pickle.dumps(dump(*made), protocol), "rank_0"))
    two = read(written(folder, json.dumps(dump(*made)).encode(), "rank_1.json"))
    for name in ("record", "sequence", "retired", "created", "state", "is_message"):
        assert np.array_equal(getattr(one.calls, name), getattr(two.calls, name)), name
    for name in ("shapes", "types", "elements"):
        pairs = zip(getattr(one.calls, name), getattr(two.calls, name), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs), name
    for row, call in enumerate(made):
        assert one.calls.names[one.calls.name[row]] == call["profiling_name"]
        assert arguments(one.path, row) == arguments(two.path, row)


@needs("hangs")
def test_real_pickles_are_what_python_makes_of_them():
    for path in sorted(path_of("hangs").glob("*/rank_0.pickle.gz")):
        theirs = pickle.loads(gzip.decompress(path.read_bytes()))
        ours = read(path)
        assert ours.calls.record.tolist() == [one["record_id"] for one in theirs["entries"]]
        for row, one in enumerate(theirs["entries"]):
            assert arguments(path, row)[0] == one["input_sizes"]
            assert len(frames(path, row)) == min(40, len(one["frames"]))


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_something_is_refused_with_its_byte(tmp_path, capsys, protocol):
    content = pickle.dumps(dump(CALL, entries_=Harmful()), protocol)
    with pytest.raises(
        TraceFileError, match=r"rank_3: (refused as a pickle: byte \d+|neither)"
    ):
        read(written(tmp_path, content))
    assert "executed" not in capsys.readouterr().out


HOSTILE = {
    "a length beyond the text": b"\x80\x02}X" + struct.pack("<I", 0xFFFFFFFF),
    "a number of 255 bytes": b"\x80\x02}(\x8a\xff" + b"\xff" * 255 + b"Nu.",
    "a memo that is never stored": b"\x80\x02}(h\x05Nu.",
    "a memo far ahead": b"\x80\x02}r\xff\xff\xff\x7f.",
    "items without a mark": b"\x80\x02}NNu.",
    "an append to nothing": b"\x80\x02Na.",
    "nothing but a stop": b"\x80\x02.",
    "an append to a dictionary": b"\x80\x02}Na.",
    "a tuple and a list of nothing": b"\x80\x02(t(la.",
    "a thousand marks": b"\x80\x02" + b"(" * 1000 + b".",
    "a dictionary of a key alone": b"\x80\x02(X\x01\x00\x00\x00ad.",
    "a call that is a number": b"\x80\x02}X\x07\x00\x00\x00entries](K\x01K\x02es.",
    "calls without an end": b"\x80\x02}X\x07\x00\x00\x00entries]q\x00(}q\x01("
    + b"NN" * 9
    + b"u"
    + b"h\x01" * 900
    + b"es.",
    "a tuple of nothing": b"\x80\x02\x85.",
    "a list of itself": b"\x80\x02]q\x00h\x00a.",
    "a dictionary of itself": b"\x80\x02}q\x00X\x07\x00\x00\x00entriesh\x00s.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(tmp_path, name):
    with pytest.raises(TraceFileError):
        read(written(tmp_path, HOSTILE[name]))


def test_a_dump_that_is_cut_gives_the_calls_that_are_whole(tmp_path):
    many = [{**CALL, "record_id": at} for at in range(20)]
    content = pickle.dumps({"entries": many}, 2)
    counts = set()
    for size in range(40, len(content) - 1, 97):
        try:
            got = read(written(tmp_path, content[:size]))
        except TraceFileError as error:
            assert "truncated" in str(error)  # noqa: PT017 - which sizes are too few is open
            continue
        assert got.calls.record.tolist() == list(range(len(got.calls)))
        assert "truncated" in got.problems[0]
        counts.add(len(got.calls))
    assert {1, 19} <= counts


@given(st.data())
def test_changed_bytes_give_a_dump_or_an_error(tmp_path_factory, data):
    content = bytearray(pickle.dumps(dump(CALL, {**CALL, "record_id": 1}), 2))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = written(tmp_path_factory.mktemp("changed"), bytes(content))
    with suppress(TraceFileError):
        read(path)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_12", 12),
        ("rank_7.pickle.gz", 7),
        ("_dump_0.json", 0),
        ("rank_host-3", 3),
        ("notes.txt", None),
    ],
)
def test_the_rank_is_the_last_number_of_the_name(tmp_path, name, rank):
    assert rank_of(tmp_path / name) == rank


def test_the_list_of_the_first_release_is_read(tmp_path):
    call = {
        key: CALL[key] for key in ("pg_id", "profiling_name", "input_sizes", "state", "retired")
    }
    old = [{**call, "seq_id": at + 1, "time_created_us": 5_000_000 + at} for at in range(3)]
    got = read(written(tmp_path, pickle.dumps(old, 2)))
    assert got.calls.sequence.tolist() == [1, 2, 3]
    assert got.calls.created.tolist() == [5_000_000_000, 5_000_001_000, 5_000_002_000]
    assert got.groups[0].name == "0"


def test_values_of_other_forms_are_no_arguments(tmp_path):
    odd = {
        **CALL,
        "duration_ms": 1.5,
        "pg_id": 0,
        "input_sizes": ((1, 2), "text"),
        "output_sizes": 7,
        "input_dtypes": [1],
        "op_id": -(1 << 40),
        "unknown": (1, 2, 3),
        5: "no text as a key",
    }
    got = read(written(tmp_path, pickle.dumps(dump(odd), 2)))
    assert got.calls.elements[0].tolist() == [2]
    assert got.calls.elements[1].tolist() == [NULL]


@pytest.mark.parametrize("size", range(2, 12))
def test_a_dump_that_is_cut_before_its_calls_is_an_error(tmp_path, size):
    with pytest.raises(TraceFileError, match="rank_3: truncated"):
        read(written(tmp_path, b"\x80\x02(K\x01(K\x02(K\x03"[:size]))


UNREADABLE = {
    "an empty file": (b"", "an empty file"),
    "blanks": (b"\n \n", "an empty file"),
    "zeros": (b"\0" * 64, "an empty file"),
    "bytes": (b"abc\0\x01", "neither a pickle nor JSON"),
    "a cut document": (json.dumps(dump(CALL)).encode()[:200], "truncated or damaged JSON"),
    "an empty package": (gzip.compress(b""), "an empty file"),
    "a cut package": (gzip.compress(pickle.dumps(dump(CALL), 2))[:60], "truncated"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_may_be_a_dump_and_cannot_be_read_is_an_error(tmp_path, name):
    content, message = UNREADABLE[name]
    with pytest.raises(TraceFileError, match=message) as error:
        read(written(tmp_path, content))
    assert not isinstance(error.value, NoDumpError)


@pytest.mark.parametrize(
    "content", [b'{"step": 1}\n{"step": 2}\n', b"loss 3.5\n", b'{"traceEvents": [{"ph'], ids=str
)
def test_logs_and_traces_with_a_rank_in_the_name_are_no_dumps(tmp_path, content):
    with pytest.raises(NoDumpError):
        read(written(tmp_path, content))


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(TraceFileError, match="rank_3: No such file"):
        read(tmp_path / "rank_3")


def test_entries_that_are_no_calls_do_not_shift_the_arguments_of_others(tmp_path):
    other = {**CALL, "input_sizes": [[7]]}
    path = written(tmp_path, json.dumps(dump(5, CALL, None, other)).encode(), "rank_1.json")
    assert len(read(path).calls) == 2
    assert [arguments(path, row)[0] for row in range(2)] == [CALL["input_sizes"], [[7]]]


def test_a_number_of_no_bytes_is_zero(tmp_path):
    content = pickle.dumps(dump({**CALL, "timeout_ms": 12345}), 2)
    got = read(written(tmp_path, content.replace(b"M\x39\x30", b"\x8a\x00")))
    assert got.calls.timeout.tolist() == [0]


@pytest.mark.parametrize("value", [1 << 40, -5, 3, True, 2.5])
@pytest.mark.parametrize("key", ["input_sizes", "profiling_name", "process_group", "frames"])
def test_a_number_in_the_place_of_a_list_or_text_is_none(tmp_path, key, value):
    got = read(written(tmp_path, pickle.dumps(dump({**CALL, key: value}, CALL), 2)))
    assert len(got.calls) == 2
    if key == "input_sizes":
        assert got.calls.shapes[0][0] == NULL != got.calls.shapes[0][1]
    if key == "profiling_name":
        assert got.calls.names[got.calls.name[0]] == ""
