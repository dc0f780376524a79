"""Communication events of whole ranks, in memory or in files, with their rates."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from fastcomm.trace.columns import filled
from fastcomm.trace.schema import ENDS_TOGETHER, OPS, numbers
from fastcomm_kernels.arrays import NULL, Floats, Ints

CELLS = 256  # of known groups; one more has the events of no known group, see `cut`
_SHIFT = 64 - CELLS.bit_length() + 1
_ROWS = 131_072  # of cells that are read at once, where more than one are

_ORDERED_BY = ("rank", "op", "stream", "group_size", "start_ns", "duration_ns")

Cells = range
ALL = Cells(CELLS + 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows by cell, those of a cell by rank and then in the order of the rank."""

    where: pa.Table | Path  # the file has one batch
    rows: tuple[int, ...]  # of each cell
    ops: tuple[int, ...]  # that there are
    ranks: tuple[int, int]  # the lowest and the highest; (0, -1) without rows
    ungrouped: int = 0  # collectives of no known group, which come first in the last cell


def cell_of(group: Ints) -> Ints:
    """The cell of each group's label; a label is a hash, so that cells are about alike."""
    return (group >> _SHIFT) + CELLS // 2


def cut(events: pa.Table) -> Piece:
    """Cut rows, which are sorted by rank, into cells.

    The last cell begins with collectives that may be matched though no group is known, sorted
    by rank, stream and end.
    """
    known = events["group"].is_valid().to_numpy()
    cell = np.where(known, cell_of(filled(events["group"], 0)), CELLS)
    order = np.argsort(cell.astype(np.int16), kind="stable")
    begin = int(known.sum())
    order[begin:], ungrouped = _ungrouped_first(events, order[begin:])
    # Rows are taken from whole columns: from many pieces it takes several times as long.
    whole = events.append_column("place", pa.array(np.arange(len(cell)))).combine_chunks()
    return Piece(
        where=whole.take(pa.array(order)),
        rows=tuple(np.bincount(cell, minlength=len(ALL)).tolist()),
        ops=tuple(np.flatnonzero(np.bincount(events["op"].to_numpy())).tolist()),
        ranks=tuple(events["rank"].take([0, len(cell) - 1]).to_pylist())
        if len(cell)
        else (0, -1),
        ungrouped=ungrouped,
    )


def _ungrouped_first(events: pa.Table, rows: Ints) -> tuple[Ints, int]:
    """Rows of no known group: first collectives, by rank, stream and end; and how many."""
    if not len(rows):
        return rows, 0
    own = events.select(_ORDERED_BY).take(pa.array(rows))
    rank, op = own["rank"].to_numpy(), own["op"].to_numpy()
    start, stream, size = (filled(own[name]) for name in ("start_ns", "stream", "group_size"))
    others = ~np.isin(op, numbers(ENDS_TOGETHER)) | (start == NULL) | (size == 1)
    stop = start + own["duration_ns"].to_numpy()
    keys = [np.where(others, 0, each) for each in (start, stop, stream)]
    return rows[np.lexsort((*keys, rank, others))], int((~others).sum())


def put_away(events: pa.Table, path: Path) -> Piece:
    """Write rows that are by rank to a file. Raises OSError."""
    piece = cut(events)
    write(piece.where, path)
    return replace(piece, where=path)


