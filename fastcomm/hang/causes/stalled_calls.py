"""Calls that all members have made, and that do not end, or not begin on some."""

from fastcomm.hang.causes.silent_ranks import silent_ranks
from fastcomm.hang.state import JobState, Verdict


def not_started(state: JobState) -> Verdict | None:
    """Blame members whose device has not begun the call that others have begun."""
    for _, stops in state.waits.roots:
        for stop in stops:
            inside = [rank for rank in state.waits.stops[stop] if stop.number is not None]
            begun = [rank for rank in inside if _has_begun(state, rank)]
            behind = [rank for rank in inside if rank not in begun]
            if begun and behind and not state.waits.holders[stop]:
                return state.verdict("not_started", behind, stop)
    return None


def _has_begun(state: JobState, rank: int) -> bool:
    calls = state.job.ranks[rank]
    return bool(calls.begun[state.waits.fronts[rank][0].place])


def stalled(state: JobState) -> Verdict | None:
    """Name a call that all members have made, and that does not end."""
    for ranks, stops in state.waits.roots:
        if not ranks and len(stops) == 1 and stops[0].number is not None:
            if state.is_overwritten(stops[0]):
                continue
            is_unknown = state.job.silent and not stops[0].group.ranks
            if is_unknown and not state.waits.has_ended(stops[0]):
                # Whoever never called anything in a group is in no list of its members.
                return silent_ranks(state, state.job.silent, stops[0])
            return state.verdict(
                "stalled", state.waits.stops[stops[0]], stops[0], confidence="low"
            )
    return None


def overwritten(state: JobState) -> Verdict | None:
    """Name a call that is open for long where rings may have overwritten its cause."""
    stops = [
        stop
        for ranks, own in state.waits.roots
        for stop in own
        if not ranks and state.is_overwritten(stop)
    ]
    if not stops:
        return None
    ranks = {rank for stop in stops for rank in state.waits.stops[stop]}
    first = min(stops, key=state.since)
    return state.verdict("stalled", ranks, first, confidence="low")
