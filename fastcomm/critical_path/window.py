"""Find the window of a trace to analyze, its events, and which of them wait for others.

The events are the operators and calls of the window, its loading of data, the work that they
launched, and the mark of a step: a path that begins and ends with it has all time of the step.
Waits are recognized by synchronization events of the profiler, and by the names of calls.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.errors import ConfigError, inert
from fastcomm.idle.causes import LOADING
from fastcomm.options import Window
from fastcomm.trace import host_names
from fastcomm.trace.columns import Integers, codes, filled, pair_codes
from fastcomm.trace.events import EventRows
from fastcomm.trace.run_traces import ranges
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm.units import format_ns, percent
from fastcomm_kernels import constraints as kernels
from fastcomm_kernels import graph as graphs
from fastcomm_kernels import intervals, matching
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints, Numbers

_ALL = 1 << 62
_ON_HOST = ("annotation", "cpu_op", "runtime", "python", "other")
_WORK = [KIND[name] for name in ("kernel", "memcpy", "memset")]
_ACTIVE = [*_WORK, KIND["cpu_op"], KIND["runtime"]]
_ON_DEVICE = (
    *("gpu_compute_bound", "gpu_graph_bound", "gpu_memory_bound"),
    "gpu_communication_bound",
)
_NOTEWORTHY = 0.1  # share of the path from which a note is due
_BUSY = 0.9  # share of the path from which the device counts as busy
# Copies that their call waits for, whatever its name.
_WAITED_FOR = r"DtoH.*Pageable"
_RECORDS = r"^(cuda|hip|cu)EventRecord"
_LATE = 1 << 62
# The kinds of events that mark a step, without operators and calls, which are its work.
_MARKS = ("annotation", "python", "other")
_Pairs = tuple[Integers, Integers, int]  # waiting rows, rows of the work, kind of the edges


class WindowError(ConfigError):
    """The trace does not have the window."""

    @classmethod
    def no_annotation(cls, annotation: str) -> Self:
        """Return the error that no event has the annotation in its name."""
        return cls(f"no event's name contains {annotation!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """A part of a trace, ``[start, stop)`` in ns."""

    start: int
    stop: int
    step: int | None = None  # its number in the trace, if the part is a step


def instances(instance: object) -> tuple[int, int]:
    """Return the first and the last instance of an option `instance`.

    Parameters
    ----------
    instance
        A number, an inclusive pair of numbers, or None for the first instance.

    Raises
    ------
    WindowError
        For anything else.

    """
    pair = instance if isinstance(instance, tuple) else (instance, instance)
    if instance is None:
        pair = (0, 0)
    if len(pair) != 2 or not all(isinstance(k, int) and k >= 0 for k in pair):  # noqa: PLR2004
        raise WindowError(
            f"invalid instance {instance!r}: expected a number from 0, or an inclusive pair"
        )
    first, last = pair
    if last < first:
        raise WindowError(f"invalid instance {instance!r}: the last is before the first")
    return first, last


def chosen(marks: Ints, annotation: str, numbers: tuple[int, int]) -> Ints:
    """Return the rows of `marks` from a first to a last instance of an annotation.

    Raises WindowError if there are fewer.
    """
    first, last = numbers
    if first >= len(marks):
        raise WindowError(
            f"no instance {first} of {annotation!r}: the trace has {len(marks)}, 0 to "
            f"{len(marks) - 1}"
        )
    return marks[first : last + 1]


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Add the path of the trace to any WindowError raised inside."""
    try:
        yield
    except WindowError as error:
        if str(error).startswith(inert(path)):
            raise
        raise WindowError(f"{path}: {error}") from error


