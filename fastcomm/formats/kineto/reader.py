"""Read one Kineto file as the trace of a rank."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.formats import assembly
from fastcomm.formats.assembly import DEVICE_KINDS, TraceOptions, assemble
from fastcomm.formats.kineto.categories import (
    ARG_NAMES,
    EVERYTHING,
    METRICS,
    ON_HOST,
    OPERAND_NAMES,
    UnknownWork,
    explain_no_device_work,
    explain_unknown_work,
    scan,
    unknown_categories,
    work_categories,
)
from fastcomm.formats.kineto.chrome import Scanned, Selection
from fastcomm.formats.kineto.communication_records import find_collectives, groups_of_rank
from fastcomm.formats.kineto.devices import (
    ProcessDevice,
    is_on_device,
    of_one_rank,
    part_of,
    peek,
    scan_again,
)
from fastcomm.formats.kineto.host import is_host_run, json_list, with_host_collectives
from fastcomm.formats.kineto.host_groups import Assigned, distributed_info
from fastcomm.formats.kineto.host_work import as_device
from fastcomm.formats.marks import without_idle_threads
from fastcomm.formats.sources import check_count
from fastcomm.trace.columns import first_seen, sums
from fastcomm.trace.events import Events
from fastcomm.trace.iterations import PROFILER_STEP
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Meta, Trace, gpu_name, host_digest
from fastcomm_kernels.arrays import NONE, NULL, Ints
from fastcomm_kernels.json_events import TEXT_LANE

HOST_RUN = (
    "a run without an accelerator: compute is the time of operators on the host, communication "
    "that of its collectives"
)
RANK_KEYS = ("rank", "world_size")
_MOST_DEVICES = 1 << 16
_LATEST = 1 << 62  # ns: differences of two such times fit 64 bits
# Times relative to a base time span at most three months; times since 1970 are larger.
_ABSOLUTE = 1_600_000_000_000_000_000
_EVENT = ("start", "stop", "kind", "name", "correlation")
_STEP = re.compile(PROFILER_STEP)
_OFTEN = 4  # of so many marks, one is open twice
# The first eight bytes of names of GEMMs and attention.
_NAMES = (b"aten::mm", b"aten::ad", b"aten::bm", b"aten::_f", b"aten::_s", b"flash_at")
_ARGS = ("Input Dims", "Input type", "Concrete Inputs")
_SHAPES = replace(METRICS, prefixes=_NAMES, detail_args=(), detail_texts=_ARGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How a file has the events of the PyTorch profiler."""

    format: str
    # Reads the events that a selection keeps, and what looks like device work and is unknown.
    scan: Callable[..., tuple[Scanned, UnknownWork]]
    # Categories that are not understood; and those of them whose events look like device work.
    unknown_categories: Callable[[Path], Sequence[str]]
    work_categories: Callable[[Path], Sequence[tuple[str, int]]]
    # What to do with a file that has the work of several devices.
    apart: str = "Each is a rank of its own if you give fastcomm this file alone"
    # Warnings about absolute times; None: those of `events_of`.
    clock_notes: Callable[[str | None], list[str]] | None = None


JSON = Encoding(
    format="kineto",
    scan=scan,
    unknown_categories=unknown_categories,
    work_categories=work_categories,
)


