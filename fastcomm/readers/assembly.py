"""From a reader's events and collectives to a `Trace`: iterations, tags, tables.

What differs from format to format ends where this begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.readers.communication import Collectives, unmatched
from fastcomm.readers.patterns import Pattern
from fastcomm.readers.tagging import SOURCE, tag
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
    Marks,
    find_iterations,
    on_device_clock,
    why_not_on_device_clock,
    without_cut_end,
)
from fastcomm.trace.schema import ARGS, TAG
from fastcomm.trace.tags import ProcessGroup, Tagged, TagRules
from fastcomm.trace.trace import NO_DEVICE, Meta, Trace
from fastcomm_kernels.arrays import NULL

DEVICE_KINDS = ("kernel", "memcpy", "memset")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What the user said about reading."""

    allow_truncated: bool = False
    iterations: IterationRule = field(default_factory=IterationRule)
    tags: TagRules = field(default_factory=TagRules)
    patterns: tuple[Pattern, ...] = ()
    whole: bool = False  # every event and its `schema.ARGS`, not only what metrics need


def assemble(
    events: Events,
    lanes: pa.Table,
    found: Collectives,
    options: TraceOptions,
    meta: Meta,
) -> Trace:
    """The trace of these events and collectives; `meta` lacks only what is found here.

    Raises `TraceFileError` where there is nothing to measure or no iteration.
    """
    found = _plausible(found)
    iterations, on_device = _iterations(events, found, options.iterations, meta)
    tagging = tag(events, found, options.tags, meta.world_size, len(iterations.number))
    warnings = (
        *meta.warnings,
        *iterations.warnings,
        *_notes(events, found, meta.lacks),
        *tagging.notes,
    )
    trace = Trace.of(
        events=_event_table(events),
        lanes=lanes,
        comm=_comm_table(events, found, tagging.events),
        groups=_group_table(found.groups, tagging.groups),
        iterations=_iteration_table(iterations),
        args=_args_table(events) if options.whole else None,
        meta=replace(
            meta,
            found_by=iterations.found_by,
            warnings=warnings,
            unused=(*tagging.unused, *unmatched(events, options.patterns)),
        ),
    )
    windows = on_device.iterations
    trace = trace.with_device_iterations(
        None if windows is None else _iteration_table(windows), on_device.notes
    )
    return trace.on_host_clock() if options.iterations.clock == "host" else trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnDevice:
    """Iterations on the device's clock, if any, and what to say of them or of their lack."""

    iterations: Iterations | None = None
    notes: tuple[str, ...] = ()


def _iterations(
    events: Events, found: Collectives, rule: IterationRule, meta: Meta
) -> tuple[Iterations, _OnDevice]:
    """Return the iterations by the host's marks, and on the device's clock.

    Raises `TraceFileError` where there is nothing to measure or no iteration.
    """
    if not len(events.start):
        raise TraceFileError(
            f"{meta.path}: no device work, launch or annotation in the whole trace"
        )
    try:
        marks = find_iterations(_marks(events, found), rule)
        work = _device_work(events)
        whole = _without_cut_end(marks, work, events) if meta.is_truncated else marks
        return whole, _on_device(marks, work, rule, kept=len(whole.number))
    except ConfigError as error:
        raise TraceFileError(f"{meta.path}: {error}") from error


def _marks(events: Events, found: Collectives) -> Marks:
    start, stop = events.start, events.stop
    rows = events.rows("annotation")
    key = found.op.astype(np.int64) * 1_000_003 + found.group
    key = key * 1_000_003 + np.where(found.sizes.payload == NULL, -1, found.sizes.payload)
    return Marks(
        names=events.names(rows),
        start=start[rows],
        stop=stop[rows],
        span=_span(events),
        comm_start=start[found.row],
        comm_key=key,
    )


def _device_work(events: Events) -> DeviceWork:
    start, stop = events.start, events.stop
    work = events.rows(*DEVICE_KINDS)
    launch = events.launch_of(work)
    return DeviceWork(
        start=start[work],
        stop=stop[work],
        launch=np.where(launch >= 0, start[launch], NULL),
    )


def _without_cut_end(marks: Iterations, work: DeviceWork, events: Events) -> Iterations:
    """Return the iterations of a truncated trace that its events show to be whole."""
    # Those that every reading keeps, sorted by start.
    offset = events.more["offset"][events.rows(*DEVICE_KINDS, "runtime", "annotation")]
    is_ordered = bool((offset[1:] > offset[:-1]).all())
    return without_cut_end(marks, work, events.unanswered(), is_ordered=is_ordered)


