"""Test that ranks measured together equal ranks measured separately."""

from dataclasses import replace
from functools import partial

import pyarrow as pa
from builders.dask_cluster import merge as merge_counts
from builders.dask_cluster import run_of
from builders.examples import in_gate
from builders.job_traces import trace
from builders.made_traces import traces
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.executors import executor
from fastcomm.executors.executor import Task, both
from fastcomm.metrics import rank_arrays
from fastcomm.metrics.partial import Partial, merge
from fastcomm.synthetic.job import Job

TABLES = ("iterations", "events", "windows", "groups", "members")


def same(ranks, **words):
    """Measure ranks together, and each alone; what is kept of them is the same."""
    found = Partial.of(*ranks, **words)
    wanted = merge([Partial.of(each, **words) for each in ranks])
    assert found.notes == wanted.notes
    for name in TABLES:
        assert getattr(found, name).equals(getattr(wanted, name)), name


def numbered(ranks):
    """The same traces as ranks 0, 1, 2, ..."""
    return [
        replace(each, meta=replace(each.meta, rank=rank)) for rank, each in enumerate(ranks)
    ]


@in_gate(10)
@given(
    st.lists(traces(), min_size=1, max_size=4).map(numbered),
    st.sampled_from(["payload", "bus", "msg"]),
)
def test_ranks_are_measured_together_as_each_alone(ranks, byte_kind):
    same(ranks, byte_kind=byte_kind)


def test_ranks_of_a_job_are_measured_together_as_each_alone():
    job = Job.of(8, steps=2, layers=2)
    ranks = [trace(job, rank, ahead=(-1) ** rank * 10**9) for rank in range(8)]
    same(ranks)
    same(ranks, only=frozenset([1]))
    same(ranks, only=frozenset())


def test_members_of_a_group_are_stored_once():
    job = Job.of(8, steps=1, layers=2)
    ranks = [trace(job, rank) for rank in range(8)]
    found = merge([Partial.of(*ranks[:3]), Partial.of(*ranks[3:5]), Partial.of(*ranks[5:])])
    wanted = {
        tuple(row["ranks"])
        for each in ranks
        for row in each.groups.to_pylist()
        if row["size"] > 1
    }
    assert {tuple(ranks) for ranks in found.members["ranks"].to_pylist()} == wanted
    labels = found.members["group"].to_pylist()
    assert labels == sorted(set(found.groups["group"].drop_null().to_pylist()))


def test_ranks_with_different_missing_data_are_measured_separately():
    job = Job.of(2)
    ranks = [trace(job, rank) for rank in range(2)]
    ranks[1] = replace(ranks[1], meta=replace(ranks[1].meta, missing_data=("compute",)))
    same(ranks)
    assert Partial.of(*ranks).iterations["exact_idle_ns"].null_count == job.steps


def moved(each, by):
    """The same trace, its last event and its iteration longer by so much."""
    tables = {}
    for name in ("events", "comm", "iterations"):
        table = getattr(each, name)
        stop = table["stop"].to_pylist()
        stop[-1:] = [end + by for end in stop[-1:]]
        place = table.column_names.index("stop")
        tables[name] = table.set_column(place, table.schema.field("stop"), pa.array(stop))
    return replace(each, **tables)


def test_ranks_that_take_too_long_together_are_measured_apart():
    job = Job.of(2, steps=1)
    ranks = [moved(trace(job, rank), 1 << 61) for rank in range(2)]
    assert rank_arrays.Stack.of(ranks[:1], [None]) is not None
    assert rank_arrays.Stack.of(ranks, [None] * len(ranks)) is None
    same(ranks)


def test_ranks_that_begin_too_early_are_measured_apart():
    job = Job.of(2, steps=1)
    ranks = [trace(job, rank) for rank in range(2)]
    steps = ranks[1].iterations
    start = pa.array([-(2**63)])
    ranks[1] = replace(ranks[1], iterations=steps.set_column(1, steps.schema.field(1), start))
    assert rank_arrays.Stack.of(ranks, [None] * len(ranks)) is None


CALLS = []


def measured_together(*ranks):
    CALLS.append([each.meta.rank for each in ranks])
    return {each.meta.rank: 1 for each in ranks}


def test_small_ranks_are_measured_together_up_to_a_limit(monkeypatch):
    """Each once; one that is large is measured by itself, at once."""
    job = Job.of(8, steps=1)
    sizes = [trace(job, rank).events.num_rows for rank in range(8)]
    large = Job.of(8, steps=5)
    run = run_of(*[partial(trace, job)] * 5, partial(trace, large), *[partial(trace, job)] * 2)
    monkeypatch.setattr(executor, "_SMALL", 3 * max(sizes))
    monkeypatch.setattr(executor, "_BATCH_S", 60.0)  # a busy machine would end the batch early
    CALLS.clear()
    task = Task(measure=measured_together, merge=merge_counts, finish=both, takes_many=True)
    done, found, error = executor.BatchTask(task=task)(run.sources)
    assert (done, found, error) == (8, dict.fromkeys(range(8), 1), None)
    assert CALLS == [[0, 1, 2], [5], [3, 4, 6], [7]]


def test_one_rank_is_not_copied():
    one = trace(Job.of(2), 0)
    found = rank_arrays.Stack.of([one], [None])
    for ours, theirs in ((found.events, one.events), (found.comm, one.comm)):
        start = theirs["start"].chunk(0).buffers()[1].address
        assert ours["start"].chunk(0).buffers()[1].address == start
