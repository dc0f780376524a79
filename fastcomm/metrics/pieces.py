"""Communication events in pieces: each of some whole ranks, in memory or in a file.

Ranks are compared group by group. So a piece is cut by group into cells, the same on all
pieces: who reads one cell of every piece has all events of its groups, and needs no more memory
than that. What thousands of ranks leave is never in memory at once.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.trace.schema import ENDS_TOGETHER, numbers

Ints = NDArray[np.int64]

CELLS = 256  # of known groups; one more has the events of no known group, see `cut`
_SHIFT = 64 - CELLS.bit_length() + 1
_ROWS = 131_072  # of cells that are read at once, where more than one are

_ORDERED_BY = ("rank", "op", "stream", "group_size", "start_ns", "duration_ns")
_NULL = np.iinfo(np.int64).min

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
    cell = np.where(known, cell_of(events["group"].fill_null(0).to_numpy()), CELLS)
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
    start, stream, size = (
        own[name].fill_null(_NULL).to_numpy() for name in ("start_ns", "stream", "group_size")
    )
    others = ~np.isin(op, numbers(ENDS_TOGETHER)) | (start == _NULL) | (size == 1)
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
