"""The operations that several ranks are part in, and who in them waits for whom."""

from collections.abc import Mapping, Sequence

import numpy as np

from fastcomm.critical_path.communication import Communication
from fastcomm.critical_path.messages import exchanges
from fastcomm.critical_path.parts import Instance, Part
from fastcomm.trace.schema import ENDS_TOGETHER, FROM_ROOT, TO_ROOT
from fastcomm_kernels.graph import Flags

_MESSAGE, _PAIR = "SendRecv", 2


def instances(
    comm: Communication, inside: Mapping[int, Flags], ahead: Mapping[int, int]
) -> tuple[list[Instance], list[str]]:
    """The instances of several ranks, in order of time; and notes on what is none.

    `inside` says which rows of a rank's `comm` count, `ahead` by how much its clock is.
    """
    counts = np.concatenate([inside[rank] for rank in comm.traces])
    exchanged, lacking = exchanges(comm, counts, ahead)
    together, silent = _together(comm, counts, ahead)
    notes = [
        f"{count} {words}"
        for count, words in (
            (lacking, "messages lack their other side and are not joined"),
            (comm.alone(counts), "collectives are on one rank alone of those that were read"),
            (
                comm.refused(counts),
                "collectives do not match in size or root and are not joined",
            ),
            (silent, "collectives whose root or peers are unknown or not read are not joined"),
        )
        if count
    ]
    joined = [*exchanged, *together]
    return sorted(joined, key=lambda each: min(part.start for part in each.members)), notes


def _together(
    comm: Communication, counts: Flags, ahead: Mapping[int, int]
) -> tuple[list[Instance], int]:
    """The instances of whole groups; and how many say too little."""
    joined, silent = [], 0
    for members in comm.members(counts, ahead):
        waits = _waits(members)
        if waits is None:
            silent += 1
            continue
        size = members[0].group.size
        joined.append(
            Instance(
                members=tuple(members),
                waits_for=waits,
                is_whole=size is None or len(members) == size,
            )
        )
    return joined, silent


def _waits(members: Sequence[Part]) -> tuple[tuple[int, ...], ...] | None:
    """For whom each member waits; None where nobody knows."""
    op, everyone = members[0].op, tuple(range(len(members)))
    alone = tuple((n,) for n in everyone)
    if op in ENDS_TOGETHER or (op == _MESSAGE and members[0].group.size == _PAIR):
        return (everyone,) * len(members)
    roots = [n for n in everyone if members[n].rank == _root(members)]
    if op not in FROM_ROOT + TO_ROOT or not roots:
        return None
    root = roots[0]
    if op in FROM_ROOT:
        return tuple((n,) if n == root else tuple(sorted((n, root))) for n in everyone)
    return (*alone[:root], everyone, *alone[root + 1 :])


def _root(members: Sequence[Part]) -> int | None:
    return next((part.root for part in members if part.root is not None), None)
