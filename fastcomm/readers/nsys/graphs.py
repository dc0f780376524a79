"""CUDA graphs: where a kernel of a graph comes from, which is where the graph was captured.

A replay launches all kernels at once, outside of every range; the range that tells what a
kernel is was open when its node was made, so that is where a kernel counts as launched.
"""

from dataclasses import dataclass

import numpy as np

from fastcomm.readers.nsys import layout
from fastcomm.readers.nsys.export import Export
from fastcomm.trace.columns import lookup
from fastcomm_kernels.arrays import NULL, Ints

_DEEPEST = 16  # copies of copies of a graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Creations:
    """Where and when nodes were made, sorted by node."""

    node: Ints
    thread: Ints
    start: Ints
    stop: Ints

    def of(self, nodes: Ints) -> Ints:
        """The row of each node's creation, or -1."""
        return lookup(self.node, nodes)


def read_creations(export: Export, process: int) -> Creations:
    """The creations of a process; nodes of a copied graph are traced back to the original."""
    table = layout.NODES if export.has(layout.NODES) else layout.OLD_NODES
    columns = ("start", "end", "globalTid", "graphNodeId", "originalGraphNodeId")
    if not export.has_column(table, "graphNodeId"):
        table = ""
    rows = export.rows(table, columns, process=process)
    node, original = rows["graphNodeId"], rows["originalGraphNodeId"]
    order = np.argsort(node, kind="stable")
    node, original = node[order], original[order]
    made = _originals(node, original)
    return Creations(
        node=node,
        thread=rows["globalTid"][order][made],
        start=rows["start"][order][made],
        stop=np.where(rows["end"] == NULL, rows["start"], rows["end"])[order][made],
    )


def _originals(node: Ints, original: Ints) -> Ints:
    """For each node the row of the node that it is a copy of, in the end."""
    at = np.arange(len(node))
    for _ in range(_DEEPEST if len(node) else 0):
        copied = lookup(node, original[at])
        if (copied < 0).all():
            break
        at = np.where(copied >= 0, copied, at)
    return at
