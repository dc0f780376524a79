"""Assemble a `Trace` from a reader's events and collectives: iterations, tags, tables.

Work of a stream begins when the work before it has ended. Programmatic dependent launches let
a successor begin some microseconds earlier, but not end earlier. Work that lasts beyond the end
of later work of its stream has a wrong duration. Nodes of CUDA graphs are left out: what is
recorded as their stream may be that of several branches.

Work that is far from its launch, and from all else, has a wrong start. A lane on which work
often begins while other work runs is no stream, but several that were merged.

Everything here is the same for all formats. Times are ns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.formats.communication import Collectives, Pattern, unused_patterns
from fastcomm.formats.marks import without_idle_threads
from fastcomm.formats.tagging import SOURCE, tag
from fastcomm.formats.unrecorded_work import find_unanswered, waiting_steps
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.columns import nullable
from fastcomm.trace.events import Events
from fastcomm.trace.iterations import (
    PERIOD,
    RANGES,
    WHOLE,
    DeviceWork,
    IterationRule,
    Iterations,
    Launching,
    Marks,
    find_iterations,
    mark_patterns,
    on_device_clock,
    why_not_on_device_clock,
    without_cut_end,
    without_incomplete,
)
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.schema import ARGS, TEXT_ARGS
from fastcomm.trace.tags import ProcessGroup, Tagged, TagRules
from fastcomm.trace.trace import NO_DEVICE, Meta, Trace
from fastcomm.units import counted, format_ns
from fastcomm_kernels.arrays import NULL, Flags, Ints

# Ends of two events of a stream that are this far apart, in ns, are in the wrong order.
_APART_NS = 50_000
# If more of the work of a lane is out of order, by number and share, it is no serial stream.
_MOST = 0.1
_FEW = 3
_MOST_NAMED = 3
_LONGEST_NAME = 80
# A pause in which nothing is recorded is this much longer than all that is, and this long, in
# ns, where a start is wrong.
_TIMES_LONGER = 10
_LEAST_PAUSE_NS = 1_000_000_000
_NO_DEVICE_WORK = "a run on the host has no work of a device; leave the option out"
# Formats whose lanes of device work are streams of a device.
_WITH_STREAMS = ("kineto", "nsys")
DEVICE_KINDS = ("kernel", "memcpy", "memset")
_BY_HOST = "iterations are by the host's marks, which the device may run behind"


def warnings(events: Events, kinds: Sequence[str]) -> list[str]:
    """Return warnings that name work with an impossible duration or start.

    Parameters
    ----------
    events
        All events of a rank.
    kinds
        The kinds of device work.

    """
    work = events.rows(*kinds)
    return [*_wrong_durations(events, work), *_wrong_starts(events, work)]


def _wrong_starts(events: Events, work: Ints) -> list[str]:
    """Return a warning on work that a long pause, of everything, parts from its launch."""
    if np.diff(events.start).max(initial=0) < _LEAST_PAUSE_NS:  # no pause is longer
        return []
    part = _parts(events)
    launch = events.launch_of(work)
    is_parted = (launch >= 0) & (part[launch] != part[work])
    rows, launch = work[is_parted], launch[is_parted]
    if not len(rows):
        return []
    distance = np.abs(events.start[rows] - events.start[launch])
    farthest = np.argsort(-distance, kind="stable")[:_MOST_NAMED]
    named = ", ".join(
        f"{_name(events, rows[k])!r} is {format_ns(int(distance[k]))} from its launch"
        for k in farthest.tolist()
    )
    return [
        f"{counted(len(rows), 'event')} with an impossible start: {named}{_more(rows)}, and "
        "for most of that time nothing is recorded. The times of their steps depend on it"
    ]


def _parts(events: Events) -> Ints:
    """Return by event how many long pauses of everything lie before it."""
    stop = np.maximum.accumulate(events.stop)
    gap = np.append(0, events.start[1:] - stop[:-1])
    # As floats, since ten times a time of a damaged file may exceed 64 bits.
    recorded = float(stop[-1:].sum() - events.start[:1].sum())
    recorded -= float(gap[gap >= _LEAST_PAUSE_NS].sum())
    return np.cumsum(gap >= max(_LEAST_PAUSE_NS, _TIMES_LONGER * recorded))


def _more(rows: Ints) -> str:
    """Return how many rows are not named, if any."""
    return f", and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""


def _name(events: Events, row: int) -> str:
    """Return the name of an event, cut where it is long."""
    return events.texts[int(events.name[row])][:_LONGEST_NAME]


def _wrong_durations(events: Events, work: Ints) -> list[str]:
    """Return a warning that names work with impossible durations, if there is any."""
    parts = list(_contradictions(events, work))
    if not parts:
        return []
    rows = np.sort(np.concatenate([longer for longer, _ in parts]))
    duration = events.stop[rows] - events.start[rows]
    streams = {int(events.lane[own[0]]): own for _, own in parts}
    named = ", ".join(
        _described(events, row, streams[int(events.lane[row])])
        for row in rows[np.argsort(-duration, kind="stable")][:_MOST_NAMED].tolist()
    )
    return [
        f"{counted(len(rows), 'event')} with an impossible duration, since a stream is serial: "
        f"{named}{_more(rows)}. Compute, idle time and all shares of the step depend on it"
    ]


def _described(events: Events, row: int, stream: Ints) -> str:
    """Return the name of an event, and what is impossible about it in its stream."""
    later = stream[stream > row]
    overlapped = np.count_nonzero(events.stop[later] < events.stop[row] - _APART_NS)
    lasts = format_ns(int(events.stop[row] - events.start[row]))
    text = f"{_name(events, row)!r} lasts {lasts} and overlaps "
    return f"{text}{counted(int(overlapped), 'later event')} of its stream"


def merged_work(events: Events, work: Ints) -> tuple[int, int]:
    """Return how much work begins while other work of its stream runs, and of how much.

    Only of streams in which this is common, as where tools merge traces of several devices.
    """
    merged = total = 0
    for rows, longer, later in _overlaps(events, work, events.start):
        if len(np.unique(longer)) > max(_FEW, _MOST * len(rows)):
            merged, total = merged + len(later), total + len(rows)
    return merged, total


def doubled_work(events: Events, work: Ints) -> int:
    """Return how much work is there twice, with equal times on one stream; 0 for little.

    Events are sorted by start.
    """
    most = max(_FEW, _MOST * len(work))
    start = events.start[work]
    if np.count_nonzero(start[1:] == start[:-1]) <= most:
        return 0
    columns = (events.name, events.stop, events.start, events.lane)
    order = work[np.lexsort([column[work] for column in columns])]
    pairs = [column[order[1:]] == column[order[:-1]] for column in columns]
    is_double = np.logical_and.reduce(pairs) & (events.stop > events.start)[order[1:]]
    count = int(np.count_nonzero(is_double))
    return count if count > most else 0


def _contradictions(events: Events, work: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield per stream the rows of work that lasts beyond later work, and of all its work.

    Nodes of graphs are left out.
    """
    for rows, longer, _ in _overlaps(events, work, events.stop):
        if 0 < len(np.unique(longer)) <= max(_FEW, _MOST * len(rows)):
            own = rows[~_in_graph(events, rows, rows)]
            stop = events.stop[own]
            earliest = np.minimum.accumulate(stop[::-1])[::-1]  # of an event and later ones
            yield own[:-1][stop[:-1] - _APART_NS > earliest[1:]], own


