"""Write one rank's trace as one Parquet file, and the tables of the whole run.

A file has a fingerprint of its source; `StoredRank` has what these tables need of a rank.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fastcomm import arrow_files, files
from fastcomm.errors import SchemaError, TraceFileError, utf8
from fastcomm.files import aside, is_local
from fastcomm.formats.store import layout, reader
from fastcomm.formats.store.files import footer_sha256, table_file
from fastcomm.formats.store.layout import (
    COMPRESSION,
    ClockNote,
    Entry,
    Fingerprint,
    TableFile,
    file_name,
    table_name,
)
from fastcomm.ranks import clocks
from fastcomm.trace.columns import filled
from fastcomm.trace.parallelisms import TAG, TAGS
from fastcomm.trace.schema import KIND, KINDS, OPS, PARTNERS, TAG_SOURCES
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NONE, Ints

_ENDS = 1 << 16  # bytes of the beginning and of the end that are hashed


def fingerprint(path: Path) -> Fingerprint:
    """Return the fingerprint of a file, or of the files in a directory.

    Raises `TraceFileError` if the path cannot be read.
    """
    try:
        if path.is_dir():
            return _directory_fingerprint(path)
        status = path.stat()
        with files.opened(path) as file:
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
    table = stored_rows(trace, comm)
    about = {
        "layout": layout.LAYOUT,
        **provenance,
        # The path is in the provenance.
        "meta": {name: own for name, own in asdict(trace.meta).items() if name != "path"},
        **layout.of_trace(trace),
        "events": trace.events.num_rows,
        "whole": trace.is_whole,
        "partners": any(comm[name].null_count < comm.num_rows for name in PARTNERS),
        "row_groups": [-(-len(rows) // layout.ROW_GROUP) for rows in sections],
    }
    with aside(path) as unfinished, _writer(unfinished, table.schema) as writer:
        writer.add_key_value_metadata({layout.ABOUT: json.dumps(about).encode()})
        for part in _parts(sections):
            writer.write_table(_compact(table.take(pa.array(part))))


def _parts(sections: list[Ints]) -> Iterator[Ints]:
    """Yield the rows of each row group."""
    for rows in sections:
        for first in range(0, len(rows), layout.ROW_GROUP):
            yield rows[first : first + layout.ROW_GROUP]


def _compact(table: pa.Table) -> pa.Table:
    """Return a table whose dictionary columns have no entry that no row uses.

    A row group of Parquet has a dictionary of its own, which otherwise would hold all texts.
    """
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            column = table[field.name].combine_chunks()
            codes = column.indices.unique().drop_null().sort()
            indices = pc.index_in(column.indices, codes)
            used = pa.DictionaryArray.from_arrays(indices, column.dictionary.take(codes))
            table = table.set_column(place, field, used)
    return table


def _writer(path: Path, schema: pa.Schema) -> AbstractContextManager[pq.ParquetWriter]:
    """Open a Parquet file for writing, with the encodings and compression of a store."""
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
        write_statistics=list(layout.FILTER_COLUMNS),
        write_page_checksum=True,
        # Parquet's own schema suffices; Arrow's takes kilobytes per file.
        store_schema=False,
    )


def _leaf(field: pa.Field) -> str:
    """Return the path in Parquet's schema of the values of a column or a list column."""
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


def _sections(trace: Trace, comm: pa.Table) -> list[Ints]:
    """Return the rows of each section, by start."""
    section_of = np.empty(len(KINDS), np.int8)
    for place, kinds in enumerate(layout.SECTIONS.values()):
        section_of[[KIND[kind] for kind in kinds]] = place
    section = section_of[trace.events["kind"].to_numpy()]
    section[comm["event"].to_numpy()] = 0
    return [np.flatnonzero(section == place) for place in range(len(layout.SECTIONS))]


def stored_rows(trace: Trace, ordered: pa.Table | None = None) -> pa.Table:
    """Return all columns of the file of a trace, with a row per event by start.

    Parameters
    ----------
    trace
        The trace, with all columns of events and communication.
    ordered
        Its communication sorted by event; None sorts it.

    Raises
    ------
    SchemaError
        If the communication does not fit the events.

    """
    comm = _ordered(trace) if ordered is None else ordered
    events, rows = trace.events, trace.events.num_rows
    lane = events["lane"].combine_chunks()
    index = np.full(rows, NONE, np.int64)
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
        **{name: trace.arguments[name] for name in trace.arguments.column_names},
        "kind": _dictionary(events["kind"].to_numpy(), KINDS),
        "rank": pa.array(np.full(rows, trace.meta.rank, np.int32)),
        "event": pa.array(np.arange(rows, dtype=np.int32)),
    }
    schema = layout.stored_columns(trace.arguments.schema)
    return pa.table([columns[name] for name in schema.names], schema.names).cast(schema)


def _texts(comm: pa.Table, name: str) -> pa.Array:
    """Return a column of the communication, with texts for codes."""
    if name in _COMM_TEXTS:
        return _dictionary(comm[name].to_numpy(), _COMM_TEXTS[name])
    return comm[name].combine_chunks()


