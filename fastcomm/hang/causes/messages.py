"""Messages whose sides differ, or that both sides stand in."""

from dataclasses import replace

from fastcomm.hang import rhythm
from fastcomm.hang.calls import RankCall
from fastcomm.hang.earlier import is_usual_message
from fastcomm.hang.state import JobState, Verdict
from fastcomm.hang.waits import Stop


def different_sides(state: JobState) -> Verdict | None:
    """Blame both sides of a message in which they stand with different types or sizes."""
    for stop, calls in state.waits.stops.items():
        is_matched = stop.number is None and stop.ordinal is not None and len(calls) > 1
        if not is_matched or all(state.ages.is_young(call) for call in calls.values()):
            continue
        for kind, value_of in _COMPARED_SIDES:
            is_odd = len({value_of(call) for call in calls.values()}) > 1
            if is_odd and not is_usual_message(state.job, calls, value_of):
                return state.verdict(kind, calls, stop)
    return None


def unmatched_message(state: JobState) -> Verdict | None:
    """Blame the sides of a message that both stand in, or that short rings do not tell."""
    for ranks, stops in state.waits.roots:
        if not ranks and len(stops) == 1 and stops[0].number is None:
            pair = [*state.waits.stops[stops[0]]]
            if -1 in stops[0].pair:
                answer = state.verdict("p2p_unmatched", (), stops[0], confidence="low")
                return replace(answer, waiting=tuple(_behind(state, stops[0])))
            if stops[0].ordinal is not None:
                return state.verdict("stalled", pair, stops[0], confidence="low")
            odd = rhythm.out_of_rhythm(state.job, pair) or pair
            return state.verdict("p2p_unmatched", odd, stops[0], confidence="low")
    return None


def _behind(state: JobState, stop: Stop) -> list[int]:
    """Return the ranks that stand in a stop, and those that wait for them."""
    inside = {*state.waits.stops[stop]}
    return sorted(inside.union(state.waits.waiting(inside, stop)))


def _type_sent(call: RankCall) -> object:
    return call.arguments[2]


def _size_sent(call: RankCall) -> object:
    return max(call.elements)


# What both sides of a message have to have.
_COMPARED_SIDES = (("mismatch_dtype", _type_sent), ("mismatch_size", _size_sent))