def _overlaps(events: Events, work: Ints, moment: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield per stream its work, and pairs of which the first ends long after the second.

    Rather, after a moment of the second: its start, or its end. Nodes of graphs are no pairs.
    """
    lane = events.lane[work]
    order = np.argsort(lane, kind="stable")  # events are sorted by start
    work, lane = work[order], lane[order]
    stop, moment = events.stop[work], moment[work]
    drops = np.flatnonzero((moment[1:] < stop[:-1]) & (lane[1:] == lane[:-1]))
    for own in np.unique(lane[drops]).tolist():
        first, end = np.searchsorted(lane, (own, own + 1)).tolist()
        latest = np.maximum.accumulate(stop[first:end])
        later = np.flatnonzero(moment[first + 1 : end] < latest[:-1] - _APART_NS) + 1
        if not len(later):
            continue
        rows = work[first:end]
        longer = rows[np.searchsorted(latest, latest[later - 1])]
        is_pair = ~(_in_graph(events, rows, longer) | _in_graph(events, rows, rows[later]))
        yield rows, longer[is_pair], rows[later[is_pair]]


def _in_graph(events: Events, work: Ints, rows: Ints) -> Flags:
    """Return which rows share their launch with other work of the stream.

    Where several calls have one number, traces were merged.
    """
    correlation, count = np.unique(events.correlation[work], return_counts=True)
    own = events.correlation[rows]
    calls = np.sort(events.correlation[events.rows("runtime")])
    is_repeated = np.isin(own, calls[1:][calls[1:] == calls[:-1]])
    is_shared = (count[np.searchsorted(correlation, own)] > 1) & (own != NULL)
    in_graph: Flags = is_shared & ~is_repeated
    return in_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What the user states about reading a trace."""

    allow_truncated: bool = False
    iterations: IterationRule = field(default_factory=IterationRule)
    tags: TagRules = field(default_factory=TagRules)
    patterns: tuple[Pattern, ...] = ()
    whole: bool = False  # all events and their `schema.ARGS`, not only what metrics need


def assemble(
    events: Events,
    lanes: pa.Table,
    collectives: Collectives,
    options: TraceOptions,
    meta: Meta,
) -> Trace:
    """Assemble the trace of a rank.

    Parameters
    ----------
    events
        Events sorted by start.
    lanes
        The lanes that the events refer to, as `schema.LANES` has them.
    collectives
        The communication among the events.
    options
        Rules for iterations, tags and patterns.
    meta
        Metadata of the trace, without what this function finds.

    Raises
    ------
    TraceFileError
        If there is nothing to measure, or no iteration.

    """
    collectives = _plausible(collectives)
    iterations, on_device = _iterations(events, collectives, options.iterations, meta)
    tagging = tag(
        events,
        collectives,
        options.tags,
        meta.world_size,
        len(iterations.number),
        is_host_run=meta.is_host_run,
    )
    warnings = (
        *meta.warnings,
        *iterations.warnings,
        *_notes(events, collectives, meta.missing_data),
        *_order_warnings(events, meta),
        *tagging.notes,
    )
    trace = Trace.of(
        events=_event_table(events),
        lanes=lanes,
        comm=_comm_table(events, collectives, tagging.events),
        groups=_group_table(collectives.groups, tagging.groups),
        iterations=_iteration_table(iterations),
        args=_args_table(events) if options.whole else None,
        meta=replace(
            meta,
            found_by=iterations.found_by,
            warnings=warnings,
            unused=(*tagging.unused, *unused_patterns(events, options.patterns)),
        ),
    )
    windows = on_device.iterations
    trace = trace.with_device_iterations(
        None if windows is None else _iteration_table(windows), on_device.notes
    )
    return trace.on_host_clock() if options.iterations.clock == "host" else trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceIterations:
    """Iterations on the device's clock, if any, and warnings about them."""

    iterations: Iterations | None = None
    notes: tuple[str, ...] = ()


def _iterations(
    events: Events, collectives: Collectives, rule: IterationRule, meta: Meta
) -> tuple[Iterations, _DeviceIterations]:
    """Return the iterations by the host's marks, and those on the device's clock.

    Raises TraceFileError if there is nothing to measure, or no iteration.
    """
    if not len(events.start):
        raise TraceFileError(
            f"{meta.path}: no device work, launch or annotation in the whole trace, as of a "
            "process that is no rank (a coordinator, a data loader): give the traces of ranks"
        )
    try:
        marks = find_iterations(_marks(events, collectives, rule.regex), rule)
        work = _device_work(events)
        whole = _without_cut_end(marks, work, events) if meta.is_truncated else marks
        count = len(whole.number)
        unanswered = find_unanswered(marks, events, work, count)
        incomplete = unanswered.is_incomplete
        return without_incomplete(
            whole, incomplete, *unanswered.warnings(marks.number)
        ), _on_device(
            marks,
            work,
            rule,
            count=count,
            is_host_run=meta.is_host_run,
            launches=0 if (work.launch != NULL).any() else len(events.unanswered()),
            launching=Launching(incomplete, waiting_steps(marks, events)),
        )
    except ConfigError as error:
        raise TraceFileError(f"{meta.path}: {error}") from error


def _marks(events: Events, collectives: Collectives, regex: str | None) -> Marks:
    """Return the ranges and collectives that may mark iterations."""
    start, stop = events.start, events.stop
    rows = without_idle_threads(events, events.rows("annotation"), mark_patterns(regex))
    key = collectives.op.astype(np.int64) * 1_000_003 + collectives.group
    key = key * 1_000_003 + np.where(
        collectives.sizes.payload == NULL, -1, collectives.sizes.payload
    )
    return Marks(
        names=events.names(rows),
        start=start[rows],
        stop=stop[rows],
        span=_span(events),
        comm_start=start[collectives.row],
        comm_key=key,
    )


def _device_work(events: Events) -> DeviceWork:
    """Return times of the device work, and of its launches."""
    start, stop = events.start, events.stop
    work = events.rows(*DEVICE_KINDS)
    launch = events.launch_of(work)
    return DeviceWork(
        start=start[work],
        stop=stop[work],
        launch=np.where(launch >= 0, start[launch], NULL),
    )


def _without_cut_end(marks: Iterations, work: DeviceWork, events: Events) -> Iterations:
    """Return the iterations of a truncated trace that are complete."""
    # The kinds that are read with and without `whole`, sorted by start.
    offset = events.more["offset"][events.rows(*DEVICE_KINDS, "runtime", "annotation")]
    is_ordered = bool((offset[1:] > offset[:-1]).all())
    return without_cut_end(marks, work, events.unanswered(), is_ordered=is_ordered)


def _on_device(
    host: Iterations,
    work: DeviceWork,
    rule: IterationRule,
    count: int,
    *,
    is_host_run: bool,
    launches: int,
    launching: Launching,
) -> _DeviceIterations:
    """Return the first `count` iterations on the device's clock, if the rule allows it.

    `launches` is the number of launches without recorded work.

    Raises ConfigError if the rule requires them, and there are none.
    """
    if rule.clock == "device" and is_host_run:
        raise ConfigError(f"--step-boundary device: {_NO_DEVICE_WORK}")
    is_required = rule.clock == "device" or not count
    # A user's ranges are not moved.
    is_fixed = is_host_run or host.found_by == RANGES or not len(work.start)
    if is_fixed and not is_required:
        return _DeviceIterations()
    reason = None if is_required else why_not_on_device_clock(host, work, launches)
    if reason is None:
        try:
            iterations = on_device_clock(host, work, count, launching)
        except ConfigError as error:
            if is_required:
                raise ConfigError(f"--step-boundary device: {error}") from error
            reason = str(error)
        else:
            return _DeviceIterations(iterations=iterations, notes=iterations.warnings)
    # The windows of these rules are nearly equal on both clocks.
    is_alike = host.found_by in (PERIOD, WHOLE)
    return _DeviceIterations(notes=() if is_alike else (f"{reason}: {_BY_HOST}",))


def _iteration_table(iterations: Iterations) -> pa.Table:
    return pa.table({name: getattr(iterations, name) for name in ("number", "start", "stop")})


def _span(events: Events) -> tuple[int, int]:
    """Return the first start and last stop of the events that are read in any case."""
    start, stop = events.start, events.stop
    selected = events.rows(*DEVICE_KINDS, "runtime", "annotation")
    rows = selected if len(selected) else np.arange(len(start))
    return int(start[rows[0]]), int(stop[rows].max())


def _notes(events: Events, collectives: Collectives, missing: Sequence[str]) -> list[str]:
    """Return warnings about missing communication and unknown sizes."""
    notes = []
    if not len(collectives.row):
        # Without device work, missing communication is no news.
        if not set(NO_DEVICE).intersection(missing):
            notes.append("no communication on the device")
    elif "bytes" not in missing and collectives.unsized is not None:
        notes += _unsized(collectives, collectives.unsized)
    if fused := _fused(collectives):
        notes.append(f"{fused} communication kernels are fused with other work")
    return notes


def _order_warnings(events: Events, meta: Meta) -> list[str]:
    """Return a warning about work that contradicts the order of its stream, if any."""
    has_streams = meta.format in _WITH_STREAMS and not meta.is_host_run
    return warnings(events, DEVICE_KINDS) if has_streams else []


def _plausible(collectives: Collectives) -> Collectives:
    """Return the collectives with sizes above the largest possible one as unknown.

    So are all sizes if their sum is too large.
    """
    sizes, count = byte_rules.plausible(collectives.sizes)
    if not count:
        return collectives
    most = f"{byte_rules.LARGEST:.2g} bytes"
    reason = (
        f"{count} have sizes that, alone or together, are above {most}, which is impossible"
    )
    unsized = (reason, *(collectives.unsized or ()))
    return replace(collectives, sizes=sizes, splits=None, unsized=unsized)


def _unsized(collectives: Collectives, reasons: Sequence[str]) -> list[str]:
    """Return the warning about events of unknown size, with the reasons."""
    unknown = int((collectives.sizes.payload == NULL).sum())
    causes = "; ".join(reasons) or "the trace does not tell"
    if not unknown:
        return []
    return [
        f"{unknown} of {len(collectives.row)} communication events have no known size, and "
        f"bandwidth and volume omit them: {causes}"
    ]


def _fused(collectives: Collectives) -> int:
    """Return the number of events that do more than communicate."""
    fused = np.array([named.fused for named in collectives.named], np.bool_)
    return int(np.count_nonzero(fused[collectives.name]))


def _event_table(events: Events) -> pa.Table:
    """Return the table of events: times in ns, `lane` as a row of the table of lanes."""
    return pa.table(
        {
            "start": events.start,
            "stop": events.stop,
            "kind": events.kind,
            "name": pa.DictionaryArray.from_arrays(
                pa.array(events.name), pa.array(events.texts, pa.string()), safe=False
            ),
            "lane": events.lane,
            "correlation": nullable(events.correlation),
            "offset": nullable(events.more["offset"]),
        }
    )


def _args_table(events: Events) -> pa.Table:
    """Return the columns of `schema.ARGS` that the reader has, and `bytes` in any case."""
    unknown = np.full(len(events.lane), NULL, np.int64)
    present = [name for name in ARGS.names if name in events.more or name == "bytes"]
    columns = {name: events.more.get(name, unknown) for name in present}
    return pa.table(
        {
            name: _texts(column, events.texts) if name in TEXT_ARGS else nullable(column)
            for name, column in columns.items()
            if name not in TEXT_ARGS or (column != NULL).any()
        }
    )


def _texts(codes: NDArray[np.int64], texts: Sequence[str]) -> pa.DictionaryArray:
    """Return the texts of codes, null for NULL; its dictionary has only those that occur."""
    used = np.unique(codes[codes != NULL])
    place = np.searchsorted(used, codes).astype(np.int32)
    names = pa.array([texts[code] for code in used.tolist()], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(place, mask=codes == NULL), names)


def _comm_table(events: Events, collectives: Collectives, tags: NDArray[np.int8]) -> pa.Table:
    """Return the table of communication; `tags` has a tag and its source per row."""
    row, call_id = collectives.row, collectives.call_id
    return pa.table(
        {
            "op": collectives.op,
            "start": events.start[row],
            "stop": events.stop[row],
            "stream": nullable(events.more["stream"][row]),
            "group": pa.array(collectives.group, mask=collectives.group < 0),
            "seq": nullable(collectives.seq),
            "tag": np.ascontiguousarray(tags[:, 0]),
            "tag_source": np.ascontiguousarray(tags[:, 1]),
            "msg_bytes": nullable(collectives.sizes.msg),
            "payload_bytes": nullable(collectives.sizes.payload),
            "bus_bytes": nullable(collectives.sizes.bus),
            "event": row.astype(np.int32),
            **({} if call_id is None else {"call_id": nullable(call_id)}),
            **({} if collectives.partners is None else collectives.partners.columns()),
            **(collectives.splits or {}),
        }
    )


def _group_table(groups: Sequence[ProcessGroup], tagged: Sequence[Tagged]) -> pa.Table:
    """Return the table of process groups; `tagged` has the tag of each group, in order."""
    return pa.table(
        {
            "name": pa.array([group.name for group in groups], pa.string()),
            "description": pa.array([group.description for group in groups], pa.string()),
            "ranks": pa.array([group.ranks for group in groups], pa.list_(pa.int32())),
            "size": pa.array([group.members for group in groups], pa.int32()),
            "tag": pa.array([TAG[entry.tag] for entry in tagged], pa.int8()),
            "tag_source": pa.array([SOURCE[entry.source] for entry in tagged], pa.int8()),
            "candidates": pa.array(
                [[TAG[tag] for tag in entry.candidates] for entry in tagged],
                pa.list_(pa.int8()),
            ),
        }
    )