def find(trace: Trace, window: Window) -> TimeRange:
    """Find a window in a trace.

    Without options this is the second iteration, or the next one with work, or the only one:
    the first lacks the device work that was launched before the trace began. Raises WindowError
    if there is none.
    """
    if window.annotation == "":
        return TimeRange(start=-_ALL, stop=_ALL)
    if window.annotation is not None:
        return _annotated(trace, window)
    numbers = trace.iterations["number"].to_pylist()
    if not numbers:
        raise WindowError(
            f"{trace.meta.path}: truncated, without a complete step. Select another part with "
            "--annotation"
        )

    number = window.step
    if number is None:
        number = numbers[_default_place(trace)]
    if number not in numbers:
        raise WindowError(
            f"{trace.meta.path}: no step {number}; the trace has {ranges(sorted(numbers))}"
        )
    row = trace.iterations.slice(numbers.index(number), 1).to_pylist()[0]
    return TimeRange(start=row["start"], stop=row["stop"], step=number)


def _default_place(trace: Trace) -> int:
    """Return the place of the first iteration with work or calls, the very first one last."""
    is_active = np.isin(trace.events["kind"].to_numpy(), _ACTIVE)
    moment = np.sort(trace.events["start"].to_numpy()[is_active])
    low, high = (
        np.searchsorted(moment, trace.iterations[name].to_numpy()) for name in ("start", "stop")
    )
    count = trace.iterations.num_rows
    active: list[int] = np.flatnonzero(high > low).tolist()
    later = [place for place in active if place] or active
    return later[0] if later else min(1, count - 1)


