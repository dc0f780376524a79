"""What holds a job up: one kind, the ranks, and what shows it."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from fastcomm.hang import ras, rhythm
from fastcomm.hang.calls import OTHER_SIDE, DumpedJob, RankCall, RankCalls, is_all_to_all
from fastcomm.hang.earlier import is_usual, is_usual_message
from fastcomm.hang.evidence import FileEvidence
from fastcomm.hang.logs import WatchdogLine, is_timeout
from fastcomm.hang.waits import Stop, WaitGraph, is_for_all, retires
from fastcomm.trace.run import named_ranks
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

_SECOND = 1_000_000_000
_YOUNG_NS = 5 * _SECOND // 2
# PyTorch names the frames of stacks between the state of a dump and its file: 1 to 8 s, when a
# process does so first. A job whose files are all of this kind is judged more slowly.
_YOUNG_IF_LATE_NS = 5 * _SECOND
_LATEST_S = 8
_TIMES_INTERVAL = 4
_TIMES_USUAL = 2
_MOST_QUOTED = 4  # lines of logs
_MS = 1_000_000
ENQUEUED = "last_enqueued_collective"  # in the status of a group
_WORLD = "default_pg"
_TWO = 2
_TIMES_SPREAD = 5
_LEAST_SPREAD_S = 2  # gzip has whole seconds
_MOMENTARY = ("not_arrived", "not_started")  # what healthy jobs show for a moment
_SLACK_S = 2  # between clocks of hosts
_NEARLY = 0.9  # of a timeout
_SLOWEST_MS = 120_000  # in which a recorder's watchdog ends a call behind its timeout
_OWN = ("code", "loader")  # what stacks show of ranks that stand in no call
_DUMP_AGAIN = "so that a slow job may look like this: a second set of dumps decides"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One answer: `none`, or a kind of hang with its culprits."""

    kind: str
    culprits: tuple[int, ...] = ()
    stop: Stop | None = None
    waiting: tuple[int, ...] = ()
    confidence: str = "high"
    evidence: tuple[str, ...] = ()
    is_doubted: bool = False  # whether the ages that it stands on may be too long


