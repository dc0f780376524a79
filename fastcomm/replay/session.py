"""Replay a step and find its critical path."""

from pathlib import Path

import numpy as np

from fastcomm.graph.graph import LongestPath
from fastcomm.readers.dpro.statistics import statistics
from fastcomm.readers.dpro.steps import step_time
from fastcomm.readers.dpro.trial import Trial, read
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
        gap = np.where(both, gap, 0.0) + made.operations.lag
        duration = np.where(made.operations.at_start == 1, 0.0, duration)
    return source, target, duration + gap


def _on_devices(replayed: Replayed, source: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Edges between what ran on a device one after the other."""
    made = replayed.replayer
    a, b = made.operations.consecutive(replayed.order)
    size = len(made.names)
    known = np.isin(a * size + b, source * size + target)
    backward = np.array([name.op_cat == "BW" for name in made.names])
    update = np.array([name.op_cat.startswith("UPDATE") for name in made.names])
    kept = ~known & ~(backward[a] & update[b])
    return a[kept], b[kept]


def replay_trial(path: str | Path, options: Options | None = None) -> Session:
    """Replay a step of a dPRO trial on its devices, beside what was measured."""
    return session(read(Path(path)), options)


def session(trial: Trial, options: Options | None = None) -> Session:
    """Measure, build the graph, replay."""
    options = options or Options()
    found = statistics(trial.trace, trial.topology, compat=options.compat)
    time = step_time(trial.trace, compat=options.compat)
    graph = dependencies(trial, time.opt_step, compat=options.compat)
    known = measured(graph, found, trial.trace, time.opt_step, compat=options.compat)
    replayed = Replayer.of(graph, known, options).run()
    return Session(measured=time, replayed=replayed, path=critical_path(replayed))
