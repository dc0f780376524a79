"""Ranks that wait for each other: by the order of their calls or of their messages."""

from collections import Counter
from collections.abc import Sequence

from fastcomm.hang import rhythm
from fastcomm.hang.calls import OTHER_SIDE
from fastcomm.hang.state import JobState, Verdict

_TWO = 2


def circle(state: JobState) -> Verdict | None:
    """Blame ranks that wait for each other: of these, those that leave their rhythm."""
    for ranks, stops in state.waits.roots:
        if not (ranks and stops):
            continue
        is_message = all(stop.number is None for stop in stops)
        # Without messages of a batch that are done.
        sides = {call.op for stop in stops for call in state.waits.stops[stop].values()}
        if is_message and len(sides) == 1:
            # Each side may send first, or one may have left out the message before.
            odd = _left_out(state, ranks)
            kind = "p2p_unmatched" if odd else "p2p_order"
            stop = state.first_held(odd) if odd else stops[0]
            return state.verdict(kind, odd or ranks, stop, confidence="low")
        if is_message and _is_ring(state, ranks):
            return state.verdict("p2p_order", ranks, stops[0], confidence="low")
        if odd := rhythm.out_of_rhythm(state.job, ranks):
            kind = "p2p_unmatched" if _leads_by_messages(state, odd) else "order"
            return state.verdict(kind, odd, state.first_held(odd))
        messages = [stop for stop in stops if stop.number is None]
        if len(messages) == 1 and not is_message and {*messages[0].pair} <= {*ranks}:
            # One side left it out, or the other made one too many.
            pair = messages[0].pair
            return state.verdict("p2p_unmatched", pair, messages[0], confidence="low")
        counts = Counter(rank for stop in stops for rank in state.waits.holders[stop])
        most = max(counts[rank] for rank in ranks)
        likely = [rank for rank in ranks if counts[rank] == most]
        kind = "p2p_order" if is_message else "order"
        return state.verdict(kind, likely, stops[0], confidence="low")
    return None


def _left_out(state: JobState, ranks: Sequence[int]) -> list[int]:
    """Return the one of two ranks that left out a message of their circle; else none.

    It leaves its rhythm. Both have called a later collective ahead of their devices, so
    that a message that it only swaps with another would be in its dump.
    """
    if len(ranks) != _TWO or not _are_ahead(state, *ranks):
        return []
    odd = rhythm.out_of_rhythm(state.job, ranks, is_certain=True)
    if len(odd) != 1:
        return []
    (own,) = odd
    peer = next(rank for rank in ranks if rank != own)
    is_fewer = any(
        state.job.since_together(own, peer, side) < state.job.since_together(peer, own, other)
        for side, other in OTHER_SIDE.items()
    )
    return odd if is_fewer else []


def _are_ahead(state: JobState, one: int, two: int) -> bool:
    """Return whether two ranks have called one collective behind what they stand in."""
    first, second = state.job.ranks[one], state.job.ranks[two]
    front = {rank: state.waits.fronts[rank][-1].place for rank in (one, two)}
    return any(
        (place or 0) > front[one] and (second.place(key, number) or 0) > front[two]
        for key, number in first.last.items()
        if second.last.get(key) == number
        for place in [first.place(key, number)]
    )


def _is_ring(state: JobState, ranks: Sequence[int]) -> bool:
    """Return whether all ranks of a circle stand in messages to ranks as far from them."""
    place = {rank: at for at, rank in enumerate(ranks)}
    steps = set()
    for rank in ranks:
        front = state.waits.fronts[rank]
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


def _leads_by_messages(state: JobState, odd: Sequence[int]) -> bool:
    """Return whether only messages wait for some ranks."""
    stops = state.waits.holding(odd)
    return bool(stops) and all(stop.number is None for stop in stops)
