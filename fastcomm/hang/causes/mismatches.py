"""Calls of one collective that have different arguments, or more than one root."""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial

from fastcomm.hang import rhythm
from fastcomm.hang.calls import RankCall, is_all_to_all
from fastcomm.hang.earlier import is_usual
from fastcomm.hang.state import JobState, Verdict
from fastcomm.hang.waits import Stop

_TWO = 2
_GATHERS_OF_LISTS = ("allgather", "allgatherv")
_SCATTERS_OF_LISTS = ("reducescatter", "reducescatterv")


def different_arguments(state: JobState) -> Verdict | None:
    """Blame members that made the call of others with different arguments."""
    for stop, calls in state.old_collectives():
        members = len(state.job.members.get(stop.group, ()))
        kind, odd = _odd(list(calls.values()), members, _usual_kinds(state, stop, calls))
        if kind is None:
            continue
        is_uneven = kind == "mismatch_size" and _has_parts([*calls.values()])
        if odd:
            confidence = "low" if is_uneven else "high"
            return state.verdict(kind, odd, stop, confidence=confidence)
        places = {rank: call.place for rank, call in calls.items()}
        odd = rhythm.unusual(state.job, places) or rhythm.out_of_rhythm(state.job, calls)
        confidence = "high" if odd and not is_uneven else "low"
        return state.verdict(kind, odd or calls, stop, confidence=confidence)
    return None


def _usual_kinds(state: JobState, stop: Stop, calls: Mapping[int, RankCall]) -> set[str]:
    """Return the kinds of mismatch that earlier calls had, too, and ended."""
    members = len(state.job.members.get(stop.group, ()))
    kinds = [
        kind
        for kind, values in _compared([*calls.values()], members)
        if len(set(values.values())) > 1
    ]
    return {
        kind
        for kind in kinds
        if is_usual(
            state.job,
            stop,
            calls,
            partial(_of_kind, kind=kind, members=members),
        )
    }


def two_roots(state: JobState) -> Verdict | None:
    """Blame a member that takes the root's side of a gather or scatter beside another."""
    for stop, calls in state.old_collectives():
        rooted = {rank: call.place for rank, call in calls.items() if _is_root(call)}
        if len(rooted) > 1 and not is_usual(state.job, stop, calls, _roots):
            odd = rhythm.unusual(state.job, rooted) or rhythm.out_of_rhythm(state.job, rooted)
            usual = rooted.keys() - set(odd)
            is_sure = any(_was_root(state, calls[rank]) for rank in usual)
            return state.verdict(
                "mismatch_root",
                odd or rooted,
                stop,
                confidence="high" if odd and is_sure else "low",
            )
    return None


def _was_root(state: JobState, call: RankCall) -> bool:
    """Return whether the rank was root of an earlier call like this one."""
    calls = state.job.ranks[call.rank]
    earlier = (calls.call(at) for at in range(call.place) if calls.key(at) is call.group)
    return any(one.op == call.op and _is_root(one) for one in earlier)


def _is_root(call: RankCall) -> bool:
    """Return whether a call is the root's side of a gather or scatter."""
    side = {"gather": 1, "scatter": 0}.get(call.op)
    return side is not None and call.elements[side] > 0


def _roots(calls: Sequence[RankCall]) -> Mapping[int, object]:
    return {call.rank: _is_root(call) for call in calls}


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
