"""Communication events of ranks, in memory or in spill files, divided into cells; and rates.

A *cell* holds the events of some process groups, all events of each, so that groups can be
processed a few at a time. Events of unknown groups are in the last cell.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from fastcomm.trace.columns import filled
from fastcomm.trace.schema import ENDS_TOGETHER, OPS
from fastcomm_kernels.arrays import NULL, Floats, Ints

CELLS = 256  # of known groups; one more cell has the events of unknown groups, see `cut`
_SHIFT = 64 - CELLS.bit_length() + 1
_ROWS = 131_072  # read at once, unless a single cell has more

_SORT_COLUMNS = ("rank", "op", "stream", "group_size", "start_ns", "duration_ns")

Cells = range
ALL = Cells(CELLS + 1)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of some ranks, sorted by cell, then by rank, then as in the rank's table."""

    where: pa.Table | Path  # columns of `traffic.rows` and `place`; the file has one batch
    rows: tuple[int, ...]  # number of rows per cell
    ops: tuple[int, ...]  # operations that occur
    ranks: tuple[int, int]  # lowest and highest; (0, -1) without rows
    ungrouped: int = 0  # number of collectives of unknown groups; they start the last cell


def cell_of(group: Ints) -> Ints:
    """Return the cell of each group hash, 0 to `CELLS` - 1; cells have similar sizes."""
    return (group >> _SHIFT) + CELLS // 2


def cut(events: pa.Table) -> EventBatch:
    """Divide the communication events of some ranks into cells.

    Parameters
    ----------
    events
        Table of `traffic.rows`, sorted by rank.

    Returns
    -------
    EventBatch
        In memory. The last cell begins with the collectives of unknown groups that can be
        matched, sorted by rank, stream and end.

    """
    has_group = events["group"].is_valid().to_numpy()
    cell = np.where(has_group, cell_of(filled(events["group"], 0)), CELLS)
    order = np.argsort(cell.astype(np.int16), kind="stable")
    begin = int(has_group.sum())
    order[begin:], ungrouped = _ungrouped_first(events, order[begin:])
    # Taking rows from chunked columns would be several times slower.
    whole = events.append_column("place", pa.array(np.arange(len(cell)))).combine_chunks()
    return EventBatch(
        where=whole.take(pa.array(order)),
        rows=tuple(np.bincount(cell, minlength=len(ALL)).tolist()),
        ops=tuple(np.flatnonzero(np.bincount(events["op"].to_numpy())).tolist()),
        ranks=tuple(events["rank"].take([0, len(cell) - 1]).to_pylist())
        if len(cell)
        else (0, -1),
        ungrouped=ungrouped,
    )


def _ungrouped_first(events: pa.Table, rows: Ints) -> tuple[Ints, int]:
    """Put collectives before other rows, sorted by rank, stream and end; and count them."""
    if not len(rows):
        return rows, 0
    own = events.select(_SORT_COLUMNS).take(pa.array(rows))
    rank, op = own["rank"].to_numpy(), own["op"].to_numpy()
    start, stream, size = (filled(own[name]) for name in ("start_ns", "stream", "group_size"))
    others = ~np.isin(op, ENDS_TOGETHER) | (start == NULL) | (size == 1)
    stop = start + own["duration_ns"].to_numpy()
    keys = [np.where(others, 0, column) for column in (start, stop, stream)]
    return rows[np.lexsort((*keys, rank, others))], int((~others).sum())


def spill(events: pa.Table, path: Path) -> EventBatch:
    """Write events to a spill file, and return the batch that names it.

    Parameters
    ----------
    events
        Communication events, sorted by rank.
    path
        New file.

    Raises
    ------
    OSError
        The file cannot be written.

    """
    batch = cut(events)
    write(batch.where, path)
    return replace(batch, where=path)


