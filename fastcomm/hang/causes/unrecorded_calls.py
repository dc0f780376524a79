"""Ranks that stand where dumps have no entry, as stacks and states of groups tell."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fastcomm.hang import rhythm
from fastcomm.hang.state import DUMP_AGAIN, ENQUEUED, MOST_QUOTED, JobState, Verdict
from fastcomm.trace.run_traces import named_ranks

_TWO = 2
_OWN = ("code", "loader")  # what stacks show of ranks that stand in no call
_SIDES = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def behind_by_status(state: JobState) -> Verdict | None:
    """Blame ranks that enqueued less in the default group; no call is recorded.

    Ranks behind are culprits if stacks show that others stand in a collective and they do
    not, or two dumps show that nothing goes on. One moment of a healthy job looks alike.
    """
    status = {rank: own.status.get(0, {}) for rank, own in state.job.ranks.items()}
    enqueued = {rank: own[ENQUEUED] for rank, own in status.items() if ENQUEUED in own}
    if {*state.unrecorded} != {*state.job.ranks} or len({*enqueued.values()}) < _TWO:
        return None
    most = max(enqueued.values())
    behind = [rank for rank, number in enqueued.items() if number < most]
    line = (
        f"no call is recorded; by pg_status, {named_ranks(behind)} had enqueued less than "
        f"#{most} of the default group, which others had"
    )
    stacks = state.evidence.stacks
    is_stuck = {*state.job.ranks} <= stacks.keys() and all(
        (stacks[rank].activity == "collective") == (rank not in behind)
        for rank in state.job.ranks
    )
    if not is_stuck and not state.has_stood:
        return Verdict(kind="none", confidence="low", evidence=(line,))
    answer = state.verdict("not_arrived", behind, None, confidence="low")
    return replace(answer, evidence=(f"{line}, {DUMP_AGAIN}",), is_doubted=True)


def in_group_or_message(state: JobState) -> dict[int, str]:
    """Return what ranks without a front do, as stacks tell: make a group, or a message."""
    return {
        rank: stack.activity
        for rank, stack in state.evidence.stacks.items()
        if stack.activity in ("group", "message") and state.stands_long(rank)
    }


def standing_in_collectives(state: JobState) -> dict[int, str]:
    """Return what says that ranks stand in a collective of which no dump has an entry."""
    return {
        rank: f"rank {rank} is in {stack.names[0]} of PyTorch, by its stack ({stack.path})"
        for rank, stack in state.evidence.stacks.items()
        if (stack.is_in_collective or stack.is_in_monitored_barrier)
        and rank in state.job.ranks
        and state.stands_long(rank)
    }


def outside_barrier(state: JobState, standing: Mapping[int, str]) -> Verdict | None:
    """Blame ranks outside of a monitored barrier, of which no dump has an entry."""
    stacks = state.evidence.stacks
    inside = [rank for rank in standing if stacks[rank].is_in_monitored_barrier]
    outside = [
        rank
        for rank, stack in stacks.items()
        if rank not in standing and stack.activity in _OWN and state.stands_long(rank)
    ]
    if len(inside) < len(standing) or not inside or not outside:
        return None
    answer = state.verdict("not_arrived", outside, None, confidence="low")
    lines = tuple(standing[rank] for rank in sorted(inside)[:MOST_QUOTED])
    return replace(answer, waiting=tuple(sorted(inside)), evidence=lines)


def outside_recorded_calls(state: JobState) -> Verdict | None:
    """Blame ranks that stand, by their stacks, where dumps have no entry."""
    activity = in_group_or_message(state)
    groups = sorted(rank for rank, name in activity.items() if name == "group")
    if groups:
        outside = _outside(state, groups)
        confidence = "high" if outside else "low"
        return state.verdict("group_creation", outside or groups, None, confidence=confidence)
    messages = sorted(rank for rank, name in activity.items() if name == "message")
    if not messages:
        return None
    names = {
        rank: next(n for n in state.evidence.stacks[rank].names if n in _SIDES)
        for rank in messages
    }
    if len(messages) > 1 and len(set(names.values())) == 1:
        return state.verdict("p2p_order", messages, None, confidence="low")
    return state.verdict("p2p_unmatched", messages, None, confidence="low")


def _outside(state: JobState, groups: Sequence[int]) -> list[int]:
    """Return who does not join those that make a group: who stands in nothing, or left."""
    others = [rank for rank in state.job.ranks if rank not in groups]
    idle = [rank for rank in others if rank not in state.waits.fronts]
    return sorted(idle) or rhythm.out_of_rhythm(state.job, others, is_certain=True)
