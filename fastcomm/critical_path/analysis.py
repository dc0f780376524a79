"""The critical path of a window of one rank."""

from fastcomm.critical_path import corrected
from fastcomm.critical_path.descriptions import TraceEvents
from fastcomm.critical_path.result import CriticalPath, PathSource, source_notes
from fastcomm.critical_path.rules import CORRECTED
from fastcomm.critical_path.window import TimeRange, errors_of, find
from fastcomm.options import Window
from fastcomm.trace.trace import Trace
from fastcomm.units import counted


def analyse(trace: Trace, window: Window | None = None) -> CriticalPath:
    """Find the critical path of a window of one rank, by default of the second step.

    Raises `WindowError` where the trace has no such window.
    """
    window = window or Window()
    with errors_of(trace.meta.path):
        time_range = find(trace, window)
    built = corrected.build(trace, time_range, window.data_load_events)
    graph = built.graph
    notes = [
        f"{counted(count, 'constraint')} of kind {kind} left out, against the measured times"
        for kind, count in built.left_out.items()
    ]
    if len(graph.time):
        time_range = TimeRange(
            start=max(time_range.start, int(graph.time[0])),
            stop=min(time_range.stop, int(graph.time[-1])),
        )
    about = PathSource(
        rules=CORRECTED,
        window=time_range,
        path=trace.meta.path,
        rank=trace.meta.rank,
        base=trace.meta.base,
        clipped=len(graph.event) // 2,
        data_load=window.data_load_events,
        notes=(*notes, *source_notes(trace)),
    )
    return CriticalPath.search(graph, TraceEvents(trace), about, built.on_device)
