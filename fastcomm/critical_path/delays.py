"""What the constraints of a graph weigh in a replay, and by how much each node has slack.

What binds a node today keeps its measured delay, what does not keeps a least one, so that a
replay has the measured times to the nanosecond.
"""

import numpy as np

from fastcomm.critical_path.result import CriticalPath
from fastcomm.graph.graph import EDGE_KIND, EDGE_KINDS
from fastcomm_kernels import binding
from fastcomm_kernels.graph import Column


def delays(found: CriticalPath) -> Column:
    """The weight of each edge; a launch that waits for nothing takes the median of those."""
    graph = found.graph
    least = np.zeros(len(EDGE_KINDS), np.int64)
    measured = _delays(found, least)
    is_launch = (graph.kind == EDGE_KIND["launch"]) & (measured > 0)
    if not is_launch.any():
        return measured
    least[EDGE_KIND["launch"]] = int(np.median(measured[is_launch]))
    return _delays(found, least)


def _delays(found: CriticalPath, least: Column) -> Column:
    graph = found.graph
    nodes = (graph.time, found.on_device)
    return binding.delays(nodes, graph.into[0], graph.source, graph.kind, least)


def slack(found: CriticalPath) -> Column:
    """By how many ns each node could be reached later without the last one being so."""
    graph = found.graph
    end = np.int64(graph.time.max(initial=0))
    return binding.latest(graph.into[0], graph.source, delays(found), end) - graph.time
