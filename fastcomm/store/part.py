"""What the tables of the whole run need of one rank, and these tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import arrow_files
from fastcomm.exchange import clocks
from fastcomm.inert import utf8
from fastcomm.outputs import aside
from fastcomm.store import reader
from fastcomm.store.files import footer_sha256, table_file
from fastcomm.store.layout import (
    COMPRESSION,
    ClockNote,
    Entry,
    Fingerprint,
    TableFile,
    file_name,
    table_name,
)
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import TAG, TAG_SOURCES, TAGS
from fastcomm.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRank:
    """One stored rank."""

    entry: Entry
    world_size: int | None
    fresh: bool  # written now, not kept from before
    groups: pa.Table
    iterations: pa.Table
    ends: pa.Table  # `clocks.ENDS`

    @classmethod
    def of(cls, trace: Trace, folder: Path) -> Self:
        """See a rank whose file is in the store."""
        path = folder / file_name(trace.meta.rank)
        said = reader.about(path)
        meta = trace.meta
        entry = Entry(
            rank=meta.rank,
            file=path.name,
            events=said["events"],
            start=pc.min(trace.events["start"]).as_py(),
            stop=pc.max(trace.events["stop"]).as_py(),
            size=path.stat().st_size,
            format=meta.format,
            clock=meta.clock,
            found_by=meta.found_by,
            iterations=trace.iterations.num_rows,
            communication=trace.comm.num_rows,
            without_bytes=without_bytes(trace),
            untagged=untagged(trace),
            warnings=meta.warnings,
            lacks=meta.lacks,
            source=said["source"],
            fingerprint=Fingerprint(**said["fingerprint"]),
            footer=footer_sha256(path),
        )
        return cls(
            entry=entry,
            world_size=meta.world_size,
            fresh=meta.path != str(path),
            groups=group_table(trace),
            iterations=with_rank(trace.iterations, meta.rank),
            ends=clocks.ends(trace),
        )


def without_bytes(trace: Trace) -> int:
    """How many communication events have no known size."""
    return int(trace.comm["payload_bytes"].null_count)


def untagged(trace: Trace) -> int:
    """Of how many communication events no parallelism is known."""
    return int((trace.comm["tag"].to_numpy() == TAG["OTHER"]).sum())


def write_tables(
    folder: Path, parts: Sequence[StoredRank], notes: Mapping[int, ClockNote]
) -> tuple[TableFile, ...]:
    """Write the tables of the whole run and say what was written; parts are sorted by rank."""
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
    column = partial(_column, entries)
    found = [notes.get(entry.rank) for entry in entries]

    def note(name: str, kind: pa.DataType) -> pa.Array:
        return pa.array([each and getattr(each, name) for each in found], kind)

    correction = [each and (each.offset_ns if each.applies else 0) for each in found]
    return pa.table(
        {
            "rank": column("rank", pa.int32()),
            "file": column("file", pa.string()),
            "events": column("events", pa.int64()),
            "start": column("start", pa.int64()),
            "stop": column("stop", pa.int64()),
            "iterations": column("iterations", pa.int64()),
            "format": column("format", pa.string()),
            "clock": column("clock", pa.string()),
            "clock_offset_ns": note("offset_ns", pa.int64()),
            "clock_spread_ns": note("spread_ns", pa.int64()),
            "clock_matches": note("matches", pa.int64()),
            "clock_reference": note("reference", pa.int32()),
            "clock_correction_ns": pa.array(correction, pa.int64()),
        }
    )


def _column(entries: Sequence[Entry], name: str, kind: pa.DataType) -> pa.Array:
    values = [getattr(entry, name) for entry in entries]
    return pa.array([utf8(each) if isinstance(each, str) else each for each in values], kind)


def group_table(trace: Trace) -> pa.Table:
    """The groups that communicated, tags in words, with what they did."""
    groups, comm = trace.groups, trace.comm
    used = filled(comm["group"], -1)
    words = [
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
                [TAG_SOURCES[each] for each in groups["tag_source"].to_pylist()], pa.string()
            ),
            "candidates": pa.array(words, pa.string()),
            "events": pa.array(np.bincount(used[used >= 0], minlength=groups.num_rows)),
        }
    )
    return with_rank(table, trace.meta.rank)


def with_rank(table: pa.Table, rank: int) -> pa.Table:
    """The table with the rank as its first column."""
    column = pa.array(np.full(table.num_rows, rank, np.int32))
    return table.add_column(0, "rank", column)
