"""Test warnings about work whose times contradict those of its stream, or of its launch."""

import re

import pytest
from builders import kineto_text as k
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader

APART = 50  # us


def warned(tmp_path, events):
    """Names and counts of events with an impossible duration."""
    path = k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#1", 0, 10**6), *events])
    trace = reader.read(path, TraceOptions())
    texts = [text for text in trace.meta.warnings if "impossible duration" in text]
    assert len(texts) <= 1
    return re.findall(r"'([^']+)' lasts .*? overlaps (\d+) later", "".join(texts))


def kernels(count, step=1000, lasts=500, stream=7):
    return [
        k.kernel(f"k{n}", step * n, lasts, stream, correlation=100 * stream + n)
        for n in range(count)
    ]


def test_work_that_lasts_beyond_its_successors_is_named(tmp_path):
    events = kernels(40)
    events[5]["dur"] = 20_000
    assert warned(tmp_path, events) == [("k5", "19")]
    events[30]["dur"] = 3_000
    assert warned(tmp_path, events) == [("k5", "19"), ("k30", "2")]


def test_all_work_that_lasts_beyond_its_successors_counts(tmp_path):
    """Also where each of them ends before the next one, as after a change of the clock."""
    events = kernels(40)
    for place in (5, 6, 7, 8):
        events[place]["dur"] = 20_000
    path = k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#1", 0, 10**6), *events])
    (text,) = [
        text
        for text in reader.read(path, TraceOptions()).meta.warnings
        if "impossible duration" in text
    ]
    assert text.startswith("4 events with an impossible duration")
    named = re.findall(r"'([^']+)' lasts .*? overlaps (\d+) later", text)
    assert named == [("k5", "16"), ("k6", "17"), ("k7", "18")]
    assert ", and 1 more. " in text


def test_successors_that_begin_early_are_no_fault(tmp_path):
    assert warned(tmp_path, kernels(40, lasts=1_020)) == []
    assert warned(tmp_path, kernels(40, lasts=1_900)) == []


@pytest.mark.parametrize("overlap", [5, 49])
def test_ends_some_microseconds_out_of_order_are_no_fault(tmp_path, overlap):
    events = kernels(40)
    events[5]["dur"] = 1_500 + overlap
    assert warned(tmp_path, events) == []


def test_other_streams_may_overlap(tmp_path):
    events = [*kernels(40), k.kernel("long", 100, 30_000, 8), k.kernel("last", 35_000, 9, 8)]
    assert warned(tmp_path, events) == []


def test_nodes_of_a_graph_may_overlap(tmp_path):
    events = kernels(40)
    for event in events[4:8]:
        event["args"]["correlation"] = 99
    events[4]["dur"] = 3_000
    assert warned(tmp_path, events) == []


def test_a_lane_whose_work_is_often_out_of_order_is_no_stream(tmp_path):
    events = kernels(40)
    for event in events[::4]:
        event["dur"] = 2_000
    assert warned(tmp_path, events) == []


def merged(tmp_path, second):
    """Two ranks of equal processes, devices, streams and numbers of calls in one file."""
    ranks = [*kernels(40), *second]
    ranks += [k.launch(event["ts"] - 10, event["args"]["correlation"]) for event in ranks]
    path = k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#1", 0, 10**6), *ranks])
    return reader.read(path, TraceOptions()).meta


def test_the_work_of_merged_devices_is_not_that_of_one(tmp_path):
    second = [{**event, "ts": event["ts"] + 300} for event in kernels(40)]
    meta = merged(tmp_path, second)
    assert meta.missing_data == ("devices",)
    (said,) = [text for text in meta.warnings if "merged" in text]
    assert said.startswith("40 of 80 kernels begin while another one of their stream runs")
    for apart in (500, 451):  # programmatic launches begin this early
        second = [{**event, "ts": event["ts"] + apart} for event in kernels(40)]
        assert merged(tmp_path, second).missing_data == ()


