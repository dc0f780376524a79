"""Messages whose sender and receiver are known, and what of them is over together.

A kernel may run several messages at once; kernels that messages join are one exchange.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fastcomm.critical_path.communication import Communication, filled
from fastcomm.critical_path.parts import Instance, Part
from fastcomm.trace import clocks
from fastcomm.trace.matching import NONE, UNKNOWN
from fastcomm.trace.messages import Messages, Sides, match_messages
from fastcomm_kernels.graph import Column, Flags


def exchanges(
    comm: Communication, counts: Flags, ahead: Mapping[int, int]
) -> tuple[list[Instance], int]:
    """The exchanges among rows that count; and how many messages lack their other side."""
    row, messages = _messages(comm, ahead)
    matches = match_messages(messages)
    sender, receiver = (row[side] for side in matches.pairs(messages.is_send))
    inside = counts[sender] & counts[receiver]
    paired = matches.instance != NONE
    paired[paired] = inside[matches.instance[paired]]
    sender, receiver = sender[inside], receiver[inside]
    rows = np.unique(np.append(sender, receiver))
    found = list(comm.parts(rows, ahead))
    pairs = np.searchsorted(rows, np.stack([sender, receiver], axis=1)).tolist()
    alone = set(np.flatnonzero(np.isin(rows, row[~paired])).tolist())
    lacking = int((matches.lacking(messages) & counts[row]).sum())
    return [_instance(found, *each, alone) for each in _joined(pairs)], lacking


def _messages(comm: Communication, ahead: Mapping[int, int]) -> tuple[Column, Messages]:
    """The messages on clocks that agree, a row a side; and the row of each in `comm`."""
    table = comm.table.take(comm.directed)
    sides = Sides.of(*(table[name].combine_chunks() for name in ("sends_to", "receives_from")))
    row = comm.directed[sides.event]
    seq, payload = (filled(table[name])[sides.event] for name in ("seq", "payload_bytes"))
    return row, Messages(
        rank=comm.rank[row],
        peer=sides.peer,
        is_send=sides.is_send,
        group=comm.group[row],
        seq=seq,
        size=np.where(sides.is_only, payload, UNKNOWN),
        stop=comm.stop[row] - clocks.by_rank(comm.rank[row], ahead),
    )


def _joined(
    pairs: Sequence[Sequence[int]],
) -> Iterator[tuple[list[int], list[Sequence[int]]]]:
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
    between: dict[int, list[Sequence[int]]] = defaultdict(list)
    for pair in pairs:
        between[top(pair[0])].append(pair)
    for key, found in members.items():
        yield found, between[key]


def _instance(
    parts: Sequence[Part], members: list[int], pairs: list[Sequence[int]], alone: set[int]
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
