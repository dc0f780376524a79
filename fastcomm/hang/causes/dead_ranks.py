"""Ranks that died or were aborted, as logs say."""

from dataclasses import replace

from fastcomm.hang import rhythm
from fastcomm.hang.causes.late_ranks import not_arrived
from fastcomm.hang.logs import is_timeout
from fastcomm.hang.state import MOST_QUOTED, JobState, Verdict
from fastcomm.hang.waits import retires


def aborted_ranks(state: JobState) -> Verdict | None:
    """Blame ranks whose messages were longer than expected: gloo aborted others for it."""
    aborted = [rank for rank in state.job.silent if state.evidence.is_aborted(rank)]
    if not aborted:
        return None
    departures = {
        rank: one
        for rank, calls in state.job.ranks.items()
        if (one := rhythm.departure(calls)) is not None
    }
    # The culprit left it in a call with the rank that was aborted, or in its last one.
    beside = [
        rank
        for rank, one in departures.items()
        if set(state.job.members.get(one.group, ())).intersection(aborted)
    ]
    odd = beside or [rank for rank, one in departures.items() if one.is_last]
    if not odd:
        return None
    stop = state.first_held(aborted) or state.last_common()
    return state.verdict(departures[odd[0]].kind, odd, stop)


def dead_ranks(state: JobState) -> Verdict | None:
    """Blame ranks without a dump of which some file says that they died."""
    dead = [rank for rank in state.job.silent if rank in state.evidence.dead]
    if not dead:
        return None
    if state.evidence.undated.issuperset(dead) and _has_nccl(state):
        # A log that does not tell when is weaker than a rank that never came to a call.
        answer = not_arrived(state)
        if answer is not None and answer.kind == "not_arrived":
            return replace(answer, confidence="low")
    stop = state.first_held(dead) or state.last_common()
    return state.verdict("missing_rank", dead, stop)


def _has_nccl(state: JobState) -> bool:
    """Return whether a death of one rank keeps no other from its next call."""
    return not any(map(retires, state.job.ranks.values()))


def broken_connections(state: JobState) -> Verdict | None:
    """Blame ranks that are gone, as logs say, though no call is open: those without a dump.

    So they do where a process died that no line calls a rank.

    A rank whose own log says so failed as others did. With all dumps, it is the few whose
    log does not say, as that of others does, that a call ran into its timeout.
    """
    lines = state.evidence.broken
    missing = state.job.missing
    if not lines and not (missing and state.evidence.deaths):
        return None
    quoted = tuple(lines[rank] for rank in sorted(lines)[:MOST_QUOTED])
    late = {rank for rank, line in lines.items() if is_timeout(line)}
    silent = sorted(state.job.ranks.keys() - late)
    if missing:
        gone = [rank for rank in missing if rank not in lines] or missing
        stop = state.first_held(gone) or state.last_common()
        answer = state.verdict("missing_rank", gone, stop, confidence="low")
    elif 0 < len(silent) < len(late):
        answer = state.verdict("not_arrived", silent, None, confidence="low")
    else:
        answer = Verdict(kind="none", confidence="low")
    return replace(answer, evidence=quoted)
