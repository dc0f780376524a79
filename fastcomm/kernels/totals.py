"""Sums of the device work of each rank by a key, which merge over ranks in any order.

Memory grows with the ranks times the keys, and not with the events: durations of runs of many
ranks are rounded before they are merged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from fastcomm.errors import SchemaError
from fastcomm.kernels import Distribution, check_durations, same_texts
from fastcomm.kernels.attribution import DEVICE_KEYS, Labels, Work
from fastcomm.options import KernelKey
from fastcomm.trace.events import matches
from fastcomm.trace.run import ranges
from fastcomm.trace.schema import ColumnSet
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Ints

EXACT_RANKS = 8  # up to this number of ranks, percentiles are exact
ROUNDED_BITS = 11  # of durations of more ranks: an error of at most 0.05 %

ROWS = pa.schema(
    [
        pa.field("rank", pa.int32()),
        pa.field("name", pa.string()),
        pa.field("category", pa.string()),
        pa.field("count", pa.int64()),
        pa.field("total_ns", pa.int64()),
        pa.field("min_ns", pa.int64()),
        pa.field("max_ns", pa.int64()),
    ]
)
DURATIONS = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("duration_ns", pa.int64()),
        pa.field("number", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkQuestion:
    """Which work of each rank is summed up."""

    by: tuple[KernelKey, ...]
    steps: tuple[int, ...] | None = None  # their numbers; None: all
    match: str | None = None
    full_names: bool = False
    is_exact: bool = True  # whether durations are kept as they are

    @property
    def columns(self) -> ColumnSet:
        """The columns of a trace that the keys need."""
        return "kernels" if set(self.by) <= set(DEVICE_KEYS) else "launches"


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
    is_host_run: bool
    warnings: tuple[str, ...]
    unused: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTotals:
    """The work of some ranks, by each key of the question."""

    ranks: tuple[RankWork, ...]
    rows: dict[KernelKey, pa.Table]  # ROWS, sorted
    durations: dict[KernelKey, pa.Table]  # DURATIONS, sorted

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
        rows, durations = {}, {}
        for key in question.by:
            labels = work.labels(key, full_names=question.full_names)
            own = _matching(work, labels, chosen, question.match)
            is_own = slice(None) if own is None else own
            at = chosen[is_own]
            rows[key], durations[key] = _tables(
                trace.meta.rank, work, labels, at, duration[is_own], question
            )
        return cls(ranks=(about,), rows=rows, durations=durations)


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
        is_host_run=meta.is_host_run,
        warnings=meta.warnings,
        unused=meta.unused,
    )


def _matching(work: Work, labels: Labels, chosen: Ints, match: str | None) -> Ints | None:
    """Return the places in `chosen` of work whose name or label matches; None for all."""
    if match is None:
        return None
    code, names = work.names
    label, texts = labels
    is_match = np.zeros(len(chosen), np.bool_)
    for codes, of in ((code, names), (label, pa.array(texts, pa.string()))):
        flags = matches(of, match).to_numpy(zero_copy_only=False).astype(np.bool_)
        is_match |= flags[codes[chosen]]
    return np.flatnonzero(is_match)


def _tables(
    rank: int, work: Work, labels: Labels, at: Ints, duration: Ints, question: WorkQuestion
) -> tuple[pa.Table, pa.Table]:
    """Return the tables ROWS and DURATIONS of the work at some indices."""
    code, texts = labels
    key, names = same_texts(code[at], pa.array(texts, pa.string()))
    kind, kinds = work.categories
    # A name has one category as a rule; rows of an operator have several.
    pair = key.astype(np.int64) * len(kinds) + kind[at]
    used, place = np.unique(pair, return_inverse=True)
    parts = Distribution.of(place.astype(np.int32), duration, len(used))
    least, most = parts.extremes
    rows = pa.table(
        {
            "rank": pa.array(np.full(len(used), rank, np.int32)),
            "name": names.take(pa.array(used // len(kinds))),
            "category": pa.array(kinds).take(pa.array(used % len(kinds))),
            "count": parts.count,
            "total_ns": parts.total,
            "min_ns": least,
            "max_ns": most,
        }
    ).cast(ROWS)
    name = (used // len(kinds)).astype(np.int32)
    whole = Distribution.merged(name[parts.keys], parts.duration, parts.number, len(names))
    if not question.is_exact:
        whole = whole.rounded(ROUNDED_BITS)
    return rows, _duration_table(whole, names)


def _duration_table(durations: Distribution, names: pa.Array) -> pa.Table:
    """Return a distribution as a table DURATIONS, sorted by name and duration."""
    columns = (names.take(pa.array(durations.keys)), durations.duration, durations.number)
    table = pa.Table.from_arrays([pa.array(column) for column in columns], schema=DURATIONS)
    return table.sort_by([("name", "ascending"), ("duration_ns", "ascending")])


def distribution(durations: pa.Table) -> tuple[Distribution, pa.Array]:
    """Return a table DURATIONS as a distribution by name, and the names."""
    encoded = durations["name"].combine_chunks().dictionary_encode()
    merged = Distribution.merged(
        encoded.indices.to_numpy(),
        durations["duration_ns"].to_numpy(),
        durations["number"].to_numpy(),
        len(encoded.dictionary),
    )
    return merged, encoded.dictionary


def merge(parts: Iterable[WorkTotals]) -> WorkTotals:
    """Merge the work of different ranks; the result does not depend on their order."""
    parts = list(parts)
    keys = parts[0].rows
    order = [("rank", "ascending"), ("name", "ascending"), ("category", "ascending")]
    return WorkTotals(
        ranks=tuple(
            sorted((rank for part in parts for rank in part.ranks), key=lambda rank: rank.rank)
        ),
        rows={key: _joined([part.rows[key] for part in parts]).sort_by(order) for key in keys},
        durations={key: _merged([part.durations[key] for part in parts]) for key in keys},
    )


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).combine_chunks()


def _merged(tables: Sequence[pa.Table]) -> pa.Table:
    """Add up the distributions of several ranks."""
    return tables[0] if len(tables) == 1 else _duration_table(*distribution(_joined(tables)))