def write(table: pa.Table, path: Path) -> None:
    """Write a table that `columns` reads. Raises OSError."""
    with pa.OSFile(os.fsencode(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table.combine_chunks())


def columns(where: pa.Table | Path, names: Sequence[str]) -> pa.Table:
    """Some columns of a piece, in its order: views of the file while they are used."""
    if isinstance(where, pa.Table):
        return where.select(names)
    with pa.memory_map(os.fsencode(where)) as source:
        return pa.ipc.open_file(source).read_all().select(names)


def read(pieces: Sequence[Piece], cells: Cells, names: Sequence[str]) -> pa.Table:
    """Some columns of the rows of some cells: those of a group by rank, and in its order."""
    found = []
    for piece in sorted(pieces, key=lambda piece: piece.ranks):
        begin, count = sum(piece.rows[: cells.start]), sum(piece.rows[cells.start : cells.stop])
        if count:
            found.append(_copied(columns(piece.where, names).slice(begin, count)))
    table = pa.concat_tables(found or [columns(pieces[0].where, names)[:0]]).combine_chunks()
    return table if _are_in_order(pieces) else _by_rank(table)


def read_ungrouped(piece: Piece, names: Sequence[str], rows: Ints | None = None) -> pa.Table:
    """Some columns of the collectives of no known group: all of them, or some by place."""
    begin = sum(piece.rows[:CELLS])
    if rows is None:
        return _copied(columns(piece.where, names).slice(begin, piece.ungrouped))
    return columns(piece.where, names).take(pa.array(begin + rows)).combine_chunks()


def _copied(table: pa.Table) -> pa.Table:
    """The same in memory: a view would keep its file mapped, and far more than its rows."""
    return pa.concat_tables([table, table.schema.empty_table()]).combine_chunks()


def _are_in_order(pieces: Sequence[Piece]) -> bool:
    """Whether no piece has ranks between those of another."""
    ranks = sorted(piece.ranks for piece in pieces if any(piece.rows))
    return all(high < low for (_, high), (low, _) in pairwise(ranks))


def _by_rank(table: pa.Table) -> pa.Table:
    return table.take(pa.array(np.argsort(table["rank"].to_numpy(), kind="stable")))


def whole(pieces: Sequence[Piece], names: Sequence[str]) -> pa.Table:
    """All rows, by rank and in the order of the rank, as they were before they were cut."""
    table = read(pieces, ALL, [*names, "place"])
    order = np.lexsort((table["place"].to_numpy(), table["rank"].to_numpy()))
    return table.take(pa.array(order)).select(names)


def shares(pieces: Sequence[Piece]) -> list[Cells]:
    """All cells of known groups, as many at a time as are read at once."""
    rows = np.sum([piece.rows for piece in pieces], axis=0).tolist()
    found, begin, held = [], 0, 0
    for cell in range(CELLS):
        if held and held + rows[cell] > _ROWS:
            found.append(Cells(begin, cell))
            begin, held = cell, 0
        held += rows[cell]
    return [*found, Cells(begin, CELLS)]


NS = 1e9  # of a second
_POWERS = 64  # of two that an int64 may hold

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
    """Bytes per second; NaN where bytes are NULL, or time did not pass."""
    known = (count != NULL) & (duration > 0)
    found = np.full(len(count), np.nan)
    found[known] = count[known] / duration[known] * NS
    return found


def p95(pieces: Sequence[Piece], tag: int) -> float:
    """The 95th percentile of the rates of a tag's events, by NumPy's linear rule; NaN: none."""
    parts = []
    for piece in pieces:
        table = columns(piece.where, ("tag", "duration_ns", "bytes"))
        own = table["tag"].to_numpy() == tag
        found = rate(filled(table["bytes"])[own], table["duration_ns"].to_numpy()[own])
        parts.append(found[~np.isnan(found)])
    rates = np.concatenate(parts)
    return float(np.percentile(rates, 95, overwrite_input=True)) if len(rates) else np.nan


def of_op(pieces: Sequence[Piece], op: int) -> pa.Table:
    """One row a group size and power of two of the size: events, median bus rate.

    `size_from` is the power of two; the sizes reach up to the next. Events of unknown size or
    without a duration are left out; a bus bandwidth that no event tells is null.
    """
    parts = [_of_op(piece, op) for piece in pieces]
    key, bus_rate = (np.concatenate(each) for each in zip(*parts, strict=True))
    # One key after another: of millions of events little more is held than rate and key.
    keys, count = np.unique(key, return_counts=True)
    median = np.array([_median(bus_rate[key == each]) for each in keys], np.float64)
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
    """Of those that are known; NaN where none is."""
    known = rates[~np.isnan(rates)]
    return float(np.percentile(known, 50, overwrite_input=True)) if len(known) else np.nan


def _of_op(piece: Piece, op: int) -> tuple[Ints, Floats]:
    """Of the events of an operation: a number for group size and power; the bus rate."""
    table = columns(piece.where, ("op", "group_size", "duration_ns", "bytes", "bus_bytes"))
    duration, size = table["duration_ns"].to_numpy(), filled(table["bytes"])
    chosen = (table["op"].to_numpy() == op) & (size != NULL) & (duration > 0)
    power = np.frexp(np.maximum(size[chosen], 1).astype(np.float64))[1] - 1
    members = np.maximum(filled(table["group_size"])[chosen], -1)
    key = (members + 1) * _POWERS + power
    return key, rate(filled(table["bus_bytes"])[chosen], duration[chosen])
