"""Which dumps count: of one job, of its latest moment, and of a rank the newest.

A folder may have dumps of several moments and jobs. Those of another job, or of an earlier
moment of this one, would make their ranks look as if they never came to the calls of others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from fastcomm.formats.flight_recorder import STATES, DumpedGroup
from fastcomm.hang.calls import RankCalls
from fastcomm.hang.waits import is_for_all, retires
from fastcomm.trace.run_traces import named_ranks
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL, Flags

_SECOND = 1_000_000_000
_APART_NS = 60 * _SECOND  # between moments that are not one
_TIMEOUT_NS = 1_800 * _SECOND  # of a group whose timeout is unknown
_MOST_OTHERS = 4
_MOST_LINES = 8


@dataclass(kw_only=True)
class JobDumps:
    """The dumps of one job by rank, the newest last, and why others are left out."""

    dumps: dict[int, list[RankCalls]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubted: set[int] = field(default_factory=set)  # ranks whose dumps contradict each other


def in_order(dumps: Sequence[RankCalls]) -> list[RankCalls]:
    """Return the dumps of a rank by their last call; of equal ones, the longest last.

    Of two forms of one dump, the pickle comes last: it has stacks.
    """
    if len(dumps) == 1:
        return [*dumps]
    return sorted(
        dumps,
        key=lambda dump: (
            dump.latest,
            last_record(dump),
            dump.written if dump.has_time else 0,
            len(dump.row),
            dump.path.suffixes[:1] != [".json"],
        ),
    )


def last_record(dump: RankCalls) -> int:
    """Return the number of the last call of a dump; -1 without any."""
    return int(dump.calls.record[-1]) if len(dump.calls) else -1


def of_one_job(dumps: Mapping[int, Sequence[RankCalls]]) -> JobDumps:
    """Return the dumps of the newest job among some, by rank."""
    job = JobDumps(dumps={rank: in_order(own) for rank, own in dumps.items()})
    _leave_out_worlds(job)
    for rank, own in job.dumps.items():
        job.dumps[rank] = _agreeing(job, rank, _of_moments(own))
    _leave_out_old(job)
    if len(job.notes) > _MOST_LINES:
        job.notes[_MOST_LINES:] = [f"{len(job.notes) - _MOST_LINES} more such dumps"]
    return job


def _leave_out_worlds(job: JobDumps) -> None:
    """Leave out dumps of jobs of another size than that of the newest dump."""
    sizes: dict[int, list[RankCalls]] = {}
    for own in job.dumps.values():
        for dump in own:
            if dump.stated_world:
                sizes.setdefault(dump.stated_world, []).append(dump)
    if len(sizes) < 2:  # noqa: PLR2004 - one job, or none states its size
        return
    newest = max(sizes, key=lambda size: (max(map(_moment, sizes[size])), len(sizes[size])))
    for size, others in sorted(sizes.items()):
        if size != newest:
            ranks = named_ranks(sorted({dump.rank for dump in others}))
            job.notes.append(
                f"dumps of two jobs: those of {ranks} are of one of {size} ranks, and left out "
                f"({others[0].path}); the newest dump is of one of {newest} ranks"
            )
    for rank, own in [*job.dumps.items()]:
        job.dumps[rank] = [dump for dump in own if dump.stated_world in (0, newest)]
        if not job.dumps[rank]:
            del job.dumps[rank]


def _of_moments(own: Sequence[RankCalls]) -> list[RankCalls]:
    """Return the dumps of a rank with one of each moment.

    Two forms of a dump are of one moment: that of the first file, or of the last call where
    that is later. A pickle names the frames of its stacks before it is written.
    """
    if len(own) == 1:
        return [*own]
    forms: dict[Path, list[RankCalls]] = {}
    for dump in own:
        forms.setdefault(dump.path.parent / _name(dump), []).append(dump)
    moments = []
    for of_one in forms.values():
        written = min(dump.written for dump in of_one)
        last = of_one[-1]
        moment = max(written, last.latest // _SECOND) if len(of_one) > 1 else last.written
        has_stacks = all(dump.has_stacks for dump in of_one)
        moments.append(replace(last, written=moment, has_stacks=has_stacks))
    return moments


def _moment(dump: RankCalls) -> int:
    return dump.latest if dump.latest != NULL else dump.written * _SECOND


def _agreeing(job: JobDumps, rank: int, own: Sequence[RankCalls]) -> list[RankCalls]:
    """Return the dumps of a rank that do not contradict its newest one."""
    newest = own[-1]
    agreeing = [dump for dump in own if dump is newest or not _contradict(dump, newest)]
    if len(agreeing) < len(own):
        other = next(dump for dump in own if dump not in agreeing)
        job.doubted.add(rank)
        job.notes.append(
            f"the dumps of rank {rank} contradict each other: calls of one number are not of "
            f"one time, as after a restart; {newest.path} has the latest call and counts, "
            f"{other.path} does not"
        )
    for first, second in pairwise(agreeing):
        is_one_folder = first.path.parent == second.path.parent
        if is_one_folder and _name(first) != _name(second):
            job.notes.append(
                f"rank {rank} has two dumps in one folder: {second.path} counts, which is the "
                f"newer or longer one, {first.path} does not"
            )
    return agreeing


def _name(dump: RankCalls) -> str:
    return dump.path.name.partition(".")[0]


def _contradict(one: RankCalls, two: RankCalls) -> bool:
    """Return whether two dumps have another time for a call of one number."""
    _, first, second = np.intersect1d(
        one.calls.record, two.calls.record, assume_unique=True, return_indices=True
    )
    before, after = one.calls.created[first], two.calls.created[second]
    return bool(((before != after) & (before != NULL) & (after != NULL)).any())


def _leave_out_old(job: JobDumps) -> None:
    """Leave out the ranks whose newest dump cannot be of the moment of the others."""
    newest = {rank: own[-1] for rank, own in job.dumps.items()}
    end = max((dump.latest for dump in newest.values()), default=NULL)
    suspects = [one for one in newest.values() if NULL != one.latest < end - _APART_NS]
    if not suspects:
        return
    of_group: dict[DumpedGroup, list[RankCalls]] = {}
    for dump in sorted(newest.values(), key=lambda one: -one.latest):
        for key in dump.last:
            others = of_group.setdefault(key, [])
            if len(others) < _MOST_OTHERS:
                others.append(dump)
    for dump in suspects:
        if why := next(_why_old(dump, of_group), ""):
            job.notes.append(
                f"the dump of rank {dump.rank} is of an earlier moment or job, and left out: "
                f"{why} ({dump.path})"
            )
            del job.dumps[dump.rank]


def _why_old(dump: RankCalls, of_group: Mapping[DumpedGroup, list[RankCalls]]) -> Iterator[str]:
    """Yield what shows that a dump is not of the moment of others."""
    for key in dump.last:
        for other in of_group[key]:
            if other.latest < dump.latest + _APART_NS:
                continue
            own, later = _collectives(dump, key), _collectives(other, key)
            if not retires(dump) and not retires(other):
                since = later & (other.calls.created > dump.latest + _APART_NS)
                if (since & (other.number > dump.last[key]) & _completed(other)).any():
                    yield (
                        f"rank {other.rank} has ended calls that need it "
                        f"{format_ns(other.latest - dump.latest)} after its last call"
                    )
                if (own & (dump.number > other.last[key]) & _completed(dump)).any():
                    yield (
                        f"it has ended calls that rank {other.rank}, whose calls are later, "
                        "never made"
                    )
            if _is_apart(dump, own, other, later):
                yield f"its calls are not of one time with those of rank {other.rank}"


def _collectives(dump: RankCalls, key: DumpedGroup) -> Flags:
    """Return which calls of a group end on no member before all have called."""
    places = [place for place, own in enumerate(dump.keys) if own is key]
    is_for_all_of = np.array([is_for_all(op) for op in dump.ops], bool)
    own: Flags = np.isin(dump.calls.group, places) & is_for_all_of[dump.calls.name]
    return own & ~dump.is_message


def _completed(dump: RankCalls) -> Flags:
    """Return which calls have ended: what is only retired may have failed."""
    is_completed: Flags = dump.calls.state == STATES.index("completed")
    return is_completed


def _is_apart(one: RankCalls, of_one: Flags, two: RankCalls, of_two: Flags) -> bool:
    """Return whether a call that ended on two ranks was made further apart than it may last."""
    first, second = np.flatnonzero(of_one & one.done), np.flatnonzero(of_two & two.done)
    _, at, to = np.intersect1d(one.number[first], two.number[second], return_indices=True)
    first, second = first[at], second[to]
    before, after = one.calls.created[first], two.calls.created[second]
    limit = max(int(one.calls.timeout.max(initial=0)) * 1_000_000, _TIMEOUT_NS) + _APART_NS
    is_timed = (before != NULL) & (after != NULL)
    return bool((np.abs(after - before) > limit)[is_timed].any())
