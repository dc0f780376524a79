"""The critical path and its replay, on a window many times in a row."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tiled import tiled
from timing import best, printed

from fastcomm.compat import hta_graph
from fastcomm.critical_path import rules
from fastcomm.critical_path.overlay import Drawing, redrawn
from fastcomm.critical_path.search import analyze, joined
from fastcomm.critical_path.what_if import Replay
from fastcomm.critical_path.window import TimeRange
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.formats.opening import open_run
from fastcomm.graph.edits import parse_edits
from fastcomm.graph.graph import longest_path
from fastcomm.options import EditOptions, Window
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write as write_job
from fastcomm_kernels import graph as graphs

REAL = Path(__file__).parents[2] / "shared/data/kineto/nccl_2rank_rank0.json.gz"
TIMES = 37  # half a million events, a million of the real trace
WHOLE = TimeRange(start=-(1 << 62), stop=1 << 62)
OPTIONS = TraceOptions(whole=True)
ROUNDS = 4


# The definition in plain Python, from rows: links, window, graph and path, or the last two
# alone. Prints its seconds per row.
DEFINITION = """
import gzip, json, sys
from pathlib import Path
from time import process_time
from oracles import critical_path as oracle, hta_trace as rules
data, seconds = Path(sys.argv[1]).read_bytes(), []
rows = oracle.read(json.loads(gzip.decompress(data)))
clipped = oracle.window(rows, "", 0)
for _ in range(9):
    begun = process_time()
    if sys.argv[2] == "whole":
        rules.link(rows)
        clipped = oracle.window(rows, "", 0)
    oracle.longest_path(oracle.Graph(rows, clipped, (), False))
    seconds.append(process_time() - begun)
print(min(seconds) / len(clipped))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A made-up rank: what every clone has."""
    (found,) = write_job(
        Job.of(ranks=8), tmp_path_factory.mktemp("job"), ranks=[0], filler_bytes=8_000_000
    )
    return found


@pytest.fixture(scope="module")
def large(path):
    return repeated(path)


def repeated(path):
    return tiled(reader.read(path, OPTIONS), TIMES)


def bound(trace):
    built = rules.build(trace, WHOLE)
    graph = built.graph
    return graph, graphs.binding(
        len(graph.event) - 1, graph.incoming[0], graph.source, graph.time, built.on_device
    )


def beside_definition(run, path, count, part="whole"):
    """Measure the definition and `run`, which handles `count` events; seconds an event."""
    run()  # compiles
    return lambda: (printed(DEFINITION, path, part), best(run, rounds=ROUNDS)[0] / count)


@pytest.mark.skipif(not REAL.exists(), reason="the real trace is in the shared data")
def test_the_path_of_a_real_trace(quotient):
    trace = repeated(REAL)
    count = len(bound(trace)[0].event) // 2
    quotient("critical_path_real", beside_definition(lambda: bound(trace), REAL, count))


def test_the_corrected_path(quotient, path, large):
    count = len(bound(large)[0].event) // 2
    quotient("critical_path", beside_definition(lambda: bound(large), path, count))


def test_the_path_of_hta(quotient, path, large):
    linked = hta_graph.linked(large, keep_last=True)
    clipped = hta_graph.clip(linked, "", 0)

    def ours():
        graph = hta_graph.build(clipped)
        return longest_path(graph, np.where(graph.weight <= -1000, 0, graph.weight))

    quotient("critical_path_hta", beside_definition(ours, path, len(clipped.rows), "graph"))


def test_a_replay(bar, large):
    replay = Replay(analyze(large, Window(annotation="")))
    weight = replay.edited(parse_edits(EditOptions(scale=("compute=0.5",))).edits)
    time, _ = replay.times(weight)
    targets = np.flatnonzero(np.diff(replay.first))
    first = replay.first[targets]

    def checked():
        """Compute each time again from the times of its sources, in one pass of NumPy."""
        return np.maximum.reduceat(time[weight.source] + weight.weight, first)

    np.testing.assert_array_equal(checked(), time[targets])
    bar("what_if_replay", lambda: replay.times(weight), checked, count=len(time))


def test_memory(held, large):
    bound(large)
    tracemalloc.start()
    graph, _ = bound(large)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held("critical_path_memory", peak / (len(graph.event) // 2))


def test_an_overlay(bar, tmp_path):
    """In memory: what the file system takes for a page depends on who else writes.

    Of a made-up rank, as real traces with shorter paths take a quarter of the time a byte.
    """
    (plain,) = write_job(
        Job.of(ranks=8), tmp_path, ranks=[0], filler_bytes=8_000_000, compress=False
    )
    trace = reader.read(plain, OPTIONS)
    found = analyze(trace, Window(annotation=""))
    bar(
        "overlay",
        lambda: b"".join(redrawn(trace, found, Drawing(only_critical=False))),
        lambda: json.dumps(json.loads(plain.read_text())),
        count=plain.stat().st_size,
    )


def test_all_ranks(bar, tmp_path):
    """16 ranks of a made-up job."""
    write_job(Job.of(ranks=16), tmp_path, filler_bytes=20_000_000, compress=False)
    run = open_run(tmp_path)
    traces = {rank: run.read(rank, "all") for rank in run.ranks}
    bar(
        "all_ranks",
        lambda: joined(traces, Window(annotation="")),
        lambda: [in_order(trace.events) for trace in traces.values()],
        count=sum(trace.events.num_rows for trace in traces.values()),
    )


def in_order(events):
    """Sort the events by lane and time, and find who begins before an earlier one has ended."""
    lane, start, stop = (events[name].to_numpy() for name in ("lane", "start", "stop"))
    order = np.lexsort((stop, start, lane))
    lane, start, stop = lane[order], start[order], stop[order]
    latest = np.maximum.accumulate(stop)
    is_inside = np.append(False, (start[1:] < latest[:-1]) & (lane[1:] == lane[:-1]))
    inside = np.flatnonzero(is_inside)
    return np.unique(lane[inside]), np.bincount(np.searchsorted(start, stop[inside]))
