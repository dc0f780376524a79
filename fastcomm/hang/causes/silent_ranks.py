"""Ranks that others wait for, and that left no dump."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fastcomm.hang.causes.circles import circle
from fastcomm.hang.launches import ranks_in_call
from fastcomm.hang.state import MOST_QUOTED, JobState, Verdict
from fastcomm.hang.waits import Stop


def missing_ranks(state: JobState) -> Verdict | None:
    """Blame ranks without a dump that others wait for."""
    for ranks, stops in state.waits.roots:
        missing = [rank for rank in ranks if rank not in state.job.ranks]
        if missing and not stops:
            # Whoever has a dump and crosses others explains the wait by itself.
            crossing = circle(replace(state, holds_silent=False))
            if crossing is not None:
                return replace(crossing, confidence="low")
            every = state.held_up(has_dump=False)
            return silent_ranks(state, every, state.first_held(every))
    return None


def silent_ranks(state: JobState, ranks: Sequence[int], stop: Stop | None) -> Verdict:
    """Return the verdict on ranks of which no dump tells where they stand.

    Suspects are those without a dump. A rank whose dump cannot be read was able to write
    one, and may stand in the same call as the others: it is named, and not blamed.
    """
    unreadable = {*state.job.unreadable}
    launched = _no_suspects(state, ranks)
    lines = tuple(launched[rank] for rank in sorted(launched)[:MOST_QUOTED])
    if stop is not None and launched.keys() == {*ranks}:
        standing = state.waits.stops[stop]
        answer = state.verdict("stalled", standing, stop, confidence="low")
        return replace(answer, evidence=lines)
    suspects = [rank for rank in ranks if rank not in unreadable | launched.keys()]
    answer = state.verdict("missing_rank", suspects, stop, confidence="low")
    waiting = tuple(state.waits.waiting({*ranks}, stop))
    return replace(answer, waiting=waiting, evidence=lines)


def _no_suspects(state: JobState, ranks: Iterable[int]) -> dict[int, str]:
    """Return the ranks that are in all calls that wait for them, with what says so."""
    some, lines = {*ranks}, dict[int, str]()
    behind: set[int] = set()
    for stop in state.waits.holding(some):
        launches = ranks_in_call(state, stop)
        holders = some.intersection(state.waits.holders[stop])
        behind |= holders - launches.keys()
        for rank in sorted(holders & launches.keys()):
            dump = "an unreadable dump" if rank in state.job.unreadable else "no dump"
            lines[rank] = f"rank {rank} left {dump}, and is no suspect: {launches[rank]}"
    return {rank: line for rank, line in lines.items() if rank not in behind}
