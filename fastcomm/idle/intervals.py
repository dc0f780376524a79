"""Causes of the idle time of a rank: why nothing runs on its device.

The device is idle from the end of its work, at `a`, to the start `b` of the next work. The
call that launched the next work, from `l0` to `l1` on a thread of the host, divides this time:

- If the call ended before `a`, the work was queued: `kernel_gaps`, or `late_communication` if
  it is communication that starts late. On a rank of a pipeline that is a `pipeline_bubble`.
- From `l0` on, the work was being launched: `launch_bound`. If the work starts late after `l1`,
  it was queued from `l1` on.
- Before `l0`, the first layer of `host_activity` counts that covers an instant on the thread of
  the call; without any, the cause is `unknown`.

While a callback of the host in a CUDA graph runs, the cause is `graph_callback`. Such a time
ends an idle time and begins another one, in which the rules above apply to the next work.

If a synchronizing call of that thread covers `a`, the host had waited until the queue was
empty, and what would be launch-bound is `synchronization`. Without a recorded launch, the
cause is unknown, and its evidence is the work. After the last work of a trace, the thread that
launched it counts.

In a run without an accelerator, the time is idle in which no operator of a thread that trains
computes, and nothing is communicated. There, all threads count at once, only annotations,
Python functions and waiting operators are causes, and the rest is `python`: a host outside of
operators runs the program's own code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.idle.causes import CAUSE, CAUSES
from fastcomm.idle.host_activity import HostActivity, Pieces, ThreadLayers
from fastcomm.trace.columns import block_starts
from fastcomm.trace.events import EventRows
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.schema import IDLE_EVIDENCE
from fastcomm.trace.trace import IdleTimes, Trace
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NONE, Ints

# Work starts late if it does so more than this after its launch and after the device became
# idle; communication then waits for others. A launch takes some 10 us to reach the device.
LEAST_BUBBLE_NS = 100_000
_MOST_NAMES = 3  # of a step and cause, as evidence
_ON_DEVICE = ("kernel", "memcpy", "memset", "host_work")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleIntervals:
    """Idle time as disjoint intervals, sorted by start; times in ns."""

    start: Ints
    stop: Ints
    cause: NDArray[np.int8]  # index into CAUSES
    name: Ints  # of the evidence: index into `names`, or NONE
    names: Sequence[str]

    @classmethod
    def of_parts(cls, parts: Sequence["_Parts"], names: Sequence[str]) -> Self:
        """Join parts, and sort them."""
        start, stop, cause, name = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        order = np.argsort(start, kind="stable")
        order = order[(start < stop)[order]]
        return cls(
            start=start[order],
            stop=stop[order],
            cause=cause[order].astype(np.int8),
            name=name[order],
            names=names,
        )


def idle_times(trace: Trace, windows: pa.Table) -> IdleTimes | None:
    """Return the idle time of a rank in some windows by cause; None if unknown.

    It is unknown if only the columns of device work were read. In each window, the times of
    all causes sum to the time in which nothing runs on the device.

    Parameters
    ----------
    trace
        With the iterations by the host's marks.
    windows
        Disjoint sorted windows, `schema.ITERATIONS`.

    """
    if "name" not in trace.events.column_names:
        return None
    start, stop = (windows[name].to_numpy() for name in ("start", "stop"))
    return _in_windows(idle_intervals(trace, start, stop), start, stop)


def idle_intervals(trace: Trace, start: Ints, stop: Ints) -> IdleIntervals:
    """Return the idle time of a rank, from the first window's start to the last one's stop.

    `start` and `stop` are disjoint sorted windows in ns; all columns of events are required.
    """
    events = EventRows.of(trace)
    host = HostActivity(events=events, trace=trace)
    if not len(start):
        return IdleIntervals.of_parts([_parts()], events.texts)
    gaps = _Gaps.of(events, trace, (int(start[0]), int(stop[-1])))
    parts = (
        _parts_on_host(host, gaps) if trace.meta.is_host_run else _parts_on_device(host, gaps)
    )
    parts.append(_callbacks(events, trace))
    if (trace.comm["tag"].to_numpy() == TAG["PP"]).any():
        parts = [_as_bubbles(part) for part in parts]
    return IdleIntervals.of_parts(parts, events.texts)


_Parts = tuple[Ints, Ints, Ints, Ints]  # start, stop, cause, name


def _parts(
    start: Ints | None = None,
    stop: Ints | None = None,
    cause: str = "unknown",
    name: Ints | None = None,
) -> _Parts:
    """Return intervals of one cause; without a name, they have none."""
    none = np.empty(0, np.int64)
    start, stop = (none if column is None else column for column in (start, stop))
    causes = np.full(len(start), CAUSE[cause], np.int64)
    return start, stop, causes, np.full(len(start), NONE) if name is None else name


def _as_bubbles(part: _Parts) -> _Parts:
    """Return intervals of a rank in a pipeline, where late communication is its bubble."""
    start, stop, cause, name = part
    is_late = cause == CAUSE["late_communication"]
    return start, stop, np.where(is_late, CAUSE["pipeline_bubble"], cause), name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gaps:
    """Idle times of a device: a row for each, sorted; NULL times where there is no launch."""

    start: Ints
    stop: Ints
    work: Ints  # row of the event that ends it; NONE after the last
    launch: Ints  # row of the call that launched that event, or NONE
    last_launch: int  # row of the call that launched the event that ends last, or NONE

    @classmethod
    def of(cls, events: EventRows, trace: Trace, span: tuple[int, int]) -> Self:
        """Find the idle times in a span (ns), each from its start before the span if it is."""
        rows = _work_rows(events, trace)
        filled_rows = np.sort(np.concatenate([rows, _callback_rows(events)]))
        begin, end = _union(events.start[filled_rows], events.stop[filled_rows])
        first, last = span
        if len(events):
            # Before all calls, so that it does not depend on which events were read.
            first = min(first, int(events.start[0]) - 1)
            last = max(last, int(events.stop.max()))
        start, stop = np.append(first, end), np.append(begin, last)
        place = np.searchsorted(events.start[rows], np.append(begin, last))
        work = np.append(rows, NONE)[np.minimum(place, len(rows))]
        chosen = (start < stop) & (stop > span[0]) & (start < span[1])
        latest = rows[[np.argmax(events.stop[rows])]] if len(rows) else rows
        return cls(
            start=start[chosen],
            stop=stop[chosen],
            work=work[chosen],
            launch=_launch_of(events, work[chosen]),
            last_launch=int(_launch_of(events, latest)[0]) if len(rows) else NONE,
        )


def _work_rows(events: EventRows, trace: Trace) -> Ints:
    """Return the rows of device work and communication with a length."""
    is_work = events.of_kind(*_ON_DEVICE)
    is_work[trace.comm["event"].to_numpy()] = True
    return np.flatnonzero(is_work & (events.start < events.stop))


def _callback_rows(events: EventRows) -> Ints:
    """Return the rows of callbacks in CUDA graphs with a length."""
    nodes = events.rows("host_node")
    return nodes[events.start[nodes] < events.stop[nodes]]


def _callbacks(events: EventRows, trace: Trace) -> _Parts:
    """Return the times in which callbacks in CUDA graphs run, and nothing on the device.

    Of two at once, the one counts that began first.
    """
    nodes = _callback_rows(events)
    if not len(nodes):
        return _parts()
    nodes = nodes[np.lexsort((-events.stop[nodes], events.start[nodes]))]
    stop = np.maximum.accumulate(events.stop[nodes])
    start = np.maximum(events.start[nodes], np.append(events.start[nodes[0]], stop[:-1]))
    rows = _work_rows(events, trace)
    begin, end = _union(events.start[rows], events.stop[rows])
    edges = np.unique(np.concatenate([start, stop, begin, end]))
    low, high = edges[:-1], edges[1:]
    node = np.searchsorted(start, low, side="right") - 1
    work = np.searchsorted(begin, low, side="right") - 1
    is_idle = (node >= 0) & (low < stop[node]) & ((work < 0) | (low >= np.append(end, 0)[work]))
    name = events.name[nodes[node[is_idle]]].astype(np.int64)
    return _parts(low[is_idle], high[is_idle], "graph_callback", name)


def _union(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Return the union of intervals sorted by start, as disjoint intervals.

    In NumPy, as loading another compiled kernel takes longer than this.
    """
    latest = np.maximum.accumulate(stop)
    first = np.flatnonzero(np.append(True, start[1:] > latest[:-1])[: len(start)])
    return start[first], latest[np.append(first[1:], len(start))[: len(first)] - 1]


