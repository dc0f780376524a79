"""Test Perfetto traces as a format: equal to the JSON of the same run, and never empty."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest
from builders.commands import invoke
from builders.perfetto_trace import Writer, a_rank, message, one
from builders.shared_data import needs, path_of
from oracles import perfetto as oracle

import fastcomm
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.formats.config import Config
from fastcomm.formats.detection import format_of
from fastcomm.formats.kineto import categories
from fastcomm.formats.kineto.categories import EVERYTHING, METRICS
from fastcomm.formats.opening import open_run
from fastcomm.formats.perfetto import reader
from fastcomm.formats.perfetto.ranks import begins_trace, peek
from fastcomm.trace.schema import KINDS, OPS
from fastcomm_kernels.arrays import NULL

DATA = path_of("formats_2026")
RUNS = ("cuspy_plain", "cuspy_graph", "cuspy_plugin", "cuspy_ids")


def written(folder, ranks=2):
    for rank in range(ranks):
        (folder / f"rank{rank}.pftrace.gz").write_bytes(gzip.compress(a_rank(rank, ranks)))
    return folder


def rows(scanned, selection):
    """All events as sorted texts, without what depends on the encoding."""
    base = scanned.envelope.get("baseTimeNanoseconds", 0)
    columns, found = scanned.columns, Counter()
    names = [*selection.row_args, "kind", "process", "thread", "start", "stop"]
    for row in range(len(columns["kind"])):
        values = {name: int(columns[name][row]) for name in names}
        values["start"] += base
        values["stop"] += base
        for name, column in scanned.details.items():
            code = int(column[columns["detail"][row]])
            is_text = name in selection.detail_texts and code != NULL
            values[name] = scanned.texts[code] if is_text else code
        kept = {name: str(value) for name, value in values.items() if value != NULL}
        # Only JSON tells the direction of copies.
        name = "Memcpy" if kept.pop("copy kind", None) else scanned.name(row)
        found[(name, *sorted(kept.items()))] += 1
    return found


@needs("formats_2026")
@pytest.mark.parametrize("run", ["cuspy_plain", "cuspy_ids"])
@pytest.mark.parametrize("selection", [METRICS, EVERYTHING], ids=["metrics", "everything"])
def test_events_and_args_are_those_of_the_json(run, selection):
    for path in sorted((DATA / run / "json").iterdir()):
        own = path.name.replace("json", "pftrace")
        found = rows(reader.scan(DATA / run / "pftrace" / own, selection)[0], selection)
        expected = rows(categories.scan(path, selection)[0], selection)
        # The ids of annotations on the device are absent, and so is the profiler's own span.
        differ = {name for (name, *_) in (found - expected) + (expected - found)}
        allowed = {"ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3", "PyTorch Profiler (0)"}
        assert differ <= (allowed if selection is EVERYTHING else set())
        assert found.total() > 200


@needs("formats_2026")
@pytest.mark.parametrize("run", RUNS)
def test_whole_slices_are_those_of_the_oracle(run):
    for path in sorted((DATA / run / "pftrace").iterdir()):
        marks, _ = oracle.slices(gzip.decompress(path.read_bytes()))
        scanned, _ = reader.scan(path, EVERYTHING)
        found = Counter(
            (scanned.name(row), int(scanned.columns["start"][row]), int(stop))
            for row, stop in enumerate(scanned.columns["stop"])
        )
        expected = Counter((mark["name"], mark["time"], mark["stop"]) for mark in marks)
        # The kind of overhead is kept, too, but not asked for by metrics.
        # What NCCL chose stands in place of the parameters in the names of its kernels.
        chosen = {(name, *times) for name, *times in found if name.endswith("]")}
        assert bool(chosen) == (run == "cuspy_plugin")
        assert found - expected == Counter(chosen)
        short = {(name.partition(" [")[0], *times) for name, *times in chosen}
        lacking = expected - found
        assert {(name.partition("(")[0], *times) for name, *times in lacking} == short
        assert lacking.total() == len(short)


# What the file does not have: names of hosts and files; and events are numbered otherwise.
EXEMPT = {"warnings", "network", "level", "event_ids", "event", "path_of_trace", "path", "gpu"}


def without_exempt(value):
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in EXEMPT}
        return {key: without_exempt(each) for key, each in kept.items()}
    return [without_exempt(each) for each in value] if isinstance(value, list) else value


@needs("formats_2026")
@pytest.mark.parametrize("command", ["metrics", "kernels", "critical-path"])
def test_commands_say_what_they_say_of_the_json(command, tmp_path):
    for path in (DATA / "cuspy_plain" / "json").iterdir():
        # Only JSON tells copies between devices from others.
        text = gzip.decompress(path.read_bytes()).replace(b'"copy kind"', b'"no kind"')
        (tmp_path / path.name).write_bytes(gzip.compress(text))
    texts = [
        invoke(command, str(folder), "--json").stdout
        for folder in (DATA / "cuspy_plain" / "pftrace", tmp_path)
    ]
    found, expected = map(json.loads, texts)
    assert without_exempt(found) == without_exempt(expected)
    notes = [text for text in found["warnings"] if "copies between devices" in text]
    assert len(notes) == 1


def work(trace, *kinds):
    """Kernels of a trace: names, durations, and whether they communicate."""
    events = trace.events
    is_kernel = np.isin(np.array(KINDS)[events["kind"].to_numpy()], kinds)
    names = np.array(events["name"].to_pylist())[is_kernel]
    length = (events["stop"].to_numpy() - events["start"].to_numpy())[is_kernel]
    return names, length, np.char.startswith(names, "nccl")


@needs("formats_2026")
def test_a_graph_has_the_work_that_its_ends_allow():
    run = fastcomm.open(DATA / "cuspy_graph" / "pftrace")
    for rank, compute, comm in ((0, 492_000, 280_000), (1, 507_000, 250_000)):
        trace = run.read(rank)
        names, length, is_comm = work(trace, "kernel")
        assert (len(names), is_comm.sum()) == (77, 16)
        assert (length[~is_comm].sum(), length[is_comm].sum()) == (compute, comm)
        assert {29_500, 10_500} <= set(length.tolist())


@needs("formats_2026")
def test_a_run_of_rocprofv3_has_its_kernels_copies_and_calls():
    run = fastcomm.open(DATA / "rocprofv3")
    assert len(run.ranks) == 2
    for rank, comm in ((0, 520_000), (1, 500_000)):
        trace = run.read(rank)
        _, length, is_comm = work(trace, "kernel")
        assert ((~is_comm).sum(), length[~is_comm].sum()) == (4, 1_000_000)
        assert (is_comm.sum(), length[is_comm].sum()) == (2, comm)
        assert [OPS[op] for op in trace.comm["op"].to_pylist()] == ["AllReduce"] * 2
        assert len(work(trace, "memcpy")[0]) == 2
        assert len(work(trace, "runtime")[0]) == 12
        assert trace.args["bytes"].drop_null().to_pylist() == [1_048_576] * 2
        assert trace.meta.clock is None
        assert trace.meta.world_size is None


def test_a_run_without_json_is_measured(tmp_path):
    result = fastcomm.open(written(tmp_path)).metrics().to_dict()
    assert result["ranks"] == [0, 1]
    assert result["world_size"] == 2
    trace = fastcomm.open(tmp_path).read(1)
    names, length, is_comm = work(trace, "kernel")
    assert dict(zip(names, length, strict=True)).keys() == {
        "gemm",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    }
    assert trace.comm["payload_bytes"].to_pylist() == [4096] * 2
    assert is_comm.sum() == 2
    assert trace.groups["ranks"].to_pylist() == [[0, 1]]
    assert trace.meta.clock == "unix"


def test_the_rank_is_that_of_the_name_else_of_the_collectives(tmp_path):
    for rank, name in ((0, "one.pftrace"), (1, "two.pftrace"), (2, "rank2.perfetto-trace")):
        (tmp_path / name).write_bytes(a_rank(rank, 3))
    assert [rank.rank for rank in open_run(tmp_path).sources] == [0, 1, 2]
    assert peek(tmp_path / "two.pftrace").world_size == 3


def collective(**args):
    writer = Writer()
    writer.begin(1, 2, "record_param_comms", "cpu_op", args)
    writer.end(5, 2)
    return writer.text()


@pytest.mark.parametrize(
    ("args", "rank", "world"),
    [
        ({"Rank": 3, "Process Group Description": "default_pg", "Group size": 8}, 3, 8),
        ({"Rank": 1, "Global rank start": 4, "Global rank stride": 2}, 6, None),
        ({"Rank": 1, "Process Group Name": "1", "Process Group Ranks": "[2, 5]"}, 5, 6),
        (
            {"Rank": 1, "Process Group Name": "1", "Process Group Ranks": "[2, ..., 5]"},
            None,
            None,
        ),
        ({"Rank": 1, "Collective name": "send", "Process Group Ranks": "[2, 5]"}, None, None),
        ({"Rank": 9, "Process Group Name": "1", "Process Group Ranks": "[2, 5]"}, None, 6),
        ({}, None, None),
    ],
)
def test_collectives_state_rank_and_world(tmp_path, args, rank, world):
    path = tmp_path / "a.pftrace"
    path.write_bytes(collective(**args))
    assert (peek(path).rank, peek(path).world_size) == (rank, world)


def test_files_without_a_rank_are_an_error(tmp_path):
    for name in ("one.pftrace", "two.pftrace"):
        (tmp_path / name).write_bytes(collective())
    with pytest.raises(TraceFileError, match=r"one\.pftrace: cannot determine the rank"):
        open_run(tmp_path)


def test_files_of_rocprofv3_are_numbered_by_process(tmp_path):
    for process in (900, 1000):
        (tmp_path / f"{process}_results.pftrace").write_bytes(a_rank())
    run = open_run(tmp_path)
    assert [source.path.name for source in run.sources] == [
        *("900_results.pftrace", "1000_results.pftrace"),
    ]
    assert any("order of the process numbers" in text for text in run.warnings)


def begun():
    """Two slices of which no end is recorded."""
    writer = Writer()
    writer.start()
    writer.process(1, 77)
    writer.thread(2, 1, 77, 78)
    for time in (10**18 + 1, 10**18 + 2):
        writer.begin(time, 2, "aten::mm", "cpu_op")
    return writer.text()


ANDROID = b"".join(one(1, message((8, n), (1, b"ftrace"))) for n in range(50))
# Content of a file, and what the message says besides its name.
FAULTS = {
    "Android": (ANDROID, "a Perfetto trace without events of a training job"),
    "no end": (begun(), "none of 2 slices has an end"),
    "random bytes": (b"\x0a" + bytes(range(40, 240)), "byte"),
    "length past the end": (a_rank() + b"\x0a\xff\x7f1234", "truncated: the file ends at byte"),
    "cut": (a_rank()[:-3], "truncated: the file ends at byte"),
    "empty": (b"", "empty; expected a Perfetto trace"),
    "other": (b"\x80\x81", "found binary data at byte 0, expected a packet"),
    "cut gzip": (
        gzip.compress(a_rank())[:300],
        "truncated: the decompressed file ends at byte",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("file", ["rank0.pftrace", "trace.perfetto-trace.gz"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name, file):
    content, problem = FAULTS[name]
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(FastcommError, match=problem) as caught:
        fastcomm.open(path).metrics()
    assert str(path) in str(caught.value)


def test_a_truncated_file_can_be_read_up_to_its_end(tmp_path):
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(a_rank()[:-40])
    run = open_run(path, config=Config(allow_truncated=True))
    assert run.read(0).meta.is_truncated


def test_slices_without_an_end_are_counted(tmp_path):
    writer = Writer()
    writer.begin(10**18, 2, "never ends", "cpu_op")
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(a_rank() + writer.text())
    warnings = fastcomm.open(path).read(0).meta.warnings
    assert any("1 slices have no end" in text for text in warnings)


def test_events_whose_names_are_lost_are_counted(tmp_path):
    """As where a ring of packets has lost the oldest ones, which have the names."""
    writer = Writer()
    writer.begin(10**18, 2, 77, "cpu_op")
    writer.end(10**18 + 5, 2)
    path = tmp_path / "rank0.pftrace"
    path.write_bytes(a_rank() + writer.text())
    warnings = fastcomm.open(path).read(0).meta.warnings
    assert any("1 event without a name" in text for text in warnings)
    path.write_bytes(a_rank())
    warnings = fastcomm.open(path).read(0).meta.warnings
    assert not any("without a name" in text for text in warnings)


def test_a_json_file_is_no_perfetto_trace_whatever_its_name(tmp_path):
    path = tmp_path / "rank0.pftrace"
    path.write_text('\n{"traceEvents": []}')
    assert format_of(path, Config()) is None
    path.write_bytes(a_rank())
    assert format_of(path, Config()) == "perfetto"


@pytest.mark.parametrize(
    ("head", "is_trace"),
    [
        (b"", False),
        (b"\n", True),
        (a_rank(), True),
        (a_rank()[:2000], True),
        (b'\n{"traceEvents": [' + b" " * 200, False),
        (b"\n\x02ab\n\x01a!", False),
        (b"\n\xff\xff", True),
    ],
)
def test_a_trace_is_known_by_its_first_lengths(head, is_trace):
    assert begins_trace(head) == is_trace


def test_a_store_of_a_perfetto_trace_measures_like_it(tmp_path):
    (tmp_path / "traces").mkdir()
    before = fastcomm.open(written(tmp_path / "traces")).metrics().to_dict()
    invoke("ingest", str(tmp_path / "traces"), "-o", str(tmp_path / "store"))
    after = fastcomm.open(tmp_path / "store").metrics().to_dict()
    assert set(after.pop("warnings")) == set(before.pop("warnings"))
    assert after == before


def measured(path):
    return fastcomm.open(path).metrics().to_dict()


@pytest.mark.parametrize("tracks", [0, 10])
def test_a_file_that_joins_ranks_has_advice_that_can_be_followed(tmp_path, tracks):
    with (tmp_path / "both.pftrace").open("ab") as both:
        for rank in range(2):
            more = {"tracks": tracks * rank, "process": 77 + 10 * rank}
            both.write(a_rank(rank, gpu=rank, **more))
    metrics = measured(tmp_path / "both.pftrace")
    assert not any((metrics["breakdown"]["exact"] or {}).values())
    shown = "".join(metrics["warnings"])
    assert "give fastcomm a file for each rank" in shown
    assert "this file alone" not in shown


def test_a_rank_that_is_joined_with_itself_is_not_measured(tmp_path):
    (tmp_path / "rank0.pftrace").write_bytes(many_kernels() * 2)
    metrics = measured(tmp_path / "rank0.pftrace")
    assert not any((metrics["breakdown"]["exact"] or {}).values())
    assert "40 of 80 kernels are twice in the file" in "".join(metrics["warnings"])


def many_kernels(count=40):
    writer = Writer()
    writer.start()
    writer.process(3, 0, "GPU 0")
    writer.interned(names={5: "gemm"}, queues={1: "Kernel", 100: "[07] stream 7"})
    for number in range(count):
        extra = {"stream id": "7", "correlation": str(number + 1), "device id": "0"}
        writer.stage(10**18 + 1000 * number, 500, 5, 1, 100, extra=extra)
    writer.packet((52, message((4, 1), (2, message((1, 0), (2, 5))))), time=10**18)
    return writer.text()