def write(table: pa.Table, path: Path) -> None:
    """Write a table to an Arrow file as one batch, for `columns`. Raises OSError."""
    with pa.OSFile(os.fsencode(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table.combine_chunks())


def columns(where: pa.Table | Path, names: Sequence[str]) -> pa.Table:
    """Return some columns of a table or of a file of `write`, in the order of `names`.

    Those of a file are views of its memory map. Raises OSError.
    """
    if isinstance(where, pa.Table):
        return where.select(names)
    # A file is opened many times, and handing one batch to a thread takes longer than this.
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.memory_map(os.fsencode(where)) as source:
        return pa.ipc.open_file(source, options=options).read_all().select(names)


def read(batches: Sequence[EventBatch], cells: Cells, names: Sequence[str]) -> pa.Table:
    """Return columns of the events in some cells, sorted by rank, then as in the rank's table.

    Parameters
    ----------
    batches
        At least one.
    cells
        Range of cells; `ALL` for all.
    names
        Columns.

    """
    tables = []
    for batch in sorted(batches, key=lambda batch: batch.ranks):
        begin, count = sum(batch.rows[: cells.start]), sum(batch.rows[cells.start : cells.stop])
        if count:
            tables.append(_copied(columns(batch.where, names).slice(begin, count)))
    table = pa.concat_tables(tables or [columns(batches[0].where, names)[:0]]).combine_chunks()
    return table if _are_in_order(batches) else _by_rank(table)


def read_ungrouped(
    batch: EventBatch, names: Sequence[str], rows: Ints | None = None
) -> pa.Table:
    """Return columns of a batch's collectives of unknown groups.

    Parameters
    ----------
    batch
        Events in memory or in a spill file.
    names
        Names of the columns.
    rows
        Indices of the collectives, among those of unknown groups; by default all.

    """
    begin = sum(batch.rows[:CELLS])
    if rows is None:
        return _copied(columns(batch.where, names).slice(begin, batch.ungrouped))
    return columns(batch.where, names).take(pa.array(begin + rows)).combine_chunks()


def _copied(table: pa.Table) -> pa.Table:
    """Return a copy: a view would keep the whole file mapped."""
    return pa.concat_tables([table, table.schema.empty_table()]).combine_chunks()


def _are_in_order(batches: Sequence[EventBatch]) -> bool:
    """Whether the ranges of ranks of the batches do not overlap."""
    ranks = sorted(batch.ranks for batch in batches if any(batch.rows))
    return all(high < low for (_, high), (low, _) in pairwise(ranks))


def _by_rank(table: pa.Table) -> pa.Table:
    return table.take(pa.array(np.argsort(table["rank"].to_numpy(), kind="stable")))


def all_events(batches: Sequence[EventBatch], names: Sequence[str]) -> pa.Table:
    """Return columns of all events of all batches, sorted by rank and then as in its trace.

    Those of spill files are in memory maps of sorted files beside these, which may be deleted.
    """
    if not _are_in_order(batches):
        return _sorted(batches, names)
    ordered = sorted(batches, key=lambda batch: batch.ranks)
    return pa.concat_tables(_sorted_piece(batch, names) for batch in ordered)


def _sorted_piece(batch: EventBatch, names: Sequence[str]) -> pa.Table:
    """Return columns of the events of a batch as in their traces."""
    table = _sorted([batch], names)
    # A file that is mapped cannot be deleted on other systems.
    if isinstance(batch.where, pa.Table) or os.name != "posix":
        return table
    path = batch.where.with_name(f"{batch.where.name}.sorted")
    write(table, path)
    return columns(path, names)


def _sorted(batches: Sequence[EventBatch], names: Sequence[str]) -> pa.Table:
    table = read(batches, ALL, [*names, "place"])
    order = np.lexsort((table["place"].to_numpy(), table["rank"].to_numpy()))
    return table.take(pa.array(order)).select(names)


def shares(batches: Sequence[EventBatch]) -> list[Cells]:
    """Divide the cells of known groups into ranges, each small enough to read at once."""
    rows = np.sum([batch.rows for batch in batches], axis=0).tolist()
    ranges, begin, count = [], 0, 0
    for cell in range(CELLS):
        if count and count + rows[cell] > _ROWS:
            ranges.append(Cells(begin, cell))
            begin, count = cell, 0
        count += rows[cell]
    return [*ranges, Cells(begin, CELLS)]


NS = 1e9  # of a second
_POWERS = 64  # of two in an int64

COLLECTIVES = pa.schema(
    [
        ("op", pa.string()),
        ("group_size", pa.int64()),
        ("size_from", pa.int64()),
        ("count", pa.int64()),
        ("p50_bus_bw", pa.float64()),
    ]
)


def rate(count: Ints, duration: Ints) -> Floats:
    """Return bytes per second; NaN where bytes are NULL, or the duration is 0.

    Parameters
    ----------
    count
        Bytes.
    duration
        Time in ns.

    """
    is_known = (count != NULL) & (duration > 0)
    rates = np.full(len(count), np.nan)
    rates[is_known] = count[is_known] / duration[is_known] * NS
    return rates


def p95(batches: Sequence[EventBatch], tag: int) -> float:
    """Return the 95th percentile of a tag's bytes/s (linear interpolation); NaN without any.

    `tag` is an index into TAGS. Events without duration or of unknown size are left out.
    """
    parts = []
    for batch in batches:
        table = columns(batch.where, ("tag", "duration_ns", "bytes"))
        own = table["tag"].to_numpy() == tag
        known_rates = rate(filled(table["bytes"])[own], table["duration_ns"].to_numpy()[own])
        parts.append(known_rates[~np.isnan(known_rates)])
    rates = np.concatenate(parts)
    return float(np.percentile(rates, 95, overwrite_input=True)) if len(rates) else np.nan


def collective_rates(batches: Sequence[EventBatch], op: int) -> pa.Table:
    """Return the bus bandwidth of an operation, by group size and message size.

    Events without duration or of unknown size are left out.

    Returns
    -------
    pyarrow.Table
        Schema `COLLECTIVES`: a row per group size and power of two. `size_from` is the power,
        in bytes; sizes are below the next power. `p50_bus_bw` is the median in bytes per
        second, null if unknown.

    """
    parts = [_size_rates(batch, op) for batch in batches]
    key, bus_rate = (np.concatenate(values) for values in zip(*parts, strict=True))
    # One key at a time, to save memory.
    keys, count = np.unique(key, return_counts=True)
    median = np.array([_median(bus_rate[key == number]) for number in keys], np.float64)
    size, power = np.divmod(keys.astype(np.int64), _POWERS)
    return pa.table(
        {
            "op": [OPS[op]] * len(size),
            "group_size": pa.array(size - 1, mask=size == 0),
            "size_from": np.left_shift(1, power),
            "count": count,
            "p50_bus_bw": pa.array(median, mask=np.isnan(median)),
        },
        schema=COLLECTIVES,
    )


def _median(rates: Floats) -> float:
    """Return the median of the known rates; NaN without any."""
    values = rates[~np.isnan(rates)]
    return float(np.percentile(values, 50, overwrite_input=True)) if len(values) else np.nan


def _size_rates(batch: EventBatch, op: int) -> tuple[Ints, Floats]:
    """Return a key of group size and power of two of the bytes, and bus bytes/s, per event."""
    table = columns(batch.where, ("op", "group_size", "duration_ns", "bytes", "bus_bytes"))
    duration, size = table["duration_ns"].to_numpy(), filled(table["bytes"])
    chosen = (table["op"].to_numpy() == op) & (size != NULL) & (duration > 0)
    power = np.frexp(np.maximum(size[chosen], 1).astype(np.float64))[1] - 1
    members = np.maximum(filled(table["group_size"])[chosen], -1)
    key = (members + 1) * _POWERS + power
    return key, rate(filled(table["bus_bytes"])[chosen], duration[chosen])
