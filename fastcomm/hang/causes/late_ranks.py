"""Ranks that never made the call in which others wait, and stand in none."""

from fastcomm.hang import rhythm
from fastcomm.hang.state import JobState, Verdict
from fastcomm.hang.waits import retires


def not_arrived(state: JobState) -> Verdict | None:
    """Blame ranks that others wait for, and that have a dump and stand in no call."""
    for ranks, stops in state.waits.roots:
        if stops or len(ranks) != 1 or ranks[0] not in state.job.ranks:
            continue
        stop = state.widest_held(ranks[0])
        if stop is None:
            continue
        absent = [
            rank
            for rank in state.waits.holders[stop]
            if rank in state.job.ranks and rank not in state.waits.fronts
        ]
        waiting = state.waits.stops[stop]
        if len(absent) > len(waiting) and len(waiting) == 1:
            return state.verdict("order", waiting, stop)
        if _failed_out_of_rhythm(state, ranks[0]):
            return state.verdict("order", ranks, state.first_held(ranks))
        if everywhere := state.held_up(has_dump=True):
            return state.verdict("not_arrived", everywhere, state.first_held(everywhere))
    return None


def _failed_out_of_rhythm(state: JobState, rank: int) -> bool:
    """Return whether a rank stood in an unusual call until it failed beside a dead rank."""
    calls = state.job.ranks[rank]
    is_beside_dead = state.evidence.dead or state.job.missing
    if not is_beside_dead or not retires(calls):
        return False
    departure = rhythm.departure(calls)
    return departure is not None and departure.is_last
