"""Statistics of a uniform trace by long name and by category."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.errors import FastcommError
from fastcomm.readers.dpro.names import Name, category, long_name
from fastcomm.readers.dpro.nccl import Topology
from fastcomm.readers.dpro.uniform import UniformTrace
from fastcomm_kernels import durations
from fastcomm_kernels.arrays import NULL, Floats, Ints

MS = 1e6
_MOST_CELLS = 1 << 28  # of operations times steps: 2 GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """One row a long name, in the order of first appearance; times in ns, variance in ns²."""

    names: tuple[str, ...]
    category: tuple[str, ...]
    count: Ints
    total: Ints
    avg: Floats
    least: Ints
    most: Ints
    median: Ints
    variance: Floats
    first: Ints
    times: Ints
    step_ids: Ints
    categories: Mapping[str, Mapping[str, Any]]
    trace: UniformTrace

    def ops(self) -> dict[str, dict[str, Any]]:
        """By long name, in ms, under dPRO's keys."""
        return {name: self.op(k) for k, name in enumerate(self.names)}

    def op(self, k: int) -> dict[str, Any]:
        """One row in ms, under dPRO's keys."""
        times = self.times[self.first[k] : self.first[k + 1]]
        return {
            "avg": float(self.avg[k]) / MS,
            "cnt": int(self.count[k]),
            "time": [each / MS for each in times.tolist()],
            "min_t": int(self.least[k]) / MS,
            "max_t": int(self.most[k]) / MS,
            "median": int(self.median[k]) / MS,
            "var": float(self.variance[k]) / MS**2,
            "id": k,
            "step_ids": [None if i < 0 else i for i in self.step_ids[k].tolist()],
            "cat": self.category[k],
        }

    def table(self) -> pa.Table:
        """One row a long name; times in ns."""
        parts = [Name.of(name) for name in self.names]
        return pa.table(
            {
                "name": pa.array(self.names, pa.string()),
                "pid": pa.array([part.pid for part in parts], pa.string()),
                "category": pa.array(self.category, pa.string()),
                "cnt": self.count,
                "time_ns": self.total,
                "avg_ns": self.avg,
                "min_ns": self.least,
                "max_ns": self.most,
                "median_ns": self.median,
                "var_ns2": self.variance,
            }
        )


def statistics(trace: UniformTrace, topology: Topology | None = None) -> Statistics:
    """Describe every long name; with a topology, RECV counts from its SEND on."""
    if topology is None:
        return describe(trace)
    pairs = send_receive(trace, topology)
    return describe(_sorted(clip_receives(trace, step_ids(trace), pairs)))


def describe(trace: UniformTrace, category_of: Callable[[str], str] = category) -> Statistics:
    """Describe every long name by its events; `category_of` takes standard names."""
    key, dur = trace.key, trace.dur
    if not trace.counts.all():
        key, dur = key[trace.counts], dur[trace.counts]
    size = len(trace.keys)
    first, times = durations.grouped(key, dur, np.int64(size))
    total, least, most, median, variance = durations.described(first, times)
    count = np.diff(first)
    kept = np.flatnonzero(count)
    known = {name: category_of(name) for name in set(trace.names)}
    ids = step_ids(trace)
    found = Statistics(
        names=tuple(trace.keys[k] for k in kept),
        category=tuple(known[trace.names[k]] for k in kept),
        count=count[kept],
        total=total[kept],
        avg=total[kept] / count[kept],
        least=least[kept],
        most=most[kept],
        median=median[kept],
        variance=variance[kept],
        first=np.append(first[:-1][kept], first[-1]),
        times=times,
        step_ids=ids[kept],
        categories={},
        trace=trace,
    )
    return replace(found, categories=_categories(found))


def _categories(found: Statistics) -> dict[str, dict[str, Any]]:
    """By fine category, in ms; the largest is that of the key with the largest mean."""
    rows: dict[str, list[int]] = {}
    for k, cat in enumerate(found.category):
        rows.setdefault(cat, []).append(k)
    out: dict[str, dict[str, Any]] = {}
    for cat, ks in rows.items():
        at = ks[int(np.argmax(found.avg[ks]))]
        time, cnt = float(found.total[ks].sum()) / MS, int(found.count[ks].sum())
        out[cat] = {
            "max_t": float(found.avg[at]) / MS,
            "max_name": found.names[at],
            "time": time,
            "cnt": cnt,
            "op_cnt": len(ks),
            "avg": time / cnt,
        }
    return out


def step_ids(trace: UniformTrace) -> Ints:
    """For each key and step the position of its last event in it; -1 where it has none."""
    known = trace.counts & (trace.step != NULL)
    rows = np.flatnonzero(known)
    steps = int(trace.step[rows].max()) + 1 if len(rows) else 0
    if len(rows) and (trace.step[rows].min() < 0 or steps * len(trace.keys) > _MOST_CELLS):
        raise FastcommError(
            f"steps are numbered {trace.step[rows].min()} to {steps - 1}; wanted numbers from 0"
        )
    ids = np.full((len(trace.keys), steps), -1, np.int64)
    ids[trace.key[rows], trace.step[rows]] = rows
    return ids


def send_receive(trace: UniformTrace, topology: Topology) -> tuple[Ints, Ints]:
    """The keys of each SEND of the trace, and of the RECV on the next rank of its ring."""
    known = {name: k for k, name in enumerate(trace.keys)}
    sends, receives = [], []
    for text, k in known.items():
        name = Name.of(text)
        if name.sub_op != "SEND" or name.suffix is None or name.pid is None:
            continue
        other = topology.receiver(name.pid, int(name.suffix.split("_")[1]))
        peer = known.get(long_name(other, f"Comm.{name.op_name}.RECV", name.suffix))
        if peer is not None:
            sends.append(k)
            receives.append(peer)
    return np.array(sends, np.int64), np.array(receives, np.int64)


def clip_receives(trace: UniformTrace, ids: Ints, pairs: tuple[Ints, Ints]) -> UniformTrace:
    """Return the trace with each RECV beginning no earlier than its SEND.

    `ids` has the event of each key in the steps that are clipped, `pairs` the keys of each SEND
    and of its RECV.
    """
    start, dur = trace.start.copy(), trace.dur.copy()
    send, receive = ids[pairs[0]].ravel(), ids[pairs[1]].ravel()
    both = (send >= 0) & (receive >= 0)
    send, receive = send[both], receive[both]
    early = start[send] > start[receive]
    send, receive = send[early], receive[early]
    left = np.maximum(0, dur[receive] - (start[send] - start[receive]))
    dur[receive], start[receive] = left, start[send]
    return trace.with_times(start, dur)


def _sorted(trace: UniformTrace) -> UniformTrace:
    """In time order again; among equal starts as before."""
    order = np.argsort(trace.start, kind="stable")
    columns = ("key", "start", "dur", "step", "cnt", "lane", "cat", "extra", "phase", "counts")
    return replace(trace, **{name: getattr(trace, name)[order] for name in columns})


def sort_rows(found: Statistics, *, by_avg: bool, head: int | None) -> Sequence[int]:
    """Rows to print: by falling mean, or in their order."""
    order = np.argsort(-found.avg, kind="stable") if by_avg else np.arange(len(found.names))
    return [int(k) for k in order[:head]]
