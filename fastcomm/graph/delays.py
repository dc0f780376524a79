"""What the edges of a graph of constraints weigh in a replay, and what slack its nodes have."""

import numpy as np

from fastcomm.graph.graph import EDGE_KIND, EDGE_KINDS, Graph
from fastcomm_kernels import binding
from fastcomm_kernels.graph import Column, Flags


def measured_delays(graph: Graph, on_device: Flags) -> Column:
    """The measured delay of what binds a node; of all else the least of its kind.

    That is 0, but of a launch the median of those that bind: none is faster. `on_device` is by
    node. The replay of these weights has the measured times, to the nanosecond.
    """
    least = np.zeros(len(EDGE_KINDS), np.int64)
    measured = _delays(graph, on_device, least)
    is_launch = (graph.kind == EDGE_KIND["launch"]) & (measured > 0)
    if not is_launch.any():
        return measured
    least[EDGE_KIND["launch"]] = int(np.median(measured[is_launch]))
    return _delays(graph, on_device, least)


def _delays(graph: Graph, on_device: Flags, least: Column) -> Column:
    nodes = graph.time, on_device
    return binding.delays(nodes, graph.into[0], graph.source, graph.kind, least)


def slack(graph: Graph, on_device: Flags) -> Column:
    """By how many ns each node could be reached later without the last one being so."""
    end = np.int64(graph.time.max(initial=0))
    weight = measured_delays(graph, on_device)
    return binding.latest(graph.into[0], graph.source, weight, end) - graph.time
