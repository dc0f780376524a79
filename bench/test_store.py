"""A stored rank beside the gzipped trace that it was made of: time to its metrics, and size."""

from functools import partial

import pyarrow as pa
import pytest
from timing import best

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader as kineto_reader
from fastcomm.formats.store import reader as store_reader
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.partial import Partial
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

MB = 1_000_000
EVENTS = 500_000
ROUNDS = 25


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    """A gzipped trace of half a million events, a tenth on the device, and its store."""
    folder = tmp_path_factory.mktemp("store")
    job = Job.of(ranks=8, steps=5, layers=16, micro_batches=16)
    (trace,) = write(job, folder / "traces", ranks=[0], filler_bytes=240 * MB)
    found = ingest(plan([trace], folder / "store"))
    return trace, folder / "store" / "rank-00000.parquet", found.manifest.ranks[0].events


def metrics(read, path):
    Partial.of(read(path, TraceOptions()))


# Of a store, as `fastcomm metrics` reads it.
reopened = partial(store_reader.read, column_set="metrics")


def test_reopening(rank, bar):
    trace, stored, events = rank
    assert events >= EVENTS
    bar(
        "reopen",
        partial(metrics, reopened, stored),
        partial(metrics, kineto_reader.read, trace),
        count=events,
    )


@pytest.fixture
def one_thread():
    """Arrow on one core: two that share their parts add up to more time."""
    count = pa.cpu_count()
    pa.set_cpu_count(1)
    yield
    pa.set_cpu_count(count)


@pytest.mark.usefixtures("one_thread")
def test_reopening_whole(rank, bar):
    trace, stored, events = rank
    whole = TraceOptions(whole=True)
    bar(
        "reopen_whole",
        partial(store_reader.read, stored, whole),
        partial(kineto_reader.read, trace, whole),
        count=events,
        least=3,
    )


def test_size(rank, held):
    trace, stored, _ = rank
    held("store_size", stored.stat().st_size / trace.stat().st_size)


def test_a_rank(quotient, tmp_path):
    """One of thousands of small ranks: what is done is little, and calls are most of it."""
    job = Job.of(512, steps=4, micro_batches=6)
    (trace,) = write(job, tmp_path / "traces", ranks=[0])
    ingest(plan([trace], tmp_path / "store"))
    stored = partial(metrics, reopened, tmp_path / "store" / "rank-00000.parquet")
    runs = stored, partial(metrics, kineto_reader.read, trace)
    for run in runs:
        run()
    quotient("store_rank", lambda: best(*runs, rounds=ROUNDS))
