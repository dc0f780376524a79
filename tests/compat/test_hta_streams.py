"""Test launch delays and queue lengths of streams: by their definition, and beside HTA 0.5."""

from pathlib import Path

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.places import RECORDED
from builders.shared_data import needs, path_of
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.compat import hta
from fastcomm.compat.hta import get_queue_length_summary, get_time_spent_blocked_on_full_queue
from fastcomm.device_work import totals
from fastcomm.errors import FastcommError

US = 1_000
KINETO = path_of("kineto")
HOST_RUN = RECORDED / "gloo_2x2"

# A launch (start, duration), and its work: (delay from the launch's start, stream), in us.
LAUNCHED = st.lists(
    st.tuples(
        st.integers(0, 20), st.integers(1, 3), st.integers(-2, 30), st.sampled_from([7, 8])
    ),
    min_size=1,
    max_size=12,
)


def trace_of(launched, folder, steps=()):
    """A trace with a kernel of 1 us per launch."""
    events = [k.mark(f"ProfilerStep#{number}", *times) for number, times in enumerate(steps)]
    for number, (start, took, wait, stream) in enumerate(launched):
        events.append(k.launch(100 + start, number + 1, dur=took, tid=number + 1))
        events.append(k.kernel("add", 100 + start + wait, 1, stream, correlation=number + 1))
    return k.write(folder / "rank0.json", events)


