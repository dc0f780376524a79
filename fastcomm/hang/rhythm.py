"""The rhythm of a rank: a training step repeats, and the culprit of a hang leaves it.

A call is compared with calls of the same rank a period before. Where a dump is too short for
two steps, what ranks of the same part of the job call one after the other decides.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np

from fastcomm.formats.flight_recorder import DumpedGroup
from fastcomm.hang.calls import DumpedJob, RankCalls, is_all_to_all
from fastcomm_kernels.arrays import Flags, Ints
from fastcomm_kernels.repetitions import longest_repetition

_SHORTEST = 3  # calls that repeat: fewer are no rhythm
_CONTEXTS = (1, 2, 4, 8)  # numbers of calls in a row that are compared
_LONGEST = _CONTEXTS[-1]
_MOST_RANKS = 128  # whose dumps are read again
_MOST_ALIKE = 16
_MOST_NEAR = 256
_FACTOR = np.uint64(1_099_511_628_211)


def tokens(calls: RankCalls) -> Ints:
    """Return a number of each call, equal for calls that other steps and ranks would repeat.

    Groups are what they are called, their size, and which of several such of the rank.
    """
    own = calls.calls
    if not len(own):
        return np.zeros(0, np.int64)
    alike: Counter[tuple[str, int]] = Counter()
    groups = []
    for key in calls.keys:
        name = (key.desc, len(key.ranks))
        groups.append(_hash(*name, alike[name]))
        alike[name] += 1
    names = [_hash(calls.ops[k], calls.direction(k)) for k in range(len(own.names))]
    varies = _vary(calls)
    token = (own.elements[1] > 0).astype(np.uint64)  # the root of a gather has outputs
    for column in (
        np.array(groups, np.uint64)[own.group],
        np.array(names, np.uint64)[own.name],
        np.where(varies, 0, own.shapes[0]).astype(np.uint64),
        own.types[0].astype(np.uint64),
    ):
        token = token * _FACTOR + column
    return token.view(np.int64)


def _vary(calls: RankCalls) -> Flags:
    """Return which calls are all-to-alls whose sizes do not repeat: those of routed tokens."""
    vary = np.array([is_all_to_all(op) for op in calls.ops], bool)[calls.calls.name]
    number = int(vary.sum())
    if number and 2 * len(np.unique(calls.calls.shapes[0][vary])) <= number:
        vary[:] = False
    return vary


def _hash(*values: object) -> int:
    return crc32(repr(values).encode())


def contexts(token: Ints, length: int) -> Ints:
    """Return a number of each call with those before it, `length` in all, or as many exist."""
    own = token.view(np.uint64)
    context = own
    for k in range(1, length):
        earlier = np.zeros(len(own), np.uint64)
        earlier[k:] = own[: len(own) - k]
        context = context * _FACTOR + earlier
    return context.view(np.int64)


def left_at(token: Ints) -> tuple[int, int] | None:
    """Return the place of the first call that leaves a rank's rhythm, and a period before it.

    None without one. The period is the one by which the longest run of calls repeats those
    before, and at least half of it; the rhythm is left behind that run.
    """
    period, begin, end = longest_repetition(token, _SHORTEST)
    if not period or 2 * (end - begin) < period:
        return None
    return (end, end - period) if end < len(token) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """The call with which a rank leaves its rhythm."""

    kind: str  # of hang
    group: DumpedGroup
    is_last: bool


def departure(calls: RankCalls) -> Departure | None:
    """Return how a rank leaves its rhythm at last; None if it does not, or long ago.

    A call that the rank makes elsewhere in a step is out of order.
    """
    whole = calls.whole()
    token = tokens(whole)
    places = left_at(token)
    if places is None or len(token) - places[0] > places[0] - places[1]:
        return None
    at, before = places
    last, usual = whole.call(at), whole.call(before)
    kind = "mismatch_dtype" if last.arguments[2:] != usual.arguments[2:] else "mismatch_size"
    if token[at] in token[:at] or (last.group, last.op) != (usual.group, usual.op):
        kind = "order"
    return Departure(kind=kind, group=last.group, is_last=at == len(token) - 1)


def next_group(calls: RankCalls) -> DumpedGroup | None:
    """Return the group of the collective that a rank would call next; None if unknown.

    That is what it called a period before, if it has not left its rhythm.
    """
    whole = calls.whole()
    period, _, end = longest_repetition(tokens(whole), _SHORTEST)
    if not period or end != len(whole.row) or whole.is_message[end - period]:
        return None
    return whole.key(end - period)


@dataclass
class _RankRhythm:
    """What a rank calls in a row, and what the ranks most like it do."""

    job: DumpedJob
    rank: int

    @cached_property
    def token(self) -> Ints:
        """The calls of the whole dump."""
        return tokens(self.job.ranks[self.rank].whole())

    def runs(self, length: int) -> Ints:
        """Return each call with those before it."""
        return contexts(self.token, length)

    @cached_property
    def alike(self) -> "list[_RankRhythm]":
        """Ranks of its groups that share most of its calls: not stages of other calls."""
        job, own = self.job, {*tokens(self.job.ranks[self.rank]).tolist()}
        groups = sorted(job.ranks[self.rank].keys, key=lambda key: len(job.members[key]))
        near = dict.fromkeys(rank for key in groups for rank in job.members[key])
        overlap: dict[int, float] = {}
        for rank in [*near][:_MOST_NEAR]:
            if rank != self.rank and rank in job.ranks:
                other = {*tokens(job.ranks[rank]).tolist()}
                overlap[rank] = len(own & other) / max(len(own | other), 1)
        most = max(overlap.values(), default=0.0)
        alike = [rank for rank, share in overlap.items() if share == most]
        return [_RankRhythm(job, rank) for rank in alike[:_MOST_ALIKE]]

    def is_usual(self, at: int, length: int, without: Container[int] = ()) -> bool:
        """Return whether it, earlier, or a rank like it makes a call after the same others."""
        runs = self.runs(length)
        others = (like for like in self.alike if like.rank not in without)
        return runs[at] in runs[:at] or any(runs[at] in like.runs(length) for like in others)

    def is_alone(self, length: int) -> bool:
        """Return whether no rank like it makes some calls in a row that it makes late."""
        late = self.runs(length)[max(length - 1, len(self.token) // 2) :]
        usual = [like.runs(length) for like in self.alike]
        return bool(usual) and not np.isin(late, np.concatenate(usual)).all()


def out_of_rhythm(
    job: DumpedJob, ranks: Iterable[int], *, is_certain: bool = False
) -> list[int]:
    """Return the ranks that leave the rhythm, ascending; none where nothing tells.

    First those that leave their own, by calls in a row that no rank like them makes; then, if
    they need not be certain, those that alone make calls in a row, as few as tell them from
    others; then all that leave theirs, unless every rank does.
    """
    own = [_RankRhythm(job, rank) for rank in _rarest(job, ranks)]
    place = {of.rank: at[0] for of in own if (at := left_at(of.token)) is not None}
    alone = [
        of.rank for of in own if of.rank in place and not of.is_usual(place[of.rank], _LONGEST)
    ]
    if alone or is_certain:
        return alone
    for length in _CONTEXTS:
        alone = [of.rank for of in own if of.is_alone(length)]
        if 0 < len(alone) < len(own):
            return alone
    return [*place] if len(place) < len(own) else []


def unusual(job: DumpedJob, places: Mapping[int, int]) -> list[int]:
    """Return the ranks whose call at a place is no usual one, ascending; none if all are alike.

    The fewest calls before it decide that tell the ranks apart; they do not vouch for another.
    """
    own = [_RankRhythm(job, rank) for rank in sorted(places)[:_MOST_RANKS]]
    for length in _CONTEXTS:
        odd = []
        for of in own:
            behind = len(job.ranks[of.rank].row) - places[of.rank]
            if not of.is_usual(len(of.token) - behind, length, places):
                odd.append(of.rank)
        if 0 < len(odd) < len(own):
            return odd
    return []


def _rarest(job: DumpedJob, ranks: Iterable[int]) -> list[int]:
    """Return some of many ranks, ascending: whose last calls in a row fewest others make."""
    own = [rank for rank in sorted(ranks) if rank in job.ranks]
    if len(own) <= _MOST_RANKS:
        return own
    runs = {
        rank: {*contexts(tokens(job.ranks[rank]), _LONGEST)[_LONGEST - 1 :].tolist()}
        for rank in own
    }
    number = Counter(run for of in runs.values() for run in of)
    rarity = {rank: min((number[run] for run in runs[rank]), default=0) for rank in own}
    return sorted(sorted(own, key=rarity.__getitem__)[:_MOST_RANKS])