def read(
    path: Path,
    options: TraceOptions,
    rank: int | None = None,
    assigned: Assigned | None = None,
    device: ProcessDevice | None = None,
    encoding: Encoding = JSON,
) -> Trace:
    """Read the trace of one rank.

    Parameters
    ----------
    path
        The file.
    options
        What to read; with `whole`, all events rather than those that metrics need.
    rank
        The rank that the run expects; None if unknown.
    assigned
        Groups of collectives on the host, if all ranks were compared.
    device
        The device that is the rank, if the file has several.
    encoding
        How the file has its events.

    Raises
    ------
    TraceFileError
        If the file is not a trace, or names another rank.

    """
    try:
        content = _scan(path, options, assigned, device, encoding)
    except ConfigError as error:
        raise TraceFileError(f"{path}: {error}") from error
    scanned, is_host_run = content.scanned, content.is_host_run
    info = distributed_info(scanned)
    own, world = _stated(path, info, rank)
    events, lanes, origin, notes = events_of(scanned)
    if encoding.clock_notes is not None:
        notes = encoding.clock_notes(origin[1])
    missing: tuple[str, ...] = ()
    if is_host_run:
        notes = [*notes, HOST_RUN]
    elif not len(events.rows(*DEVICE_KINDS)):
        key, reason = explain_no_device_work(
            encoding.unknown_categories(path),
            len(events.rows("runtime")),
            is_truncated=scanned.is_truncated,
        )
        missing, notes = (key,), [*notes, reason]
    elif content.devices:
        missing, notes = ("devices",), [*notes, _several(content.devices, encoding.apart)]
    elif merged := _merged(events) or _merged_by_marks(events, lanes):
        missing, notes = ("devices",), [*notes, merged]
    elif content.unknown.events:
        missing, reason = explain_unknown_work(content.unknown, encoding.work_categories(path))
        notes = [*notes, reason]
    collectives = find_collectives(events, groups_of_rank(info), options.patterns)
    meta = Meta(
        rank=own if own is not None else rank or 0,
        world_size=world,
        format=encoding.format,
        path=str(path),
        base=origin[0],
        clock=origin[1],
        warnings=(*scanned.warnings, *content.notes, *notes),
        missing_data=missing,
        is_truncated=scanned.is_truncated,
        is_host_run=is_host_run,
        gpu=_gpu(scanned.envelope.get("deviceProperties")),
        host=host_digest(scanned.envelope.get("host_name")),
    )
    return assemble(events, lanes, collectives, options, meta)


class _Content(NamedTuple):
    """What a file has of a rank."""

    scanned: Scanned
    unknown: UnknownWork  # work of unknown kind
    is_host_run: bool
    devices: tuple[ProcessDevice, ...]  # several ranks that the file has instead
    notes: tuple[str, ...]  # on devices that are none


def _scan(
    path: Path,
    options: TraceOptions,
    assigned: Assigned | None,
    device: ProcessDevice | None,
    encoding: Encoding,
) -> _Content:
    """Read the columns of a rank's file that the options select.

    A run without an accelerator needs other events, and its work is returned as that of a
    device. `assigned` are the groups of its collectives, if they were determined across ranks.
    """
    # Only ranks of such runs are compared before they are read.
    selection = _selection(options, on_host=assigned is not None)

    def find(selection: Selection) -> tuple[Scanned, UnknownWork]:
        return scan_again(path, selection, scan=encoding.scan, **_scan_options(options))

    scanned, unknown_work = find(selection)
    on_host = is_host_run(scanned)
    if (needed := _selection(options, on_host=on_host)) is not selection:
        scanned, unknown_work = find(needed)
    devices: tuple[ProcessDevice, ...] = ()
    notes: tuple[str, ...] = ()
    if device is not None:
        scanned = part_of(scanned, device)
    elif not on_host:
        scanned, devices, notes = of_one_rank(scanned)
    if on_host:
        scanned = as_device(scanned, assigned, with_waits=options.whole)
    else:
        scanned = with_host_collectives(scanned)
    return _Content(scanned, unknown_work, on_host, devices, notes)


def find_devices(path: Path, options: TraceOptions) -> tuple[ProcessDevice, ...]:
    """Return the devices of a file, as `devices_of`; empty if no two of them are ranks."""
    devices = peek(path, METRICS, scan=scan, **_scan_options(options))
    return devices if sum(device.is_rank for device in devices) > 1 else ()


def _scan_options(options: TraceOptions) -> dict[str, Any]:
    """Return the options of scanning a file."""
    return {"allow_truncated": options.allow_truncated, "marks": options.iterations.regex}


def _selection(options: TraceOptions, *, on_host: bool) -> Selection:
    """Return what to read of a run with or without an accelerator."""
    if options.whole:
        return EVERYTHING
    return ON_HOST if on_host else METRICS


def _several(devices: Sequence[ProcessDevice], apart: str) -> str:
    """Return the warning about a file among others that has the work of several devices."""
    names = ", ".join(str(device) for device in devices)
    if not all(device.is_told for device in devices):
        return (
            f"the file has the work of {len(devices)} devices ({names}), and which process "
            "launched which work is not recorded, so that times of its device are n/a"
        )
    return (
        f"the file has the work of {len(devices)} devices ({names}), so that times of its "
        f"device are n/a. {apart}"
    )


