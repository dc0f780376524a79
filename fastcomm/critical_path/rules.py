"""What the graph of a critical path means: how its path is searched, what each edge stands for.

An analysis makes a graph and says here how to read it. `CORRECTED` are the rules of this
package; whoever reproduces another tool brings rules of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.critical_path.classes import Fact, corrected_class
from fastcomm.critical_path.descriptions import EventDescriptions
from fastcomm.graph.graph import EDGE_KINDS, Graph, LongestPath
from fastcomm_kernels import binding
from fastcomm_kernels.arrays import Flags, Ints

# The path, or None where the graph has no valid one; the slack of its edges, if it is known.
Search = Callable[[Graph, EventDescriptions, Flags], tuple[LongestPath | None, Ints | None]]
# The class of an edge: from its kind, whether it leads to the device, its owner, and what
# loads data.
EdgeClass = Callable[[str, bool, Fact, Sequence[str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRules:
    """How a graph is searched and read."""

    name: str  # in JSON and on the terminal
    search: Search
    edge_class: EdgeClass
    edge_kinds: tuple[str, ...]  # that a graph may have, as JSON lists them
    # Each edge is a constraint that the times confirm: the path tiles the window, edges are in
    # order of time, and the graph can be replayed.
    is_exact: bool


def bound_path(
    graph: Graph, _: EventDescriptions, on_device: Flags
) -> tuple[LongestPath, Ints]:
    """Follow from the last node backwards the constraint that was met last; with its slack."""
    if not len(graph.event):
        return LongestPath(nodes=graph.event, edges=graph.source), np.empty(0, np.int64)
    last = len(graph.event) - 1
    edges, slack = binding.binding(last, graph.into[0], graph.source, graph.time, on_device)
    nodes = np.append(graph.source[edges], np.int32(last))
    return LongestPath(nodes=nodes, edges=edges), slack


CORRECTED = PathRules(
    name="corrected",
    search=bound_path,
    edge_class=corrected_class,
    edge_kinds=EDGE_KINDS,
    is_exact=True,
)
