"""What holds a job up: rules in order, the first that applies is the verdict."""

from fastcomm.hang.causes.circles import circle
from fastcomm.hang.causes.dead_ranks import aborted_ranks, broken_connections, dead_ranks
from fastcomm.hang.causes.late_ranks import not_arrived
from fastcomm.hang.causes.messages import different_sides, unmatched_message
from fastcomm.hang.causes.mismatches import different_arguments, two_roots
from fastcomm.hang.causes.silent_ranks import missing_ranks
from fastcomm.hang.causes.stalled_calls import not_started, overwritten, stalled
from fastcomm.hang.causes.unrecorded_calls import (
    behind_by_status,
    in_group_or_message,
    outside_barrier,
    outside_recorded_calls,
    standing_in_collectives,
)
from fastcomm.hang.doubts import doubted, doubted_by_ring
from fastcomm.hang.state import MOST_QUOTED, JobState, Verdict

_RULES = (
    different_arguments,
    different_sides,
    aborted_ranks,
    dead_ranks,
    outside_recorded_calls,
    not_arrived,
    two_roots,
    not_started,
    stalled,
    circle,
    missing_ranks,
    unmatched_message,
)


def judge(state: JobState) -> Verdict:
    """Return what holds a job up, and how sure that is; of kind "none" if nothing does."""
    if _is_quiet(state):
        return _quiet(state)
    for rule in _RULES:
        answer = rule(state)
        if answer is not None:
            return doubted_by_ring(state, doubted(state, answer))
    if answer := broken_connections(state):
        return answer
    if answer := overwritten(state):
        return doubted_by_ring(state, answer)
    return Verdict(kind="none", confidence="low")


def _quiet(state: JobState) -> Verdict:
    """Return the verdict on a job in which no dump shows a call that is open for long."""
    # Whoever left no dump may be dead, and nobody wait for it yet.
    evidence = state.evidence
    is_dark = state.job.silent or evidence.dead or evidence.deaths or state.unrecorded
    standing = standing_in_collectives(state)
    confidence = "low" if is_dark or standing or any(state.passed()) else "high"
    return (
        broken_connections(state)
        or behind_by_status(state)
        or outside_barrier(state, standing)
        or Verdict(
            kind="none",
            confidence=confidence,
            evidence=tuple(standing[rank] for rank in sorted(standing)[:MOST_QUOTED]),
        )
    )


def _is_quiet(state: JobState) -> bool:
    """Return whether nobody is dead and no rank has stood in a call for long.

    A rank that made other calls since does not stand in it.
    """
    if state.is_dead() or state.evidence.aborted:
        return False
    if any(line.timeout for line in state.evidence.watchdog):
        return False
    if in_group_or_message(state):
        return False
    return all(
        all(state.ages.is_young(call) for call in own) or state.goes_on(rank)
        for rank, own in state.waits.fronts.items()
    )
