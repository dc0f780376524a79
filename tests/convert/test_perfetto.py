"""Test traces for Perfetto: text, pieces, and the events, waits and arrows of all ranks."""

import gzip
import json
import re
from collections import defaultdict
from decimal import Decimal
from functools import cache, partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from builders import job_traces
from builders.opened import read_here
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from oracles.drawn import drawn
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from fastcomm.cli.main import main
from fastcomm.convert.perfetto import convert
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.trace import timelines
from fastcomm.trace.perfetto_trace import PerfettoTimeline
from fastcomm.trace.run_traces import RunTraces, Source
from fastcomm.trace.schema import ENDS_TOGETHER
from fastcomm.trace.timelines import PROGRAM, DrawnWaits, Piece, Place, Slices, join

JOB = Job.of(8, steps=3, layers=2, micro_batches=2)
AHEAD = {3: 7_000_000, 5: -250_000}
WHOLE = st.integers(0, 10**12 - 1)
PLACE = ("pid", "tid")


@given(st.lists(WHOLE, min_size=1))
def test_numbers_are_those_that_python_writes(values):
    texts = timelines.integers(np.array(values))
    assert [bytes(text).decode() for text in texts] == [f"{value:12}" for value in values]


@given(st.lists(st.integers(0, 10**15 - 1), min_size=1))
def test_times_are_exact(values):
    texts = timelines.microseconds(np.array(values))
    assert [Decimal(bytes(text).decode()) * 1000 for text in texts] == values
    assert {len(bytes(text)) for text in texts} == {16}


@given(st.lists(st.lists(st.binary(), max_size=3), max_size=4), st.binary(), st.binary())
@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_pieces_are_one_text(tmp_path_factory, name, parts, begin, end):
    folder = tmp_path_factory.mktemp("pieces")
    compressed = name.endswith(".gz")
    pieces = [
        Piece.write(folder / f"{number}", part, compressed=compressed)
        for number, part in enumerate(parts)
    ]
    join(begin, pieces, end, folder / name, folder)
    data = (folder / name).read_bytes()
    # gzip checks length and checksum.
    text = gzip.decompress(data) if compressed else data
    assert text == begin + b"".join(content for part in parts for content in part) + end
    assert [path.name for path in folder.iterdir()] == [name]


EVENT = st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 8))


@given(st.lists(EVENT, max_size=25))
def test_nested_events_share_a_level(events):
    lane, start, length = np.array(events, np.int64).reshape(-1, 3).T
    stop = start + length
    levels = timelines.free_levels(lane, start, stop, nests=True)
    alone = timelines.free_levels(lane, start, stop)
    for row, other in combinations(range(len(lane)), 2):
        if (lane[row], levels[row]) == (lane[other], levels[other]):
            apart = stop[row] <= start[other] or stop[other] <= start[row]
            inside = start[row] <= start[other] and stop[other] <= stop[row]
            around = start[other] <= start[row] and stop[row] <= stop[other]
            assert apart or inside or around
    if not alone.any():
        assert not levels.any()


@given(st.lists(EVENT, max_size=25))
def test_a_level_is_the_first_that_is_free(events):
    lane, start, length = np.array(events, np.int64).reshape(-1, 3).T
    levels = timelines.free_levels(lane, start, start + length).tolist()
    busy = defaultdict(list)
    for row in np.lexsort((start + length, start, lane)).tolist():
        begin, end = int(start[row]), int(start[row] + length[row])
        free = next(k for k in range(len(lane)) if max(busy[lane[row], k], default=0) <= begin)
        assert levels[row] == free
        busy[lane[row], free].append(end)


made_trace = cache(job_traces.trace)


def in_memory(job, ahead, ranks=None):
    """A run whose traces are made when they are read; clocks are `ahead` ns, by rank."""
    sources = tuple(
        Source(
            rank=rank,
            path=Path(f"{rank}.json"),
            size=1,
            reader=partial(made, job, rank, ahead.get(rank, 0)),
        )
        for rank in ranks or range(job.ranks)
    )
    return read_here(RunTraces(sources=sources, world_size=job.ranks))


def made(job, rank, ahead, _content):
    return made_trace(job, rank, ahead)