@dataclass(kw_only=True)
class Judge:
    """Finds the root of a hang: rules in order, the first that applies is the verdict.

    `first_written` is the second of the first dump of any rank: all are of about one moment.
    `is_prompt` says whether some dump was written at once, as those without stacks are;
    `spread_s` by how many seconds some files are later behind the last calls than others;
    `has_stood` whether ranks were where they are in dumps long before, too;
    `holds_silent` whether ranks that no dump tells of hold others up.
    """

    job: DumpedJob
    evidence: FileEvidence
    first_written: int
    is_prompt: bool
    has_stood: bool = False
    spread_s: int = 0
    holds_silent: bool = True
    waits: WaitGraph = field(init=False)
    _moments: dict[int, int | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        ranks = self.job.ranks.values()
        is_over = not any(len(calls.open) for calls in ranks) and all(map(self._is_old, ranks))
        self.waits = WaitGraph(job=self.job, is_over=is_over, holds_silent=self.holds_silent)

    def _is_old(self, calls: RankCalls) -> bool:
        """Return whether the last call of a rank is old, or it has none."""
        last = len(calls.row) - 1
        return last < 0 or not self.is_young(calls.rank, calls.call(last))

    def verdict(self) -> Verdict:
        """Return the verdict."""
        rules = (
            self._mismatch,
            self._message_mismatch,
            self._aborted,
            self._dead,
            self._by_stacks,
            self._not_arrived,
            self._two_roots,
            self._not_started,
            self._stalled,
            self._circle,
            self._missing,
            self._message,
        )
        if self.is_quiet():
            # Whoever left no dump may be dead, and nobody wait for it yet.
            evidence = self.evidence
            is_dark = self.job.silent or evidence.dead or evidence.deaths or self.unrecorded
            standing = self._standing()
            confidence = "low" if is_dark or standing or any(self.passed()) else "high"
            return (
                self._broken()
                or self._by_status()
                or self._by_barrier(standing)
                or Verdict(
                    kind="none",
                    confidence=confidence,
                    evidence=tuple(standing[rank] for rank in sorted(standing)[:_MOST_QUOTED]),
                )
            )
        for rule in rules:
            answer = rule()
            if answer is not None:
                return self._beside_overwritten(self._doubted(answer))
        return self._broken() or self._overwritten() or Verdict(kind="none", confidence="low")

    def _overwritten(self) -> Verdict | None:
        """Calls are open for long, and rings may have overwritten what holds them up."""
        stops = [
            stop
            for ranks, own in self.waits.roots
            for stop in own
            if not ranks and self._is_overwritten(stop)
        ]
        if not stops:
            return None
        ranks = {rank for stop in stops for rank in self.waits.stops[stop]}
        first = min(stops, key=self._since)
        answer = self._answer("stalled", ranks, first, confidence="low")
        return self._beside_overwritten(answer)

    def _beside_overwritten(self, answer: Verdict) -> Verdict:
        """Return a verdict with low confidence if rings may have overwritten what it stands on.

        Arguments of one call differ whatever came before it.
        """
        calls = self.job.ranks
        ranks = [
            rank for rank in answer.culprits if rank in calls and calls[rank].is_overwritten
        ]
        if not ranks or answer.kind.startswith("mismatch") or answer.kind == "none":
            return answer
        line = (
            f"all calls in the dumps of {named_ranks(ranks)} are open: the ring may have "
            "overwritten the one that they stand in, so that others may hold them up "
            "(TORCH_FR_BUFFER_SIZE sets its length)"
        )
        return replace(answer, confidence="low", evidence=(*answer.evidence, line))

    # When there is no hang

    def is_quiet(self) -> bool:
        """Return whether nobody is dead and no rank has stood in a call for long.

        A rank that made other calls since does not stand in it.
        """
        if self._is_dead() or self.evidence.aborted:
            return False
        if any(line.timeout for line in self.evidence.watchdog):
            return False
        if self._stands_in_group_or_message():
            return False
        return all(
            all(self.is_young(rank, call) for call in own) or self._goes_on(rank)
            for rank, own in self.waits.fronts.items()
        )

    def _goes_on(self, rank: int) -> bool:
        """Return whether a rank, or its training where threads are unknown, has just called.

        Then its training is the group that it calls most.
        """
        calls = self.job.ranks[rank]
        own = calls.calls
        if (own.thread != NULL).any():
            return not self._is_old(calls)
        most = int(np.bincount(own.group).argmax())
        return self.is_young(rank, calls.call(int(np.flatnonzero(own.group == most)[-1])))

    def passed(self) -> Iterator[RankCall]:
        """Yield the calls that are open for long, and that their ranks went on beside."""
        for rank, own in self.waits.fronts.items():
            old = [call for call in own if not self.is_young(rank, call)]
            if old and self._goes_on(rank):
                yield old[0]

    def _is_dead(self) -> bool:
        """Return whether a rank died and left no dump: others died after theirs."""
        return any(rank in self.evidence.dead for rank in self.job.silent)

    def is_young(self, rank: int, call: RankCall) -> bool:
        """Return whether a call has not been open for longer than calls usually are apart.

        Nor for longer than earlier ones of the group, with its operation and size, took.
        """
        calls = self.job.ranks[rank]
        now = self.moment(calls)
        if now is None or call.created == NULL:
            return False
        created = calls.calls.created[calls.calls.created != NULL]
        later = np.diff(created[len(created) // 2 :])
        longest = int(later.max()) if len(later) else 0
        least = _YOUNG_NS if self.is_prompt else _YOUNG_IF_LATE_NS
        usual = _TIMES_USUAL * calls.usual.item(call.place)
        return now - call.created < max(least, _TIMES_INTERVAL * longest, usual)

    @property
    def unrecorded(self) -> tuple[int, ...]:
        """Ranks whose dump has no call: their recorder was off."""
        return tuple(rank for rank, own in self.job.ranks.items() if not len(own.row))

    @property
    def first_open(self) -> int | None:
        """When the first call was made that a rank stands in; None where nothing tells."""
        fronts = self.waits.fronts.values()
        created = [call.created for own in fronts for call in own]
        return None if NULL in created else min(created, default=None)

    def age(self, rank: int) -> int | None:
        """Return for how many ns a rank has stood in its front; None where nothing tells."""
        front = self.waits.fronts.get(rank)
        return self.age_of(front[0]) if front else None

    def age_of(self, call: RankCall) -> int | None:
        """Return how many ns ago a call was made; None where nothing tells."""
        now = self.moment(self.job.ranks[call.rank])
        return None if now is None or call.created == NULL else max(0, now - call.created)

    def moment(self, calls: RankCalls) -> int | None:
        """Return when the state of a dump was taken, in ns of its host.

        None if its calls are younger than the file, or would be open beyond their timeout.

        Files know the second in which they were written, which may be seconds after that: when
        the first file of the job was written, all states were about to be taken, too. Clocks
        of hosts differ, so that the first file moves another by a few seconds at most.
        """
        if calls.rank not in self._moments:
            self._moments[calls.rank] = self._moment(calls)
        return self._moments[calls.rank]

    def _moment(self, calls: RankCalls) -> int | None:
        latest = calls.latest
        if latest >= (calls.written + 1) * _SECOND:
            return None
        first = max(self.first_written, calls.written - _LATEST_S)
        now = max(latest, min(first, calls.written) * _SECOND)
        return None if _is_beyond_timeout(calls, now) else now

    def _doubted(self, answer: Verdict) -> Verdict:
        """Return a verdict with low confidence if it stands on an age that may be too long."""
        is_certain = (
            answer.kind.startswith("mismatch")
            or bool(self._is_dead() or self.evidence.aborted)
            or any(line.timeout for line in self.evidence.watchdog)
        )
        if not is_certain and (late := self._late_files(answer)):
            return Verdict(kind="none", confidence="low", evidence=(late,))
        why = "" if is_certain else self._doubt() or self._lateness(answer.kind)
        if against := self._against(answer):
            evidence = (*answer.evidence, against)
            answer = replace(answer, confidence="low", evidence=evidence)
        if not why:
            return answer
        evidence = (*answer.evidence, why)
        return replace(answer, confidence="low", evidence=evidence, is_doubted=True)

    def _late_files(self, answer: Verdict) -> str:
        """Return why a job that only waits for a moment looks like this; empty if it cannot.

        A healthy job shows a rank that is on its way to a call, too, and a call that all have
        made just now. Where files with stacks were written seconds apart, naming the
        frames took as long, and all of them may be later than that.
        """
        calls = self.waits.stops.get(answer.stop, {}) if answer.stop is not None else {}
        is_whole = answer.kind == "stalled" and all(is_for_all(c.op) for c in calls.values())
        ages = [age for rank in self.waits.fronts if (age := self.age(rank)) is not None]
        is_momentary = is_whole or answer.kind in _MOMENTARY
        if self.is_prompt or self.has_stood or not is_momentary or not ages:
            return ""
        latest = _YOUNG_IF_LATE_NS + _TIMES_SPREAD * min(self.spread_s, _LATEST_S) * _SECOND
        if self.spread_s < _LEAST_SPREAD_S or max(ages) >= latest:
            return ""
        return (
            f"the calls are open for {format_ns(max(ages))} by the times of the files; these "
            f"were written up to {self.spread_s} s apart, as naming the frames of stacks took "
            f"time, and may be late by {format_ns(latest)}, {_DUMP_AGAIN}"
        )

    def _doubt(self) -> str:
        """Return why the calls may be younger than they seem; empty if they are old."""
        ranks = [*self.waits.fronts] or [*self.job.ranks]
        timed = [rank for rank in ranks if self._has_moment(rank)]
        if not timed:
            return (
                "no time tells for how long the calls are open: they have none, or the files "
                "are older than their calls, or were written long after the timeout of calls "
                f"that are still open, as copies are, {_DUMP_AGAIN}"
            )
        certain = [rank for rank in timed if self.job.ranks[rank].has_time]
        if not certain:
            return f"the age is that of the file; copied files look old, {_DUMP_AGAIN}"
        ages = [age for rank in certain if (age := self.age(rank)) is not None]
        if self.is_prompt or not ages or max(ages) >= _YOUNG_NS + _LATEST_S * _SECOND:
            return ""
        return (
            f"the calls are open for {format_ns(max(ages))} by the times of the files; dumps "
            f"with stacks may be written {_LATEST_S} s late, {_DUMP_AGAIN}"
        )

    def _against(self, answer: Verdict) -> str:
        """Return what says that a rank is in the call that it has not made; empty without."""
        stop = answer.stop
        if stop is None or stop.number is None:
            return ""
        lines: list[str] = []
        if answer.kind in ("not_arrived", "missing_rank"):
            lines.append(self._by_ras(answer.culprits, stop))
        if answer.kind == "not_arrived":
            for rank in answer.culprits:
                lines.append(self._unrecorded(rank, stop))
                lines.append(self._by_stack(rank))
                lines.append(self._by_watchdog(rank, stop, stop.number))
        return next(filter(None, lines), "")

    def _by_ras(self, culprits: Sequence[int], stop: Stop) -> str:
        launched = self._launched(stop)
        even = [rank for rank in culprits if rank in launched]
        if not even:
            return ""
        return (
            f"NCCL RAS speaks against it: of {named_ranks(even)}, it says that as many "
            f"operations are launched as by the others ({launched[even[0]]})"
        )

    def _by_stack(self, rank: int) -> str:
        stack = self.evidence.stacks.get(rank)
        if stack is None or not stack.is_in_collective:
            return ""
        name = stack.names[0]
        return f"the stack of rank {rank} speaks against it: it is in {name} of PyTorch"

    def _by_watchdog(self, rank: int, stop: Stop, number: int) -> str:
        for line in self._enqueued(stop, number):
            if line.rank == rank:
                return (
                    f"the watchdog of rank {rank} speaks against it: it enqueued "
                    f"#{line.enqueued} ({line.place})"
                )
        return ""

    def _enqueued(self, stop: Stop, number: int) -> Iterator[WatchdogLine]:
        """Yield what watchdogs say of ranks that have enqueued the call of a stop."""
        name = stop.group.desc or stop.group.name
        for line in self.evidence.watchdog:
            if name in line.group and line.enqueued >= number:
                yield line

    def _unrecorded(self, rank: int, stop: Stop) -> str:
        """Return why no call in the dump of a rank tells nothing; empty where it has some."""
        calls = self.job.ranks.get(rank)
        if calls is None or len(calls.row):
            return ""
        number = calls.status.get(0, {}).get(ENQUEUED, -1)
        if stop.group.desc == _WORLD and number >= (stop.number or 0):
            return (
                f"pg_status of rank {rank} speaks against it: it has enqueued #{number} of the "
                f"default group ({calls.path})"
            )
        if all(own.done.any() for own in self.job.ranks.values() if len(own.row)):
            return (
                f"no call of rank {rank} is recorded, so that its dump does not tell where it "
                f"is ({calls.path})"
            )
        return ""

    def _no_suspects(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the ranks that are in all calls that wait for them, with what says so."""
        some, lines = {*ranks}, dict[int, str]()
        behind: set[int] = set()
        for stop in self.waits.holding(some):
            launches = self._launches(stop)
            holders = some.intersection(self.waits.holders[stop])
            behind |= holders - launches.keys()
            for rank in sorted(holders & launches.keys()):
                dump = "an unreadable dump" if rank in self.job.unreadable else "no dump"
                lines[rank] = f"rank {rank} left {dump}, and is no suspect: {launches[rank]}"
        return {rank: line for rank, line in lines.items() if rank not in behind}

    def _launches(self, stop: Stop) -> dict[int, str]:
        """Return the ranks that files say are in the call of a stop, with what says so."""
        lines: dict[int | None, str] = {}
        if stop.number is not None:
            for line in self._enqueued(stop, stop.number):
                says = f"its watchdog says that it enqueued #{line.enqueued} ({line.place})"
                lines[line.rank] = says
        for rank, place in self._launched(stop).items():
            says = f"NCCL RAS says that it has launched as many operations as others ({place})"
            lines[rank] = says
        return {rank: line for rank, line in lines.items() if rank is not None}

    def _launched(self, stop: Stop) -> Mapping[int, str]:
        """Return the ranks that have launched the call of a stop, as RAS says, with its place.

        A report that is older than the calls does not tell, and the dead answered before.
        """
        first = self.first_open
        reports = [
            one
            for one in self.evidence.reports
            if first is None
            or one.written is None
            or first // _SECOND <= one.written + _SLACK_S
        ]
        members = self.job.members.get(stop.group, ())
        if stop.number is None:
            return {}
        launched = ras.arrived(reports, members, stop.number)
        return {rank: line for rank, line in launched.items() if rank not in self.evidence.dead}

    def _lateness(self, kind: str) -> str:
        """Return why a rank in its own code may only be late; empty if it is stuck.

        Calls that failed, or are about as old as their timeout, waited for it in vain.
        """
        ages = [age for rank in self.waits.fronts if (age := self.age(rank)) is not None]
        if kind != "not_arrived" or self.has_stood or self.waits.failed or not ages:
            return ""
        timeouts = [
            int(self.job.ranks[rank].calls.timeout[front[0].place])
            for rank, front in self.waits.fronts.items()
        ]
        timeout = max(timeouts) * _MS
        if 0 < timeout * _NEARLY <= max(ages):
            return ""
        limit = f" of a timeout of {format_ns(timeout)}" if timeout > 0 else ""
        return (
            f"the calls are open for {format_ns(max(ages))}{limit}: a rank that is late for "
            "the first time looks like one that is stuck; a second set of dumps decides"
        )

    def _has_moment(self, rank: int) -> bool:
        """Return whether both the last calls of a rank and its dump have a time."""
        calls = self.job.ranks[rank]
        front = self.waits.fronts.get(rank)
        created = calls.calls.created if front is None else np.array([front[0].created])
        return bool((created != NULL).any()) and self.moment(calls) is not None

    # The rules

    def _mismatch(self) -> Verdict | None:
        """Members of a front called it with different arguments."""
        for stop, calls in self._old_collectives():
            members = len(self.job.members.get(stop.group, ()))
            kind, odd = _odd(list(calls.values()), members, self._usual_kinds(stop, calls))
            if kind is None:
                continue
            is_uneven = kind == "mismatch_size" and _has_parts([*calls.values()])
            if odd:
                confidence = "low" if is_uneven else "high"
                return self._answer(kind, odd, stop, confidence=confidence)
            places = {rank: call.place for rank, call in calls.items()}
            odd = rhythm.unusual(self.job, places) or rhythm.out_of_rhythm(self.job, calls)
            confidence = "high" if odd and not is_uneven else "low"
            return self._answer(kind, odd or calls, stop, confidence=confidence)
        return None

    def _usual_kinds(self, stop: Stop, calls: Mapping[int, RankCall]) -> set[str]:
        """Return the kinds of mismatch that earlier calls had, too, and ended."""
        members = len(self.job.members.get(stop.group, ()))
        kinds = [
            kind
            for kind, values in _compared([*calls.values()], members)
            if len(set(values.values())) > 1
        ]
        return {
            kind
            for kind in kinds
            if is_usual(
                self.job,
                stop,
                calls,
                partial(_of_kind, kind=kind, members=members),
            )
        }

    def _message_mismatch(self) -> Verdict | None:
        """Both sides of a message stand in it, with other types or sizes."""
        for stop, calls in self.waits.stops.items():
            is_matched = stop.number is None and stop.ordinal is not None and len(calls) > 1
            if not is_matched or all(self.is_young(*one) for one in calls.items()):
                continue
            for kind, value_of in _COMPARED_SIDES:
                is_odd = len({value_of(call) for call in calls.values()}) > 1
                if is_odd and not is_usual_message(self.job, calls, value_of):
                    return self._answer(kind, calls, stop)
        return None

    def calls_of(self, stop: Stop) -> dict[int, RankCall]:
        """Return the calls of a stop by the ranks that made it; of a message, by who waits."""
        if stop.number is None:
            return self.waits.stops.get(stop, {})
        calls = {}
        for rank in self.job.members.get(stop.group, ()):
            own = self.job.ranks.get(rank)
            at = own.place(stop.group, stop.number) if own else None
            if own is not None and at is not None:
                calls[rank] = own.call(at)
        return calls

    def _aborted(self) -> Verdict | None:
        """Ranks that gloo aborted: a message was longer than their call expects."""
        aborted = [rank for rank in self.job.silent if self.evidence.is_aborted(rank)]
        if not aborted:
            return None
        departures = {
            rank: one
            for rank, calls in self.job.ranks.items()
            if (one := rhythm.departure(calls)) is not None
        }
        # The culprit left it in a call with the rank that was aborted, or in its last one.
        beside = [
            rank
            for rank, one in departures.items()
            if set(self.job.members.get(one.group, ())).intersection(aborted)
        ]
        odd = beside or [rank for rank, one in departures.items() if one.is_last]
        if not odd:
            return None
        stop = self._first_held(aborted) or self._last_common()
        return self._answer(departures[odd[0]].kind, odd, stop)

    def _dead(self) -> Verdict | None:
        """Ranks without a dump of which something says that they died."""
        dead = [rank for rank in self.job.silent if rank in self.evidence.dead]
        if not dead:
            return None
        if self.evidence.undated.issuperset(dead) and self._has_nccl():
            # A log that does not tell when is weaker than a rank that never came to a call.
            answer = self._not_arrived()
            if answer is not None and answer.kind == "not_arrived":
                return replace(answer, confidence="low")
        stop = self._first_held(dead) or self._last_common()
        return self._answer("missing_rank", dead, stop)

    def _has_nccl(self) -> bool:
        """Return whether a death of one rank keeps no other from its next call."""
        return not any(map(retires, self.job.ranks.values()))

    def _broken(self) -> Verdict | None:
        """Nothing is open, yet logs say that ranks are gone: those without a dump.

        So they do where a process died that no line calls a rank.

        A rank whose own log says so failed as others did. With all dumps, it is the few whose
        log does not say, as that of others does, that a call ran into its timeout.
        """
        lines = self.evidence.broken
        missing = self.job.missing
        if not lines and not (missing and self.evidence.deaths):
            return None
        quoted = tuple(lines[rank] for rank in sorted(lines)[:_MOST_QUOTED])
        late = {rank for rank, line in lines.items() if is_timeout(line)}
        silent = sorted(self.job.ranks.keys() - late)
        if missing:
            gone = [rank for rank in missing if rank not in lines] or missing
            stop = self._first_held(gone) or self._last_common()
            answer = self._answer("missing_rank", gone, stop, confidence="low")
        elif 0 < len(silent) < len(late):
            answer = self._answer("not_arrived", silent, None, confidence="low")
        else:
            answer = Verdict(kind="none", confidence="low")
        return replace(answer, evidence=quoted)

    def _by_status(self) -> Verdict | None:
        """No call is recorded: what the default group has enqueued on each rank tells.

        Ranks behind are culprits if stacks show that others stand in a collective and they do
        not, or two dumps show that nothing goes on. One moment of a healthy job looks alike.
        """
        status = {rank: own.status.get(0, {}) for rank, own in self.job.ranks.items()}
        enqueued = {rank: own[ENQUEUED] for rank, own in status.items() if ENQUEUED in own}
        if {*self.unrecorded} != {*self.job.ranks} or len({*enqueued.values()}) < _TWO:
            return None
        most = max(enqueued.values())
        behind = [rank for rank, number in enqueued.items() if number < most]
        line = (
            f"no call is recorded; by pg_status, {named_ranks(behind)} had enqueued less than "
            f"#{most} of the default group, which others had"
        )
        stacks = self.evidence.stacks
        is_stuck = {*self.job.ranks} <= stacks.keys() and all(
            (stacks[rank].activity == "collective") == (rank not in behind)
            for rank in self.job.ranks
        )
        if not is_stuck and not self.has_stood:
            return Verdict(kind="none", confidence="low", evidence=(line,))
        answer = self._answer("not_arrived", behind, None, confidence="low")
        return replace(answer, evidence=(f"{line}, {_DUMP_AGAIN}",), is_doubted=True)

    def _stands_in_group_or_message(self) -> dict[int, str]:
        """Return what ranks without a front do, as stacks tell: make a group, or a message."""
        return {
            rank: stack.activity
            for rank, stack in self.evidence.stacks.items()
            if stack.activity in ("group", "message") and self._stands_long(rank)
        }

    def _stands_long(self, rank: int) -> bool:
        """Return whether a rank has nothing open, and made its last call long ago."""
        calls = self.job.ranks.get(rank)
        return rank not in self.waits.fronts and (calls is None or self._is_old(calls))

    def _standing(self) -> dict[int, str]:
        """Return what says that ranks stand in a collective of which no dump has an entry."""
        return {
            rank: f"rank {rank} is in {stack.names[0]} of PyTorch, by its stack ({stack.path})"
            for rank, stack in self.evidence.stacks.items()
            if (stack.is_in_collective or stack.is_in_monitored_barrier)
            and rank in self.job.ranks
            and self._stands_long(rank)
        }

    def _by_barrier(self, standing: Mapping[int, str]) -> Verdict | None:
        """Stacks stand in a barrier without entries, and those of some ranks elsewhere."""
        stacks = self.evidence.stacks
        inside = [rank for rank in standing if stacks[rank].is_in_monitored_barrier]
        outside = [
            rank
            for rank, stack in stacks.items()
            if rank not in standing and stack.activity in _OWN and self._stands_long(rank)
        ]
        if len(inside) < len(standing) or not inside or not outside:
            return None
        answer = self._answer("not_arrived", outside, None, confidence="low")
        lines = tuple(standing[rank] for rank in sorted(inside)[:_MOST_QUOTED])
        return replace(answer, waiting=tuple(sorted(inside)), evidence=lines)

    def _by_stacks(self) -> Verdict | None:
        """Nobody has a front that matters, and ranks stand where no entry is made."""
        activity = self._stands_in_group_or_message()
        groups = sorted(rank for rank, name in activity.items() if name == "group")
        if groups:
            outside = self._outside(groups)
            confidence = "high" if outside else "low"
            return self._answer(
                "group_creation", outside or groups, None, confidence=confidence
            )
        messages = sorted(rank for rank, name in activity.items() if name == "message")
        if not messages:
            return None
        names = {
            rank: next(n for n in self.evidence.stacks[rank].names if n in _SIDES)
            for rank in messages
        }
        if len(messages) > 1 and len(set(names.values())) == 1:
            return self._answer("p2p_order", messages, None, confidence="low")
        return self._answer("p2p_unmatched", messages, None, confidence="low")

    def _outside(self, groups: Sequence[int]) -> list[int]:
        """Return who does not join those that make a group: who stands in nothing, or left."""
        others = [rank for rank in self.job.ranks if rank not in groups]
        idle = [rank for rank in others if rank not in self.waits.fronts]
        return sorted(idle) or rhythm.out_of_rhythm(self.job, others, is_certain=True)

    def _not_arrived(self) -> Verdict | None:
        """Ranks that are waited for, have a dump, and stand in nothing."""
        for ranks, stops in self.waits.roots:
            if stops or len(ranks) != 1 or ranks[0] not in self.job.ranks:
                continue
            stop = self._widest_held(ranks[0])
            if stop is None:
                continue
            absent = [
                rank
                for rank in self.waits.holders[stop]
                if rank in self.job.ranks and rank not in self.waits.fronts
            ]
            waiting = self.waits.stops[stop]
            if len(absent) > len(waiting) and len(waiting) == 1:
                return self._answer("order", waiting, stop)
            if self._failed_out_of_rhythm(ranks[0]):
                return self._answer("order", ranks, self._first_held(ranks))
            if everywhere := self._held_up(has_dump=True):
                return self._answer("not_arrived", everywhere, self._first_held(everywhere))
        return None

    def _failed_out_of_rhythm(self, rank: int) -> bool:
        """Return whether a rank stood in an unusual call until it failed beside a dead rank."""
        calls = self.job.ranks[rank]
        is_beside_dead = self.evidence.dead or self.job.missing
        if not is_beside_dead or not retires(calls):
            return False
        departure = rhythm.departure(calls)
        return departure is not None and departure.is_last

    def _two_roots(self) -> Verdict | None:
        """More than one member has the root's side of a gather or scatter."""
        for stop, calls in self._old_collectives():
            rooted = {rank: call.place for rank, call in calls.items() if _is_root(call)}
            if len(rooted) > 1 and not is_usual(self.job, stop, calls, _roots):
                odd = rhythm.unusual(self.job, rooted) or rhythm.out_of_rhythm(self.job, rooted)
                usual = rooted.keys() - set(odd)
                is_sure = any(self._was_root(calls[rank]) for rank in usual)
                return self._answer(
                    "mismatch_root",
                    odd or rooted,
                    stop,
                    confidence="high" if odd and is_sure else "low",
                )
        return None

    def _was_root(self, call: RankCall) -> bool:
        """Return whether the rank was root of an earlier call like this one."""
        calls = self.job.ranks[call.rank]
        earlier = (calls.call(at) for at in range(call.place) if calls.key(at) is call.group)
        return any(one.op == call.op and _is_root(one) for one in earlier)

    def _not_started(self) -> Verdict | None:
        """Members whose device has not begun what others have."""
        for _, stops in self.waits.roots:
            for stop in stops:
                inside = [rank for rank in self.waits.stops[stop] if stop.number is not None]
                begun = [rank for rank in inside if self._has_begun(rank)]
                behind = [rank for rank in inside if rank not in begun]
                if begun and behind and not self.waits.holders[stop]:
                    return self._answer("not_started", behind, stop)
        return None

    def _has_begun(self, rank: int) -> bool:
        calls = self.job.ranks[rank]
        return bool(calls.begun[self.waits.fronts[rank][0].place])

    def _stalled(self) -> Verdict | None:
        """A front that all members have reached."""
        for ranks, stops in self.waits.roots:
            if not ranks and len(stops) == 1 and stops[0].number is not None:
                if self._is_overwritten(stops[0]):
                    continue
                is_unknown = self.job.silent and not stops[0].group.ranks
                if is_unknown and not self.waits.has_ended(stops[0]):
                    # Whoever never called anything in a group is in no list of its members.
                    return self._of_silent(self.job.silent, stops[0])
                return self._answer(
                    "stalled", self.waits.stops[stops[0]], stops[0], confidence="low"
                )
        return None

    def _is_overwritten(self, stop: Stop) -> bool:
        """Return whether the ring of a rank may have overwritten the call that it stands in."""
        return any(self.job.ranks[rank].is_overwritten for rank in self.waits.stops[stop])

    def _circle(self) -> Verdict | None:
        """Ranks that wait for each other: the culprits leave their rhythm."""
        for ranks, stops in self.waits.roots:
            if not (ranks and stops):
                continue
            is_message = all(stop.number is None for stop in stops)
            # Without messages of a batch that are done.
            sides = {call.op for stop in stops for call in self.waits.stops[stop].values()}
            if is_message and len(sides) == 1:
                # Each side may send first, or one may have left out the message before.
                odd = self._left_out(ranks)
                kind = "p2p_unmatched" if odd else "p2p_order"
                stop = self._first_held(odd) if odd else stops[0]
                return self._answer(kind, odd or ranks, stop, confidence="low")
            if is_message and self._is_ring(ranks):
                return self._answer("p2p_order", ranks, stops[0], confidence="low")
            if odd := rhythm.out_of_rhythm(self.job, ranks):
                kind = "p2p_unmatched" if self._leads_by_messages(odd) else "order"
                return self._answer(kind, odd, self._first_held(odd))
            messages = [stop for stop in stops if stop.number is None]
            if len(messages) == 1 and not is_message and {*messages[0].pair} <= {*ranks}:
                # One side left it out, or the other made one too many.
                pair = messages[0].pair
                return self._answer("p2p_unmatched", pair, messages[0], confidence="low")
            counts = Counter(rank for stop in stops for rank in self.waits.holders[stop])
            most = max(counts[rank] for rank in ranks)
            likely = [rank for rank in ranks if counts[rank] == most]
            kind = "p2p_order" if is_message else "order"
            return self._answer(kind, likely, stops[0], confidence="low")
        return None

    def _left_out(self, ranks: Sequence[int]) -> list[int]:
        """Return the one of two ranks that left out a message of their circle; else none.

        It leaves its rhythm. Both have called a later collective ahead of their devices, so
        that a message that it only swaps with another would be in its dump.
        """
        if len(ranks) != _TWO or not self._are_ahead(*ranks):
            return []
        odd = rhythm.out_of_rhythm(self.job, ranks, is_certain=True)
        if len(odd) != 1:
            return []
        (own,) = odd
        peer = next(rank for rank in ranks if rank != own)
        is_fewer = any(
            self.job.since_together(own, peer, side) < self.job.since_together(peer, own, other)
            for side, other in OTHER_SIDE.items()
        )
        return odd if is_fewer else []

    def _are_ahead(self, one: int, two: int) -> bool:
        """Return whether two ranks have called one collective behind what they stand in."""
        first, second = self.job.ranks[one], self.job.ranks[two]
        front = {rank: self.waits.fronts[rank][-1].place for rank in (one, two)}
        return any(
            (place or 0) > front[one] and (second.place(key, number) or 0) > front[two]
            for key, number in first.last.items()
            if second.last.get(key) == number
            for place in [first.place(key, number)]
        )

    def _is_ring(self, ranks: Sequence[int]) -> bool:
        """Return whether all ranks of a circle stand in messages to ranks as far from them."""
        place = {rank: at for at, rank in enumerate(ranks)}
        steps = set()
        for rank in ranks:
            front = self.waits.fronts[rank]
            if not all(call.peer in place for call in front):
                return False
            steps.add(
                frozenset(
                    (call.op, (place[call.peer] - place[rank]) % len(ranks))
                    for call in front
                    if call.peer is not None
                )
            )
        return len(steps) == 1 and len(ranks) > _TWO

    def _leads_by_messages(self, odd: Sequence[int]) -> bool:
        """Return whether only messages wait for some ranks."""
        stops = self.waits.holding(odd)
        return bool(stops) and all(stop.number is None for stop in stops)

    def _missing(self) -> Verdict | None:
        """Missing ranks that are waited for."""
        for ranks, stops in self.waits.roots:
            missing = [rank for rank in ranks if rank not in self.job.ranks]
            if missing and not stops:
                # Whoever has a dump and crosses others explains the wait by itself.
                crossing = replace(self, holds_silent=False)._circle()
                if crossing is not None:
                    return replace(crossing, confidence="low")
                every = self._held_up(has_dump=False)
                return self._of_silent(every, self._first_held(every))
        return None

    def _message(self) -> Verdict | None:
        """A message that both sides stand in, or that short rings cannot tell from it."""
        for ranks, stops in self.waits.roots:
            if not ranks and len(stops) == 1 and stops[0].number is None:
                pair = [*self.waits.stops[stops[0]]]
                if -1 in stops[0].pair:
                    answer = self._answer("p2p_unmatched", (), stops[0], confidence="low")
                    return replace(answer, waiting=tuple(self._behind(stops[0])))
                if stops[0].ordinal is not None:
                    return self._answer("stalled", pair, stops[0], confidence="low")
                odd = rhythm.out_of_rhythm(self.job, pair) or pair
                return self._answer("p2p_unmatched", odd, stops[0], confidence="low")
        return None

    def _behind(self, stop: Stop) -> list[int]:
        """Return the ranks that stand in a stop, and those that wait for them."""
        inside = {*self.waits.stops[stop]}
        return sorted(inside.union(self.waits.waiting(inside, stop)))

    def _of_silent(self, ranks: Sequence[int], stop: Stop | None) -> Verdict:
        """Return the verdict on ranks of which no dump tells where they stand.

        Suspects are those without a dump. A rank whose dump cannot be read was able to write
        one, and may stand in the same call as the others: it is named, and not blamed.
        """
        unreadable = {*self.job.unreadable}
        launched = self._no_suspects(ranks)
        lines = tuple(launched[rank] for rank in sorted(launched)[:_MOST_QUOTED])
        if stop is not None and launched.keys() == {*ranks}:
            standing = self.waits.stops[stop]
            answer = self._answer("stalled", standing, stop, confidence="low")
            return replace(answer, evidence=lines)
        suspects = [rank for rank in ranks if rank not in unreadable | launched.keys()]
        answer = self._answer("missing_rank", suspects, stop, confidence="low")
        waiting = tuple(self.waits.waiting({*ranks}, stop))
        return replace(answer, waiting=waiting, evidence=lines)

    # What the rules share

    def _old_collectives(self) -> Iterator[tuple[Stop, dict[int, RankCall]]]:
        """Yield the collectives in which some rank has stood for long, with their calls."""
        for stop, calls in self.waits.stops.items():
            is_old = any(not self.is_young(rank, call) for rank, call in calls.items())
            if stop.number is not None and is_old:
                yield stop, self.calls_of(stop)

    def _held_up(self, *, has_dump: bool) -> list[int]:
        """Return the ranks that are waited for and stand in nothing, with or without a dump."""
        return sorted(
            {
                rank
                for own in self.waits.holders.values()
                for rank in own
                if (rank in self.job.ranks) == has_dump and rank not in self.waits.fronts
            }
        )

    def _widest_held(self, rank: int) -> Stop | None:
        """Return a stop that waits for a rank: that with the most ranks in it."""
        stops = self.waits.holding([rank])
        return max(stops, key=lambda stop: len(self.waits.stops[stop]), default=None)

    def _first_held(self, ranks: Sequence[int]) -> Stop | None:
        """Return the stop in which some ranks are waited for first: the cause of the others.

        It is what the first of them would call next, as far as its rhythm tells.
        """
        stops = self.waits.holding(ranks)
        calls = self.job.ranks.get(ranks[0])
        group = rhythm.next_group(calls) if calls else None
        own = [stop for stop in stops if stop.group is group and stop.number is not None]
        return min(own or stops, key=self._since, default=None)

    def _since(self, stop: Stop) -> tuple[int, int]:
        """Return when the first rank came to a stop, and how many did not, to order stops."""
        calls = self.waits.stops[stop]
        created = (call.created for call in calls.values() if call.created != NULL)
        return min(created, default=1 << 62), -len(calls)

    def _last_common(self) -> Stop | None:
        """Return the collective that most ranks called last, where they retire what failed."""
        last = Counter(
            Stop(group=call.group, number=call.number)
            for calls in self.job.ranks.values()
            if len(calls.row) and retires(calls)
            for call in [calls.call(len(calls.row) - 1)]
            if not call.is_message
        )
        return last.most_common(1)[0][0] if last else None

    def _answer(
        self,
        kind: str,
        culprits: Iterable[int],
        stop: Stop | None,
        *,
        confidence: str = "high",
    ) -> Verdict:
        ranks = tuple(sorted(culprits))
        waiting = self.waits.waiting(set(ranks), stop)
        is_open = any(rank in self.waits.fronts for rank in {*ranks} - self.waits.failed)
        if not waiting and not is_open:
            # Where nothing is open any more, all have failed for the same reason.
            waiting = sorted(self.job.ranks.keys() - set(ranks))
        return Verdict(
            kind=kind,
            culprits=ranks,
            stop=stop,
            waiting=tuple(waiting),
            confidence=confidence,
        )


def _is_root(call: RankCall) -> bool:
    """Return whether a call is the root's side of a gather or scatter."""
    side = {"gather": 1, "scatter": 0}.get(call.op)
    return side is not None and call.elements[side] > 0


def _roots(calls: Sequence[RankCall]) -> Mapping[int, object]:
    return {call.rank: _is_root(call) for call in calls}


def _type_sent(call: RankCall) -> object:
    return call.arguments[2]


def _size_sent(call: RankCall) -> object:
    return max(call.elements)


# What both sides of a message have to have.
_COMPARED_SIDES = (("mismatch_dtype", _type_sent), ("mismatch_size", _size_sent))


def _is_beyond_timeout(calls: RankCalls, now: int) -> bool:
    """Return whether a call would be open for longer than its timeout, which ends it."""
    own, at = calls.calls, calls.open
    created, timeout = own.created[at], own.timeout[at]
    is_open = (own.retired[at] != 1) & (created != NULL) & (timeout > 0)
    return bool((((now - created) // _MS - _SLOWEST_MS > timeout) & is_open).any())


_GATHERS_OF_LISTS = ("allgather", "allgatherv")
_SCATTERS_OF_LISTS = ("reducescatter", "reducescatterv")
_SIDES = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def _odd(
    calls: Sequence[RankCall], members: int, usual: Container[str]
) -> tuple[str | None, list[int]]:
    """Return the kind of mismatch among calls of a collective, and the minority's ranks.

    `usual` are kinds that earlier calls had, too.
    """
    for kind, values in _compared(calls, members):
        if kind not in usual and len(set(values.values())) > 1:
            return kind, _minority(values)
    return None, []


def _compared(
    calls: Sequence[RankCall], members: int
) -> Iterator[tuple[str, Mapping[int, object]]]:
    """Yield what has to be equal on all members, by rank: operation, types, sizes.

    Members of a gather or scatter have different lists, those of an all-to-all other sizes.
    """
    yield "mismatch_op", {call.rank: call.op for call in calls}
    op = calls[0].op if calls else ""
    if op not in ("gather", "scatter"):
        yield "mismatch_dtype", {call.rank: call.arguments[2:] for call in calls}
    if op in ("gather", "scatter") or is_all_to_all(op) or _is_uneven(calls, members):
        return
    yield "mismatch_size", {call.rank: call.elements for call in calls}


def _of_kind(
    calls: Sequence[RankCall], *, kind: str, members: int
) -> Mapping[int, object] | None:
    """Return what a kind of mismatch compares, by rank; None where it compares nothing."""
    return dict(_compared(calls, members)).get(kind)


def _has_parts(calls: Sequence[RankCall]) -> bool:
    """Return whether members take or give parts of more than two sizes, as is allowed."""
    op = calls[0].op.replace("_", "") if calls else ""
    side = 0 if op in _GATHERS_OF_LISTS else 1
    is_of_lists = op in (*_GATHERS_OF_LISTS, *_SCATTERS_OF_LISTS)
    return is_of_lists and len({call.elements[side] for call in calls}) > _TWO


def _is_uneven(calls: Sequence[RankCall], members: int) -> bool:
    """Return whether members take or give parts of other sizes, which make up the whole.

    All-gathers and reduce-scatters of lists, and their forms for vectors, allow it.
    """
    op = calls[0].op.replace("_", "") if calls else ""
    if op not in (*_GATHERS_OF_LISTS, *_SCATTERS_OF_LISTS):
        return False
    side = 0 if op in _GATHERS_OF_LISTS else 1
    parts = [call.elements[side] for call in calls]
    wholes = {call.elements[1 - side] for call in calls}
    if len(wholes) > 1 or len(set(parts)) == 1:
        return False
    (whole,) = wholes
    return sum(parts) == whole if len(calls) >= members else sum(parts) <= whole


def _minority(values: Mapping[int, object]) -> list[int]:
    """Return the ranks with a value that fewer than half have; none on a tie."""
    counts = Counter(values.values())
    (most, number), *rest = counts.most_common()
    if rest and rest[0][1] == number:
        return []
    return [rank for rank, value in values.items() if value != most]