def _merged(events: Events) -> str | None:
    """Return the warning about a file that has several devices as one; None if it has not."""
    kernels = events.rows("kernel")
    if doubles := assembly.doubled_work(events, kernels):
        return (
            f"{doubles} of {len(kernels)} kernels are twice in the file, as where the trace of "
            "a rank was joined with itself: times of the device are n/a. Give fastcomm the "
            "trace of each rank once"
        )
    merged, count = assembly.merged_work(events, kernels)
    if not merged:
        return None
    return (
        f"{merged} of {count} kernels begin while another one of their stream runs, as where "
        "traces of several devices are merged whose processes, devices and streams have equal "
        "numbers: times of the device are n/a. Give fastcomm the trace of each rank instead"
    )


def _merged_by_marks(events: Events, lanes: pa.Table) -> str | None:
    """Return the warning about a file that has several processes as one; None if it has not.

    A process has one step of a number at a time, but for threads that launch nothing.
    """
    marks = events.rows_named(lambda name: _STEP.match(name) is not None, "annotation")
    latest = np.maximum.accumulate(events.stop[marks])
    if (events.start[marks[1:]] >= latest[:-1]).all():  # no two are open at once
        return None
    marks = without_idle_threads(events, marks, (PROFILER_STEP,))
    process = lanes["process"].combine_chunks().dictionary_encode().indices.to_numpy()
    process, name = process[events.lane[marks]], events.name[marks]
    order = np.lexsort((events.start[marks], process, name))
    marks, process, name = marks[order], process[order], name[order]
    is_open = (process[1:] == process[:-1]) & (name[1:] == name[:-1])
    is_open &= events.start[marks[1:]] < events.stop[marks[:-1]]
    count = int(np.count_nonzero(is_open))
    if _OFTEN * count < len(marks) or not count:
        return None
    return (
        f"{count} of {len(marks)} marks of steps begin while another one of their number and "
        "process is open, as where traces of several processes with equal numbers are merged: "
        "times of the device are n/a. Give fastcomm the trace of each rank instead"
    )


def _gpu(devices: object) -> str | None:
    """Return the name that all devices of a file have; None without one."""
    devices = devices if isinstance(devices, list) else []
    return gpu_name([device.get("name") for device in devices if isinstance(device, dict)])


def _stated(
    path: Path, info: Mapping[str, Any], rank: int | None
) -> tuple[int | None, int | None]:
    """Return the rank and the world size that a file states; None if it does not.

    Raises TraceFileError if they are invalid, or the rank is not the expected one.
    """
    if isinstance(stated := info.get("rank"), int) and stated < 0:
        raise TraceFileError(
            f"{path}: distributedInfo says rank {stated}; expected a number from 0 on. Correct "
            "it, or remove it to take the rank from the name of the file"
        )
    own, world = (info[key] if is_count(info.get(key)) else None for key in RANK_KEYS)
    for value, name in ((own, "rank"), (world, "world size")):
        check_count(value or 0, path, name)
    if own is not None and rank is not None and own != rank:
        raise TraceFileError(
            f"{path}: distributedInfo says rank {own}, but the file stands for rank {rank}"
        )
    return own, world


def is_count(value: object) -> bool:
    """Return whether a JSON value is a non-negative integer, as ranks and world sizes are."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def events_of(
    scanned: Scanned,
) -> tuple[Events, pa.Table, tuple[int, str | None], list[str]]:
    """Return the events sorted by start, their lanes, base and clock, and warnings."""
    columns = scanned.columns
    start = columns["start"]
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        columns = {name: column.take(order) for name, column in columns.items()}
    lane, lanes = _lanes(columns, scanned.texts)
    base, clock, notes = _base(columns["start"], columns["stop"], scanned.envelope)
    columns["start"] += base
    columns["stop"] += base
    columns |= {name: columns[key] for key, name in ARG_NAMES.items() if key in columns}
    if "position" in columns:  # all events were read
        columns |= _operands(columns, scanned.details)
    events = Events(
        **{name: columns.pop(name) for name in _EVENT},
        lane=lane,
        texts=scanned.texts,
        more=columns,
        details=scanned.details,
    )
    return events, lanes, (base, clock), notes


def _operands(columns: dict[str, Any], details: Mapping[str, Ints]) -> dict[str, Ints]:
    """Return the codes of the texts of operators' inputs by column; NULL without any."""
    is_operator = np.isin(columns["kind"], (KIND["cpu_op"], KIND["host_work"]))
    place = np.where(is_operator, columns["detail"], np.int32(NONE))
    return {name: details[key][place] for key, name in OPERAND_NAMES.items() if key in details}


