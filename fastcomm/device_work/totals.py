"""Sums of the device work of each rank by a key, which merge over ranks in any order.

Memory grows with the ranks times the keys, and not with the events.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.device_work.attribution import DEVICE_KEYS, INPUTS, Labels, Work
from fastcomm.device_work.costs import WorkCosts, why_unknown
from fastcomm.device_work.flops import (
    COSTS,
    PROBLEMS,
    RankFlops,
    merged_problems,
    problems,
    row_costs,
)
from fastcomm.device_work.names import Distribution, KeySums, check_durations, same_texts
from fastcomm.device_work.options import KernelKey
from fastcomm.errors import SchemaError
from fastcomm.hardware.gpus import roof_of
from fastcomm.regexes import matches
from fastcomm.trace.columns import block_lengths, block_starts
from fastcomm.trace.run_traces import Content, ranges
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Flags, Floats, Ints

NOT_COUNTED = "FLOPs were not counted"
_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
ROWS = pa.schema(
    [("rank", pa.int32()), ("name", _TEXT), ("category", _TEXT)]
    + [(name, _INT) for name in ("count", "total_ns", "min_ns", "max_ns")]
    + [(name, _FLOAT) for name in COSTS]  # 0 where FLOPs are unknown
)
_BY_CATEGORY = [("rank", "ascending"), ("category", "ascending")]
# The time in which at least one event of a category runs, on any stream.
RUNNING = pa.schema([("rank", pa.int32()), ("category", _TEXT), ("running_ns", _INT)])
_ORDER = [("rank", "ascending"), ("name", "ascending"), ("category", "ascending")]
DURATIONS = pa.schema([("name", _TEXT), ("bucket", _INT), ("number", _INT)])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkQuestion:
    """Which work of each rank is summed up."""

    by: tuple[KernelKey, ...]
    steps: tuple[int, ...] | None = None  # their numbers; None: all
    match: str | None = None
    full_names: bool = False
    flops: bool = False  # whether FLOPs are counted, and operators divided by their inputs
    gpu: str | None = None  # whose peaks count; None: the one that the trace names

    @property
    def content(self) -> Content:
        """The part of a trace that the keys need."""
        if not set(self.by) <= set(DEVICE_KEYS):
            return "launches"
        return "flops" if self.flops else "kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """Facts about the work of a rank, and its warnings."""

    rank: int
    world_size: int | None
    steps: int  # number of steps that count
    step_ns: int  # of these steps together
    events: int  # number of events that count
    outside: int  # number of events outside of all steps
    numbers: str  # of all steps of the trace
    format: str
    is_host_run: bool
    has_devices: bool  # whether it is the work of several devices, of which none has the steps
    warnings: tuple[str, ...]
    unused: tuple[str, ...]
    flops: RankFlops | str = NOT_COUNTED  # a text says why they are unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTotals:
    """The work of some ranks, by each key of the question."""

    ranks: tuple[RankWork, ...]
    rows: dict[KernelKey, pa.Table]  # ROWS, sorted
    durations: dict[KernelKey, pa.Table]  # DURATIONS, sorted
    running: dict[KernelKey, pa.Table]  # RUNNING
    problems: pa.Table  # GEMMs by their size: PROBLEMS
    queues: pa.Table  # of streams, if they are asked for: QUEUES

    @property
    def counted(self) -> tuple[RankWork, ...]:
        """Facts about the ranks that count: those with steps, or without any step, all."""
        return tuple(rank for rank in self.ranks if rank.steps) or self.ranks

    @classmethod
    def of(cls, trace: Trace, question: WorkQuestion) -> Self:
        """Sum up the work of one rank. Raises SchemaError for impossible durations."""
        work = Work(trace)
        chosen, about = _chosen(work, question)
        start, stop = (
            trace.events[name].to_numpy()[work.rows[chosen]] for name in ("start", "stop")
        )
        duration = stop - start
        try:
            check_durations(duration)
        except SchemaError as error:
            raise SchemaError(f"{trace.meta.path}: {error}") from error
        costs = _costs(work, question)
        rows, durations, running, sizes = {}, {}, {}, PROBLEMS.empty_table()
        if isinstance(costs, WorkCosts):
            about = replace(about, flops=RankFlops.of(work, costs, chosen, duration))
            sizes = problems(costs, chosen, duration)
        else:
            about = replace(about, flops=costs)
        for key in question.by:
            labels = work.labels(
                key, full_names=question.full_names, with_inputs=question.flops
            )
            own = _matching(work, labels, chosen, question.match)
            at, spent, numbers = chosen[own], duration[own], {}
            if isinstance(costs, WorkCosts):
                of_operators = key not in (*DEVICE_KEYS, "stream")
                numbers = row_costs(costs, at, spent, of_operators=of_operators)
            rows[key], durations[key] = _tables(
                trace.meta.rank, work, labels, at, spent, numbers
            )
            running[key] = _running(trace.meta.rank, work, at, (start[own], stop[own]))
        return cls(
            ranks=(about,),
            rows=rows,
            durations=durations,
            running=running,
            problems=sizes,
            queues=queues(work, chosen) if "stream" in question.by else QUEUES.empty_table(),
        )


def _costs(work: Work, question: WorkQuestion) -> WorkCosts | str:
    """Return the FLOPs of the work of a rank; a text says why they are unknown."""
    if not question.flops:
        return NOT_COUNTED
    roof = roof_of(work.trace.meta.gpu, question.gpu)
    return why_unknown(work) or WorkCosts.of(work, roof)


def _chosen(work: Work, question: WorkQuestion) -> tuple[Ints, RankWork]:
    """Return the indices of the work that starts in the chosen steps, and facts about it."""
    trace = work.trace
    steps = trace.on_device_clock().iterations
    number, begin, end = (steps[name].to_numpy() for name in ("number", "start", "stop"))
    start = trace.events["start"].to_numpy()[work.rows]
    if len(number):
        step = intervals.segment_of(start, begin, end)
        outside = int(np.count_nonzero(step < 0))
        own = np.ones(len(number), np.bool_)
        if question.steps is not None:
            own = np.isin(number, question.steps)
        chosen = np.flatnonzero(np.append(own, False)[step])
    else:
        outside, own = 0, np.zeros(0, np.bool_)
        chosen = np.arange(0 if question.steps is not None else len(start))
    meta = trace.meta
    return chosen, RankWork(
        rank=meta.rank,
        world_size=meta.world_size,
        steps=int(own.sum()),
        step_ns=int((end - begin)[own].sum()),
        events=len(chosen),
        outside=outside,
        numbers=ranges(sorted(set(number.tolist()))),
        format=meta.format,
        is_host_run=meta.is_host_run,
        has_devices="devices" in meta.missing_data,
        warnings=meta.warnings,
        unused=meta.unused,
    )


def _matching(work: Work, labels: Labels, chosen: Ints, match: str | None) -> Ints | slice:
    """Return the places in `chosen` of work whose name or label matches; all without any."""
    if match is None:
        return slice(None)
    code, names = work.names
    label, texts = labels
    is_match = np.zeros(len(chosen), np.bool_)
    labels_ = pa.array([text.partition(INPUTS)[0] for text in texts], pa.string())
    for codes, of in ((code, names), (label, labels_)):
        flags = matches(of, match).to_numpy(zero_copy_only=False).astype(np.bool_)
        is_match |= flags[codes[chosen]]
    return np.flatnonzero(is_match)


def _tables(
    rank: int,
    work: Work,
    labels: Labels,
    at: Ints,
    duration: Ints,
    numbers: Mapping[str, Floats],
) -> tuple[pa.Table, pa.Table]:
    """Return the tables ROWS and DURATIONS of the work at some indices."""
    key, names = same_texts(labels[0][at], pa.array(labels[1], pa.string()))
    kind, kinds = work.categories
    # A name has one category as a rule; rows of an operator have several.
    pair = key * np.int32(len(kinds)) + kind[at]
    parts = KeySums.of(pair, duration, len(names) * len(kinds))
    used = np.flatnonzero(parts.count)
    rows = pa.table(
        {
            "rank": pa.array(np.full(len(used), rank, np.int32)),
            "name": names.take(pa.array(used // len(kinds))),
            "category": pa.array(kinds).take(pa.array(used % len(kinds))),
            "count": parts.count[used],
            "total_ns": parts.total[used],
            "min_ns": parts.least[used],
            "max_ns": parts.most[used],
            **dict.fromkeys(COSTS, np.zeros(len(used))),
            **{
                name: np.bincount(pair, weights=values, minlength=len(parts.count))[used]
                for name, values in numbers.items()
            },
        }
    )
    whole = Distribution.of(key, duration, KeySums.of(key, duration, len(names)))
    return rows.cast(ROWS).sort_by(_ORDER), _duration_table(whole, names)


def _running(rank: int, work: Work, at: Ints, times: tuple[Ints, Ints]) -> pa.Table:
    """Return the table RUNNING of the work at some indices, by start.

    `times` are its starts and its stops, in ns.
    """
    kind, names = work.categories
    kind = kind[at]
    used = np.flatnonzero(np.bincount(kind, minlength=len(names)))
    parts = (kind == code for code in used)
    lengths = [intervals.union_length(*(column[own] for column in times)) for own in parts]
    ranks = np.full(len(used), rank, np.int32)
    table = pa.table([ranks, pa.array(names).take(pa.array(used)), lengths], schema=RUNNING)
    return table.sort_by(_BY_CATEGORY)


def _duration_table(durations: Distribution, names: pa.Array) -> pa.Table:
    """Return a distribution as a table DURATIONS, sorted by name and bucket."""
    columns = (names.take(pa.array(durations.keys)), durations.bucket, durations.number)
    table = pa.Table.from_arrays([pa.array(column) for column in columns], schema=DURATIONS)
    return table.sort_by([("name", "ascending"), ("bucket", "ascending")])


def distribution(durations: pa.Table, names: pa.Array) -> Distribution:
    """Return a table DURATIONS as a distribution by the index in `names`, which has all."""
    return Distribution.merged(
        pc.index_in(durations["name"].combine_chunks(), names).to_numpy(),
        durations["bucket"].to_numpy(),
        durations["number"].to_numpy(),
        len(names),
    )


def merge(parts: Iterable[WorkTotals]) -> WorkTotals:
    """Merge the work of different ranks; the result does not depend on their order.

    If any rank has steps, only the work of such ranks is kept: that of others is not of steps.
    """
    parts = list(parts)
    ranks = sorted((rank for part in parts for rank in part.ranks), key=lambda rank: rank.rank)
    parts = [part for part in parts if any(rank.steps for rank in part.ranks)] or parts
    keys = parts[0].rows
    return WorkTotals(
        ranks=tuple(ranks),
        rows={key: _joined([part.rows[key] for part in parts]).sort_by(_ORDER) for key in keys},
        durations={key: _merged([part.durations[key] for part in parts]) for key in keys},
        running={
            key: _joined([part.running[key] for part in parts]).sort_by(_BY_CATEGORY)
            for key in keys
        },
        problems=merged_problems([part.problems for part in parts]),
        queues=_joined([part.queues for part in parts]),
    )


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).combine_chunks()


def _merged(tables: Sequence[pa.Table]) -> pa.Table:
    """Add up the distributions of several ranks."""
    if len(tables) == 1:
        return tables[0]
    whole = _joined(tables)
    names = whole["name"].unique()
    return _duration_table(distribution(whole, names), names)


FULL_QUEUE = 1024  # entries of a queue of CUDA: the next launch waits for one to leave
# Sums of a rank and stream over the work whose launch was recorded.
QUEUES = pa.schema(
    [
        ("rank", pa.int32()),
        ("name", _TEXT),  # of the stream
        *[(name, _INT) for name in ("launched", "delay_ns", "longest_delay_ns")],
        *[(name, _INT) for name in ("queued_ns", "longest_queue", "full_ns")],
        ("span_ns", _INT),  # from the first launch to the last start
    ]
)
QUEUE_COLUMNS = pa.schema(
    [
        ("launched", _INT),  # events whose launch was recorded
        ("launch_delay_mean_ns", _FLOAT),  # from the end of the call to the start
        ("launch_delay_max_ns", _INT),
        ("queue_mean", _FLOAT),  # launched and not yet begun, over time
        ("queue_max", _INT),
        ("queue_full_ns", _INT),  # with FULL_QUEUE or more
    ]
)


def queues(work: Work, chosen: Ints) -> pa.Table:
    """Return launch delays and queue lengths of the streams of a rank.

    Parameters
    ----------
    work
        The work of a rank.
    chosen
        Indices of the work that counts.

    Returns
    -------
    pyarrow.Table
        A row per stream with a launch: QUEUES.

    """
    is_device = work.events.of_kind("kernel", "memcpy", "memset")[work.rows[chosen]]
    own = chosen[is_device & (work.launch[chosen] >= 0)]
    if not len(own) or work.trace.meta.is_host_run:
        return QUEUES.empty_table()
    code, texts = work.labels("stream", full_names=False)
    lane = code.astype(np.int64)
    call, row = work.launch[own], work.rows[own]
    order = np.argsort(lane[own], kind="stable")
    call, row, lane = call[order], row[order], lane[own][order]
    start, stop = work.events.start, work.events.stop
    begin = np.minimum(start[call], start[row])  # clocks of host and device may differ
    delay = np.maximum(start[row] - stop[call], 0)
    first = block_starts(lane)
    earliest = np.minimum.reduceat(begin, first)
    span = np.maximum.reduceat(start[row], first) - earliest
    longest, full = _lengths(begin, start[row], lane)
    columns = {
        "rank": np.full(len(first), work.trace.meta.rank),
        "name": [texts[k] for k in lane[first].tolist()],
        "launched": block_lengths(first, len(lane)),
        "delay_ns": np.add.reduceat(delay, first),
        "longest_delay_ns": np.maximum.reduceat(delay, first),
        "queued_ns": np.add.reduceat(start[row] - begin, first),
        "longest_queue": longest,
        "full_ns": full,
        "span_ns": span,
    }
    return pa.table(columns).cast(QUEUES)


def _lengths(begin: Ints, start: Ints, lane: Ints) -> tuple[Ints, Ints]:
    """Return the longest queue of each lane, and the time in which it has FULL_QUEUE entries.

    Work joins the queue of its lane at `begin` and leaves it at `start`, which is no earlier;
    rows are sorted by lane.
    """
    time, lanes = np.concatenate([begin, start]), np.concatenate([lane, lane])
    leaves: Flags = np.repeat([False, True], len(begin))
    order = np.lexsort((leaves, time, lanes))
    # Every queue is empty after its last start, so that one sum serves all lanes.
    length = np.cumsum(np.where(leaves[order], -1, 1))
    lasts = np.diff(time[order], append=0)
    first = block_starts(lanes[order])
    full = np.add.reduceat(np.where(length >= FULL_QUEUE, lasts, 0), first)
    return np.maximum.reduceat(length, first), full


def queue_columns(table: pa.Table, names: Sequence[str]) -> dict[str, pa.Array]:
    """Return QUEUE_COLUMNS for some streams of all ranks; null without any launch."""
    summed = ("launched", "delay_ns", "queued_ns", "full_ns", "span_ns")
    largest = ("longest_delay_ns", "longest_queue")
    sums = table.group_by("name").aggregate(
        [*((name, "sum") for name in summed), *((name, "max") for name in largest)]
    )
    sums = sums.take(pc.index_in(pa.array(names, pa.string()), sums["name"].combine_chunks()))

    def ratio(over: str, under: str) -> pa.ChunkedArray:
        return pc.divide(sums[f"{over}_sum"].cast(_FLOAT), sums[f"{under}_sum"])

    length = ratio("queued_ns", "span_ns")
    return {
        "launched": pc.fill_null(sums["launched_sum"], 0),
        "launch_delay_mean_ns": ratio("delay_ns", "launched"),
        "launch_delay_max_ns": sums["longest_delay_ns_max"],
        # Null where the span is 0.
        "queue_mean": pc.if_else(pc.is_finite(length), length, None),
        "queue_max": sums["longest_queue_max"],
        "queue_full_ns": sums["full_ns_sum"],
    }