def _launch_of(events: EventRows, work: Ints) -> Ints:
    """Return the row of the launch of each event, or NONE; NONE is no event."""
    launch = np.full(len(work), NONE, np.int64)
    launch[work >= 0] = events.launch_of(work[work >= 0])
    return launch


def _parts_on_device(host: HostActivity, gaps: _Gaps) -> list[_Parts]:
    """Return the parts of idle times of a device."""
    events, a, b = host.events, gaps.start, gaps.stop
    is_last = (gaps.work < 0) & (gaps.last_launch >= 0)
    launch = np.where(is_last, gaps.last_launch, gaps.launch)
    is_launched = launch >= 0
    l0, l1 = (np.where(is_last, b, np.where(is_launched, c[launch], a)) for c in host.times)
    name = np.where(gaps.work >= 0, events.name[gaps.work], NONE).astype(np.int64)
    by_host = is_launched & (l1 > a)
    is_late = is_launched & (b - np.maximum(l1, a) > LEAST_BUBBLE_NS)
    # Where the host ends, and the work is queued.
    launched = np.where(by_host & ~is_late, b, np.maximum(l1, a))
    waits = is_late & host.is_comm[gaps.work]
    parts = [
        _parts(a[~is_launched], b[~is_launched], "unknown", name[~is_launched]),
        *(
            _parts(launched[rows], b[rows], cause, name[rows])
            for rows, cause in (
                (is_launched & ~waits, "kernel_gaps"),
                (waits, "late_communication"),
            )
        ),
    ]
    middle = np.clip(l0, a, b)
    lane = events.lane[launch]
    for thread, rows in _by_thread(lane, np.flatnonzero(by_host)):
        layers = ThreadLayers.of(host, thread)
        drained = layers.synchronization_at(a[rows])
        is_drained = drained >= 0
        pieces = layers.pieces(a[rows], middle[rows], name[rows])
        parts.append(_blamed(pieces, drained[pieces.interval]))
        launching = (
            _parts(middle[rows][flags], launched[rows][flags], cause, names[flags])
            for flags, cause, names in (
                (~is_drained, "launch_bound", name[rows]),
                (is_drained, "synchronization", drained),
            )
        )
        parts += launching
    return parts


