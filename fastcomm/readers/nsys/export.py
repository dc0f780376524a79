"""One export as tables of our columns: what kind of file it is does not matter past here."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers.nsys import folders, layout, sqlite
from fastcomm_kernels.json_numbers import NULL

Ints = NDArray[np.int64]


class _Tables(Protocol):
    path: Path
    kind: str

    def columns(self) -> dict[str, tuple[str, ...]]: ...

    def read(
        self,
        table: str,
        types: dict[str, str],
        where: Iterable[str] = (),
        *,
        distinct: bool = False,
    ) -> dict[str, pa.ChunkedArray]: ...


class Rows:
    """Some columns of some rows of a table; a column that the file lacks is null throughout."""

    def __init__(self, count: int, columns: dict[str, pa.ChunkedArray]) -> None:
        self.count = count
        self._columns = columns

    def __getitem__(self, name: str) -> Ints:
        """A column of integers; NULL is null."""
        if name not in self._columns:
            return np.full(self.count, NULL, np.int64)
        whole: Ints = self._columns[name].to_numpy()
        return whole

    def texts(self, name: str) -> pa.ChunkedArray:
        """A column of texts or blobs; the empty one is null."""
        if name not in self._columns:
            return pa.chunked_array([pa.array([""] * self.count, pa.string())])
        return _readable(self._columns[name])

    def has(self, name: str) -> bool:
        """Whether the file has the column."""
        return name in self._columns

    def where(self, kept: NDArray[np.bool_]) -> "Rows":
        """Only the rows of which `kept` is true."""
        if kept.all():
            return self
        mask = pa.array(kept)
        return Rows(
            int(kept.sum()), {name: each.filter(mask) for name, each in self._columns.items()}
        )


def _readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with what is no UTF-8 replaced."""
    if column.type != pa.string():
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        texts = column.cast(pa.binary()).to_pylist()
        return pa.chunked_array([[text.decode(errors="replace") for text in texts]])
    return column


class Export:
    """An opened export. Nothing is kept open between two reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tables: _Tables = folders.Folder(path) if path.is_dir() else sqlite.Database(path)
        self.kind = self._tables.kind
        self._columns = self._tables.columns()

    def has(self, table: str) -> bool:
        """Whether the table is there; an absent one has no rows."""
        return table in self._columns

    def has_column(self, table: str, column: str) -> bool:
        """Whether the table is there and has the column."""
        return column in self._columns.get(table, ())

    @property
    def tables(self) -> str:
        """The names of the tables, for a message."""
        return ", ".join(sorted(self._columns)[:8]) or "none"

    @property
    def is_strange(self) -> bool:
        """Whether no table of an export is there at all."""
        known = (layout.EXPORT, layout.STRINGS, layout.NVTX, *layout.DEVICE_WORK)
        return not any(self.has(table) for table in known)

    def rows(
        self,
        table: str,
        columns: Iterable[str],
        *,
        process: int | None = None,
        where: Iterable[str] = (),
    ) -> Rows:
        """Columns of a table, of one process (`g >> 24`) where that is given.

        `where` are conditions in SQL that spare a database rows which the caller drops anyway.
        Raises `TraceFileError` where the table lacks a required column or a type is strange.
        """
        if not self.has(table):
            return Rows(0, {})
        present = self._columns[table]
        required = layout.REQUIRED.get(table, ())
        if missing := [name for name in required if name not in present]:
            raise TraceFileError(
                f"{self.path}: table {table} has no column {', '.join(missing)}: a version of "
                f"the export that fastcomm does not know; found {', '.join(present)}"
            )
        owner = layout.PROCESS_COLUMN.get(table) if process is not None else None
        wanted = dict.fromkeys((*columns, *([owner] if owner else [])))
        types = {
            name: layout.TYPES.get(name, layout.INTEGER) for name in wanted if name in present
        }
        where = list(where)
        if owner in present:
            where.append(f'"{owner}" >> {layout.THREAD_BITS} = {process}')
        found = self._tables.read(table, types, where)
        count = len(next(iter(found.values()))) if found else 0
        rows = Rows(count, found)
        if owner is not None and owner in present:
            rows = rows.where(rows[owner] >> layout.THREAD_BITS == process)
        if table in layout.SPANS:
            self._check_spans(table, rows)
        return rows

    def _check_spans(self, table: str, rows: Rows) -> None:
        """TraceFileError where a row has no time, or one that cannot be."""
        for name in ("start", "end"):
            if rows.has(name) and (absent := int((rows[name] == NULL).sum())):
                raise TraceFileError(
                    f"{self.path}: {table}.{name}: {absent} rows without a value"
                )
        start, end = rows["start"], rows["end"]
        strange = np.flatnonzero((end < start) | (np.abs(start) > _LATEST) | (end > _LATEST))
        if rows.has("end") and len(strange):
            first = strange[0]
            raise TraceFileError(
                f"{self.path}: {table}: {len(strange)} rows whose times cannot be; the first "
                f"has start = {start[first]}, end = {end[first]}"
            )

    def processes(self, table: str) -> set[int | None]:
        """The processes (`g >> 24`) that have rows in a table; None: rows name no process."""
        column = layout.PROCESS_COLUMN[table]
        if not self.has_column(table, column):
            return set()
        owner = self._tables.read(table, {column: layout.INTEGER}, distinct=True)[column]
        values = owner.unique().to_pylist()
        return {None if each == NULL else each >> layout.THREAD_BITS for each in values}

    def strings(self, ids: Ints) -> dict[int, str]:
        """The texts of these ids; only those that kept rows refer to are ever read."""
        wanted = np.unique(ids[ids != NULL])
        if not len(wanted):
            return {}
        found: dict[int, str] = {}
        for condition in _id_conditions(wanted):
            rows = self.rows(layout.STRINGS, ("id", "value"), where=[condition])
            kept = rows.where(np.isin(rows["id"], wanted))
            texts = kept.texts("value").to_pylist()
            found |= dict(zip(kept["id"].tolist(), texts, strict=True))
            if self.kind != "sqlite":
                break
        return found

    def ids_of(self, glob: str, prefix: str) -> Ints:
        """Ids of the strings that begin with `prefix`; `glob` says the same to a database."""
        rows = self.rows(layout.STRINGS, ("id", "value"), where=[f"value GLOB '{glob}'"])
        kept = pa.compute.starts_with(rows.texts("value"), prefix)
        ids: Ints = rows["id"][kept.to_numpy()]
        return ids


_MOST_IDS = 20_000
# ns: some 73 years, or as long since 1970.
_LATEST = 1 << 61


def _id_conditions(ids: Ints) -> Iterable[str]:
    for start in range(0, len(ids), _MOST_IDS):
        part = ids[start : start + _MOST_IDS].tolist()
        yield f"id IN ({', '.join(map(str, part))})"
