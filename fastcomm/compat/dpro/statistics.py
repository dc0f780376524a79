"""Measure the steps and the operations of a uniform trace.

A step of a rank lasts from the start of its first operator to the end of its operators. With
NCCL's topology a RECV counts from the start of its SEND. Times are ns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.compat.dpro.job import Topology
from fastcomm.compat.dpro.uniform import Name, UniformTrace, category, coarse, long_name
from fastcomm.errors import FastcommError
from fastcomm.trace.columns import block_starts, sums
from fastcomm_kernels import grouping
from fastcomm_kernels.arrays import NULL, Floats, Ints

_PARTS = {"fw": "operator.FW", "bw": "operator.BW", "update": "operator.UPDATE"}
_RANKS = ("host", "traces_", "default")
_SPREAD = 0.1  # coefficient of variation from which the median step counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """Steps of a rank; each tuple has one value per step, ns."""

    time: tuple[int, ...]
    parts: Mapping[str, tuple[int, ...]]  # sum of the operators of "fw", "bw" or "update"

    def mean_ns(self, part: str) -> float:
        """Return the mean over the steps of a part."""
        return sum(self.parts[part]) / len(self.parts[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperators:
    """Operators of a rank, sorted by step and start."""

    start: Ints
    stop: Ints
    category: NDArray[np.str_]
    bounds: Ints  # step k has the operators from bounds[k] to bounds[k + 1]
    begin: Ints  # start of each step

    @property
    def step(self) -> Ints:
        """Step of each operator, an index into `begin`."""
        return np.repeat(np.arange(len(self.begin)), np.diff(self.bounds))

    def rank_steps(self, end: Ints, step: Ints) -> RankSteps:
        """Return the length of each step, and the time of its parts.

        `end` is the end of each step in ns, `step` the step of each operator.
        """
        parts = {}
        for part, kind in _PARTS.items():
            own = self.category == kind
            times = sums(step[own], (self.stop - self.start)[own], len(self.begin))
            parts[part] = tuple(times.tolist())
        return RankSteps(time=tuple((end - self.begin).tolist()), parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Step time of a run."""

    ranks: Mapping[str, RankSteps]  # by pid
    steps: tuple[float, ...]  # mean over the ranks, ns
    time_ns: float  # mean over the steps; the median if they differ much
    opt_step: int  # position of the step closest to `time_ns`


def to_last_end(operators: StepOperators) -> RankSteps:
    """Measure steps that end with the last of their operators."""
    ends = np.maximum.reduceat(operators.stop, operators.bounds[:-1])
    return operators.rank_steps(ends, operators.step)


def step_time(
    trace: UniformTrace,
    category_of: Callable[[str], str] = category,
    measure: Callable[[StepOperators], RankSteps] = to_last_end,
) -> StepTime:
    """Measure the steps that all ranks have.

    Parameters
    ----------
    trace
        A trace with steps.
    category_of
        Returns the fine category of a standard name.
    measure
        Measures the operators of a rank.

    Raises
    ------
    FastcommError
        If no rank has an operator.

    """
    cats = np.array([category_of(name) for name in trace.names])
    is_operator = np.array([coarse(cat) == "operator" for cat in cats], bool)[trace.key]
    is_operator &= trace.counts & (trace.step != NULL)
    process, ranks = trace.process, {}
    for number, name in enumerate(trace.pids):
        rows = np.flatnonzero(is_operator & (process == number))
        if len(rows) and name.startswith(_RANKS):
            ranks[name] = measure(_operators(trace, rows, cats))
    return _over_all(ranks)


def _operators(trace: UniformTrace, rows: Ints, cats: NDArray[np.str_]) -> StepOperators:
    """Sort the operators of a rank, rows in time order, into steps; `cats` are by key."""
    rows = rows[np.argsort(trace.step[rows], kind="stable")]
    bounds = np.append(block_starts(trace.step[rows]), len(rows))
    own, start = cats[trace.key[rows]], trace.start[rows]
    begin = start[bounds[:-1]]
    barrier = np.array(["input_barrier" in name for name in trace.names], bool)
    if barrier.any():
        is_barrier = barrier[trace.key[rows]]
        for k, (low, high) in enumerate(pairwise(bounds.tolist())):
            begin[k] = start[low + _first_operator(own[low:high], is_barrier[low:high])]
    stop = start + trace.dur[rows]
    return StepOperators(start=start, stop=stop, category=own, bounds=bounds, begin=begin)


