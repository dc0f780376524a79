"""Replay a step and find its critical path."""

import numpy as np

from fastcomm.graph.graph import LongestPath
from fastcomm.readers.dpro.trial import Trial
from fastcomm.replay.dependency import dependencies
from fastcomm.replay.gaps import measured
from fastcomm.replay.replayer import Options, Replayed, Replayer
from fastcomm.replay.result import ReplayPath, Session
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import Floats, Ints

_SAME_NS = 1e-3  # paths that differ by less are equally long


def critical_path(replayed: Replayed) -> ReplayPath:
    """Find it: a dependency costs its node and the gap behind it, a device what has passed."""
    made = replayed.replayer
    source, target, cost = execution_graph(replayed)
    into = graphs.index(target.astype(np.int32), len(made.names))
    order, ends = replayed.order.astype(np.int32), source.astype(np.int32)
    far, through = graphs.longest_path(order, into, ends, cost, _SAME_NS)
    path = LongestPath.to(int(np.argmax(far)), through, ends).nodes
    steps = np.diff(far[path], append=far[path[-1]])
    return ReplayPath(nodes=tuple(path.tolist()), cost=tuple(steps.tolist()), edges=len(source))


def execution_graph(replayed: Replayed) -> tuple[Ints, Ints, Floats]:
    """Edges of dependencies, then of devices, and what each costs."""
    made = replayed.replayer
    source, target = made.graph.source, made.graph.target
    cost = made.options.rules.edge_costs(replayed)
    earlier, later = _on_devices(replayed, source, target)
    return (
        np.concatenate((source, earlier)),
        np.concatenate((target, later)),
        np.concatenate((cost, replayed.start[later] - replayed.start[earlier])),
    )


def _on_devices(replayed: Replayed, source: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Edges between what ran on a device one after the other."""
    made = replayed.replayer
    a, b = made.operations.consecutive(replayed.order)
    size = len(made.names)
    known = np.isin(a * size + b, source * size + target)
    update = np.array([name.op_cat.startswith("UPDATE") for name in made.names])
    kept = ~known & ~(made.is_of("BW")[a] & update[b])
    return a[kept], b[kept]


def session(trial: Trial, options: Options | None = None) -> Session:
    """Measure a step of a trial, and replay it on its devices."""
    options = options or Options()
    rules = options.rules
    time = rules.step_time(trial.trace)
    graph = dependencies(trial, time.opt_step, joins_ranks=rules.gaps.joins_ranks)
    statistics = rules.statistics(trial.trace, trial.topology)
    known = measured(graph, statistics, trial.trace, time.opt_step, rules.gaps)
    replayed = Replayer.of(graph, known, options).run()
    return Session(measured=time, replayed=replayed, path=critical_path(replayed))
