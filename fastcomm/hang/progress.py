"""Ranks that went on between two dumps, or have stood where they are since."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastcomm.hang.calls import RankCalls
from fastcomm.hang.moments import last_record
from fastcomm.hang.state import ENQUEUED
from fastcomm_kernels.arrays import NULL

_TWO = 2  # moments of dumps
_SECOND = 1_000_000_000
_TIMELY_S = 10  # between the last call and its dump, of a job that goes on


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """A rank that went on between two dumps."""

    sentence: str
    last: int  # when the last call of the first dump was made, or NULL
    is_timely: bool  # whether the time of that file is about that of the call: it is no copy


def has_stood(own: Sequence[RankCalls]) -> bool:
    """Return whether a rank made no call between two dumps whose times are in the files."""
    if len(own) < _TWO:
        return False
    timed = [dump for dump in own if dump.has_time and not dump.is_cut]
    written = [dump.written for dump in timed]
    states = {(last_record(dump), _enqueued(dump)) for dump in timed}
    return len(states) == 1 and max(written) - min(written) >= _TIMELY_S


def _enqueued(dump: RankCalls) -> int:
    """Return how many calls a rank has made in all groups, by the status of these."""
    return sum(group.get(ENQUEUED, 0) for group in dump.status.values())


def ranks_that_went_on(dumps: dict[int, list[RankCalls]]) -> Iterator[RankProgress]:
    """Yield the ranks that went on between two moments."""
    for rank, own in sorted(dumps.items()):
        ordered = [dump for dump in own if not dump.is_cut]
        folders = {dump.path.parent for dump in ordered}
        if len(folders) < _TWO:
            continue
        first, last = ordered[0], ordered[-1]
        if not len(last.row) and _enqueued(last) > _enqueued(first):
            yield RankProgress(
                sentence=f"rank {rank} went on between two dumps: it had made "
                f"{_enqueued(first)} calls in {first.path}, {_enqueued(last)} in {last.path}",
                last=NULL,
                is_timely=False,
            )
        if last_record(last) > last_record(first):
            at = max(first.calls.created.tolist(), default=NULL)
            yield RankProgress(
                sentence=f"rank {rank} went on between two dumps: call {last_record(first)} is "
                f"the last in {first.path}, {last_record(last)} in {last.path}",
                last=at,
                is_timely=first.has_time or abs(first.written - at / _SECOND) < _TIMELY_S,
            )