def _on_device(
    found: Iterations, work: DeviceWork, rule: IterationRule, kept: int
) -> _OnDevice:
    """Return the first `kept` iterations on the device's clock as far as the rule asks for it.

    Raises ConfigError where the rule demands them and there are none.
    """
    if rule.clock == "device" or not kept:
        try:
            iterations = on_device_clock(found, work, kept)
        except ConfigError as error:
            raise ConfigError(f"--step-boundary device: {error}") from error
        return _OnDevice(iterations=iterations, notes=iterations.warnings)
    # Ranges that a user gives are taken as they are.
    if found.found_by == RANGES or not len(work.start):
        return _OnDevice()
    why = why_not_on_device_clock(found, work)
    if why is None:
        try:
            iterations = on_device_clock(found, work, kept)
        except ConfigError as error:
            why = str(error)
        else:
            return _OnDevice(iterations=iterations, notes=iterations.warnings)
    # These windows are nearly the same on either clock.
    is_alike = found.found_by in (PERIOD, WHOLE)
    return _OnDevice(notes=() if is_alike else (f"{why}: {_BY_HOST}",))


_BY_HOST = "iterations are by the host's marks, which the device may run behind"


def _iteration_table(iterations: Iterations) -> pa.Table:
    return pa.table({name: getattr(iterations, name) for name in ("number", "start", "stop")})


def _span(events: Events) -> tuple[int, int]:
    """From the first to the end of the last of the events that every reading keeps."""
    start, stop = events.start, events.stop
    kept = events.rows(*DEVICE_KINDS, "runtime", "annotation")
    rows = kept if len(kept) else np.arange(len(start))
    return int(start[rows[0]]), int(stop[rows].max())


def _notes(events: Events, found: Collectives, lacks: Sequence[str]) -> list[str]:
    """What a user should know before trusting the numbers."""
    notes = []
    if not len(found.row):
        host_only = _host_only(events)
        # Without any device work, that there is no communication says nothing new.
        if host_only or not set(NO_DEVICE).intersection(lacks):
            notes.append("no communication on the device" + host_only)
    elif "bytes" not in lacks and found.unsized is not None:
        notes += _unsized(found, found.unsized)
    if fused := _fused(found):
        notes.append(f"{fused} communication kernels are fused with other work")
    return notes


def _plausible(found: Collectives) -> Collectives:
    """The events, of unknown size where a size cannot be."""
    sizes, count = byte_rules.plausible(found.sizes)
    if not count:
        return found
    most = f"{byte_rules.LARGEST:.2g} bytes"
    reason = f"{count} have sizes that, alone or together, are above {most} and cannot be"
    return replace(found, sizes=sizes, unsized=(reason, *(found.unsized or ())))


def _unsized(found: Collectives, reasons: Sequence[str]) -> list[str]:
    """Report how many events have no known size, and why."""
    unknown = int((found.sizes.payload == NULL).sum())
    why = "; ".join(reasons) or "nothing in the trace says it"
    return [
        f"{unknown} of {len(found.row)} communication events have no known size, and bandwidth "
        f"and volume omit them: {why}"
    ][:unknown]


def _fused(found: Collectives) -> int:
    """How many events do more than communicate."""
    fused = np.array([named.fused for named in found.named], np.bool_)
    return int(np.count_nonzero(fused[found.name]))


def _host_only(events: Events) -> str:
    """How many collectives the host shows that run on the host."""
    gloo = events.rows_named(lambda name: name.startswith("gloo:"), "annotation", "cpu_op")
    if not len(gloo):
        return ""
    return (
        f": {len(gloo)} gloo: annotations show collectives of the host, which are not measured"
    )


def _event_table(events: Events) -> pa.Table:
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
    """The columns of `schema.ARGS` that the reader has, `bytes` in any case."""
    nothing = np.full(len(events.lane), NULL, np.int64)
    present = [name for name in ARGS.names if name in events.more or name == "bytes"]
    return pa.table({name: nullable(events.more.get(name, nothing)) for name in present})


def _comm_table(events: Events, found: Collectives, tags: NDArray[np.int8]) -> pa.Table:
    row = found.row
    return pa.table(
        {
            "op": found.op,
            "start": events.start[row],
            "stop": events.stop[row],
            "stream": nullable(events.more["stream"][row]),
            "group": pa.array(found.group, mask=found.group < 0),
            "seq": nullable(found.seq),
            "tag": np.ascontiguousarray(tags[:, 0]),
            "tag_source": np.ascontiguousarray(tags[:, 1]),
            "msg_bytes": nullable(found.sizes.msg),
            "payload_bytes": nullable(found.sizes.payload),
            "bus_bytes": nullable(found.sizes.bus),
            "event": row.astype(np.int32),
            **({} if found.partners is None else found.partners.columns()),
        }
    )


def _group_table(groups: Sequence[ProcessGroup], tagged: Sequence[Tagged]) -> pa.Table:
    return pa.table(
        {
            "name": pa.array([group.name for group in groups], pa.string()),
            "description": pa.array([group.description for group in groups], pa.string()),
            "ranks": pa.array([group.ranks for group in groups], pa.list_(pa.int32())),
            "size": pa.array([group.members for group in groups], pa.int32()),
            "tag": pa.array([TAG[each.tag] for each in tagged], pa.int8()),
            "tag_source": pa.array([SOURCE[each.source] for each in tagged], pa.int8()),
            "candidates": pa.array(
                [[TAG[tag] for tag in each.candidates] for each in tagged], pa.list_(pa.int8())
            ),
        }
    )
