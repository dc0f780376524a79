"""Write one rank's trace as one Parquet file, and identify its source by a fingerprint."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fastcomm import inputs, parquet
from fastcomm.errors import SchemaError, TraceFileError
from fastcomm.outputs import aside
from fastcomm.remote import is_local
from fastcomm.store import layout
from fastcomm.store.layout import Fingerprint
from fastcomm.trace.schema import KIND, KINDS, OPS, PARTNERS, TAG_SOURCES, TAGS
from fastcomm.trace.trace import Trace

_ENDS = 1 << 16  # bytes of the beginning and of the end that are hashed


def fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a file, or of the files in a directory.

    Raises `TraceFileError` if the path cannot be read.
    """
    try:
        if path.is_dir():
            return _directory_fingerprint(path)
        status = path.stat()
        with inputs.opened(path) as file:
            text = file.read(_ENDS)
            file.seek(max(len(text), status.st_size - _ENDS))
            text += file.read(_ENDS)
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error
    return Fingerprint(
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        sha256=hashlib.sha256(text).hexdigest(),
    )


def _directory_fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of the names, sizes and times of all files in a directory."""
    if is_local(path):
        below = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    else:
        below = [file for file in path.rglob("*") if file.is_file()]
    states = [(str(file.relative_to(path)), file.stat()) for file in sorted(below)]
    text = repr([(name, status.st_size, status.st_mtime_ns) for name, status in states])
    return Fingerprint(
        size=sum(status.st_size for _, status in states),
        mtime_ns=max((status.st_mtime_ns for _, status in states), default=0),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


Rows = NDArray[np.int64]

_COMM_TEXTS = {"op": OPS, "tag": TAGS, "tag_source": TAG_SOURCES}
_LANE_COLUMNS = ("process", "thread", "device", "is_device")


def write(trace: Trace, path: Path, provenance: Mapping[str, Any]) -> None:
    """Write a trace as the file of a rank, which appears when it is complete.

    Parameters
    ----------
    trace
        The trace.
    path
        The file.
    provenance
        The source of the trace and how it was read, for the metadata of the file.

    Raises
    ------
    SchemaError
        If the communication does not fit the events.

    """
    comm = _ordered(trace)
    sections = _sections(trace, comm)
    table = _table(trace, comm)
    about = {
        "layout": layout.LAYOUT,
        **provenance,
        "meta": _meta(trace),
        **{
            name: getattr(trace, name).to_pydict() for name in ("lanes", "groups", "iterations")
        },
        "device_iterations": _device_iterations(trace),
        "device_notes": trace.device_notes,
        "events": trace.events.num_rows,
        "whole": trace.args is not None,
        "partners": any(comm[name].null_count < comm.num_rows for name in PARTNERS),
        "row_groups": [-(-len(rows) // layout.ROW_GROUP) for rows in sections],
    }
    with aside(path) as unfinished, _writer(unfinished, table.schema) as writer:
        writer.add_key_value_metadata({layout.ABOUT: json.dumps(about).encode()})
        for part in _parts(sections):
            writer.write_table(_compact(table.take(pa.array(part))))


def _parts(sections: list[Rows]) -> Iterator[Rows]:
    """Yield the rows of each row group."""
    for rows in sections:
        for first in range(0, len(rows), layout.ROW_GROUP):
            yield rows[first : first + layout.ROW_GROUP]


def _compact(table: pa.Table) -> pa.Table:
    """Return a table with only the texts that it uses: a row group has its own dictionary."""
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            column = table[field.name].combine_chunks()
            codes = column.indices.unique().drop_null().sort()
            indices = pc.index_in(column.indices, codes)
            used = pa.DictionaryArray.from_arrays(indices, column.dictionary.take(codes))
            table = table.set_column(place, field, used)
    return table


def _writer(path: Path, schema: pa.Schema) -> AbstractContextManager[pq.ParquetWriter]:
    growing = [name for name in schema.names if name in layout.GROWING]
    packed = {
        _leaf(field): "snappy" if field.name in layout.QUICK else layout.COMPRESSION
        for field in schema
    }
    return parquet.writer(
        path,
        schema,
        compression=packed,
        compression_level={
            leaf: layout.LEVEL for leaf, kind in packed.items() if kind == layout.COMPRESSION
        },
        use_dictionary=[name for name in schema.names if name not in growing],
        column_encoding=dict.fromkeys(growing, "DELTA_BINARY_PACKED"),
        write_statistics=list(layout.FILTER_COLUMNS),
        write_page_checksum=True,
        # Parquet's own schema suffices; Arrow's takes kilobytes per file.
        store_schema=False,
    )


def _leaf(field: pa.Field) -> str:
    """Return the name in Parquet of the values of a column."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)


