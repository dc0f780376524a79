"""Replay of some tensors alone: their communication, what it waits for, what waits for it."""

from collections.abc import Collection

import numpy as np

from fastcomm.errors import FastcommError
from fastcomm.replay.dependency import Dependencies
from fastcomm.replay.gaps import Measured
from fastcomm.replay.replayer import Replayed, Replayer


def partial(made: Replayer, tensors: Collection[int]) -> Replayed:
    """Replay the groups that hold one of the tensors, with their backward ops and updates."""
    wanted = set(tensors)
    comm = np.array([bool(wanted & set(name.tensors)) for name in made.names])
    if not comm.any():
        raise FastcommError(f"no communication of tensor {', '.join(map(str, sorted(wanted)))}")
    kept = comm.copy()
    graph = made.graph
    backward = np.array([name.op_cat == "BW" for name in made.names])
    update = np.array([name.op_cat.startswith("UPDATE") for name in made.names])
    before, after = comm[graph.target], comm[graph.source]
    kept[graph.source[before & backward[graph.source]]] = True
    kept[graph.target[after & update[graph.target]]] = True
    number = np.cumsum(kept) - 1
    inside = kept[graph.source] & kept[graph.target]
    found = Dependencies(
        nodes=tuple(node for node, own in zip(graph.nodes, kept, strict=True) if own),
        source=number[graph.source[inside]],
        target=number[graph.target[inside]],
        groups=tuple(group for group in graph.groups if wanted & set(group)),
    )
    known = made.measured
    measured = Measured(
        avg=known.avg[kept],
        gap=known.gap[kept],
        samples=known.samples[kept],
        comm_gap=known.comm_gap[kept],
    )
    return Replayer.of(found, measured, made.options).run()
