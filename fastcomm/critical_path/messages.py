"""Which message of one rank is which of another: by sender, receiver and order.

The k-th message from one rank to another in a group is the k-th that the other receives from
it: messages do not overtake each other. A kernel may run several messages at once; kernels that
messages join are one exchange.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fastcomm.critical_path.parts import GroupKey, Instance, Part

Route = tuple[GroupKey, int, int]  # group, who sends, who receives


def exchanges(parts: Sequence[Part]) -> tuple[list[Instance], int]:
    """The exchanges of several ranks, and how many messages the other side does not have.

    Where two ranks do not agree how many messages there were, none of these is matched.
    """
    sends, receives = _routes(parts)
    ranks = {part.rank for part in parts}
    pairs: list[tuple[int, int]] = []
    alone, unmatched = set(), 0
    for route in sorted(sends.keys() | receives.keys(), key=repr):
        ours, theirs = sends.get(route, []), receives.get(route, [])
        if len(ours) == len(theirs):
            pairs += zip(ours, theirs, strict=True)
        else:
            alone |= {*ours, *theirs}
            both_here = {route[1], route[2]} <= ranks
            unmatched += abs(len(ours) - len(theirs)) if both_here else 0
    return [_instance(parts, *each, alone) for each in _joined(pairs)], unmatched


def _routes(parts: Sequence[Part]) -> tuple[dict[Route, list[int]], dict[Route, list[int]]]:
    """By route: the places in `parts` of its sends and of its receives, in order of time."""
    sends: dict[Route, list[int]] = defaultdict(list)
    receives: dict[Route, list[int]] = defaultdict(list)
    for k in sorted(range(len(parts)), key=lambda k: (parts[k].start, k)):
        part = parts[k]
        for peer in part.sends_to or ():
            sends[part.group.key, part.rank, peer].append(k)
        for peer in part.receives_from or ():
            receives[part.group.key, peer, part.rank].append(k)
    return sends, receives


def _joined(
    pairs: Sequence[tuple[int, int]],
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """What pairs join, directly or through others: the parts, and the pairs between them."""
    parent: dict[int, int] = {}

    def top(k: int) -> int:
        while parent.setdefault(k, k) != k:
            parent[k] = parent[parent[k]]
            k = parent[k]
        return k

    for sender, receiver in pairs:
        parent[top(sender)] = top(receiver)
    members: dict[int, list[int]] = defaultdict(list)
    for k in sorted(parent):
        members[top(k)].append(k)
    between: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in pairs:
        between[top(pair[0])].append(pair)
    for key, found in members.items():
        yield found, between[key]


def _instance(
    parts: Sequence[Part], members: list[int], pairs: list[tuple[int, int]], alone: set[int]
) -> Instance:
    """An exchange: a receive waits for its send, and a send for its receive.

    But a send of so little that it fits a buffer is over before anybody receives: where it
    ended first, it did not wait.
    """
    place = {k: n for n, k in enumerate(members)}
    waits = [{n} for n in range(len(members))]
    for sender, receiver in pairs:
        waits[place[receiver]].add(place[sender])
        if parts[receiver].start <= parts[sender].stop:
            waits[place[sender]].add(place[receiver])
    return Instance(
        members=tuple(parts[k] for k in members),
        waits_for=tuple(tuple(sorted(each)) for each in waits),
        is_whole=alone.isdisjoint(members),
    )
