"""Ranges projected on the device: from the first to the last work launched inside of each."""

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
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NULL


def project(path: Path, process: int | None = None) -> pa.Table:
    """A row a range, of one process or of all; `nsys.project` says what is in it."""
    export = Export(path)
    report = read_report(export)
    chosen = [p for p in report.processes if process in (None, layout.process_of(p))]
    return pa.concat_tables([_project(export, each, report.ends) for each in chosen])


def _project(export: Export, process: int, ends: frozenset[int]) -> pa.Table:
    ranges = read_ranges(export, process, ends, operators=True, numbered=True)
    own = read_events(export, process, ranges, whole=False)
    events, points = own.events, launch_points(own, read_creations(export, process))
    work = events.rows("kernel", "memcpy", "memset")
    work = work[points.thread[work] != NULL]
    rows = np.flatnonzero(ranges.kind == layout.PUSH_POP)
    both = np.concatenate([ranges.thread[rows], points.thread[work]])
    lanes: NDArray[np.int32] = np.unique(both, return_inverse=True)[1].astype(np.int32)
    range_lane, lane = lanes[: len(rows)], lanes[len(rows) :]
    order = np.lexsort((-ranges.stop[rows], ranges.start[rows], range_lane))
    rows, range_lane = rows[order], range_lane[order]
    by_launch = np.lexsort((points.start[work], lane))
    work, lane = work[by_launch], lane[by_launch]
    first, last, count = matching.projected(
        (range_lane, ranges.start[rows], ranges.stop[rows]),
        (lane, points.start[work], points.stop[work]),
        (events.start[work], events.stop[work]),
    )
    kept = np.flatnonzero(count > 0)
    rows = rows[kept]
    thread = ranges.thread[rows]
    return pa.table(
        {
            "process": np.full(len(rows), layout.process_of(process)),
            "thread": thread & ((1 << layout.THREAD_BITS) - 1),
            "name": ranges.name.take(pa.array(rows)).cast(pa.string()),
            "start": ranges.start[rows],
            "stop": ranges.stop[rows],
            "first": first[kept],
            "last": last[kept],
            "count": count[kept],
        }
    )