def _by_thread(lane: NDArray[np.int32], rows: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each thread, ascending, and its rows, ascending."""
    rows = rows[np.argsort(lane[rows], kind="stable")]
    for own in np.split(rows, block_starts(lane[rows])[1:]) if len(rows) else ():
        yield int(lane[own[0]]), own


def _blamed(pieces: Pieces, drained: Ints) -> _Parts:
    """Return pieces; launch-bound ones after a synchronization (its name, or NONE) are its."""
    is_its = (pieces.cause == CAUSE["launch_bound"]) & (drained >= 0)
    cause = np.where(is_its, CAUSE["synchronization"], pieces.cause)
    return pieces.start, pieces.stop, cause, np.where(is_its, drained, pieces.name)


def _parts_on_host(host: HostActivity, gaps: _Gaps) -> list[_Parts]:
    """Return the parts of idle times of a run without an accelerator."""
    layers = ThreadLayers.of_host_run(host)
    pieces = layers.pieces(gaps.start, gaps.stop, np.full(len(gaps.start), NONE))
    is_rest = pieces.cause == CAUSE["unknown"]
    cause = np.where(is_rest, CAUSE["python"], pieces.cause)
    return [(pieces.start, pieces.stop, cause, pieces.name)]


def _in_windows(idle: IdleIntervals, start: Ints, stop: Ints) -> IdleTimes:
    """Sum idle intervals by window and cause."""
    edges = np.array([0, len(start)], np.int64)
    rows = np.flatnonzero(start < stop)
    edges[1] = len(rows)
    interval, end, owner = matching.owners(
        idle.start, idle.stop, start[rows], stop[rows], edges
    )
    is_next = np.append(False, interval[1:] == interval[:-1])[: len(end)]
    length = end - np.where(is_next, np.roll(end, 1), idle.start[interval])
    inside = owner >= 0
    interval, length, window = interval[inside], length[inside], rows[owner[inside]]
    cause = idle.cause[interval].astype(np.int64)
    ns = np.zeros(len(start) * len(CAUSES), np.int64)
    np.add.at(ns, window * len(CAUSES) + cause, length)
    by_window = ns.reshape(len(start), len(CAUSES))
    return IdleTimes(ns=by_window, evidence=_evidence(window, cause, idle, interval, length))


def _evidence(
    window: Ints, cause: Ints, idle: IdleIntervals, interval: Ints, length: Ints
) -> pa.Table:
    """Return the largest names of each window and cause, `schema.IDLE_EVIDENCE`."""
    is_named = idle.name[interval] != NONE
    name = idle.name[interval][is_named]
    group = (window * len(CAUSES) + cause)[is_named]
    width = max(len(idle.names), 1)
    keys, row, counts = np.unique(group * width + name, return_inverse=True, return_counts=True)
    ns = np.zeros(len(keys), np.int64)
    np.add.at(ns, row, length[is_named])
    # Among equals the text decides, as numbers of names differ between readers.
    codes = (keys % width).tolist()
    by_text = sorted(set(codes), key=idle.names.__getitem__)
    rank_of = {code: rank for rank, code in enumerate(by_text)}
    text = np.array([rank_of[code] for code in codes], np.int64)
    order = np.lexsort((text, -ns, keys // width))
    of_group = (keys // width)[order]
    place = np.arange(len(order)) - np.searchsorted(of_group, of_group)
    chosen = order[place < _MOST_NAMES]
    step, number = np.divmod(keys[chosen] // width, len(CAUSES))
    named = pa.array([idle.names[codes[row]] for row in chosen.tolist()], pa.string())
    columns = [step, number, named, ns[chosen], counts[chosen]]
    return pa.table(columns, names=IDLE_EVIDENCE.names).cast(IDLE_EVIDENCE)
