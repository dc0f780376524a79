"""Traces of synthetic jobs in memory, for tests of many jobs."""

import numpy as np
import pyarrow as pa

from fastcomm.metrics.computation import compute
from fastcomm.metrics.partial import Partial, merge
from fastcomm.synthetic.catalog import groups
from fastcomm.synthetic.play import steps
from fastcomm.trace import schema
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.trace import Meta, Trace

KIND = {"compute": "kernel", "comm": "kernel", "memcpy": "memcpy", "memset": "memset"}


def trace(job, rank, ahead=0):
    """One rank, with a clock that is so many ns ahead."""
    played = list(steps(job, rank))
    works = sorted((work for step in played for work in step.works), key=lambda w: w.start)
    calls = [(row, work) for row, work in enumerate(works) if work.call]
    kinds = {group.name: place for place, group in enumerate(groups(job, rank).values())}
    start, stop = (
        np.array([getattr(work, name) for work in works], np.int64) + ahead
        for name in ("start", "stop")
    )
    rows = np.array([row for row, _ in calls], np.int64)
    return Trace.of(
        events=pa.table(
            {
                "start": start,
                "stop": stop,
                "kind": pa.array([schema.KIND[KIND[work.kind]] for work in works], pa.int8()),
                "name": pa.array([work.name for work in works]).dictionary_encode(),
                "lane": pa.array(np.zeros(len(works), np.int32)),
                "correlation": pa.nulls(len(works), pa.int64()),
                "offset": pa.nulls(len(works), pa.int64()),
            }
        ),
        lanes=pa.table({"process": ["0"], "thread": ["7"], "device": [0], "is_device": [True]}),
        comm=pa.table(
            {
                "op": pa.array([schema.OP[w.call.operation.op] for _, w in calls], pa.int8()),
                "start": start[rows],
                "stop": stop[rows],
                "stream": pa.array([w.stream for _, w in calls], pa.int64()),
                "group": pa.array([kinds[w.call.group.name] for _, w in calls], pa.int32()),
                "seq": pa.array([w.call.seq for _, w in calls], pa.int64()),
                "tag": pa.array([TAG[w.call.group.tag] for _, w in calls], pa.int8()),
                "tag_source": pa.array([0] * len(calls), pa.int8()),
                "msg_bytes": pa.array([w.call.payload for _, w in calls], pa.int64()),
                "payload_bytes": pa.array([w.call.payload for _, w in calls], pa.int64()),
                "bus_bytes": pa.array([w.call.bus for _, w in calls], pa.int64()),
                "event": pa.array(rows, pa.int32()),
            }
        ),
        groups=pa.table(
            {
                "name": [group.name for group in groups(job, rank).values()],
                "description": [group.description for group in groups(job, rank).values()],
                "ranks": [list(group.ranks) for group in groups(job, rank).values()],
                "size": [group.size for group in groups(job, rank).values()],
                "tag": [TAG[group.tag] for group in groups(job, rank).values()],
                "tag_source": [0] * len(kinds),
                "candidates": pa.array([[]] * len(kinds), pa.list_(pa.int8())),
            }
        ),
        iterations=pa.table(
            {
                "number": [step.number for step in played],
                "start": [step.start + ahead for step in played],
                "stop": [step.stop + ahead for step in played],
            }
        ),
        meta=Meta(
            rank=rank,
            world_size=job.ranks,
            format="made",
            path="nowhere",
            found_by="ProfilerStep#N",
        ),
    )


def measured(traces, **words):
    """The metrics of some traces."""
    partials = [Partial.of(each) for each in traces]
    return compute(merge(partials), byte_kind="payload", link=None, **words)


def job_partials(job):
    """What is kept of each rank of a job."""
    return [Partial.of(trace(job, rank)) for rank in range(job.ranks)]


def measured_job(job, ahead=None, **words):
    """The metrics of a job; `ahead` says how far clocks are, by rank."""
    clocks = ahead or {}
    return measured((trace(job, r, clocks.get(r, 0)) for r in range(job.ranks)), **words)
