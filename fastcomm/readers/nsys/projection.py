"""Project ranges on the device: from the first to the last work launched inside each."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.readers.nsys import layout
from fastcomm.readers.nsys.collectives import launch_points
from fastcomm.readers.nsys.events import read_creations, read_events
from fastcomm.readers.nsys.export import Export
from fastcomm.readers.nsys.nvtx import read_ranges
from fastcomm.readers.nsys.report import read_report
from fastcomm_kernels import attribution
from fastcomm_kernels.arrays import NULL


def project(path: Path, process: int | None = None) -> pa.Table:
    """Return one row per range of a process, or of all; see `fastcomm.readers.nsys.project`."""
    export = Export(path)
    report = read_report(export)
    chosen = [p for p in report.processes if process in (None, layout.process_of(p))]
    return pa.concat_tables([_project(export, process, report.ends) for process in chosen])


def _project(export: Export, process: int, ends: frozenset[int]) -> pa.Table:
    ranges = read_ranges(export, process, ends, operators=True, numbered=True)
    process_events = read_events(export, process, ranges, whole=False)
    events, points = (
        process_events.events,
        launch_points(process_events, read_creations(export, process)),
    )
    work = events.rows("kernel", "memcpy", "memset")
    work = work[points.thread[work] != NULL]
    rows = np.flatnonzero(ranges.kind == layout.PUSH_POP)
    threads = np.concatenate([ranges.thread[rows], points.thread[work]])
    lanes: NDArray[np.int32] = np.unique(threads, return_inverse=True)[1].astype(np.int32)
    range_lane, lane = lanes[: len(rows)], lanes[len(rows) :]
    order = np.lexsort((-ranges.stop[rows], ranges.start[rows], range_lane))
    rows, range_lane = rows[order], range_lane[order]
    by_launch = np.lexsort((points.start[work], lane))
    work, lane = work[by_launch], lane[by_launch]
    first, last, count = attribution.projected(
        (range_lane, ranges.start[rows], ranges.stop[rows]),
        (lane, points.start[work], points.stop[work]),
        (events.start[work], events.stop[work]),
    )
    projected = np.flatnonzero(count > 0)
    rows = rows[projected]
    thread = ranges.thread[rows]
    return pa.table(
        {
            "process": np.full(len(rows), layout.process_of(process)),
            "thread": thread & ((1 << layout.THREAD_BITS) - 1),
            "name": ranges.name.take(pa.array(rows)).cast(pa.string()),
            "start": ranges.start[rows],
            "stop": ranges.stop[rows],
            "first": first[projected],
            "last": last[projected],
            "count": count[projected],
        }
    )
