"""Why a verdict may be wrong: ages that may be too long, and files that speak against it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastcomm.hang.ages import LATEST_S, YOUNG_IF_LATE_NS, YOUNG_NS
from fastcomm.hang.launches import enqueued_lines, launched_ranks
from fastcomm.hang.state import DUMP_AGAIN, ENQUEUED, JobState, Verdict
from fastcomm.hang.waits import Stop, is_for_all
from fastcomm.trace.run_traces import named_ranks
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

_SECOND = 1_000_000_000
_MS = 1_000_000
_MOMENTARY = ("not_arrived", "not_started")  # what healthy jobs show for a moment
_WORLD = "default_pg"
_TIMES_SPREAD = 5
_LEAST_SPREAD_S = 2  # gzip has whole seconds
_NEARLY = 0.9  # of a timeout


def doubted(state: JobState, answer: Verdict) -> Verdict:
    """Return a verdict with low confidence if it stands on an age that may be too long."""
    is_certain = (
        answer.kind.startswith("mismatch")
        or bool(state.is_dead() or state.evidence.aborted)
        or any(line.timeout for line in state.evidence.watchdog)
    )
    if not is_certain and (late := _late_files(state, answer)):
        return Verdict(kind="none", confidence="low", evidence=(late,))
    why = "" if is_certain else _why_ages_doubted(state) or _why_only_late(state, answer.kind)
    if against := _against(state, answer):
        evidence = (*answer.evidence, against)
        answer = replace(answer, confidence="low", evidence=evidence)
    if not why:
        return answer
    evidence = (*answer.evidence, why)
    return replace(answer, confidence="low", evidence=evidence, is_doubted=True)


def _late_files(state: JobState, answer: Verdict) -> str:
    """Return why a job that only waits for a moment looks like this; empty if it cannot.

    A healthy job shows a rank that is on its way to a call, too, and a call that all have
    made just now. Where files with stacks were written seconds apart, naming the
    frames took as long, and all of them may be later than that.
    """
    calls = state.waits.stops.get(answer.stop, {}) if answer.stop is not None else {}
    is_whole = answer.kind == "stalled" and all(is_for_all(c.op) for c in calls.values())
    ages = [age for rank in state.waits.fronts if (age := state.age(rank)) is not None]
    is_momentary = is_whole or answer.kind in _MOMENTARY
    if state.is_prompt or state.has_stood or not is_momentary or not ages:
        return ""
    latest = YOUNG_IF_LATE_NS + _TIMES_SPREAD * min(state.spread_s, LATEST_S) * _SECOND
    if state.spread_s < _LEAST_SPREAD_S or max(ages) >= latest:
        return ""
    return (
        f"the calls are open for {format_ns(max(ages))} by the times of the files; these "
        f"were written up to {state.spread_s} s apart, as naming the frames of stacks took "
        f"time, and may be late by {format_ns(latest)}, {DUMP_AGAIN}"
    )


def _why_ages_doubted(state: JobState) -> str:
    """Return why the calls may be younger than they seem; empty if they are old."""
    ranks = [*state.waits.fronts] or [*state.job.ranks]
    timed = [rank for rank in ranks if _has_moment(state, rank)]
    if not timed:
        return (
            "no time tells for how long the calls are open: they have none, or the files "
            "are older than their calls, or were written long after the timeout of calls "
            f"that are still open, as copies are, {DUMP_AGAIN}"
        )
    certain = [rank for rank in timed if state.job.ranks[rank].has_time]
    if not certain:
        return f"the age is that of the file; copied files look old, {DUMP_AGAIN}"
    ages = [age for rank in certain if (age := state.age(rank)) is not None]
    if state.is_prompt or not ages or max(ages) >= YOUNG_NS + LATEST_S * _SECOND:
        return ""
    return (
        f"the calls are open for {format_ns(max(ages))} by the times of the files; dumps "
        f"with stacks may be written {LATEST_S} s late, {DUMP_AGAIN}"
    )


def _why_only_late(state: JobState, kind: str) -> str:
    """Return why a rank in its own code may only be late; empty if it is stuck.

    Calls that failed, or are about as old as their timeout, waited for it in vain.
    """
    ages = [age for rank in state.waits.fronts if (age := state.age(rank)) is not None]
    if kind != "not_arrived" or state.has_stood or state.waits.failed or not ages:
        return ""
    timeouts = [
        int(state.job.ranks[rank].calls.timeout[front[0].place])
        for rank, front in state.waits.fronts.items()
    ]
    timeout = max(timeouts) * _MS
    if 0 < timeout * _NEARLY <= max(ages):
        return ""
    limit = f" of a timeout of {format_ns(timeout)}" if timeout > 0 else ""
    return (
        f"the calls are open for {format_ns(max(ages))}{limit}: a rank that is late for "
        "the first time looks like one that is stuck; a second set of dumps decides"
    )


def _has_moment(state: JobState, rank: int) -> bool:
    """Return whether both the last calls of a rank and its dump have a time."""
    calls = state.job.ranks[rank]
    front = state.waits.fronts.get(rank)
    created = calls.calls.created if front is None else np.array([front[0].created])
    return bool((created != NULL).any()) and state.ages.moment(calls) is not None


def _against(state: JobState, answer: Verdict) -> str:
    """Return what says that a rank is in the call that it has not made; empty without."""
    stop = answer.stop
    if stop is None or stop.number is None:
        return ""
    lines: list[str] = []
    if answer.kind in ("not_arrived", "missing_rank"):
        lines.append(_by_ras(state, answer.culprits, stop))
    if answer.kind == "not_arrived":
        for rank in answer.culprits:
            lines.append(_by_status(state, rank, stop))
            lines.append(_by_stack(state, rank))
            lines.append(_by_watchdog(state, rank, stop, stop.number))
    return next(filter(None, lines), "")


def _by_ras(state: JobState, culprits: Sequence[int], stop: Stop) -> str:
    launched = launched_ranks(state, stop)
    even = [rank for rank in culprits if rank in launched]
    if not even:
        return ""
    return (
        f"NCCL RAS speaks against it: of {named_ranks(even)}, it says that as many "
        f"operations are launched as by the others ({launched[even[0]]})"
    )


def _by_stack(state: JobState, rank: int) -> str:
    stack = state.evidence.stacks.get(rank)
    if stack is None or not stack.is_in_collective:
        return ""
    name = stack.names[0]
    return f"the stack of rank {rank} speaks against it: it is in {name} of PyTorch"


def _by_watchdog(state: JobState, rank: int, stop: Stop, number: int) -> str:
    for line in enqueued_lines(state, stop, number):
        if line.rank == rank:
            return (
                f"the watchdog of rank {rank} speaks against it: it enqueued "
                f"#{line.enqueued} ({line.place})"
            )
    return ""


def _by_status(state: JobState, rank: int, stop: Stop) -> str:
    """Return why no call in the dump of a rank tells nothing; empty where it has some."""
    calls = state.job.ranks.get(rank)
    if calls is None or len(calls.row):
        return ""
    number = calls.status.get(0, {}).get(ENQUEUED, -1)
    if stop.group.desc == _WORLD and number >= (stop.number or 0):
        return (
            f"pg_status of rank {rank} speaks against it: it has enqueued #{number} of the "
            f"default group ({calls.path})"
        )
    if all(own.done.any() for own in state.job.ranks.values() if len(own.row)):
        return (
            f"no call of rank {rank} is recorded, so that its dump does not tell where it "
            f"is ({calls.path})"
        )
    return ""


def doubted_by_ring(state: JobState, answer: Verdict) -> Verdict:
    """Return a verdict with low confidence if rings may have overwritten what it stands on.

    Arguments of one call differ whatever came before it.
    """
    calls = state.job.ranks
    ranks = [rank for rank in answer.culprits if rank in calls and calls[rank].is_overwritten]
    if not ranks or answer.kind.startswith("mismatch") or answer.kind == "none":
        return answer
    line = (
        f"all calls in the dumps of {named_ranks(ranks)} are open: the ring may have "
        "overwritten the one that they stand in, so that others may hold them up "
        "(TORCH_FR_BUFFER_SIZE sets its length)"
    )
    return replace(answer, confidence="low", evidence=(*answer.evidence, line))
