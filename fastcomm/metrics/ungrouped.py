"""Collectives whose process group no trace names, found on all ranks of a run.

They become the collectives of one group of all ranks, with a number each, where their order and
their ends leave no doubt (`trace.ungrouped`). Every rank is compared with one reference rank, a
piece at a time; what is kept of a rank is small.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from fastcomm.exchange.clocks import Apart
from fastcomm.exchange.sequences import NONE, Refusal, Sample, Stream, edges, places
from fastcomm.metrics import pieces as pieces_
from fastcomm.metrics.pieces import Piece
from fastcomm.trace.columns import filled
from fastcomm.trace.run import Spread
from fastcomm.trace.schema import EVEN, numbers
from fastcomm_kernels.arrays import NULL, Ints

# The label of the group of all ranks; labels are hashes.
GROUP = 0x1B873593CC9E2D51
_EVEN = numbers(EVEN)
_NAMES = ("rank", "op", "stream", "payload_bytes", "iteration", "start_ns", "duration_ns")
_SAMPLE = 64  # collectives of a stream by which all ranks are compared with each other
_ROWS = 1 << 18  # that are compared at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMembers:
    """Who should be in a collective of all ranks."""

    ranks: Sequence[int]
    world_size: int | None
    contradiction: Refusal | None = None  # what else shows that there are smaller groups

    @property
    def missing(self) -> int:
        """How many ranks of the job are missing, as far as is known."""
        return max(0, (self.world_size or 0) - len(self.ranks))


class Doubt(NamedTuple):
    """Why the collectives of a stream were not matched."""

    why: Refusal
    stream: int = NULL  # NULL where streams have no number
    rank: int | None = None  # that differs from the reference rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Ungrouped:
    """The collectives of no known group that were matched on all ranks."""

    events: int  # collectives on a rank whose group is not known, matched or not
    reference: int | None = None  # rank
    # Columns go together, one a run of rows that follow each other: index of the piece, first
    # row among its collectives of no known group, number of the first collective, rows.
    runs: Ints = field(default_factory=lambda: np.zeros((4, 0), np.int64))
    ends: Apart | None = None  # of a sample, by which clocks are aligned
    agree_ns: float = 0.0  # the farthest two ends of one collective in the sample
    doubts: tuple[Doubt, ...] = ()  # of streams, those that decided first
    missing: int = 0  # ranks of the job, where nothing was matched because of them

    @property
    def matched(self) -> int:
        """How many of the events were matched."""
        return int(self.runs[3].sum())

    def spans(self) -> list[range]:
        """Numbers of collectives, as many at a time as are compared at once."""
        first, rows = self.runs[2], self.runs[3]
        if not len(rows):
            return []
        last = int((first + rows).max())
        change = np.zeros(last + 1, np.int64)
        np.add.at(change, first, 1)
        np.add.at(change, first + rows, -1)
        total = np.append(0, np.cumsum(np.cumsum(change[:-1])))
        cuts = np.searchsorted(total, np.arange(0, total[-1], _ROWS), side="left")
        return [range(a, b) for a, b in pairwise(np.unique([*cuts, last]).tolist())]

    def read(self, pieces: Sequence[Piece], span: range, names: Sequence[str]) -> pa.Table:
        """Some columns of some collectives, with `group` and their number as `seq`."""
        piece, row, first, rows = self.runs
        begin = np.maximum(first, span.start)
        count = np.minimum(first + rows, span.stop) - begin
        kept = np.flatnonzero(count > 0)
        tables, found = [], []
        for place in np.unique(piece[kept]).tolist():
            own = kept[piece[kept] == place]
            within = np.arange(count[own].sum()) - np.repeat(
                np.cumsum(count[own]) - count[own], count[own]
            )
            seq = np.repeat(begin[own], count[own]) + within
            at = np.repeat((row + begin - first)[own], count[own]) + within
            tables.append(pieces_.read_ungrouped(pieces[place], names, at))
            found.append(seq)
        table, number = pa.concat_tables(tables).combine_chunks(), np.concatenate(found)
        for name, values in (("group", np.full(len(number), GROUP)), ("seq", number)):
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        return table


@dataclass(frozen=True, slots=True)
class _Own:
    """The collectives of one rank on one stream."""

    row: int  # of the first one, among the collectives of no known group of its piece
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Aligned:
    """One rank beside the reference rank, on one stream."""

    runs: Ints  # a row a run: first row in the piece, place on the reference rank, rows
    start: Ints  # of the sample; NULL where the rank lacks the collective
    stop: Ints


_Answers = dict[tuple[int, int], _Aligned | Refusal]  # by stream and rank


def find(pieces: Sequence[Piece], job: ExpectedMembers, spread: Spread) -> Ungrouped:
    """Match the collectives of no known group on all ranks, or refuse to.

    Where ranks of the job are missing, the others may share no collective: the first ranks of
    several nodes, say, whose groups are inside the nodes and do the same work in step.
    """
    events = sum(piece.ungrouped for piece in pieces)
    if not events or len(job.ranks) < 2:  # noqa: PLR2004 - nobody to be matched with
        return Ungrouped(events=events)
    if job.contradiction:
        return Ungrouped(events=events, doubts=(Doubt(job.contradiction),))
    if job.missing:
        return Ungrouped(events=events, missing=job.missing)
    counts = spread(_counts, pieces)
    rank, stream, count = np.concatenate(counts, axis=1)
    ranks, place = np.unique(rank, return_inverse=True)
    is_single = len(ranks) == len(rank)  # every rank has one stream: its number says nothing
    chosen = int(ranks[np.argmax(np.bincount(place, count))])
    home = next(n for n, each in enumerate(counts) if chosen in each[0])
    reference = _streams(pieces[home], is_single)[chosen]
    answers = spread(partial(_align, reference, is_single), pieces)
    others = set() if is_single else set(stream.tolist()) - set(reference)
    doubts = [Doubt("absent", each, chosen) for each in sorted(others)]
    return _judged(answers, reference, job, Ungrouped(events=events, reference=chosen), doubts)


def _counts(piece: Piece) -> Ints:
    """Columns of rank, stream, and how many collectives of no known group it has there."""
    table = pieces_.read_ungrouped(piece, ("rank", "stream"))
    return np.array([(r, s, b - a) for r, s, a, b in _parts(table)], np.int64).reshape(-1, 3).T


def _parts(table: pa.Table) -> Iterator[tuple[int, int, int, int]]:
    """Each rank and stream, its first row and the one behind its last."""
    rank, stream = (filled(table[name]) for name in ("rank", "stream"))
    starts = np.union1d(edges(rank), edges(stream))
    for a, b in pairwise([*starts.tolist(), len(rank)]):
        yield int(rank[a]), int(stream[a]), a, b


def _streams(piece: Piece, is_single: bool) -> dict[int, dict[int, _Own]]:
    """The collectives of no known group, by rank and stream."""
    table = pieces_.read_ungrouped(piece, _NAMES)
    op, size, iteration, start, duration = (
        filled(table[name])
        for name in ("op", "payload_bytes", "iteration", "start_ns", "duration_ns")
    )
    size, stop = np.where(np.isin(op, _EVEN), size, NULL), start + duration
    found: dict[int, dict[int, _Own]] = {}
    for rank, stream, a, b in _parts(table):
        columns = (each[a:b] for each in (op, size, iteration, start, stop))
        key = NULL if is_single else stream
        found.setdefault(rank, {})[key] = _Own(a, Stream(*columns))
    return found


def _align(reference: Mapping[int, _Own], is_single: bool, piece: Piece) -> _Answers:
    """Compare the ranks of a piece with the reference rank."""
    return {
        (key, rank): _beside(own.stream, streams.get(key))
        for rank, streams in _streams(piece, is_single).items()
        for key, own in reference.items()
    }


def _sampled(reference: Stream) -> Ints:
    """Places of the collectives by which all ranks are compared, evenly spread."""
    return np.unique(
        np.linspace(0, len(reference) - 1, min(len(reference), _SAMPLE)).astype(np.int64)
    )


def _beside(reference: Stream, own: _Own | None) -> _Aligned | Refusal:
    if own is None:
        return "absent"
    place = places(reference, own.stream)
    if isinstance(place, str):
        return place
    known = np.flatnonzero(place != NONE)
    other = place[known]
    begin = np.flatnonzero(np.append(True, (np.diff(known) != 1) | (np.diff(other) != 1)))
    rows = np.diff(np.append(begin, len(known)))
    at = np.full(len(reference), NONE, np.int64)
    at[other] = known
    at = at[_sampled(reference)]
    start, stop = (
        np.where(at == NONE, NULL, times[at]) for times in (own.stream.start, own.stream.stop)
    )
    return _Aligned(np.stack([own.row + known[begin], other[begin], rows]), start, stop)


def _judged(
    answers: Sequence[_Answers],
    reference: Mapping[int, _Own],
    job: ExpectedMembers,
    nothing: Ungrouped,
    doubts: list[Doubt],
) -> Ungrouped:
    """Take all streams or none.

    A stream whose collectives are not of all ranks shows that there are smaller groups, and
    ranks that these keep in step may end together on other streams without being one group.
    """
    by_key = {key: (n, each) for n, part in enumerate(answers) for key, each in part.items()}
    taken, first = [], 0
    for stream, own in sorted(reference.items()):
        aligned = {rank: by_key.get((stream, rank), (0, "absent")) for rank in job.ranks}
        sample = _sample(own.stream, aligned, stream)
        if isinstance(sample, Doubt):
            doubts.append(sample)
            continue
        taken.append(_Taken(first, _sampled(own.stream), aligned, float(sample.ends_ns.max())))
        first += len(own.stream)
    doubts.sort(key=lambda doubt: doubt.why == "few")
    if not taken or (doubts and doubts[0].why != "few"):
        return replace(nothing, doubts=tuple(doubts))
    return replace(
        nothing,
        runs=np.concatenate([each.runs() for each in taken], axis=1),
        ends=Apart.joined([each.ends() for each in taken]),
        agree_ns=max(each.agree_ns for each in taken),
        doubts=tuple(doubts),
    )


@dataclass(frozen=True, slots=True)
class _Taken:
    """A stream on which all ranks agree."""

    first: int  # number of its first collective
    sampled: Ints  # places
    aligned: Mapping[int, tuple[int, _Aligned | Refusal]]  # by rank; with the piece's index
    agree_ns: float

    def _ranks(self) -> Iterator[tuple[int, int, _Aligned]]:
        for rank, (piece, each) in self.aligned.items():
            if not isinstance(each, str):
                yield rank, piece, each

    def runs(self) -> Ints:
        """The columns of `Ungrouped.runs`."""
        parts = []
        for _, piece, each in self._ranks():
            row, place, rows = each.runs
            parts.append(np.stack([np.full_like(row, piece), row, place + self.first, rows]))
        return np.concatenate(parts, axis=1)

    def ends(self) -> Apart:
        """The ends of the sample, by which the clocks of ranks are compared."""
        parts = [
            np.stack([np.full_like(each.stop, rank), each.stop, self.first + self.sampled])
            for rank, _, each in self._ranks()
        ]
        rank, stop, number = np.concatenate(parts, axis=1)
        known = stop != NULL
        return Apart.of(rank[known], stop[known], number[known])


def _sample(
    reference: Stream, aligned: Mapping[int, tuple[int, _Aligned | Refusal]], stream: int
) -> Sample | Doubt:
    """The sampled times of all ranks on a stream, or why it is not matched."""
    start, stop = [], []
    for rank, (_, each) in aligned.items():
        if isinstance(each, str):
            return Doubt(each, stream, rank)
        start.append(each.start)
        stop.append(each.stop)
    sample = Sample.of(np.array(start), np.array(stop), reference.stop[_sampled(reference)])
    why = sample.refusal()
    return sample if why is None else Doubt(why, stream)
