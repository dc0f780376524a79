"""How members differed in earlier calls: what was so in calls that ended holds nothing up."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fastcomm.hang.calls import DumpedJob, RankCall, RankCalls
from fastcomm.hang.waits import Stop

_MOST_CALLS = 8  # that are compared
Values = Mapping[int, object]  # by rank


def is_usual(
    job: DumpedJob,
    stop: Stop,
    calls: Mapping[int, RankCall],
    values_of: Callable[[Sequence[RankCall]], Values | None],
) -> bool:
    """Return whether members differed in most earlier calls of a group as they do in one.

    Those are calls that all of them have done, with the operation of most of them where there
    are such.
    """
    values = values_of([*calls.values()])
    earlier = [*_earlier(job, stop, calls)]
    op = _usual_op([*calls.values()])
    alike = [own for own in earlier if _usual_op(own) == op] or earlier
    some = alike[:_MOST_CALLS]
    if values is None or not some:
        return False
    return 2 * sum(_differ_so(values, values_of(own)) for own in some) > len(some)


def _usual_op(calls: Sequence[RankCall]) -> str:
    return Counter(call.op for call in calls).most_common(1)[0][0]


def _differ_so(values: Values, earlier: Values | None) -> bool:
    """Return whether ranks whose values differ now had other values earlier, too."""
    now: dict[object, object] = {}
    return earlier is not None and all(
        now.setdefault(earlier.get(rank), value) == value for rank, value in values.items()
    )


def _earlier(
    job: DumpedJob, stop: Stop, calls: Mapping[int, RankCall]
) -> Iterator[list[RankCall]]:
    """Yield the calls of earlier numbers that all ranks of a stop have done, the last first."""
    ranks = [job.ranks[rank] for rank in calls]
    if not ranks or stop.number is None:
        return
    first = ranks[0].places
    numbers = sorted(n for key, n in first if key is stop.group and n < stop.number)
    for number in numbers[: -4 * _MOST_CALLS - 1 : -1]:
        places = [own.places.get((stop.group, number)) for own in ranks]
        own = [
            one.call(at)
            for one, at in zip(ranks, places, strict=True)
            if at is not None and one.done[at]
        ]
        if len(own) == len(ranks):
            yield own


def is_usual_message(
    job: DumpedJob, calls: Mapping[int, RankCall], value_of: Callable[[RankCall], object]
) -> bool:
    """Return whether the sides of most earlier messages of a pair, which are done, differed."""
    sides = [*calls.values()]
    alike = []
    for back in range(1, _MOST_CALLS + 1):
        own = [_message_before(job.ranks[call.rank], call, back) for call in sides]
        some = [call for call in own if call is not None]
        if len(some) == len(sides):
            alike.append(len({value_of(call) for call in some}) > 1)
    return 2 * sum(alike) > len(alike)


def _message_before(calls: RankCalls, call: RankCall, back: int) -> RankCall | None:
    """Return the message of a side so many before one, if it is done."""
    for at in np.flatnonzero(calls.ordinal == call.ordinal - back).tolist():
        own = calls.call(at)
        if (own.op, own.peer) == (call.op, call.peer) and calls.done[at]:
            return own
    return None