def events_of(path):
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return json.loads(text, parse_float=Decimal)["traceEvents"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    target = tmp_path_factory.mktemp("perfetto") / "run.json.gz"
    return convert(in_memory(JOB, AHEAD), target), events_of(target)


def slices(events):
    return [event for event in events if event["ph"] == "X"]


def works(events):
    return [one for one in slices(events) if one["cat"] not in ("step", "wait")]


def test_every_event_of_every_rank_is_at_its_time_on_one_clock(converted):
    _, events = converted
    traces = [made_trace(JOB, rank) for rank in range(JOB.ranks)]
    zero = min(trace.iterations["start"][0].as_py() for trace in traces)
    for rank, trace in enumerate(traces):
        end = trace.iterations["stop"][-1].as_py()
        expected = sorted(
            (start - zero, stop - start, name)
            for start, stop, name in zip(
                *(trace.events[name].to_pylist() for name in ("start", "stop", "name")),
                strict=True,
            )
            if zero <= start < end
        )
        shown = sorted(
            (int(one["ts"] * 1000), int(one["dur"] * 1000), one["name"])
            for one in works(events)
            if one["pid"] == rank
        )
        # Clocks are aligned by ends of collectives, which are equal here.
        assert shown == expected


def perfetto_of(path):
    data = path.read_bytes()
    return drawn(gzip.decompress(data) if path.suffix == ".gz" else data)


@pytest.fixture(scope="module")
def packets_file(tmp_path_factory):
    target = tmp_path_factory.mktemp("perfetto") / "run.pftrace.gz"
    return convert(in_memory(JOB, AHEAD), target), target


def row_of(one, thread, start, length):
    return *(one["pid"], thread, start, length, one["name"], one["cat"]), str(one["args"])


def test_packets_have_the_slices_of_the_text(converted, packets_file):
    text, events = converted
    written, path = packets_file
    assert written == text
    names = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in events
        if one["name"] == "thread_name"
    }
    found, _, _ = perfetto_of(path)
    assert sorted(
        row_of(one, one["thread"], one["start"], one["stop"] - one["start"]) for one in found
    ) == sorted(
        row_of(
            {"args": {}} | one,
            names[one["pid"], one["tid"]],
            int(one["ts"] * 1000),
            int(one["dur"] * 1000),
        )
        for one in slices(events)
    )


def test_packets_have_the_arrows_of_the_text(converted, packets_file):
    _, events = converted
    found, instants, _ = perfetto_of(packets_file[1])
    begins, ends = (
        {one["id"]: one for one in events if one["ph"] == kind} for kind in ("s", "f")
    )
    from_instants = {flow: (time, one["pid"]) for time, one, own in instants for flow in own}
    assert len(from_instants) == sum(len(own) for _, _, own in instants)
    assert all(time == one["start"] for time, one, _ in instants)
    assert sorted(
        (*from_instants[flow], one["pid"], one["start"])
        for one in found
        for flow in one["arrow"]
    ) == sorted(
        (int(begins[key]["ts"] * 1000), begins[key]["pid"], end["pid"], start_of(events, end))
        for key, end in ends.items()
    )


def start_of(events, arrow):
    """Start of the wait at whose end an arrow ends, ns."""
    (start,) = (
        int(one["ts"] * 1000)
        for one in slices(events)
        if one["cat"] == "wait"
        and [one[key] for key in PLACE] == [arrow[key] for key in PLACE]
        and one["ts"] + one["dur"] == arrow["ts"]
    )
    return start


def test_packets_have_real_time_and_processes_in_order(packets_file):
    _, path = packets_file
    data = gzip.decompress(path.read_bytes())
    program, snapshot = Trace.FromString(data).packet[:2]
    assert program.trace_config.unique_session_name == PROGRAM
    first = snapshot.clock_snapshot.clocks
    zero = min(
        made_trace(JOB, rank, AHEAD.get(rank, 0)).iterations["start"][0].as_py() - ahead
        for rank, ahead in {0: 0, **AHEAD}.items()
    )
    # Boot time and real time are one clock, as in files of the PyTorch profiler.
    assert {clock.clock_id: clock.timestamp for clock in first} == {1: zero, 6: zero}
    _, _, tracks = perfetto_of(path)
    processes = [one for one in tracks.values() if one.HasField("process")]
    assert [(one.process.pid, one.process.process_name) for one in processes] == [
        (rank, f"rank {rank}") for rank in range(JOB.ranks)
    ]
    for one in tracks.values():
        assert one.HasField("process") or one.parent_uuid in tracks


def test_packets_take_a_third_of_the_text(tmp_path):
    sizes = {}
    for name in ("run.json", "run.pftrace"):
        convert(in_memory(JOB, AHEAD), tmp_path / name)
        sizes[name] = (tmp_path / name).stat().st_size
    assert sizes["run.pftrace"] <= sizes["run.json"] / 3


SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 6), st.integers(1, 6)),
    min_size=1,
    max_size=12,
)


@given(SPANS)
def test_a_wait_is_inside_of_what_waits_whatever_follows(spans):
    """Slices may follow each other at once, and wait for all of their time."""
    busy, rows = [0, 0, 0], []
    for thread, gap, length, wait in spans:
        start = busy[thread] + gap
        busy[thread] = start + length
        rows.append((thread + 1, start, start + length, min(wait, length)))
    thread, start, stop, wait = np.array(rows, np.int64).T
    rank = np.zeros(len(rows), np.int64)
    heads = [{"name": "all-reduce", "cat": "DP", "pid": 0, "tid": tid} for tid in (1, 2, 3)]
    timeline = PerfettoTimeline(10**18, 0)
    place = Place(pid=rank, tid=thread, time=start)
    waits = DrawnWaits(
        place=place,
        length=wait,
        awaited=place,
        arrival=start + np.minimum(wait, stop - start - 1),
    )
    work = Slices(heads=heads, head=thread - 1, start=start, stop=stop)
    titles = {tid: f"stream {tid}" for tid in (1, 2, 3)}
    text = b"".join(
        [timeline.begin, *timeline.rank(0, "rank 0", titles, work), *timeline.waits(0, waits)]
    )
    found, instants, _ = drawn(text)
    assert sorted(
        (one["thread"], one["start"], one["stop"]) for one in found if one["name"] != "wait"
    ) == sorted((f"stream {tid}", begin, end) for tid, begin, end, _ in rows)
    assert sorted(
        (one["thread"], one["start"], one["stop"]) for one in found if one["name"] == "wait"
    ) == sorted(
        (f"stream {tid}", begin, begin + min(length, end - begin - 1))
        for tid, begin, end, length in rows
    )
    assert len(instants) == len({(tid, begin) for tid, begin, *_ in rows})


def test_the_file_follows_the_format(converted):
    """Keys and types are those of the document "Trace Event Format"."""
    _, events = converted
    common = {"name": str, "ph": str, "pid": int}
    timed = {**common, "cat": str, "tid": int, "ts": Decimal}
    keys = {
        "X": {**timed, "dur": Decimal},
        "s": {**timed, "id": int},
        "f": {**timed, "id": int, "bp": str},
        "M": {**common, "args": dict},
    }
    for event in events:
        for key, kind in keys[event["ph"]].items():
            assert isinstance(event[key], kind), (key, event)
        assert event.get("ts", 0) >= 0 <= event.get("dur", 0)
    names = {
        (one["pid"], one.get("tid")): one["args"]["name"]
        for one in events
        if one["name"] in ("process_name", "thread_name")
    }
    assert {place for place, name in names.items() if name.startswith("rank")} == {
        (rank, None) for rank in range(JOB.ranks)
    }
    assert {tuple(one[key] for key in PLACE) for one in slices(events)} <= set(names)


