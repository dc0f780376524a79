"""Read the rows of one process as events: device work, launches, and waits of the host.

Times are ns of the file; NULL stands for an unknown number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.formats.nsys import schema
from fastcomm.formats.nsys.export import Export, ExportRows, Points
from fastcomm.formats.nsys.nvtx import Ranges
from fastcomm.formats.sources import is_for_others
from fastcomm.trace.columns import lookup
from fastcomm.trace.events import Events
from fastcomm.trace.schema import KIND, WHOLE_GRAPH
from fastcomm_kernels.arrays import NULL, Ints

_SYNC = ("start", "end", "deviceId", "streamId", "correlationId", "syncType", *schema.EVENT_IDS)
_RECORD = ("streamId", "correlationId", *schema.EVENT_IDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRows:
    """Rows of the synchronization table, and the event record that each waits for."""

    rows: ExportRows
    columns: dict[str, Ints]  # "wait_stream" and "wait_correlation" of `schema.ARGS`

    @property
    def kind(self) -> Ints:
        """The kind of each wait, a key of `schema.SYNCS`."""
        return self.rows["syncType"]


def read_waits(export: Export, process: int) -> WaitRows:
    """Read the synchronizations of a process, each with the event record that it waits for.

    That is the last record of its CUDA event before it; without one, the columns are NULL.
    `process` is the number of a process in the export (`globalPid >> 24`).

    Raises `TraceFileError` if a table lacks a required column or has impossible times.
    """
    rows = export.rows(schema.SYNC, _SYNC, process=process)
    records = export.rows(schema.CUDA_EVENT, _RECORD, process=process)
    record = _record_of(rows, records)
    columns = {
        name: np.where(record >= 0, np.append(records[column], NULL)[record], NULL)
        for name, column in (("wait_stream", "streamId"), ("wait_correlation", "correlationId"))
    }
    return WaitRows(rows=rows, columns=columns)


def _record_of(waits: ExportRows, records: ExportRows) -> Ints:
    """Return the row of the record that each wait is for, or -1.

    A CUDA event is recorded repeatedly: newer exports number the recordings (`eventSyncId`),
    and calls are numbered in order (`correlationId`).
    """
    result = np.full(waits.count, -1, np.int64)
    if not records.count:
        return result
    keys = [np.concatenate([records[name], waits[name]]) for name in schema.EVENT_IDS]
    call = np.concatenate([records["correlationId"], waits["correlationId"]])
    is_wait = np.arange(len(call)) >= records.count
    order = np.lexsort((is_wait, call, *keys))
    is_record = ~is_wait[order]
    last = np.maximum.accumulate(np.where(is_record, np.arange(len(order)), -1))
    candidate = order[last]
    same = last >= 0
    for key in keys:
        same &= key[candidate] == key[order]
    kinds = np.isin(waits["syncType"], schema.WAITS_FOR_EVENT)
    row = order[is_wait[order]] - records.count
    chosen = np.where(same, candidate, -1)[is_wait[order]]
    result[row] = np.where(kinds[row], chosen, -1)
    return result


_DEVICE = ("start", "end", "deviceId", "streamId", "correlationId", "graphNodeId")
_COLUMNS = ("start", "stop", "stream", "device", "thread", "correlation", "bytes", "node")
_WAITS = ("wait_stream", "wait_correlation")
# The version that ends the name of a call: cudaLaunchKernel_v7000.
_VERSION = r"_v\d+(?:_ptsz|_ptds)?$"


@dataclass(slots=True)
class _Parts:
    """Columns of event rows of several kinds, concatenated into one table at the end."""

    columns: dict[str, list[NDArray[Any]]] = field(
        default_factory=lambda: {
            name: [] for name in (*_COLUMNS, *_WAITS, "kind", "name", "lane_kind")
        }
    )
    texts: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def add(self, kind: str, names: pa.DictionaryArray, **columns: NDArray[Any]) -> None:
        """Append rows of a kind; columns that are not passed are NULL."""
        rows = len(names)
        self.count += rows
        for name in (*_COLUMNS, *_WAITS):
            self.columns[name].append(columns.get(name, np.broadcast_to(np.int64(NULL), rows)))
        self.columns["kind"].append(np.full(rows, KIND[kind], np.int8))
        self.columns["lane_kind"].append(columns.get("lane_kind", np.zeros(rows, np.int8)))
        texts = names.dictionary.to_pylist()
        codes = [self.texts.setdefault(text, len(self.texts)) for text in texts]
        index = names.indices.to_numpy(zero_copy_only=False)
        self.columns["name"].append(np.array([*codes, 0], np.int32)[index])

    def sorted_columns(self) -> dict[str, Ints]:
        """Return the columns of all rows, sorted by start; frees the parts one by one."""
        order = np.argsort(np.concatenate(self.columns["start"]), kind="stable")
        names = list(self.columns)
        return {name: np.concatenate(self.columns.pop(name))[order] for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvents:
    """All events of a process, sorted by start, with columns that only nsys exports have."""

    events: Events
    lanes: pa.Table
    thread: Ints  # globalTid of events on the host, else NULL
    node: Ints  # CUDA graph node that launched a kernel, else NULL


def read_events(
    export: Export,
    process: int,
    ranges: Ranges,
    *,
    device: int | None = None,
    whole: bool,
) -> ProcessEvents:
    """Read the events of a process.

    Parameters
    ----------
    export, process
        The export, and the process (`g >> 24`).
    ranges
        NVTX ranges of the process, which become annotations and operators.
    device
        The device whose work is read, and no launches of others; None reads all.
    whole
        Whether to read waits as well, which no metric needs.

    Raises
    ------
    TraceFileError
        If a table lacks a required column or has impossible times.

    """
    parts = _Parts()
    _add_kernels(parts, export, process)
    _add_copies(parts, export, process)
    _add_graphs(parts, export, process)
    _add_runtime(parts, export, process)
    _add_ranges(parts, ranges, "annotation", ~ranges.is_operator)
    _add_ranges(parts, ranges, "cpu_op", ranges.is_operator)
    if whole:
        waits = read_waits(export, process)
        kind = _labels(waits.kind, schema.SYNCS, "Sync")
        parts.add("sync", kind, **_device(waits.rows), **waits.columns)
    columns: dict[str, Any] = parts.sorted_columns()
    if device is not None:
        columns = _of_device(columns, device)
    lane, lanes = _lanes(columns)
    count = len(lane)
    thread, node = columns.pop("thread"), columns.pop("node")
    columns |= {
        "offset": np.full(count, NULL, np.int64),
        "detail": np.full(count, -1, np.int32),
    }
    events = Events(
        **{name: columns.pop(name) for name in _EVENT},
        lane=lane,
        texts=list(parts.texts),
        more=columns,
    )
    return ProcessEvents(events=events, lanes=lanes, thread=thread, node=node)


def _of_device(columns: Mapping[str, Ints], device: int) -> dict[str, Ints]:
    """Return the events of a device and the host, but not the calls for other devices."""
    is_own, is_on_host = columns["device"] == device, columns["device"] == NULL
    strange = is_for_others(columns, is_own, ~is_own & ~is_on_host)
    selected = is_own | (is_on_host & ~strange)
    return {name: column[selected] for name, column in columns.items()}


_EVENT = ("start", "stop", "kind", "name", "correlation")
# The kinds of lanes that rows are on.
_LANE_KINDS = _DEVICE_LANE, _HOST_LANE, _START_END_LANE = 0, 1, 2


def _add_kernels(parts: _Parts, export: Export, process: int) -> None:
    """Add the kernels of a process, by demangled name, or by short name without one."""
    columns = (*_DEVICE, "demangledName", "shortName")
    rows = export.rows(schema.KERNEL, columns, process=process)
    name = np.where(rows["demangledName"] == NULL, rows["shortName"], rows["demangledName"])
    parts.add("kernel", _named(export, name), **_device(rows))


def _add_copies(parts: _Parts, export: Export, process: int) -> None:
    """Add the copies and memsets of a process."""
    columns = (*_DEVICE, "bytes", "copyKind", *schema.COPY_ENDS)
    rows = export.rows(schema.MEMCPY, columns, process=process)
    source, target = (rows[name] for name in schema.COPY_ENDS)
    is_between = (source != target) & (source != NULL) & (target != NULL)
    is_between &= rows["copyKind"] == schema.ON_DEVICE
    kind = np.where(is_between, schema.BETWEEN_DEVICES, rows["copyKind"])
    names = _labels(kind, schema.COPIES, "Memcpy")
    parts.add("memcpy", names, **_device(rows), bytes=rows["bytes"])
    rows = export.rows(schema.MEMSET, (*_DEVICE, "bytes"), process=process)
    names = _labels(np.zeros(rows.count, np.int64), {0: "Memset (Device)"}, "Memset")
    parts.add("memset", names, **_device(rows), bytes=rows["bytes"])


def _add_graphs(parts: _Parts, export: Export, process: int) -> None:
    """Add launches of whole graphs, whose kernels the capture left out."""
    rows = export.rows(schema.GRAPH, (*_DEVICE, "graphExecId"), process=process)
    names = _labels(np.zeros(rows.count, np.int64), {0: WHOLE_GRAPH}, WHOLE_GRAPH)
    parts.add("kernel", names, **_device(rows))


_UNKNOWN, _MISSING = "unknown", "string"
_NO_NAME = re.compile(rf"{_UNKNOWN}|{_MISSING} -?\d+")


def set_aside_unnamed(events: Events) -> tuple[int, float]:
    """Make kernels without a name neither compute nor communication, in place.

    Returns
    -------
    int
        Number of such kernels.
    float
        Their share of the time of all kernels.

    """
    start, stop = events.start, events.stop
    unnamed = events.rows_named(lambda name: _NO_NAME.fullmatch(name) is not None, "kernel")
    if not len(unnamed):
        return 0, 0.0
    kernels = events.rows("kernel")
    own, whole = (
        float((stop[rows] - start[rows]).sum(dtype=np.float64)) for rows in (unnamed, kernels)
    )
    share = 1.0 if len(unnamed) == len(kernels) else own / (whole or 1.0)
    events.kind[unnamed] = KIND["other"]
    return len(unnamed), share


def _add_runtime(parts: _Parts, export: Export, process: int) -> None:
    """Add the CUDA calls of a process, with names without a version suffix."""
    columns = ("start", "end", "globalTid", "correlationId", "nameId")
    rows = export.rows(schema.RUNTIME, columns, process=process)
    names = _named(export, rows["nameId"])
    cut = pc.replace_substring_regex(names.dictionary, _VERSION, "")
    parts.add(
        "runtime",
        pa.DictionaryArray.from_arrays(names.indices, cut),
        start=rows["start"],
        stop=rows["end"],
        thread=rows["globalTid"],
        correlation=rows["correlationId"],
        lane_kind=np.full(rows.count, _HOST_LANE, np.int8),
    )


def _add_ranges(parts: _Parts, ranges: Ranges, kind: str, chosen: NDArray[np.bool_]) -> None:
    """Add the NVTX ranges that the mask `chosen` selects, as events of a kind."""
    lanes = np.where(ranges.kind == schema.START_END, _START_END_LANE, _HOST_LANE)
    parts.add(
        kind,
        ranges.name.filter(pa.array(chosen)),
        start=ranges.start[chosen],
        stop=ranges.stop[chosen],
        thread=ranges.thread[chosen],
        lane_kind=lanes.astype(np.int8)[chosen],
    )


def _device(rows: ExportRows) -> dict[str, Ints]:
    """Return the columns that all device rows share; the stream is NULL for all streams."""
    stream = rows["streamId"]
    return {
        "start": rows["start"],
        "stop": rows["end"],
        "device": rows["deviceId"],
        "stream": np.where(stream == schema.ALL_STREAMS, NULL, stream),
        "correlation": rows["correlationId"],
        "node": rows["graphNodeId"],
    }


def _named(export: Export, ids: Ints) -> pa.DictionaryArray:
    """Return the strings with the ids; a missing one is named by its id."""
    encoded = pa.array(ids).dictionary_encode()
    different = encoded.dictionary.to_numpy()
    strings = export.strings(different)
    texts = [
        strings.get(key) or (_UNKNOWN if key == NULL else f"{_MISSING} {key}")
        for key in different.tolist()
    ]
    return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(texts, pa.string()))


def _labels(keys: Ints, names: dict[int, str], other: str) -> pa.DictionaryArray:
    """Return the label of each key; an unknown key is labeled `other` and its number."""
    encoded = pa.array(keys).dictionary_encode()
    labels = [names.get(key, f"{other} {key}") for key in encoded.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(labels, pa.string()))


def _lanes(columns: dict[str, Ints]) -> tuple[NDArray[np.int32], pa.Table]:
    """Return the lane of each event, and the lanes in the order of their first events."""
    kind, thread = columns.pop("lane_kind"), columns["thread"]
    stream = np.where(columns["stream"] == NULL, -1, columns["stream"])
    device = (columns["device"] << _STREAM_BITS) + stream + 1
    key = np.where(kind == _DEVICE_LANE, device, thread) * len(_LANE_KINDS) + kind
    encoded = pa.array(key).dictionary_encode()
    lane = encoded.indices.to_numpy()
    rows = [_lane(value) for value in encoded.dictionary.to_pylist()]
    return lane.astype(np.int32), pa.Table.from_pylist(rows, _LANES)


_STREAM_BITS = 33
_LANES = pa.schema(
    {
        "process": pa.string(),
        "thread": pa.string(),
        "device": pa.int32(),
        "is_device": pa.bool_(),
    }
)


def _lane(key: int) -> dict[str, Any]:
    """Return one row of the lane table."""
    place, kind = divmod(key, len(_LANE_KINDS))
    if kind == _DEVICE_LANE:
        device, stream = place >> _STREAM_BITS, (place & ((1 << _STREAM_BITS) - 1)) - 1
        thread = str(stream) if stream >= 0 else "all"
        return {"process": str(device), "thread": thread, "device": device, "is_device": True}
    thread = str(place & ((1 << schema.THREAD_BITS) - 1))
    if kind == _START_END_LANE:
        thread += " (ranges that start and end anywhere)"
    process = str(schema.process_of(place >> schema.THREAD_BITS))
    return {"process": process, "thread": thread, "device": None, "is_device": False}


_DEEPEST = 16  # levels of copies of a graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Creations(Points):
    """Where and when the nodes of CUDA graphs were created, sorted by node."""

    node: Ints

    def find(self, nodes: Ints) -> Ints:
        """Return the row of the creation of each graph node, or -1; `nodes` are their ids."""
        return lookup(self.node, nodes)


def read_creations(export: Export, process: int) -> Creations:
    """Read where the graph nodes of a process were created.

    A node of a copied graph has the creation of the original node.
    """
    table = schema.NODES if export.has(schema.NODES) else schema.OLD_NODES
    columns = ("start", "end", "globalTid", "graphNodeId", "originalGraphNodeId")
    if not export.has_column(table, "graphNodeId"):
        table = ""
    rows = export.rows(table, columns, process=process)
    order = np.argsort(rows["graphNodeId"], kind="stable")
    created = Creations(
        node=rows["graphNodeId"],
        thread=rows["globalTid"],
        start=rows["start"],
        stop=np.where(rows["end"] == NULL, rows["start"], rows["end"]),
    ).at(order)
    source = _originals(created.node, rows["originalGraphNodeId"][order])
    return replace(created.at(source), node=created.node)


def _originals(node: Ints, original: Ints) -> Ints:
    """Return, for each node, the row of the node that it was first copied from."""
    row = np.arange(len(node))
    for _ in range(_DEEPEST if len(node) else 0):
        copied = lookup(node, original[row])
        if (copied < 0).all():
            break
        row = np.where(copied >= 0, copied, row)
    return row
