"""Match collectives of unknown process groups on all ranks of a run.

They become collectives of one group of all ranks, numbered, if their order and their ends leave
no doubt (`exchange.ungrouped`). Every rank is compared with one reference rank, one batch at a
time, so that memory stays bounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from fastcomm.metrics import spill_files
from fastcomm.metrics.spill_files import EventBatch
from fastcomm.ranks.clocks import EndOffsets
from fastcomm.ranks.matching import LEAST, Refusal, Sample, Stream, places
from fastcomm.trace.columns import block_lengths, block_starts, filled
from fastcomm.trace.run_traces import ParallelMap
from fastcomm.trace.schema import EVEN
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NONE, NULL, Ints

# Label of the group of all ranks; a constant that no hash is likely to equal.
GROUP = 0x1B873593CC9E2D51
_NAMES = ("rank", "op", "stream", "payload_bytes", "step", "start_ns", "duration_ns")
_SAMPLE = 64  # collectives per stream by which all ranks are compared with each other
_ROWS = 1 << 18  # events compared at once
_MAX_DOUBTS = 2  # in a note


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMembers:
    """The ranks that should take part in a collective of all ranks."""

    ranks: Sequence[int]
    world_size: int | None
    contradiction: Refusal | None = None  # evidence of smaller groups

    @property
    def missing(self) -> int:
        """Number of ranks of the job that were not read; 0 if its size is unknown."""
        return max(0, (self.world_size or 0) - len(self.ranks))


class Doubt(NamedTuple):
    """The reason why the collectives of a stream were not matched."""

    why: Refusal
    stream: int = NULL  # NULL if every rank has one stream
    rank: int | None = None  # the rank that differs from the reference rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Ungrouped:
    """Collectives of unknown groups, as far as they were matched on all ranks."""

    events: int  # number of collective events of unknown group, matched or not
    reference: int | None = None  # rank
    # A column per run of consecutive rows: index of the batch, first row among its collectives
    # of unknown groups, number of the first collective, number of rows.
    runs: Ints = field(default_factory=lambda: np.zeros((4, 0), np.int64))
    ends: EndOffsets | None = None  # of a sample, to align clocks
    agree_ns: float = 0.0  # largest difference of ends of one collective in the sample
    doubts: tuple[Doubt, ...] = ()  # by stream, decisive ones first
    missing: int = 0  # missing ranks of the job, if they are why nothing was matched

    @property
    def matched(self) -> int:
        """Number of events that were matched with that of another rank."""
        ranks = self._ranks_of()
        return int(ranks[ranks > 1].sum())

    def _ranks_of(self) -> Ints:
        """Return the number of ranks of each collective, by its number."""
        first, rows = self.runs[2], self.runs[3]
        change = np.zeros(int((first + rows).max(initial=0)) + 1, np.int64)
        np.add.at(change, first, 1)
        np.add.at(change, first + rows, -1)
        return np.cumsum(change[:-1])

    def spans(self) -> list[range]:
        """Divide the collectives into ranges of numbers, each small enough for memory."""
        ranks = self._ranks_of()
        if not len(ranks):
            return []
        total = np.append(0, np.cumsum(ranks))
        cuts = np.searchsorted(total, np.arange(0, total[-1], _ROWS), side="left")
        return [range(a, b) for a, b in pairwise(np.unique([*cuts, len(ranks)]).tolist())]

    def read(
        self, batches: Sequence[EventBatch], span: range, names: Sequence[str]
    ) -> pa.Table:
        """Return columns of some matched collectives, as if of one group and numbered.

        Parameters
        ----------
        batches
            Events of all ranks.
        span
            Numbers of the collectives to read.
        names
            Names of the columns; `group` and `seq` among them become `GROUP` and the number.

        """
        batch, row, first, rows = self.runs
        begin = np.maximum(first, span.start)
        count = np.minimum(first + rows, span.stop) - begin
        chosen = np.flatnonzero(count > 0)
        tables, numbers = [], []
        for place in np.unique(batch[chosen]).tolist():
            own = chosen[batch[chosen] == place]
            within = np.arange(count[own].sum()) - np.repeat(
                np.cumsum(count[own]) - count[own], count[own]
            )
            seq = np.repeat(begin[own], count[own]) + within
            at = np.repeat((row + begin - first)[own], count[own]) + within
            tables.append(spill_files.read_ungrouped(batches[place], names, at))
            numbers.append(seq)
        table, number = pa.concat_tables(tables).combine_chunks(), np.concatenate(numbers)
        for name, values in (("group", np.full(len(number), GROUP)), ("seq", number)):
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        return table


@dataclass(frozen=True, slots=True)
class _RankStream:
    """Collectives of one rank on one stream."""

    row: int  # first row among the collectives of unknown groups of its batch
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Aligned:
    """One rank aligned with the reference rank, on one stream."""

    runs: Ints  # per run: first row in the batch, index on the reference rank, number of rows
    start: Ints  # of the sample; NULL where the rank misses the collective
    stop: Ints


_Alignments = dict[tuple[int, int], _Aligned | Refusal]  # by stream and rank


def find(
    batches: Sequence[EventBatch], job: ExpectedMembers, parallel_map: ParallelMap
) -> Ungrouped:
    """Match the collectives of unknown groups on all ranks, or none of them.

    If ranks of the job are missing, the others may share no collective: for example the first
    ranks of several nodes, whose groups are inside the nodes and do the same work in step.

    Parameters
    ----------
    batches
        Communication events of all ranks.
    job
        Expected members.
    parallel_map
        Maps a function over arguments, maybe in other processes.

    """
    events = sum(batch.ungrouped for batch in batches)
    if not events or len(job.ranks) < 2:  # noqa: PLR2004 - nobody to be matched with
        return Ungrouped(events=events)
    if job.contradiction:
        return Ungrouped(events=events, doubts=(Doubt(job.contradiction),))
    if job.missing:
        return Ungrouped(events=events, missing=job.missing)
    counts = parallel_map(_counts, batches)
    rank, stream, count = np.concatenate(counts, axis=1)
    ranks, place = np.unique(rank, return_inverse=True)
    is_single = len(ranks) == len(rank)  # one stream per rank: numbers of streams may differ
    chosen = int(ranks[np.argmax(np.bincount(place, count))])
    index = next(n for n, columns in enumerate(counts) if chosen in columns[0])
    reference = _streams(batches[index], is_single)[chosen]
    alignments = parallel_map(partial(_align, reference, is_single), batches)
    others = set() if is_single else set(stream.tolist()) - set(reference)
    doubts = [Doubt("absent", number, chosen) for number in sorted(others)]
    return _all_or_none(
        alignments, reference, job, Ungrouped(events=events, reference=chosen), doubts
    )


def _counts(batch: EventBatch) -> Ints:
    """Return rows of rank, stream, and number of collectives of unknown groups."""
    table = spill_files.read_ungrouped(batch, ("rank", "stream"))
    return np.array([(r, s, b - a) for r, s, a, b in _parts(table)], np.int64).reshape(-1, 3).T


def _parts(table: pa.Table) -> Iterator[tuple[int, int, int, int]]:
    """Yield each rank and stream, its first row, and the row after its last."""
    rank, stream = (filled(table[name]) for name in ("rank", "stream"))
    starts = np.union1d(block_starts(rank), block_starts(stream))
    for a, b in pairwise([*starts.tolist(), len(rank)]):
        yield int(rank[a]), int(stream[a]), a, b


def _streams(batch: EventBatch, is_single: bool) -> dict[int, dict[int, _RankStream]]:
    """Return the collectives of unknown groups, by rank and stream."""
    table = spill_files.read_ungrouped(batch, _NAMES)
    op, size, step, start, duration = (
        filled(table[name])
        for name in ("op", "payload_bytes", "step", "start_ns", "duration_ns")
    )
    size, stop = np.where(np.isin(op, EVEN), size, NULL), start + duration
    by_rank: dict[int, dict[int, _RankStream]] = {}
    for rank, stream, a, b in _parts(table):
        columns = (values[a:b] for values in (op, size, step, start, stop))
        key = NULL if is_single else stream
        by_rank.setdefault(rank, {})[key] = _RankStream(a, Stream(*columns))
    return by_rank


def _align(
    reference: Mapping[int, _RankStream], is_single: bool, batch: EventBatch
) -> _Alignments:
    """Align the ranks of a batch with the reference rank."""
    return {
        (key, rank): _aligned(own.stream, streams.get(key))
        for rank, streams in _streams(batch, is_single).items()
        for key, own in reference.items()
    }


def _sampled(reference: Stream) -> Ints:
    """Return evenly spread indices of collectives, by which all ranks are compared."""
    return np.unique(
        np.linspace(0, len(reference) - 1, min(len(reference), _SAMPLE)).astype(np.int64)
    )


def _aligned(reference: Stream, own: _RankStream | None) -> _Aligned | Refusal:
    """Align one rank with the reference rank, on one stream."""
    if own is None:
        return "absent"
    place = places(reference, own.stream)
    if isinstance(place, str):
        return place
    matched = np.flatnonzero(place != NONE)
    other = place[matched]
    begin = np.flatnonzero(np.append(True, (np.diff(matched) != 1) | (np.diff(other) != 1)))
    rows = block_lengths(begin, len(matched))
    row_on_rank = np.full(len(reference), NONE, np.int64)
    row_on_rank[other] = matched
    row_on_rank = row_on_rank[_sampled(reference)]
    start, stop = (
        np.where(row_on_rank == NONE, NULL, times[row_on_rank])
        for times in (own.stream.start, own.stream.stop)
    )
    return _Aligned(np.stack([own.row + matched[begin], other[begin], rows]), start, stop)


def _all_or_none(
    alignments: Sequence[_Alignments],
    reference: Mapping[int, _RankStream],
    job: ExpectedMembers,
    unmatched: Ungrouped,
    doubts: list[Doubt],
) -> Ungrouped:
    """Accept the matches on all streams, or on none.

    A stream with collectives of fewer ranks shows that smaller groups exist. Ranks kept in step
    by these may end collectives together on other streams, without being one group.
    """
    by_key = {
        key: (n, alignment)
        for n, part in enumerate(alignments)
        for key, alignment in part.items()
    }
    accepted, first = [], 0
    for stream, own in sorted(reference.items()):
        aligned = {rank: by_key.get((stream, rank), (0, "absent")) for rank in job.ranks}
        sample = _sample(own.stream, aligned, stream)
        if isinstance(sample, Doubt):
            doubts.append(sample)
            continue
        accepted.append(
            _AcceptedStream(first, _sampled(own.stream), aligned, float(sample.ends_ns.max()))
        )
        first += len(own.stream)
    doubts.sort(key=lambda doubt: doubt.why == "few")
    if not accepted or (doubts and doubts[0].why != "few"):
        return replace(unmatched, doubts=tuple(doubts))
    return replace(
        unmatched,
        runs=np.concatenate([stream.runs() for stream in accepted], axis=1),
        ends=EndOffsets.concatenate([stream.ends() for stream in accepted]),
        agree_ns=max(stream.agree_ns for stream in accepted),
        doubts=tuple(doubts),
    )


@dataclass(frozen=True, slots=True)
class _AcceptedStream:
    """A stream on which all ranks agree."""

    first: int  # number of its first collective
    sampled: Ints  # indices of sampled collectives
    aligned: Mapping[int, tuple[int, _Aligned | Refusal]]  # by rank; with the batch's index
    agree_ns: float

    def _ranks(self) -> Iterator[tuple[int, int, _Aligned]]:
        for rank, (batch, alignment) in self.aligned.items():
            if not isinstance(alignment, str):
                yield rank, batch, alignment

    def runs(self) -> Ints:
        """Return columns of `Ungrouped.runs`."""
        parts = []
        for _, batch, alignment in self._ranks():
            row, place, rows = alignment.runs
            parts.append(np.stack([np.full_like(row, batch), row, place + self.first, rows]))
        return np.concatenate(parts, axis=1)

    def ends(self) -> EndOffsets:
        """Return the ends of the sample, to align clocks."""
        parts = [
            np.stack(
                [np.full_like(alignment.stop, rank), alignment.stop, self.first + self.sampled]
            )
            for rank, _, alignment in self._ranks()
        ]
        rank, stop, number = np.concatenate(parts, axis=1)
        is_known = stop != NULL
        return EndOffsets.of(rank[is_known], stop[is_known], number[is_known])


def _sample(
    reference: Stream, aligned: Mapping[int, tuple[int, _Aligned | Refusal]], stream: int
) -> Sample | Doubt:
    """Return the sampled times of all ranks on a stream, or why it is not matched."""
    start, stop = [], []
    for rank, (_, alignment) in aligned.items():
        if isinstance(alignment, str):
            return Doubt(alignment, stream, rank)
        start.append(alignment.start)
        stop.append(alignment.stop)
    sample = Sample.of(np.array(start), np.array(stop), reference.stop[_sampled(reference)])
    refusal = sample.refusal()
    return sample if refusal is None else Doubt(refusal, stream)


def note(ungrouped_: Ungrouped) -> str | None:
    """Return how collectives of unknown groups were matched, or why not; None without any."""
    if not (ungrouped_.matched or ungrouped_.doubts or ungrouped_.missing):
        return None
    if not ungrouped_.matched:
        return (
            f"{ungrouped_.events} collective events name no process group and were not matched "
            f"across ranks: {_reasons(ungrouped_)}. Waiting and order of arrival are n/a for "
            "them."
        )
    how = (
        f"by their order on each stream and by their ends, which agree within "
        f"{format_ns(ungrouped_.agree_ns)} on aligned clocks"
    )
    if ungrouped_.matched == ungrouped_.events:
        return f"No process group is named: collectives were matched across all ranks {how}."
    reasons = f": {_reasons(ungrouped_)}" if ungrouped_.doubts else ""
    return (
        f"{ungrouped_.matched} of {ungrouped_.events} collective events that name no process "
        f"group were matched across all ranks {how}. The others were not{reasons}."
    )


def _reasons(ungrouped_: Ungrouped) -> str:
    """Return why collectives were not matched; names the first few streams."""
    reasons = [
        _reason(doubt, ungrouped_.reference) for doubt in ungrouped_.doubts[:_MAX_DOUBTS]
    ]
    if more := len(ungrouped_.doubts) - len(reasons):
        reasons.append(f"likewise {more} more streams")
    if ungrouped_.missing:
        ranks = "rank of the job is" if ungrouped_.missing == 1 else "ranks of the job are"
        reasons.append(
            f"{ungrouped_.missing} {ranks} missing, and the ranks read may share no collective"
        )
    return "; ".join(reasons)


def _reason(doubt: Doubt, reference: int | None) -> str:
    """Return why a stream's collectives were not matched with those of rank `reference`."""
    stream = "" if doubt.stream == NULL else f" on stream {doubt.stream}"
    pair = f"ranks {reference} and {doubt.rank}"
    return {
        "smaller groups": "other collectives are of groups of fewer ranks",
        "messages": "there are messages between ranks, so not all ranks do the same",
        "absent": f"rank {doubt.rank} has none{stream}",
        "few": f"there are fewer than {LEAST}{stream}",
        "order": f"{pair} differ in operations, sizes or their order{stream}",
        "ends": f"their ends{stream} do not agree between {pair}",
        "impossible": f"some{stream} end on one rank before they begin on another",
        "loose": f"their ends{stream} differ nearly as much as their starts",
        "separate": f"ranks{stream} fall into groups that end separately",
    }[doubt.why]
