"""The critical path of a replay: the longest path over dependencies and devices."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.replay.replayer import Replayed
from fastcomm_kernels import replay as kernels

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Nodes of the path with what each adds to it, in ns; the last adds nothing."""

    nodes: tuple[int, ...]
    cost: tuple[float, ...]
    edges: int

    @property
    def length_ns(self) -> float:
        """Length of the path."""
        return sum(self.cost)


def critical_path(replayed: Replayed) -> CriticalPath:
    """Find it: a dependency costs its node and the gap behind it, a device what has passed."""
    made = replayed.replayer
    source, target, cost = execution_graph(replayed)
    by_source = np.argsort(source, kind="stable")
    counts = np.bincount(source, minlength=len(made.names))
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    far, by = kernels.longest(
        first, target[by_source], cost[by_source], by_source, replayed.order
    )
    path = [int(np.argmax(far))]
    while by[path[-1]] >= 0:
        path.append(int(source[by_source[by[path[-1]]]]))
    path.reverse()
    steps = np.diff(far[path], append=far[path[-1]])
    return CriticalPath(nodes=tuple(path), cost=tuple(steps.tolist()), edges=len(source))


def execution_graph(replayed: Replayed) -> tuple[Ints, Ints, Floats]:
    """Edges of dependencies, then of devices, and what each costs."""
    source, target, cost = _dependencies(replayed)
    earlier, later = _on_devices(replayed, source, target)
    return (
        np.concatenate((source, earlier)),
        np.concatenate((target, later)),
        np.concatenate((cost, replayed.start[later] - replayed.start[earlier])),
    )


def _dependencies(replayed: Replayed) -> tuple[Ints, Ints, Floats]:
    """Edges of the graph and their costs."""
    made = replayed.replayer
    operator = made.operators
    source, target = made.graph.source, made.graph.target
    both = operator[source] & operator[target]
    gap = np.where(both, made.measured.gap[source], 0.0)
    comm = np.array([name.op_cat == "Comm" for name in made.names])
    gap += np.where(operator[source] & comm[target], made.measured.comm_gap[source], 0.0)
    duration = replayed.duration[source]
    if not made.options.compat:
        lag, at_start = np.empty(len(source)), np.empty(len(source), np.int64)
        lag[made.edge], at_start[made.edge] = made.lag, made.at_start
        gap = np.where(both, gap, 0.0) + lag
        duration = np.where(at_start == 1, 0.0, duration)
    return source, target, duration + gap


def _on_devices(replayed: Replayed, source: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Edges between what ran on a device one after the other."""
    made = replayed.replayer
    device = made.device[replayed.order]
    by = np.argsort(device, kind="stable")
    nodes, device = replayed.order[by], device[by]
    follows = (device[1:] == device[:-1]) & (made.kind[device[1:]] != kernels.UNLIMITED)
    a, b = nodes[:-1][follows], nodes[1:][follows]
    size = len(made.names)
    known = np.isin(a * size + b, source * size + target)
    backward = np.array([name.op_cat == "BW" for name in made.names])
    update = np.array([name.op_cat.startswith("UPDATE") for name in made.names])
    kept = ~known & ~(backward[a] & update[b])
    return a[kept], b[kept]