def _first_operator(cats: NDArray[np.str_], is_barrier: NDArray[np.bool_]) -> int:
    """Return the position of the first operator of a step, without those up to a barrier."""
    barriers = np.flatnonzero(is_barrier)
    after = int(barriers[-1]) + 1 if len(barriers) else 0
    forward = np.flatnonzero(cats[after:] == "operator.FW")
    return after + int(forward[0]) if after and len(forward) else 0


def _over_all(ranks: Mapping[str, RankSteps]) -> StepTime:
    """Combine the steps of all ranks."""
    if not ranks:
        raise FastcommError(
            "no operator of any rank in the trace: expected FW, BW or UPDATE events"
        )
    fewest = min(len(rank.time) for rank in ranks.values())
    steps = np.array([rank.time[:fewest] for rank in ranks.values()], np.float64).mean(axis=0)
    time = float(steps.mean())
    if steps.std() / time > _SPREAD:
        time = float(np.median(steps))
    return StepTime(
        ranks=ranks,
        steps=tuple(steps.tolist()),
        time_ns=time,
        opt_step=int(np.argmin(np.abs(steps - time))),
    )


MS = 1e6
_MOST_CELLS = 1 << 28  # of operations times steps: 2 GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Durations of operations: one row per long name, in the order of first appearance."""

    names: tuple[str, ...]
    category: tuple[str, ...]  # fine
    count: Ints
    total: Ints  # ns, as all durations
    avg: Floats
    least: Ints
    most: Ints
    median: Ints
    variance: Floats  # ns²
    first: Ints  # position of each row's first duration in `times`, and the end
    times: Ints  # sorted within each row
    step_ids: Ints  # event of each row by step, see `step_ids`
    categories: Mapping[str, Mapping[str, Any]]  # by fine category, in ms
    trace: UniformTrace

    def table(self) -> pa.Table:
        """Return the rows as a table, with pid and category; times are ns, the variance ns²."""
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
    """Measure the operations of a trace by long name.

    With a topology, RECV counts from the start of its SEND.
    """
    if topology is None:
        return describe(trace)
    pairs = send_receive(trace, topology)
    return describe(_sorted(clip_receives(trace, step_ids(trace), pairs)))


def describe(trace: UniformTrace, category_of: Callable[[str], str] = category) -> Statistics:
    """Measure the operations of a trace by long name.

    Parameters
    ----------
    trace
        A trace with steps.
    category_of
        Returns the fine category of a standard name.

    """
    key, dur = trace.key, trace.dur
    if not trace.counts.all():
        key, dur = key[trace.counts], dur[trace.counts]
    first, times = grouping.grouped(key, dur, np.int64(len(trace.keys)))
    total, least, most, median, variance = grouping.described(first, times)
    count = np.diff(first)
    used = np.flatnonzero(count)
    categories = {name: category_of(name) for name in set(trace.names)}
    statistics = Statistics(
        names=tuple(trace.keys[k] for k in used),
        category=tuple(categories[trace.names[k]] for k in used),
        count=count[used],
        total=total[used],
        avg=total[used] / count[used],
        least=least[used],
        most=most[used],
        median=median[used],
        variance=variance[used],
        first=np.append(first[:-1][used], first[-1]),
        times=times,
        step_ids=step_ids(trace)[used],
        categories={},
        trace=trace,
    )
    return replace(statistics, categories=_categories(statistics))


