"""The critical path of a window of one rank."""

from collections.abc import Sequence

from fastcomm.critical_path import corrected
from fastcomm.critical_path.descriptions import TraceEvents
from fastcomm.critical_path.result import CriticalPath, PathSource, source_notes
from fastcomm.critical_path.rules import CORRECTED
from fastcomm.critical_path.window import TimeRange, errors_of, find
from fastcomm.options import Window
from fastcomm.trace.trace import Trace
from fastcomm.units import counted


def analyse(
    trace: Trace,
    wanted: Window | None = None,
    *,
    data_load: Sequence[str] = (),
) -> CriticalPath:
    """Find the critical path of a window, by default of the second step.

    `data_load` are expressions for the names of host events that load data. Raises
    `WindowError` where the trace has no such window.
    """
    with errors_of(trace.meta.path):
        window = find(trace, wanted or Window())
    built = corrected.build(trace, window, data_load)
    graph = built.graph
    notes = [
        f"{counted(count, 'constraint')} of kind {kind} left out, against the measured times"
        for kind, count in built.left_out.items()
    ]
    if len(graph.time):
        window = TimeRange(
            start=max(window.start, int(graph.time[0])),
            stop=min(window.stop, int(graph.time[-1])),
        )
    about = PathSource(
        rules=CORRECTED,
        window=window,
        path=trace.meta.path,
        rank=trace.meta.rank,
        base=trace.meta.base,
        clipped=len(graph.event) // 2,
        data_load=tuple(data_load),
        notes=(*notes, *source_notes(trace)),
    )
    return CriticalPath.search(graph, TraceEvents(trace), about, built.on_device)
