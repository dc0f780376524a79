"""The critical path of a window of one rank."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastcomm.critical_path import corrected, hta_graph, hta_window
from fastcomm.critical_path.classes import Rules
from fastcomm.critical_path.result import CriticalPath, PathSource
from fastcomm.critical_path.rows import TraceEvents
from fastcomm.critical_path.window import TimeRange, WindowError, errors_of, find
from fastcomm.options import Window
from fastcomm.readers.runs import OpenOptions, open_run
from fastcomm.trace.run import RunTraces
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace

_LOG = logging.getLogger("fastcomm")


def critical_path_analysis(
    run: RunTraces | str | Path,
    rank: int,
    annotation: str,
    instance_id: int | tuple[int, int] | None = None,
    data_load_events: Sequence[str] | None = None,
    *,
    zero_weight_launches: bool = False,
    include_last_profiler_step: bool = False,
) -> tuple[CriticalPath, bool] | None:
    """The critical path as HolisticTraceAnalysis finds it, and whether it found one.

    It leaves the last profiled step out, unless `include_last_profiler_step`. `run` is a path,
    or a run opened with `OpenOptions(whole=True)`. None, and a message in the log, where no
    name contains the annotation or the instance is no instance.
    """
    if not isinstance(run, RunTraces):
        run = open_run(run, options=OpenOptions(whole=True))
    trace = run.read(rank)
    try:
        found = by_hta(
            trace,
            Window(annotation=annotation, instance=instance_id),
            data_load_events or (),
            zero_weight_launches=zero_weight_launches,
            keep_last=include_last_profiler_step,
        )
    except WindowError as error:
        if "no instance" in str(error):
            raise
        _LOG.error("%s", error)
        return None
    return found, found.path is not None


def analyse(
    trace: Trace,
    wanted: Window | None = None,
    *,
    rules: Rules = "corrected",
    data_load: Sequence[str] = (),
    zero_weight_launches: bool = False,
) -> CriticalPath:
    """The critical path of a window; `path` is None where the graph has no valid one."""
    if rules == "hta":
        return by_hta(
            trace, wanted or Window(), data_load, zero_weight_launches=zero_weight_launches
        )
    with errors_of(trace.meta.path):
        window = find(trace, wanted or Window())
    built = corrected.build(trace, window, data_load)
    graph = built.graph
    notes = [
        f"{count} constraints of kind {kind} contradict the measured times and are left out"
        for kind, count in built.left_out.items()
    ]
    if len(graph.time):
        window = TimeRange(
            start=max(window.start, int(graph.time[0])),
            stop=min(window.stop, int(graph.time[-1])),
        )
    about = PathSource(
        rules=rules,
        window=window,
        path=trace.meta.path,
        rank=trace.meta.rank,
        base=trace.meta.base,
        clipped=len(graph.event) // 2,
        data_load=tuple(data_load),
        notes=(*notes, *_hints(trace)),
    )
    found = CriticalPath(graph, TraceEvents(trace), about, built.on_device)
    found.critical_path()
    return found


def by_hta(
    trace: Trace,
    wanted: Window,
    data_load: Sequence[str] = (),
    *,
    zero_weight_launches: bool = False,
    keep_last: bool = False,
) -> CriticalPath:
    """The same by the rules of HTA; an iteration is the annotation ``ProfilerStep#N``."""
    linked = hta_window.linked(trace, keep_last=keep_last)
    annotation, exact = wanted.annotation, wanted.exact
    if annotation is None:
        exact = wanted.step is not None
        annotation = f"ProfilerStep#{wanted.step}" if exact else "ProfilerStep"
    with errors_of(trace.meta.path):
        clipped = hta_window.clipped(linked, annotation, wanted.instance, exact=exact)
    graph = hta_graph.build(clipped, data_load, zero_launches=zero_weight_launches)
    window = clipped.window
    kept = len(linked.rows) < trace.events.num_rows and linked.has_steps
    notes = ["the last profiled step is left out, as HTA does"] if kept else []
    about = PathSource(
        rules="hta",
        window=TimeRange(start=window.start + linked.origin, stop=window.stop + linked.origin),
        path=trace.meta.path,
        rank=trace.meta.rank,
        base=trace.meta.base,
        clipped=len(clipped.rows),
        data_load=tuple(data_load),
        notes=(*notes, *_hints(trace)),
    )
    streams = TraceEvents(trace).describe(graph.event, ["stream"])["stream"].fill_null(-1)
    found = CriticalPath(graph, TraceEvents(trace), about, streams.to_numpy() != -1)
    found.critical_path()
    return found


def _hints(trace: Trace) -> list[str]:
    """What a user should know before trusting the path."""
    kind = trace.events["kind"].to_numpy()
    if not np.isin(kind, [KIND[name] for name in ("kernel", "memcpy", "memset")]).any():
        return ["no device work: the path is that of the host"]
    if not (kind == KIND["sync"]).any():
        return [
            "no cuda_sync events (enable_cuda_sync_events in the profiler's experimental "
            "options): what waits for the device is guessed"
        ]
    return []
