"""A rank's device work as operations that wait for each other: what a simulator replays.

An operation waits for the work before it on its stream, for work that an event or a
synchronization makes it wait for, and for the host: how long for the host, is what is left
between the last of these and its start.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.critical_path import corrected
from fastcomm.critical_path.window import Window
from fastcomm.graph.graph import EDGE_KIND
from fastcomm.trace.trace import Trace

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Operations in the order of their start; times in ns since the first one's."""

    row: Ints  # of `trace.events`
    start: Ints
    stop: Ints
    comm: Ints  # row of `trace.comm`; -1: no communication
    first: Ints  # where in `before` an operation's own begin; one more than operations
    before: Ints  # operations that have to end first
    host_ns: Ints  # from the last of those, or the beginning, to the start

    def waits_for(self, operation: int) -> Ints:
        """The operations that have to end before one starts."""
        return self.before[self.first[operation] : self.first[operation + 1]]


def execution(trace: Trace) -> Execution:
    """The device work of a rank and its order. `trace` is read whole."""
    events = trace.events
    start, stop = (events[name].to_numpy() for name in ("start", "stop"))
    window = Window(start=int(start.min()), stop=int(stop.max()))
    built = corrected.build(trace, window)
    graph, on_device = built.graph, built.on_device
    row: Ints = np.unique(graph.event[on_device & ~graph.is_end]).astype(np.int64)
    operation = np.full(events.num_rows, -1, np.int64)
    operation[row] = np.arange(len(row))
    waits = on_device[graph.source] & graph.is_end[graph.source]
    waits &= on_device[graph.target] & ~graph.is_end[graph.target]
    waits &= graph.kind != EDGE_KIND["unexplained"]
    of, before = (operation[graph.event[side[waits]]] for side in (graph.target, graph.source))
    order = np.lexsort((before, of))
    first = np.searchsorted(of[order], np.arange(len(row) + 1))
    origin = int(start[row].min()) if len(row) else 0
    begin, end = start[row] - origin, stop[row] - origin
    ready = np.zeros(len(row), np.int64)
    np.maximum.at(ready, of, end[before])
    comm = np.full(events.num_rows, -1, np.int64)
    comm[trace.comm["event"].to_numpy()] = np.arange(trace.comm.num_rows)
    return Execution(
        row=row,
        start=begin,
        stop=end,
        comm=comm[row],
        first=first,
        before=before[order],
        host_ns=np.maximum(begin - ready, 0),
    )