def _dictionary(codes: NDArray[np.int8], texts: tuple[str, ...]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(codes.astype(np.int32), pa.array(texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRank:
    """One rank of a store, with its rows of the tables of the whole run."""

    entry: Entry
    world_size: int | None
    unused: tuple[str, ...]  # rules and options without effect, and why
    fresh: bool  # whether it was written now, not by an earlier ingest
    groups: pa.Table
    iterations: pa.Table
    ends: pa.Table  # `clocks.ENDS`

    @classmethod
    def of(cls, trace: Trace, folder: Path) -> Self:
        """Describe a rank whose file is in the store."""
        path = folder / file_name(trace.meta.rank)
        about = reader.about(path)
        meta = trace.meta
        entry = Entry(
            **rank_facts(trace),
            file=path.name,
            size=path.stat().st_size,
            source=about["source"],
            fingerprint=Fingerprint(**about["fingerprint"]),
            footer=footer_sha256(path),
        )
        return cls(
            entry=entry,
            world_size=meta.world_size,
            unused=meta.unused,
            fresh=meta.path != str(path),
            groups=group_table(trace),
            iterations=with_rank(trace.iterations, meta.rank),
            ends=clocks.ends(trace),
        )


def rank_facts(trace: Trace) -> dict[str, Any]:
    """Return what an `Entry` says of a trace, by the names of its fields; times in ns."""
    events, comm, meta = trace.events, trace.comm, trace.meta
    return {
        "rank": meta.rank,
        "format": meta.format,
        "clock": meta.clock,
        "events": events.num_rows,
        "start": pc.min(events["start"]).as_py(),
        "stop": pc.max(events["stop"]).as_py(),
        "found_by": meta.found_by,
        "iterations": trace.iterations.num_rows,
        "communication": comm.num_rows,
        "without_bytes": comm["payload_bytes"].null_count,
        "untagged": int((comm["tag"].to_numpy() == TAG["OTHER"]).sum()),
        "warnings": meta.warnings,
        "missing_data": meta.missing_data,
    }


def write_tables(
    folder: Path, parts: Sequence[StoredRank], notes: Mapping[int, ClockNote]
) -> tuple[TableFile, ...]:
    """Write the tables of the whole run, and return the size and hash of each.

    Parameters
    ----------
    folder
        The store.
    parts
        Ranks, sorted.
    notes
        Evidence about clocks, by rank.

    """
    tables = {
        "ranks": _ranks([part.entry for part in parts], notes),
        "groups": pa.concat_tables([part.groups for part in parts]),
        "iterations": pa.concat_tables([part.iterations for part in parts]),
    }
    for name, table in tables.items():
        with aside(folder / table_name(name)) as path:
            arrow_files.write(table, path, compression=COMPRESSION, store_schema=False)
    return tuple(table_file(folder, name) for name in tables)


def _ranks(entries: Sequence[Entry], notes: Mapping[int, ClockNote]) -> pa.Table:
    """Return the table of ranks."""
    rows = []
    for entry in entries:
        row = {name: getattr(entry, name, None) for name in _RANKS.names}
        if note := notes.get(entry.rank):
            row |= {f"clock_{name}": value for name, value in asdict(note).items()}
            row["clock_correction_ns"] = note.offset_ns if note.applies else 0
        rows.append({name: utf8(v) if isinstance(v, str) else v for name, v in row.items()})
    return pa.Table.from_pylist(rows, schema=_RANKS)


_RANKS = pa.schema(
    [
        *[("rank", pa.int32()), ("file", pa.string())],
        *[(name, pa.int64()) for name in ("events", "start", "stop", "iterations")],
        *[("format", pa.string()), ("clock", pa.string())],
        ("clock_offset_ns", pa.int64()),
        ("clock_spread_ns", pa.int64()),
        ("clock_matches", pa.int64()),
        ("clock_reference", pa.int32()),
        ("clock_correction_ns", pa.int64()),
    ]
)


def group_table(trace: Trace) -> pa.Table:
    """Return the groups of a rank, with texts for tags and the number of their events."""
    groups, comm = trace.groups, trace.comm
    used = filled(comm["group"], -1)
    candidates = [
        "/".join(TAGS[tag] for tag in fits or ()) for fits in groups["candidates"].to_pylist()
    ]
    table = pa.table(
        {
            "group_id": pa.array(np.arange(groups.num_rows, dtype=np.int32)),
            "name": groups["name"],
            "description": groups["description"],
            "ranks": groups["ranks"],
            "size": groups["size"],
            "tag": pa.array([TAGS[tag] for tag in groups["tag"].to_pylist()], pa.string()),
            "tag_source": pa.array(
                [TAG_SOURCES[code] for code in groups["tag_source"].to_pylist()], pa.string()
            ),
            "candidates": pa.array(candidates, pa.string()),
            "events": pa.array(np.bincount(used[used >= 0], minlength=groups.num_rows)),
        }
    )
    return with_rank(table, trace.meta.rank)


def with_rank(table: pa.Table, rank: int) -> pa.Table:
    """Return a table with the rank as its first column."""
    column = pa.array(np.full(table.num_rows, rank, np.int32))
    return table.add_column(0, "rank", column)
