"""One nsys export as tables of our columns: SQLite file, parquetdir or arrowdir."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm import arrow_files, files
from fastcomm.errors import TraceFileError
from fastcomm.readers.nsys import layout, sqlite
from fastcomm.readers.nsys.layout import BLOB, INTEGER, SUFFIXES, TEXT
from fastcomm_kernels.arrays import NULL, Ints


class Folder:
    """The tables of one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        self._files = {file.stem: file for file in files}
        kinds = {file.suffix for file in files}
        if len(kinds) > 1:
            raise TraceFileError(f"{path}: files of two exports, {' and '.join(sorted(kinds))}")
        self.kind = "parquetdir" if ".parquet" in kinds else "arrowdir"

    def columns(self) -> dict[str, tuple[str, ...]]:
        """The columns of every table."""
        return {table: _names_of(file) for table, file in self._files.items()}

    def read(
        self,
        table: str,
        types: Mapping[str, str],
        where: Iterable[str] = (),
        *,
        distinct: bool = False,
    ) -> dict[str, pa.ChunkedArray]:
        """Columns of a table; null is the least integer, and the empty text or blob.

        `where` and `distinct` are wishes that only a database fulfils.
        """
        found = _table_of(self._files[table], list(types))
        return {
            name: self._typed(found[name], type_, f"{table}.{name}")
            for name, type_ in types.items()
        }

    def _typed(self, column: pa.ChunkedArray, type_: str, place: str) -> pa.ChunkedArray:
        if not _fits(column.type, type_):
            raise TraceFileError(
                f"{self.path}: {place} holds values of type {column.type}, wanted {type_}"
            )
        if type_ == INTEGER:
            return pc.fill_null(_signed(column), NULL)
        return pc.fill_null(column.cast(pa.string() if type_ == TEXT else pa.binary()), "")


def _names_of(file: Path) -> tuple[str, ...]:
    with _errors_of(file):
        if file.suffix == ".parquet":
            return tuple(arrow_files.names(file))
        files.check(file)
        with files.opened(file) as stream, pa.ipc.open_stream(stream) as reader:
            return tuple(reader.schema.names)


def _table_of(file: Path, columns: Sequence[str]) -> pa.Table:
    with _errors_of(file):
        if file.suffix == ".parquet":
            return arrow_files.read(file, columns, utf8=False)
        table = _stream(file, columns)
        # A stream is taken as it is: what it says of its buffers has to be checked.
        for column in table.columns:
            for chunk in column.chunks:
                arrow_files.as_bytes(chunk).validate(full=True)
        return table


def _stream(file: Path, columns: Sequence[str]) -> pa.Table:
    """Columns of an Arrow stream.

    It is read, not mapped: a file that somebody cuts would end a program that has it mapped.
    """
    size, made = file.stat().st_size, 0
    limits = files.Limits.of_environment()
    files.check(file)
    with files.opened(file) as stream:
        arrow_files.inflated(stream, lambda inflated: limits.check(inflated, size, file))
    with files.opened(file) as stream, pa.ipc.open_stream(stream) as reader:
        schema, batches = reader.schema, []
        for batch in reader:
            batches.append(batch.select(columns))
            made += batches[-1].nbytes
            limits.check(made, size, file)
    wanted = pa.schema([schema.field(name) for name in columns])
    return pa.Table.from_batches(batches, wanted)


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise TraceFileError(f"{file}: {error}") from error


def _fits(found: pa.DataType, wanted: str) -> bool:
    if pa.types.is_null(found):
        return True
    if wanted == INTEGER:
        return bool(pa.types.is_integer(found) or pa.types.is_boolean(found))
    if wanted == BLOB:
        # Exports of 2026 label blobs as text.
        return bool(pa.types.is_binary(found) or pa.types.is_string(found))
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


def _signed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """int64; what is above keeps its bits, as in SQLite."""
    if column.type == pa.uint64():
        return pa.chunked_array([chunk.view(pa.int64()) for chunk in column.chunks], pa.int64())
    return column.cast(pa.int64())


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


class ExportRows:
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

    def where(self, kept: NDArray[np.bool_]) -> "ExportRows":
        """Only the rows of which `kept` is true."""
        if kept.all():
            return self
        mask = pa.array(kept)
        return ExportRows(
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
        self._tables: _Tables = Folder(path) if path.is_dir() else sqlite.Database(path)
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
    ) -> ExportRows:
        """Columns of a table, of one process (`g >> 24`) where that is given.

        `where` are conditions in SQL that spare a database rows which the caller drops anyway.
        Raises `TraceFileError` where the table lacks a required column or a type is strange.
        """
        if not self.has(table):
            return ExportRows(0, {})
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
        rows = ExportRows(count, found)
        if owner is not None and owner in present:
            rows = rows.where(rows[owner] >> layout.THREAD_BITS == process)
        if table in layout.SPANS:
            self._check_spans(table, rows)
        return rows

    def _check_spans(self, table: str, rows: ExportRows) -> None:
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