def test_one_long_kernel_is_no_other_device(tmp_path):
    meta = merged(tmp_path, [k.kernel("long", 50, 39_000, correlation=1)])
    assert meta.missing_data == ()


@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.integers(1, 900), st.sampled_from([7, 8])),
        min_size=1,
        max_size=12,
        unique_by=lambda row: (row[0], row[2]),
    )
)
def test_warnings_agree_with_the_definition(tmp_path_factory, rows):
    rows = sorted(rows)
    events = [
        k.kernel(f"k{n}", ts, dur, stream, correlation=n)
        for n, (ts, dur, stream) in enumerate(rows)
    ]
    longer = []
    for stream in (7, 8):
        own = [(n, ts, ts + dur) for n, (ts, dur, of) in enumerate(rows) if of == stream]
        blamed = set()
        for at, (_, _, stop) in enumerate(own):
            # Of earlier work, the first that ends last.
            latest = max(own[:at], key=lambda row: (row[2], -row[0]), default=None)
            if latest and latest[2] - APART > stop:
                blamed.add(latest)
        if len(blamed) <= max(3, 0.1 * len(own)):
            for at, (n, ts, stop) in enumerate(own):
                count = sum(later < stop - APART for *_, later in own[at + 1 :])
                longer += [(ts - stop, n, str(count))] if count else []
    found = warned(tmp_path_factory.mktemp("x"), events)
    assert found == [(f"k{n}", count) for _, n, count in sorted(longer)[:3]]


SECOND = 1_000_000  # us


def starts(tmp_path, *events):
    """Warnings on impossible starts of work among two steps of 10 ms."""
    rows = [k.mark(f"ProfilerStep#{n}", 10_000 * n, 10_000) for n in range(2)]
    rows += [k.launch(15_000, 1), *events]
    trace = reader.read(k.write(tmp_path / "rank0.json", rows), TraceOptions())
    return [text for text in trace.meta.warnings if "impossible start" in text]


@pytest.mark.parametrize("at", [5_000 * SECOND, -5_000 * SECOND])
def test_work_far_from_its_launch_and_from_all_else_is_named(tmp_path, at):
    (warning,) = starts(tmp_path, k.kernel("far", at, 500, correlation=1))
    assert warning.startswith(
        "1 event with an impossible start: 'far' is 5000 s from its launch"
    )


def test_all_starts_are_named_that_are_far_from_their_launch(tmp_path):
    """Each in a pause of its own, one of them before all else."""
    far = [5_000 * SECOND, 9_000 * SECOND, -3_000 * SECOND, 20_000 * SECOND]
    events = [k.launch(15_000 + n, n) for n in range(2, 6)]
    events += [k.kernel(f"k{n}", at, 500, correlation=n) for n, at in enumerate(far, 2)]
    (warning,) = starts(tmp_path, *events)
    assert warning.startswith(
        "4 events with an impossible start: 'k5' is 20000 s from its launch, 'k3' is 9000 s "
        "from its launch, 'k2' is 5000 s from its launch, and 1 more, and for most"
    )


def test_work_that_waits_for_other_work_may_begin_late(tmp_path):
    waits = [
        k.launch(14_000, 2),
        k.kernel("stuck", 14_010, 600 * SECOND, correlation=2),
        k.kernel("late", 14_010 + 600 * SECOND, 500, correlation=1),
    ]
    assert starts(tmp_path, *waits) == []


def test_a_pause_between_launched_works_is_no_fault(tmp_path):
    later = 5_000 * SECOND
    windows = [
        k.kernel("soon", 15_010, 500, correlation=1),
        k.mark("ProfilerStep#900", later, 10_000),
        k.launch(later + 10, 2),
        k.kernel("soon", later + 20, 500, correlation=2),
    ]
    assert starts(tmp_path, *windows) == []
    assert starts(tmp_path, k.kernel("late", 915_000, 500, correlation=1)) == []
