"""What a path through all ranks needs of one: the events of its window, and its communication.

Clocks are compared by all communication, so that is kept outside of the window, too.
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from fastcomm.critical_path.events import TraceEvents
from fastcomm.critical_path.result import CriticalPath
from fastcomm.trace.trace import Trace
from fastcomm_kernels.graph import Column


def trimmed(trace: Trace, found: CriticalPath) -> tuple[Trace, CriticalPath]:
    """A trace and its path without the rows that neither it nor another rank asks for.

    The rows that are left have new numbers. The ids of events stay.
    """
    graph, rows = found.graph, trace.events.num_rows
    wanted = np.zeros(rows + 1, np.bool_)  # one behind the last for -1, which is none
    for column in (graph.event, graph.owner, trace.comm["event"].to_numpy()):
        wanted[column] = True
    kept = np.flatnonzero(wanted[:rows])
    number = np.full(rows + 1, -1, np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    small = _rows(trace, found, kept, number)
    path = CriticalPath(
        graph.owned_by(number[graph.event], number[graph.owner]),
        TraceEvents(small),
        found.about,
        found.on_device,
    )
    path.path, path.slack = found.path, found.slack
    return small, path


def _rows(trace: Trace, found: CriticalPath, kept: Column, number: Column) -> Trace:
    """The trace with these rows of its events."""
    at = pa.array(kept)
    comm = trace.comm
    event = pa.array(number[comm["event"].to_numpy()])
    ids = pa.array(found.events.ids(kept.astype(np.int32)))
    args = pa.table({"position": ids})
    if trace.args is not None:
        others = [name for name in trace.args.column_names if name != "position"]
        args = trace.args.select(others).take(at).append_column("position", ids)
    return replace(
        trace,
        events=trace.events.take(at).combine_chunks(),
        comm=comm.set_column(comm.column_names.index("event"), "event", event),
        args=args.combine_chunks(),
    )