def _categories(statistics: Statistics) -> dict[str, dict[str, Any]]:
    """Sum up the operations of each fine category, in ms, as dPRO does.

    The maximum is that of the mean durations.
    """
    rows: dict[str, list[int]] = {}
    for k, cat in enumerate(statistics.category):
        rows.setdefault(cat, []).append(k)
    categories: dict[str, dict[str, Any]] = {}
    for cat, ks in rows.items():
        at = ks[int(np.argmax(statistics.avg[ks]))]
        time, cnt = float(statistics.total[ks].sum()) / MS, int(statistics.count[ks].sum())
        categories[cat] = {
            "max_t": float(statistics.avg[at]) / MS,
            "max_name": statistics.names[at],
            "time": time,
            "cnt": cnt,
            "op_cnt": len(ks),
            "avg": time / cnt,
        }
    return categories


def step_ids(trace: UniformTrace) -> Ints:
    """Return the row of the last event of each key in each step, keys x steps; -1 if none.

    Raises FastcommError if steps have negative or far too large numbers.
    """
    rows = np.flatnonzero(trace.counts & (trace.step != NULL))
    steps = int(trace.step[rows].max()) + 1 if len(rows) else 0
    if len(rows) and (trace.step[rows].min() < 0 or steps * len(trace.keys) > _MOST_CELLS):
        raise FastcommError(
            f"steps are numbered {trace.step[rows].min()} to {steps - 1}; expected small "
            "numbers from 0"
        )
    ids = np.full((len(trace.keys), steps), -1, np.int64)
    ids[trace.key[rows], trace.step[rows]] = rows
    return ids


def send_receive(trace: UniformTrace, topology: Topology) -> tuple[Ints, Ints]:
    """Return the SENDs and, for each, the RECV on the next rank of its ring.

    Returns
    -------
    tuple of two Ints
        Indices into `trace.keys`. SENDs without a RECV are left out.

    """
    number = {name: k for k, name in enumerate(trace.keys)}
    sends, receives = [], []
    for text, k in number.items():
        name = Name.of(text)
        if name.sub_op != "SEND" or name.suffix is None or name.pid is None:
            continue
        other = topology.receiver(name.pid, int(name.suffix.split("_")[1]))
        peer = number.get(long_name(other, f"Comm.{name.op_name}.RECV", name.suffix))
        if peer is not None:
            sends.append(k)
            receives.append(peer)
    return np.array(sends, np.int64), np.array(receives, np.int64)


def paired_rows(ids: Ints, pairs: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the rows of each SEND and of its RECV, in all steps that have both.

    `ids` are those of `step_ids`, `pairs` the keys of each SEND and of its RECV.
    """
    send, receive = (ids[keys].ravel() for keys in pairs)
    both = (send >= 0) & (receive >= 0)
    return send[both], receive[both]


def clip_receives(trace: UniformTrace, ids: Ints, pairs: tuple[Ints, Ints]) -> UniformTrace:
    """Return the trace with each RECV beginning no earlier than its SEND.

    Parameters
    ----------
    trace
        The trace.
    ids
        Row of each key's event by step, as from `step_ids`; other steps are not clipped.
    pairs
        Keys of each SEND and of its RECV.

    """
    start, dur = trace.start.copy(), trace.dur.copy()
    send, receive = paired_rows(ids, pairs)
    early = start[send] > start[receive]
    send, receive = send[early], receive[early]
    clipped = np.maximum(0, dur[receive] - (start[send] - start[receive]))
    dur[receive], start[receive] = clipped, start[send]
    return trace.with_times(start, dur)


def _sorted(trace: UniformTrace) -> UniformTrace:
    """Sort events by start, stably."""
    order = np.argsort(trace.start, kind="stable")
    columns = ("key", "start", "dur", "step", "cnt", "lane", "cat", "extra", "phase", "counts")
    return replace(trace, **{name: getattr(trace, name)[order] for name in columns})


def sort_rows(statistics: Statistics, *, by_avg: bool, head: int | None) -> Sequence[int]:
    """Return the indices of the rows to print.

    Parameters
    ----------
    statistics
        Rows of operations.
    by_avg
        Whether to sort by descending mean; otherwise rows stay in order.
    head
        Number of rows; None is all.

    """
    avg = statistics.avg
    order = np.argsort(-avg, kind="stable") if by_avg else np.arange(len(avg))
    rows: list[int] = order[:head].tolist()
    return rows