def _annotated(trace: Trace, window: Window) -> TimeRange:
    """Return the range of the selected instances of an annotation on the host."""
    names = trace.events["name"].combine_chunks()
    text = window.annotation or ""
    is_match = (
        pc.equal(names.dictionary, text)
        if window.exact
        else pc.match_substring(names.dictionary, text)
    )
    is_named = is_match.to_numpy(zero_copy_only=False)[names.indices.to_numpy()]
    kind = trace.events["kind"].to_numpy()
    marks = np.flatnonzero(is_named & np.isin(kind, [KIND[name] for name in _ON_HOST]))
    if not len(marks):
        raise WindowError.no_annotation(text)
    rows = chosen(marks, text, instances(window.instance))
    start, stop = (trace.events[name].to_numpy()[rows] for name in ("start", "stop"))
    return TimeRange(start=int(start.min()), stop=int(stop.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """What the device does along the path of one rank."""

    path_ns: int
    elsewhere_ns: int  # part of the path that is no device work
    busy_ns: int  # part of the path during which the device is busy
    earlier_ns: int  # part of `elsewhere_ns` with device work launched outside of the window

    @classmethod
    def of(cls, trace: Trace, table: pa.Table, own: Numbers) -> Self:
        """Measure a path.

        Parameters
        ----------
        trace
            The rank.
        table
            `CriticalPath.breakdown`.
        own
            Rows of the events of the window.

        """
        events = trace.events
        edges, times = (table["start_ns"], table["stop_ns"]), (events["start"], events["stop"])
        is_gap = ~np.isin(table["bound_by"].to_pylist(), _ON_DEVICE)
        path, gaps = _merged(*edges, np.ones_like(is_gap)), _merged(*edges, is_gap)
        is_work = np.isin(events["kind"].to_numpy(), _WORK)
        is_own = np.zeros(events.num_rows, np.bool_)
        is_own[own] = True
        work, earlier = _merged(*times, is_work), _merged(*times, is_work & ~is_own)
        return cls(
            path_ns=int((path[1] - path[0]).sum()),
            elsewhere_ns=int((gaps[1] - gaps[0]).sum()),
            busy_ns=int(intervals.overlap_length(*path, *work)),
            earlier_ns=int(intervals.overlap_length(*gaps, *earlier)),
        )

    def note(self) -> str | None:
        """Return a note that explains a path on the host while the device is busy, or None."""
        least = _NOTEWORTHY * self.path_ns
        is_behind = self.earlier_ns >= max(least, 1)
        if not is_behind and (self.elsewhere_ns < least or self.busy_ns < _BUSY * self.path_ns):
            return None
        elsewhere, busy, earlier = (
            percent(ns / max(self.path_ns, 1))
            for ns in (self.elsewhere_ns, self.busy_ns, self.earlier_ns)
        )
        behind = (
            f" (it runs behind the host: {earlier} with work launched outside of the window, "
            "which the path does not have)"
        )
        return (
            f"{elsewhere} of the path is host time, gaps and delays, but the device is busy "
            f"for {busy} of the path{behind if is_behind else ''}; a faster host saves little "
            "more than the rest"
        )


def _merged(start: object, stop: object, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return the union of the chosen intervals, merged."""
    first, last = (np.asarray(column)[chosen] for column in (start, stop))
    order = np.argsort(first, kind="stable")
    merged: tuple[Ints, Ints] = intervals.merge(first[order], last[order])
    return merged


def step_note(trace: Trace, window: TimeRange, wall_ns: int) -> str | None:
    """Return a note that explains why the window differs from the step on the device, or None.

    Parameters
    ----------
    trace
        The rank.
    window
        An iteration of the host.
    wall_ns
        Length of the window with the device work that it launched.

    """
    if trace.device_iterations is None:
        return None
    steps = {row["number"]: row for row in trace.device_iterations.to_pylist()}
    step = steps.get(window.step)
    on_device = step["stop"] - step["start"] if step else wall_ns
    if abs(wall_ns - on_device) < _NOTEWORTHY * on_device:
        return None
    return (
        f"the window is the host's step of {format_ns(window.stop - window.start)}, which with "
        f"the device work that it launched lasts {format_ns(wall_ns)}; on the device's clock, "
        f"as in `fastcomm metrics`, this step takes {format_ns(on_device)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The events of a window, and its synchronization events."""

    rows: EventRows  # by (start, host before device, longer first)
    is_device: Flags  # of `rows`
    call: Numbers  # of `rows`: row of the launch of work, or NONE
    syncs: EventRows
    sync_call: Numbers  # of `syncs`: row of the call, or NONE
    nodes: "GraphNodes"
    mark: int | None  # of `rows`: the mark of the step, on the thread of its first event

    @classmethod
    def of(cls, trace: Trace, window: TimeRange, data_load: Sequence[str] = ()) -> Self:
        """Select the operators and calls of a window, and the work that they launched.

        Work whose launch is not in the trace belongs to the window in which it starts.

        Parameters
        ----------
        trace
            The rank, with all events.
        window
            The window.
        data_load
            Regular expressions of names of events that load data. Without any, it is ranges
            that are named so, on threads with operators or calls.

        """
        whole = EventRows.whole(trace)
        is_work = whole.of_kind("kernel", "memcpy", "memset", "host_node")
        on_device = np.flatnonzero(is_work | (whole.kind == KIND["sync"]))
        call = whole.launch_of(on_device)
        inside = (whole.start >= window.start) & (whole.start < window.stop)
        host = _host(whole, inside, data_load)
        host[on_device] = False
        launched = np.where(call >= 0, host[call], inside[on_device])
        is_sync = ~is_work[on_device] & launched & (call >= 0)
        is_own = is_work[on_device] & launched
        first, mark = _mark(whole, window, host)
        is_selected = host
        is_selected[on_device[is_own]] = True
        if mark is not None:
            is_selected[mark] = True
        order = _ordered(whole, is_work, np.flatnonzero(is_selected))
        place = np.full(len(whole) + 1, NONE, np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        launch = np.full(len(order), NONE, np.int32)
        launch[place[on_device[is_own]]] = place[call[is_own]]
        rows = whole.without("position", "stream", "wait_stream", "wait_record").take(order)
        if mark is not None:
            mark = int(place[mark])
            rows.stop[mark], rows.lane[mark] = window.stop, whole.lane[first]
        return cls(
            rows=rows,
            is_device=is_work[order],
            call=launch,
            syncs=whole.take(on_device[is_sync]),
            sync_call=place[call[is_sync]],
            nodes=GraphNodes.of(trace, order),
            mark=mark,
        )


def _host(rows: EventRows, inside: Flags, data_load: Sequence[str]) -> Flags:
    """Return which rows inside of a window are operators, calls, or load data."""
    host: Flags = rows.of_kind("runtime", "cpu_op") & inside
    if data_load:
        for regex in data_load:
            host |= rows.matching(regex) & inside
        return host
    loads = np.flatnonzero(rows.of_kind(*LOADING.kinds) & inside)
    loads = loads[np.isin(rows.lane[loads], rows.lane[host])]
    host[loads[rows.matching(LOADING.pattern)[loads]]] = True
    return host


def _mark(rows: EventRows, window: TimeRange, host: Flags) -> tuple[int, int | None]:
    """Return the rows of the first event of the host in a window, and of the window's mark.

    The mark is the longest event that begins with the window; None if there is none.
    """
    first = int(np.argmax(host))
    marks = np.flatnonzero(rows.of_kind(*_MARKS) & (rows.start == window.start) & ~host)
    if not len(marks) or not host[first]:
        return first, None
    return first, int(marks[np.argmax(rows.stop[marks])])


def _ordered(rows: EventRows, is_work: Flags, order: Ints) -> Ints:
    """Sort row numbers by (start, host before device, longer first), in place."""
    tie = -rows.stop
    tie[is_work] += _LATE
    graphs.settle(order, rows.start, tie)
    return order


@dataclass(frozen=True, slots=True)
class GraphNodes:
    """What is known of the order of nodes of CUDA graphs, by row."""

    is_known: Flags  # whether `waiting` and `source` have all dependencies of the row
    is_unordered: Flags  # whether its lane tells no order
    waiting: Numbers  # rows that wait
    source: Numbers  # rows that they wait for

    @classmethod
    def of(cls, trace: Trace, order: Ints) -> Self:
        """Read the order of some rows of a trace."""
        is_known, is_unordered = (np.zeros(len(order), np.bool_) for _ in range(2))
        none = np.empty(0, np.int32)
        args = trace.arguments
        if "on_lane" not in args.column_names:
            return cls(is_known, is_unordered, none, none)
        is_unordered = filled(args["on_lane"])[order] == 1
        if "after" not in args.column_names:
            return cls(is_known, is_unordered, none, none)
        after = args["after"].take(pa.array(order)).combine_chunks()
        is_known = after.is_valid().to_numpy(zero_copy_only=False)
        place = {row: k for k, row in enumerate(filled(args["position"])[order].tolist())}
        pairs = [
            (k, place[int(position)])
            for k in np.flatnonzero(is_known).tolist()
            for position in after[k].as_py().split()
            if int(position) in place
        ]
        waiting, source = np.array(pairs, np.int32).reshape(-1, 2).T
        return cls(is_known, is_unordered, waiting, source)


def waits_of(
    selected: Selected, guessed: tuple[()] | tuple[Ints, Ints] = ()
) -> tuple[kernels.Waits, Numbers, Numbers]:
    """Return the rows that wait for work to end; and, by row, what a call waits for.

    The latter is a role, such as a wait for a stream, and a goal, the lane or row of the work.
    `guessed` are more pairs of rows that wait and rows of the work.
    """
    rows, syncs = selected.rows, selected.syncs
    role = np.full(len(rows), kernels.NO_ROLE, np.int32)
    goal = np.full(len(rows), NONE, np.int32)
    role[(rows.kind == KIND["runtime"]) & rows.matching(host_names.WORK_WAIT)] = (
        kernels.FOR_SOMETHING
    )
    if selected.mark is not None:
        role[selected.mark] = kernels.MARK
    streams = _Streams.of(selected)
    for name, kind in (
        ("Stream Sync", kernels.FOR_STREAM),
        ("Context Sync", kernels.FOR_DEVICE),
    ):
        own = np.flatnonzero(syncs.named((name,)) & (selected.sync_call >= 0))
        at = selected.sync_call[own]
        role[at] = kind
        if kind == kernels.FOR_STREAM:
            goal[at] = streams.lanes(syncs.lane[own], syncs.stream[own])
        else:
            goal[at] = streams.devices(syncs.lane[own])
    nodes = selected.nodes
    pairs = [*_copies(selected), *_events(selected, role, streams)]
    pairs.append((nodes.waiting, nodes.source, kernels.SYNC))
    pairs.append(_of_mark(selected))
    if guessed:
        is_guess = ~nodes.is_known[guessed[0]]
        pairs.append((guessed[0][is_guess], guessed[1][is_guess], kernels.INFERRED))
    return _indexed(pairs, len(rows), are_known(syncs)), role, goal


def _indexed(pairs: Sequence[_Pairs], rows: int, are_known: bool) -> kernels.Waits:
    """Index pairs by the waiting row; `rows` is the number of rows of the trace."""
    waiting = np.concatenate([np.empty(0, np.int32), *(pair[0] for pair in pairs)])
    source = np.concatenate([np.empty(0, np.int32), *(pair[1] for pair in pairs)])
    kind = np.concatenate([np.full(len(pair[0]), pair[2], np.int32) for pair in pairs])
    first, order = graphs.index(waiting.astype(np.int32), rows)
    return kernels.Waits(first, source[order].astype(np.int32), kind[order], are_known)


def _of_mark(selected: Selected) -> _Pairs:
    """Return the mark of the step, and the last work and event of another thread inside it.

    The host may have waited for them, unrecorded.
    """
    rows, mark = selected.rows, selected.mark
    if mark is None:
        return (np.empty(0, np.int32),) * 2 + (kernels.INFERRED,)
    is_inside = (rows.stop <= rows.stop[mark]) & (rows.lane != rows.lane[mark])
    parts = [np.flatnonzero(is_inside & (selected.is_device == flag)) for flag in (False, True)]
    source = np.array(
        [part[np.argmax(rows.stop[part])] for part in parts if len(part)], np.int32
    )
    return np.full(len(source), mark, np.int32), source, kernels.INFERRED


def _copies(selected: Selected) -> list[_Pairs]:
    """Return the calls that wait for their copies, by their names or by pageable memory."""
    rows = selected.rows
    work = np.flatnonzero(selected.is_device & (selected.call >= 0))
    call = selected.call[work]
    waits = rows.matching(host_names.COPY_WAIT)[call]
    guessed = ~waits & rows.matching(_WAITED_FOR)[work]
    guessed &= rows.stop[work] <= rows.stop[call]
    return [
        (call[waits], work[waits], kernels.SYNC),
        (call[guessed], work[guessed], kernels.INFERRED),
    ]


def _events(selected: Selected, role: Numbers, streams: "_Streams") -> list[_Pairs]:
    """Return the rows that wait for a CUDA event, and the last work before its record."""
    rows, syncs = selected.rows, selected.syncs
    empty = np.full(0, NONE, np.int32)
    records = np.flatnonzero(rows.matching(_RECORDS))
    on_event = syncs.named(("Stream Wait Event", "Event Sync")) & (selected.sync_call >= 0)
    if not len(records) or not on_event.any():
        return [(empty, empty, kernels.SYNC)]
    work = np.flatnonzero(selected.is_device & (selected.call >= 0))
    # Work by the start of its launch; a launch of a CUDA graph has several pieces of work.
    work = work[np.argsort(selected.call[work], kind="stable")]
    waits = np.flatnonzero(on_event)
    source = _recorded(selected, streams, work, records, waits)
    call = selected.sync_call[waits]
    is_host = syncs.named(("Event Sync",))[waits]
    role[call[is_host]] = kernels.NO_ROLE
    waiting = np.where(is_host, call, _delayed(selected, streams, work, waits))
    is_known = (source >= 0) & (waiting >= 0)
    return [(waiting[is_known], source[is_known], kernels.SYNC)]


def _recorded(
    selected: Selected, streams: "_Streams", work: Ints, records: Ints, waits: Ints
) -> Numbers:
    """Return for each wait the last work launched before its record, or NONE."""
    rows, syncs = selected.rows, selected.syncs
    (of_wait, of_record), count = codes(syncs.wait_record[waits], rows.correlation[records])
    goal = np.full(count + 1, NONE, np.int32)
    goal[of_wait] = streams.lanes(syncs.lane[waits], syncs.wait_stream[waits])
    goal[-1] = NONE
    marks = np.flatnonzero(goal[of_record] != NONE)
    lanes = (records[marks], goal[of_record[marks]])
    by_record = np.full(count + 1, NONE, np.int32)
    by_record[of_record[marks]] = _last_launched(
        selected, (work, rows.lane[work]), lanes, rows.lanes.num_rows
    )
    by_record[-1] = NONE
    return by_record[of_wait]


def _last_launched(
    selected: Selected, works: tuple[Ints, Numbers], marks: tuple[Ints, Numbers], lanes: int
) -> Numbers:
    """Return for each mark the last work launched before it; pairs are (rows, lanes)."""
    work, lane = works
    # Positions in `work` instead of rows, as a launch may have several pieces of work.
    start = np.concatenate(
        [selected.rows.start[selected.call[work]], selected.rows.start[marks[0]]]
    )
    behind = len(work) + np.arange(len(marks[0]))
    at = matching.launches_before(
        (np.arange(len(work)), lane), (behind, marks[1]), start, lanes
    )
    last: Numbers = np.append(work, NONE)[at].astype(np.int32)
    return last


def _delayed(selected: Selected, streams: "_Streams", work: Ints, waits: Ints) -> Numbers:
    """Return for each stream wait the next work that its thread launches on the stream."""
    rows, syncs = selected.rows, selected.syncs
    call = selected.sync_call[waits]
    order = np.argsort(call, kind="stable")
    launch = selected.call[work]
    goal = streams.lanes(syncs.lane[waits[order]], syncs.stream[waits[order]])
    lane, mark_lane, lanes = pair_codes(
        (rows.lane[launch], rows.lane[work]), (rows.lane[call[order]], goal)
    )
    start = np.concatenate([rows.start[launch], rows.start[call[order]]])
    marks = len(work) + np.arange(len(order))
    at = matching.launches_behind(
        (np.arange(len(work)), lane), (marks, mark_lane), start, lanes
    )
    delayed = np.full(len(waits), NONE, np.int32)
    delayed[order] = np.append(work, NONE)[at]
    return delayed


def are_known(syncs: EventRows) -> bool:
    """Return whether the trace has waits with their records, so that none has to be guessed."""
    on_stream = syncs.named(("Stream Wait Event",))
    return len(syncs) > 0 and not (
        on_stream.any() and (syncs.wait_record[on_stream] == NULL).all()
    )


@dataclass(frozen=True, slots=True)
class _Streams:
    """The lanes on which work runs, by device and stream.

    Some formats do not record the device of a synchronization event. Then it refers to the
    stream of its number, if only one device has work on such a stream.
    """

    device: tuple[int, ...]  # by lane
    by_both: dict[tuple[int, int], int]  # lane by device and stream
    by_stream: dict[int, int]  # lane, or NONE if several devices have the stream

    @classmethod
    def of(cls, selected: Selected) -> Self:
        """Return the lanes of the selected work."""
        table = selected.rows.lanes
        threads = table["thread"].to_pylist()
        device = tuple(filled(table["device"], NONE).tolist())
        by_both, by_stream = {}, {}
        for lane in np.unique(selected.rows.lane[selected.is_device]).tolist():
            if re.fullmatch(r"-?\d{1,18}", threads[lane]):
                stream = int(threads[lane])
                by_both[device[lane], stream] = lane
                by_stream[stream] = NONE if stream in by_stream else lane
        return cls(device, by_both, by_stream)

    def lanes(self, of: Numbers, stream: Ints) -> Numbers:
        """Return the lane of each synchronization event by its lane and stream, or NONE."""
        lanes = [
            self.by_both.get((self.device[lane], number), self.by_stream.get(number, NONE))
            for lane, number in zip(of.tolist(), stream.tolist(), strict=True)
        ]
        return np.array(lanes, np.int32)

    def devices(self, of: Numbers) -> Numbers:
        """Return the device of each synchronization event by its lane; NONE for all devices."""
        working = {device for device, _ in self.by_both}
        devices = [
            self.device[lane] if self.device[lane] in working else NONE for lane in of.tolist()
        ]
        return np.array(devices, np.int32)