def definition(launched, stream, full):
    """The numbers of one stream, an instant after the other; times in us."""
    own = [row for row in launched if row[3] == stream]
    waits = [(min(start, start + wait), start + wait) for start, _, wait, _ in own]
    delays = [max(0, wait - took) for _, took, wait, _ in own]
    first, last = min(begin for begin, _ in waits), max(start for _, start in waits)
    lengths = [sum(b <= t < s for b, s in waits) for t in range(first, last)]
    at_once = [sum(b <= t <= s for b, s in waits) for t in range(first, last + 1)]
    return {
        "launched": len(own),
        "launch_delay_mean_ns": pytest.approx(US * sum(delays) / len(own)),
        "launch_delay_max_ns": US * max(delays),
        "queue_mean": pytest.approx(sum(lengths) / (last - first)) if last > first else None,
        "queue_max": max(at_once),
        "queue_full_ns": US * sum(length >= full for length in lengths),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("queues")


@given(LAUNCHED)
def test_queues_are_those_of_the_definition(folder, launched):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(totals, "FULL_QUEUE", 2)
        rows = fastcomm.open(trace_of(launched, folder)).kernels(by="stream").to_arrow()
    found = {
        row["name"]: {n: row[n] for n in totals.QUEUE_COLUMNS.names} for row in rows.to_pylist()
    }
    streams = {row[3] for row in launched}
    assert found == {f"stream {each}": definition(launched, each, 2) for each in streams}


def test_only_work_that_starts_in_the_step_is_in_the_queue(tmp_path):
    launched = [(0, 1, 10, 7), (2, 1, 18, 7), (95, 1, 30, 7)]
    path = trace_of(launched, tmp_path, [(90, 100), (190, 100)])
    (row,) = fastcomm.open(path).kernels(by="stream", step=0).to_arrow().to_pylist()
    assert row["launched"] == 2
    assert row["queue_mean"] == pytest.approx((10 + 18) / 20)


def test_ranks_are_added_up_and_extremes_kept(tmp_path):
    for rank, wait in enumerate((10, 30)):
        k.write(
            tmp_path / f"rank{rank}.json",
            [k.launch(100, 1), k.kernel("add", 100 + wait, 1, correlation=1)],
            rank=rank,
            world=2,
        )
    (row,) = fastcomm.open(tmp_path).kernels(by="stream").to_arrow().to_pylist()
    assert (row["launched"], row["launch_delay_max_ns"]) == (2, 29 * US)
    assert row["launch_delay_mean_ns"] == pytest.approx((9 + 29) / 2 * US)
    assert row["queue_mean"] == pytest.approx(1)


def test_work_without_a_launch_has_no_queue(tmp_path):
    path = k.write(tmp_path / "rank0.json", [k.kernel("add", 10, 5)])
    found = fastcomm.open(path).kernels(by="stream")
    assert found.to_arrow()["queue_max"].to_pylist() == [None]
    assert found.to_arrow()["launched"].to_pylist() == [0]
    assert found.unknown["queue_mean"] == "no launch of this work was recorded"


def test_threads_of_a_host_run_have_no_queue():
    table = fastcomm.open(HOST_RUN).kernels(by="stream").to_arrow()
    assert set(table["queue_mean"].to_pylist()) == {None}


def test_the_table_of_streams_shows_queues(tmp_path):
    said = invoke("kernels", trace_of([(0, 1, 10, 7)], tmp_path), "--by", "stream", "--wide")
    assert "launch delay" in said.stdout
    assert "9.00 us" in said.stdout
    markdown = invoke("kernels", tmp_path, "--by", "stream", "--format", "markdown").stdout
    assert "launch delay" in markdown
    assert "9.00 us" in markdown


# What HTA 0.5.0 returned for these traces, made to keep events at one time in order: rank,
# first stream, count, mean, std, median and maximum; then a number of entries, the time in us
# with as many, and its share.
BY_HTA = {
    "nccl_2rank_rank0.json.gz": (
        *(0, 7, 5004, 0.8229416466826539, 1.06336579393224, 1.0, 10.0),
        *(5, 3777.0, 0.008554441990827246),
    ),
    "h100_qwen/Qwen1.5-0.5B-Chat.json.gz": (
        *(0, 7, 2396, 47.791318864774624, 34.50654023773537, 43.5, 111.0),
        *(55, 14690.0, 0.29513993530629057),
    ),
    "trace_diff/control.json.gz": (
        *(3, 7, 14940, 35.4528781793842, 52.22112703935267, 17.0, 287.0),
        *(143, 31213.0, 0.08126776992053657),
    ),
}


@needs("kineto")
@pytest.mark.parametrize("name", BY_HTA)
def test_summaries_are_those_of_hta(name):
    rank, stream, *numbers, limit, us, share = BY_HTA[name]
    path = KINETO / name
    row = get_queue_length_summary(path, [rank]).to_pylist()[0]
    assert row["stream"] == stream
    found = [row[column] for column in ("count", "mean", "std", "50%", "max")]
    assert found == pytest.approx(numbers, rel=1e-12)
    (full,) = get_time_spent_blocked_on_full_queue(
        path, [rank], max_queue_length=limit
    ).to_pylist()
    assert (full["stream"], full["duration_at_max_queue_length"]) == (stream, us)
    assert full["relative_duration_at_max_queue_length"] == pytest.approx(share, rel=1e-12)


def test_a_queue_that_is_never_full_has_no_row(tmp_path):
    path = trace_of([(0, 1, 10, 7)], tmp_path)
    assert get_queue_length_summary(path)["max"].to_pylist() == [1]
    assert get_time_spent_blocked_on_full_queue(path).num_rows == 0


def test_a_trace_without_launches_has_no_summary(tmp_path):
    path = k.write(tmp_path / "rank0.json", [k.kernel("add", 10, 5)])
    assert get_queue_length_summary(path).num_rows == 0


def test_functions_of_hta_take_a_run_or_the_path_of_its_traces(tmp_path):
    path = trace_of([(0, 1, 5, 7), (3, 1, 20, 7)], tmp_path, steps=[(0, 90), (95, 60)])
    run = fastcomm.open(path)
    for function in (hta.get_queue_length_summary, hta.get_time_spent_blocked_on_full_queue):
        assert function(run).equals(function(path))
    assert hta.get_idle_time_breakdown(run).equals(hta.get_idle_time_breakdown(path))
    of_run, of_path = (hta.critical_path_analysis(of, 0, "") for of in (run, path))
    assert of_run[0].breakdown.equals(of_path[0].breakdown)
    first, second = (
        Path(hta.overlay_critical_path_analysis(of, 0, of_run[0], tmp_path / name))
        for of, name in ((run, "run"), (path, "path"))
    )
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(FastcommError, match="rank 7"):
        hta.get_idle_time_breakdown(run, 7)
