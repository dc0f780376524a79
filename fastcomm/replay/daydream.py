"""Daydream's prediction: one rank, whose tensors need their bytes over a bandwidth and no more.

No rank waits for another and tensors are sent one by one, so that it bounds a step from below.
The method is that of H. Zhu et al., Daydream (USENIX ATC 2020), with the bandwidth that dPRO's
baseline has: 85 % of 100, which it calls Gbit/s and counts as GB/s.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import FastcommError
from fastcomm.replay.dependency import Dependencies
from fastcomm.replay.gaps import Measured
from fastcomm.replay.names import OUT
from fastcomm.replay.replayer import Replayed, Replayer

BANDWIDTH = 0.85 * 100e9
_NS = 1e9


def daydream(
    made: Replayer, bytes_of: Mapping[int, int], bandwidth: float = BANDWIDTH
) -> Replayed:
    """Replay the first rank alone; `bandwidth` is in bytes a second."""
    pid = next(each for each in made.pids if each)
    own = [name.pid in {pid, None} and name.op_cat != "Comm" for name in made.names]
    nodes = {made.graph.nodes[i]: None for i in np.flatnonzero(own).tolist()}
    edges = {(a, b): None for a, b in made.graph.edges if a in nodes and b in nodes}
    duration: dict[str, float] = {}
    for before, tensors, after in _sent(made, pid):
        for tensor in tensors:
            if tensor not in bytes_of:
                raise FastcommError(
                    f"the size of tensor {tensor} is not known: wanted its output, under its "
                    "name, in metadata.json"
                )
            node = f"{pid}->Comm.{tensor}"
            duration[node] = bytes_of[tensor] / bandwidth * _NS
            edges[before, node] = edges[node, after] = None
    names = (*nodes, *duration)
    number = {name: i for i, name in enumerate(names)}
    graph = Dependencies(
        nodes=names,
        source=np.array([number[a] for a, _ in edges], np.int64),
        target=np.array([number[b] for _, b in edges], np.int64),
        groups=tuple((tensor,) for tensor in sorted(bytes_of)),
    )
    known = _with(made.measured, np.array(own), list(duration.values()))
    return Replayer.of(graph, known, made.options).run()


def _with(known: Measured, own: NDArray[np.bool_], sent: list[float]) -> Measured:
    """What is known of the rank's own nodes, and of communication its time alone."""
    none = np.zeros(len(sent))
    return Measured(
        avg=np.concatenate((known.avg[own], sent)),
        gap=np.concatenate((known.gap[own], none)),
        samples=np.concatenate((known.samples[own], none.astype(np.int64))),
        comm_gap=np.concatenate((known.comm_gap[own], none)),
    )


def _sent(made: Replayer, pid: str) -> list[tuple[str, tuple[int, ...], str]]:
    """What each group of tensors waits for, its tensors, and what waits for it first."""
    first_after: dict[tuple[int, ...], str] = {}
    befores = []
    edges = zip(made.graph.source.tolist(), made.graph.target.tolist(), strict=True)
    for a, b in edges:
        source, target = made.names[a], made.names[b]
        if source.pid != pid:
            continue
        if source.op_cat == "BW" and target.sub_op == "Sync":
            befores.append((made.graph.nodes[a], target.tensors))
        elif source.sub_op == OUT:
            first_after.setdefault(source.tensors, made.graph.nodes[b])
    return [
        (before, tensors, first_after[tensors])
        for before, tensors in befores
        if tensors in first_after
    ]
