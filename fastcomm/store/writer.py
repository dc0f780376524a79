"""Write one rank's trace as one Parquet file, with a fingerprint of its source."""

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

from fastcomm import arrow_files, inputs
from fastcomm.errors import SchemaError, TraceFileError
from fastcomm.inputs import is_local
from fastcomm.outputs import aside
from fastcomm.store import layout
from fastcomm.store.layout import Fingerprint
from fastcomm.trace.schema import KIND, KINDS, OPS, PARTNERS, TAG_SOURCES, TAGS
from fastcomm.trace.trace import Trace

_ENDS = 1 << 16  # bytes


def fingerprint(path: Path) -> Fingerprint:
    """The fingerprint of a file, or of a directory by the files in it."""
    try:
        if path.is_dir():
            return _of_directory(path)
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


def _of_directory(path: Path) -> Fingerprint:
    if is_local(path):
        below = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    else:
        below = [file for file in path.rglob("*") if file.is_file()]
    files = sorted(below)
    seen = [(str(file.relative_to(path)), file.stat()) for file in files]
    text = repr([(name, status.st_size, status.st_mtime_ns) for name, status in seen])
    return Fingerprint(
        size=sum(status.st_size for _, status in seen),
        mtime_ns=max((status.st_mtime_ns for _, status in seen), default=0),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


Rows = NDArray[np.int64]

_COMM_WORDS = {"op": OPS, "tag": TAGS, "tag_source": TAG_SOURCES}
_LANE_COLUMNS = ("process", "thread", "device", "is_device")


def write(trace: Trace, path: Path, provenance: Mapping[str, Any]) -> None:
    """Write the trace, aside and renamed when it is whole.

    `provenance` is kept with it as JSON: where it comes from, and how it was read.
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
    for rows in sections:
        for first in range(0, len(rows), layout.ROW_GROUP):
            yield rows[first : first + layout.ROW_GROUP]


def _compact(table: pa.Table) -> pa.Table:
    """The table with the words that it uses: a row group has its own dictionary."""
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
    return arrow_files.writer(
        path,
        schema,
        compression=packed,
        compression_level={
            leaf: layout.LEVEL for leaf, kind in packed.items() if kind == layout.COMPRESSION
        },
        use_dictionary=[name for name in schema.names if name not in growing],
        column_encoding=dict.fromkeys(growing, "DELTA_BINARY_PACKED"),
        write_statistics=list(layout.CHOSEN_BY),
        write_page_checksum=True,
        # What a reader needs stands in Parquet's own schema; Arrow's takes kilobytes a file.
        store_schema=False,
    )


def _leaf(field: pa.Field) -> str:
    """The name that Parquet has for what a column holds."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)


def _ordered(trace: Trace) -> pa.Table:
    """The communication in the order of its events; SchemaError where two are one event."""
    event = trace.comm["event"].to_numpy()
    comm = trace.comm
    if (event[1:] < event[:-1]).any():
        comm = comm.take(pa.array(np.argsort(event, kind="stable")))
        event = comm["event"].to_numpy()
    if (event[1:] == event[:-1]).any():
        raise SchemaError("comm.event: two rows of one event, wanted one")
    times = trace.events.select(["start", "stop"]).take(comm["event"].combine_chunks())
    if not times.equals(comm.select(["start", "stop"])):
        raise SchemaError("comm: start and stop differ from those of its events")
    return comm


def _sections(trace: Trace, comm: pa.Table) -> list[Rows]:
    """The rows of each section, by start."""
    section_of = np.empty(len(KINDS), np.int8)
    for place, kinds in enumerate(layout.SECTIONS.values()):
        section_of[[KIND[kind] for kind in kinds]] = place
    section = section_of[trace.events["kind"].to_numpy()]
    section[comm["event"].to_numpy()] = 0
    return [np.flatnonzero(section == place) for place in range(len(layout.SECTIONS))]


def _table(trace: Trace, comm: pa.Table) -> pa.Table:
    """All columns of the file, rows as in the trace."""
    events, rows = trace.events, trace.events.num_rows
    lane = events["lane"].combine_chunks()
    at = np.full(rows, -1, np.int64)
    at[comm["event"].to_numpy()] = np.arange(comm.num_rows)
    place = pa.array(at, mask=at < 0)
    columns = {
        **{layout.EVENT_NAMES.get(name, name): events[name] for name in events.column_names},
        **{name: trace.lanes[name].combine_chunks().take(lane) for name in _LANE_COLUMNS},
        **{
            layout.COMM_NAMES.get(name, name): _words(comm, name).take(place)
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


def _words(comm: pa.Table, name: str) -> pa.Array:
    """A column of the communication, numbers that stand for words as these."""
    if name in _COMM_WORDS:
        return _dictionary(comm[name].to_numpy(), _COMM_WORDS[name])
    return comm[name].combine_chunks()


def _dictionary(codes: NDArray[np.int8], words: tuple[str, ...]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(codes.astype(np.int32), pa.array(words))


def _device_iterations(trace: Trace) -> dict[str, Any] | None:
    table = trace.device_iterations
    return None if table is None else table.to_pydict()


def _meta(trace: Trace) -> dict[str, Any]:
    """What is known of the rank, but for the path, which the provenance has."""
    return {name: value for name, value in asdict(trace.meta).items() if name != "path"}
