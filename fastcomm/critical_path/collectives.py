"""Which communication of one rank is which of another, and who in it waits for whom.

An instance is one operation of one group. It is known by its sequence number where every event
of that group and operation has one, else by its place among them. Messages whose peers are
known go by sender and receiver.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fastcomm.critical_path.messages import exchanges
from fastcomm.critical_path.parts import GroupKey, Instance, Part, parts
from fastcomm.trace.trace import Trace
from fastcomm_kernels.graph import Flags

# Operations that end nowhere before all have begun.
_TOGETHER = frozenset(("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Barrier"))
_FROM_ROOT = frozenset(("Broadcast", "Scatter"))
_TO_ROOT = frozenset(("Reduce", "Gather"))
_MESSAGE, _PAIR = "SendRecv", 2
# The amounts of these are the same on every rank.
_EVEN = frozenset(("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce"))

Key = tuple[GroupKey, str, object]


def instances(
    traces: Mapping[int, Trace], inside: Mapping[int, Flags], ahead: Mapping[int, int]
) -> tuple[list[Instance], list[str]]:
    """The instances of several ranks, in order of time; and notes on what is none.

    `inside` says which rows of a rank's `comm` count, `ahead` by how much its clock is.
    """
    every = [
        part
        for rank, trace in traces.items()
        for part in parts(rank, trace, inside[rank], ahead[rank])
    ]
    known = [part for part in every if part.op == _MESSAGE and part.sends_to is not None]
    found, unmatched = exchanges(known)
    together, mismatched, silent = _together(part for part in every if part.sends_to is None)
    notes = [
        f"{count} {words}"
        for count, words in (
            (
                unmatched,
                "messages lack their other side: those of the two ranks are not joined",
            ),
            (mismatched, "collectives do not match in size or root and are not joined"),
            (silent, "collectives whose root or peers are unknown or not read are not joined"),
        )
        if count
    ]
    joined = [*found, *together]
    return sorted(joined, key=lambda each: min(part.start for part in each.members)), notes


def _together(every: Iterable[Part]) -> tuple[list[Instance], int, int]:
    """The instances of whole groups; how many contradict themselves; and who say too little."""
    by_rank: dict[int, list[Part]] = defaultdict(list)
    for part in every:
        by_rank[part.rank].append(part)
    found: dict[Key, list[Part]] = defaultdict(list)
    for mine in by_rank.values():
        for key, part in _keyed(mine):
            found[key].append(part)
    joined, mismatched, silent = [], 0, 0
    for members in found.values():
        if len(members) < _PAIR or len({part.rank for part in members}) < len(members):
            continue
        waits = _waits(members)
        if waits is None or _contradict(members):
            mismatched += waits is not None
            silent += waits is None
            continue
        size = members[0].group.size
        joined.append(
            Instance(
                members=tuple(members),
                waits_for=waits,
                is_whole=size is None or len(members) == size,
            )
        )
    return joined, mismatched, silent


def _keyed(mine: Sequence[Part]) -> list[tuple[Key, Part]]:
    """The parts of a rank, each with what is the same on every rank of its instance."""
    numbers: dict[object, list[int | None]] = defaultdict(list)
    for part in mine:
        numbers[part.group.key, part.op].append(part.seq)
    numbered = {
        key: None not in seen and len(set(seen)) == len(seen) for key, seen in numbers.items()
    }
    place: dict[object, int] = defaultdict(int)
    found: list[tuple[Key, Part]] = []
    for part in mine:
        series = part.group.key, part.op
        found.append(((*series, part.seq if numbered[series] else place[series]), part))
        place[series] += 1
    return found


def _waits(members: Sequence[Part]) -> tuple[tuple[int, ...], ...] | None:
    """For whom each member waits; None where nobody knows."""
    op, everyone = members[0].op, tuple(range(len(members)))
    alone = tuple((n,) for n in everyone)
    if op in _TOGETHER or (op == _MESSAGE and members[0].group.size == _PAIR):
        return (everyone,) * len(members)
    roots = [n for n in everyone if members[n].rank == _root(members)]
    if op not in _FROM_ROOT | _TO_ROOT or not roots:
        return None
    root = roots[0]
    if op in _FROM_ROOT:
        return tuple((n,) if n == root else tuple(sorted((n, root))) for n in everyone)
    return (*alone[:root], everyone, *alone[root + 1 :])


def _root(members: Sequence[Part]) -> int | None:
    return next((part.root for part in members if part.root is not None), None)


def _contradict(members: Sequence[Part]) -> bool:
    """Whether the members cannot be one instance: in their amounts, or their root."""
    amounts = {part.payload for part in members} - {None}
    roots = {part.root for part in members} - {None}
    return len(roots) > 1 or (members[0].op in _EVEN and len(amounts) > 1)
