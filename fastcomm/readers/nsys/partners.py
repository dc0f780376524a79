"""The root of a rooted operation of NCCL, and the peers of its messages, as global ranks.

`Root` and `Peer rank` are places in the communicator (NCCL's API and its NVTX payloads), which
those that are in it resolve.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.nsys.communicators import Communicator, unsigned
from fastcomm.readers.nsys.operations import Matched, Operations
from fastcomm.readers.partners import ROOTED, Partners, Peers
from fastcomm.trace.schema import OP
from fastcomm_kernels.json_numbers import NULL

Ints = NDArray[np.int64]


def find_partners(
    operations: Operations,
    matched: Matched,
    op: NDArray[np.int8],
    communicators: Mapping[int, Communicator],
) -> Partners:
    """The partners of each communication kernel, through the operations that it runs.

    A kernel that does several parts, or is one more than its part has, has none that is known.
    """
    found = Partners.unknown(len(op))
    sends_to, receives_from = list(found.sends_to), list(found.receives_from)
    root, peer = (
        _global(operations, places, communicators)
        for places in (operations.root, operations.peer)
    )
    order = np.argsort(operations.part, kind="stable")
    parts = operations.part[order]
    unknown = matched.extra.copy()
    unknown[list(matched.fused)] = True
    known = (matched.part >= 0) & ~unknown
    for k in np.flatnonzero(known & np.isin(op, (*ROOTED, OP["SendRecv"]))).tolist():
        first, last = np.searchsorted(parts, (matched.part[k], matched.part[k] + 1))
        single = matched.operation[k]
        members = order[first:last] if single < 0 else np.array([single])
        if op[k] != OP["SendRecv"]:
            found.root[k] = root[members[0]]
        elif (peer[members] != NULL).all():
            sends_to[k] = _chosen(peer, members[operations.is_send[members]])
            receives_from[k] = _chosen(peer, members[operations.is_receive[members]])
    return Partners(root=found.root, sends_to=sends_to, receives_from=receives_from)


def _chosen(peer: Ints, members: Ints) -> Peers:
    return tuple(peer[members].tolist())


def _global(
    operations: Operations, places: Ints, communicators: Mapping[int, Communicator]
) -> Ints:
    """The global rank at each operation's place in its communicator, or NULL."""
    found = np.full(len(places), NULL, np.int64)
    for key in np.unique(operations.communicator).tolist():
        known = communicators.get(unsigned(key))
        if known is None or known.ranks is None:
            continue
        mine = np.flatnonzero((operations.communicator == key) & (places >= 0))
        mine = mine[places[mine] < len(known.ranks)]
        found[mine] = np.array(known.ranks, np.int64)[places[mine]]
    return found