def test_slices_of_a_thread_are_apart_or_nested(converted):
    """Perfetto drops others; of slices that begin at once, the outer one is first."""
    _, events = converted
    threads = defaultdict(list)
    for one in slices(events):
        threads[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for spans in threads.values():
        running = []
        for begin, end in sorted(spans, key=lambda span: span[0]):
            while running and running[-1] <= begin:
                running.pop()
            assert not running or end <= running[-1]
            running.append(end)


def collectives():
    """Start and rank of the members of each collective whose members end together."""
    members = defaultdict(list)
    for rank in range(JOB.ranks):
        trace = made_trace(JOB, rank)
        groups = trace.groups.to_pylist()
        steps = trace.iterations.to_pylist()
        for row in trace.comm.to_pylist():
            group = groups[row["group"]]
            is_inside = any(one["start"] <= row["start"] < one["stop"] for one in steps)
            if group["size"] > 1 and row["op"] in ENDS_TOGETHER and is_inside:
                key = (group["description"], tuple(group["ranks"]), row["seq"])
                members[key].append((row["start"], rank))
    return list(members.values())


def test_a_member_waits_from_its_start_to_the_last_start(converted):
    _, events = converted
    zero = min(made_trace(JOB, r).iterations["start"][0].as_py() for r in range(JOB.ranks))
    expected = {
        (start - zero, max(members)[0] - start, waiter, max(members)[1])
        for members in collectives()
        for start, waiter in members
        if start < max(members)[0]
    }
    shown = {
        (int(one["ts"] * 1000), int(one["dur"] * 1000), one["pid"], one["args"]["for rank"])
        for one in slices(events)
        if one["cat"] == "wait"
    }
    assert expected
    assert expected <= shown  # messages have waits, too


def test_each_wait_has_an_arrow_from_the_last_arrival(converted):
    written, events = converted
    waits = [one for one in slices(events) if one["cat"] == "wait"]
    begins, ends = (
        {one["id"]: one for one in events if one["ph"] == kind} for kind in ("s", "f")
    )
    assert set(begins) == set(ends)
    assert len(begins) == len(waits) == written.arrows
    inside = defaultdict(list)
    for one in works(events):
        inside[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for number, begin in begins.items():
        end = ends[number]
        assert any(a == begin["ts"] for a, _ in inside[begin["pid"], begin["tid"]])
        assert any(a <= end["ts"] < b for a, b in inside[end["pid"], end["tid"]])
    assert sorted(
        (end["pid"], end["ts"], begins[end["id"]]["pid"]) for end in ends.values()
    ) == (
        sorted((one["pid"], one["ts"] + one["dur"], one["args"]["for rank"]) for one in waits)
    )


def test_chosen_steps_are_a_part_of_all(converted, tmp_path):
    _, whole = converted
    number = made_trace(JOB, 0).iterations["number"][1].as_py()
    target = tmp_path / "one.json"
    written = convert(in_memory(JOB, AHEAD), target, steps=(number,))
    events = events_of(target)
    steps = [one for one in slices(events) if one["cat"] == "step"]
    assert {one["name"] for one in steps} == {f"step {number}"}
    assert len(steps) == JOB.ranks
    assert 0 < written.events < len(works(whole))
    begin = min(one["ts"] for one in slices(whole) if one["name"] == f"step {number}")
    first = min(one["ts"] for one in steps)
    moved = {(one["pid"], one["name"], one["ts"] - first) for one in works(events)}
    assert moved <= {(one["pid"], one["name"], one["ts"] - begin) for one in works(whole)}


def test_a_rank_whose_clock_is_apart_is_drawn_without_waits(tmp_path):
    traces = in_memory(JOB, {2: 10**15}, ranks=(0, 2))
    target = tmp_path / "apart.json"
    written = convert(traces, target)
    events = events_of(target)
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    if any("clocks of rank" in text for text in written.warnings):
        assert any("clock not aligned" in name for name in names)
        assert not written.arrows
    else:  # they share a collective
        assert written.arrows
    assert min(one["ts"] for one in works(events)) < 10**9


def test_a_step_that_no_rank_has_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no step 99; the run has"):
        convert(in_memory(JOB, {}), tmp_path / "run.json", steps=(99,))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("traces")
    write(Job.of(4, steps=2, layers=1, micro_batches=1), target)
    return target


def command(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments), "--to", "perfetto"])


@pytest.mark.parametrize("suffix", ["json", "pftrace"])
def test_workers_write_the_same_file(folder, tmp_path, suffix):
    for workers in (1, 2):
        done = command(folder, tmp_path / f"{workers}.{suffix}", "--workers", workers)
        assert done.exit_code == 0, done.output
        assert re.search(r"\d+ events of 4 ranks \(perfetto\)", done.output)
    first, second = (tmp_path / f"{workers}.{suffix}" for workers in (1, 2))
    assert first.read_bytes() == second.read_bytes()
    assert sorted(tmp_path.iterdir()) == [first, second]


def test_a_rank_that_cannot_be_read_is_named(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "rank2.pt.trace.json.gz").write_bytes(b"not gzip")
    target = tmp_path / "out" / "run.json"
    target.parent.mkdir()
    assert command(tmp_path, target).exit_code == 1
    done = command(tmp_path, target, "--keep-going")
    assert done.exit_code == 3
    assert done.output.count("skipped: rank 2") == 1
    assert {one["pid"] for one in events_of(target)} == {0, 1, 3}


def test_steps_are_for_perfetto_alone(folder, tmp_path):
    arguments = ["convert", str(folder), str(tmp_path / "a.json"), "--steps", "1"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "--to perfetto" in done.output


def test_a_trace_without_times_is_refused(tmp_path):
    def untimed(_content):
        trace = made_trace(JOB, 0)
        return trace.__class__.of(
            **{name: getattr(trace, name) for name in ("events", "lanes", "comm", "groups")},
            iterations=trace.iterations[:0],
            meta=trace.meta,
        )

    source = Source(rank=0, path=Path("0.json"), size=1, reader=untimed)
    with pytest.raises(FastcommError, match="no rank has a step"):
        convert(read_here(RunTraces(sources=(source,), world_size=1)), tmp_path / "run.json")