def _base(
    start: Ints, stop: Ints, envelope: Mapping[str, Any]
) -> tuple[int, str | None, list[str]]:
    """Return the ns to add to the times, the resulting clock (None: unknown), and warnings."""
    base = envelope.get("baseTimeNanoseconds")
    if isinstance(base, int):
        least, most = (int(start[0]), int(stop.max())) if len(start) else (0, 0)
        if base + least >= -_LATEST and base + most <= _LATEST:
            return base, "unix", []
        return 0, None, ["baseTimeNanoseconds is no valid time: absolute times are unknown"]
    if not len(start) or int(start[-1]) >= _ABSOLUTE:
        return 0, "unix", []
    return 0, None, ["no baseTimeNanoseconds: the absolute time of the events is unknown"]


def _lanes(columns: dict[str, Any], texts: Sequence[str]) -> tuple[NDArray[np.int32], pa.Table]:
    """Return the index of the thread or stream of each event, and the table of all of them.

    The table has process, thread and device, in the order of their first events. `texts` are
    the names to which codes of processes and threads refer.
    """
    is_device = is_on_device(columns)
    process, thread = columns.pop("process"), columns.pop("thread")
    first, lane = first_seen(process, thread, is_device)

    device = columns["device"][first]
    device = np.where(is_device[first] & (device == NULL), process[first], device)
    no_device = ~is_device[first] | (device < 0) | (device > _MOST_DEVICES)
    lanes = pa.table(
        {
            "process": pa.array(_lane_names(process[first], texts), pa.string()),
            "thread": pa.array(_lane_names(thread[first], texts), pa.string()),
            "device": pa.array(device, mask=no_device),
            "is_device": is_device[first],
        }
    )
    return lane.astype(np.int32), lanes


def _lane_names(column: Ints, texts: Sequence[str]) -> pa.Array | list[str]:
    """Return processes or threads as texts: a number, a name from the trace, or ""."""
    if (column > TEXT_LANE).all():  # avoids millions of Python objects
        return pa.array(column).cast(pa.string())
    return [
        "" if value == NULL else texts[TEXT_LANE - value] if value <= TEXT_LANE else str(value)
        for value in column.tolist()
    ]


class ShapedCall(NamedTuple):
    """One operator: shapes and types of its inputs, and the values of scalars."""

    name: str
    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...]
    seconds: float  # of the kernels that it launched


def calls(path: Path, names: tuple[str, ...]) -> list[ShapedCall]:
    """Return the operators with the given names that have shapes and launched kernels.

    Raises `TraceFileError` if the file is not a trace.
    """
    scanned, _ = scan(path, _SHAPES)
    events = events_of(scanned)[0]
    ops = events.rows_named(names.__contains__, "cpu_op")
    spent = _spent(events, ops)
    ops, spent = ops[spent > 0], spent[spent > 0]
    texts = (map(events.text, events.detail(name, ops).tolist()) for name in _ARGS)
    args = zip(*texts, strict=True)
    shaped = map(_shaped_call, events.names(ops), args, (spent * 1e-9).tolist())
    return [call for call in shaped if call]


def _spent(events: Events, ops: Ints) -> Ints:
    """Return the ns of the kernels of each operator: the innermost around their launches.

    If a launch's thread has no operators, as with ids of another kind, all threads count.
    """
    kernels = events.rows("kernel")
    launches = events.launch_of(kernels)
    op = events.enclosing(ops, launches)
    is_elsewhere = (launches >= 0) & ~np.isin(events.lane[launches], events.lane[ops])
    on_one_lane = replace(events, lane=np.zeros_like(events.lane))
    op[is_elsewhere] = on_one_lane.enclosing(ops, launches[is_elsewhere])
    duration = events.stop[kernels] - events.start[kernels]
    return sums(op, duration, len(events) + 1)[ops]  # kernels of no operator are at NONE


def _shaped_call(name: str, texts: tuple[str | None, ...], seconds: float) -> ShapedCall | None:
    """Return a call, from the texts of its args; None if they have no shapes or types.

    `seconds` is the time of the kernels that it launched.
    """
    args = [json_list(text or "") for text in texts]
    if args[0] is None or args[1] is None:
        return None
    dims = tuple(tuple(shape) if _is_shape(shape) else () for shape in args[0])
    types, values = (tuple(str(value) for value in arg or ()) for arg in args[1:])
    return ShapedCall(name, dims, types, values, seconds)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(length, int) for length in value)