def _ordered(trace: Trace) -> pa.Table:
    """Return the communication by event; SchemaError if two rows are of one event."""
    event = trace.comm["event"].to_numpy()
    comm = trace.comm
    if (event[1:] < event[:-1]).any():
        comm = comm.take(pa.array(np.argsort(event, kind="stable")))
        event = comm["event"].to_numpy()
    if (event[1:] == event[:-1]).any():
        raise SchemaError("comm.event: two rows of one event, expected one")
    times = trace.events.select(["start", "stop"]).take(comm["event"].combine_chunks())
    if not times.equals(comm.select(["start", "stop"])):
        raise SchemaError("comm: start and stop differ from those of its events")
    return comm


def _sections(trace: Trace, comm: pa.Table) -> list[Rows]:
    """Return the rows of each section, by start."""
    section_of = np.empty(len(KINDS), np.int8)
    for place, kinds in enumerate(layout.SECTIONS.values()):
        section_of[[KIND[kind] for kind in kinds]] = place
    section = section_of[trace.events["kind"].to_numpy()]
    section[comm["event"].to_numpy()] = 0
    return [np.flatnonzero(section == place) for place in range(len(layout.SECTIONS))]


def _table(trace: Trace, comm: pa.Table) -> pa.Table:
    """Return all columns of the file, with the rows of the trace."""
    events, rows = trace.events, trace.events.num_rows
    lane = events["lane"].combine_chunks()
    index = np.full(rows, -1, np.int64)
    index[comm["event"].to_numpy()] = np.arange(comm.num_rows)
    place = pa.array(index, mask=index < 0)
    columns = {
        **{layout.EVENT_NAMES.get(name, name): events[name] for name in events.column_names},
        **{name: trace.lanes[name].combine_chunks().take(lane) for name in _LANE_COLUMNS},
        **{
            layout.COMM_NAMES.get(name, name): _texts(comm, name).take(place)
            for name in comm.column_names
            if name not in ("start", "stop", "event")
        },
        **({} if trace.args is None else {n: trace.args[n] for n in trace.args.column_names}),
        "kind": _dictionary(events["kind"].to_numpy(), KINDS),
        "rank": pa.array(np.full(rows, trace.meta.rank, np.int32)),
        "event": pa.array(np.arange(rows, dtype=np.int32)),
    }
    schema = layout.stored_columns(None if trace.args is None else trace.args.schema)
    return pa.table([columns[name] for name in schema.names], schema.names).cast(schema)


def _texts(comm: pa.Table, name: str) -> pa.Array:
    """Return a column of the communication, with texts for codes."""
    if name in _COMM_TEXTS:
        return _dictionary(comm[name].to_numpy(), _COMM_TEXTS[name])
    return comm[name].combine_chunks()


def _dictionary(codes: NDArray[np.int8], texts: tuple[str, ...]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(codes.astype(np.int32), pa.array(texts))


def _device_iterations(trace: Trace) -> dict[str, Any] | None:
    table = trace.device_iterations
    return None if table is None else table.to_pydict()


def _meta(trace: Trace) -> dict[str, Any]:
    """Return the metadata of the trace without its path, which the provenance has."""
    return {name: value for name, value in asdict(trace.meta).items() if name != "path"}
