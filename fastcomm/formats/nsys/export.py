"""Read one export as tables with uniform columns: SQLite file, parquetdir or arrowdir."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm import arrow_files, files
from fastcomm.errors import TraceFileError
from fastcomm.formats.nsys import schema, sqlite
from fastcomm.formats.nsys.schema import BLOB, INTEGER, SUFFIXES, TEXT
from fastcomm.formats.sources import busy
from fastcomm_kernels.arrays import NULL, Ints


class Folder:
    """The tables of a parquetdir or arrowdir."""

    def __init__(self, path: Path) -> None:
        """List the tables of a folder; raise `TraceFileError` if two formats are mixed."""
        self.path = path
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        self._files = {file.stem: file for file in files}
        kinds = {file.suffix for file in files}
        if len(kinds) > 1:
            raise TraceFileError(f"{path}: files of two exports, {' and '.join(sorted(kinds))}")
        self.kind = "parquetdir" if ".parquet" in kinds else "arrowdir"

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return the column names of every table."""
        return {table: _names_of(file) for table, file in self._files.items()}

    def read(
        self,
        table: str,
        types: Mapping[str, str],
        where: Iterable[str] = (),
        *,
        distinct: bool = False,
    ) -> pa.Table:
        """Read columns of a table; conditions are ignored: they only save a database work."""
        del where, distinct
        return _table_of(self._files[table], list(types))


def _names_of(file: Path) -> tuple[str, ...]:
    """Return the column names of a Parquet or Arrow file."""
    with _errors_of(file):
        if file.suffix == ".parquet":
            return tuple(arrow_files.names(file))
        files.check(file)
        with files.opened(file) as stream, pa.ipc.open_stream(stream) as reader:
            return tuple(reader.schema.names)


def _table_of(file: Path, columns: Sequence[str]) -> pa.Table:
    """Read columns of a Parquet or Arrow file; Arrow buffers are validated."""
    with _errors_of(file):
        if file.suffix == ".parquet":
            return arrow_files.read(file, columns, utf8=False)
        table = _stream(file, columns)
        # pyarrow trusts the buffer sizes that a stream states, so they are checked here.
        for column in table.columns:
            for chunk in column.chunks:
                arrow_files.as_bytes(chunk).validate(full=True)
        return table


def _stream(file: Path, columns: Sequence[str]) -> pa.Table:
    """Read columns of an Arrow stream.

    The file is read, not mapped: truncating a mapped file would kill the program.
    """
    size, total = file.stat().st_size, 0
    limits = files.Limits.of_environment()
    files.check(file)
    with files.opened(file) as stream, pa.ipc.open_stream(stream) as reader:
        file_schema, batches = reader.schema, []
        for batch in reader:
            total += batch.nbytes
            limits.check(total, size, file)
            batches.append(batch.select(columns))
    selected = pa.schema([file_schema.field(name) for name in columns])
    return pa.Table.from_batches(batches, selected)


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """Raise errors of reading a file as TraceFileError with its path."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise TraceFileError(f"{file}: {error}") from error


def _fits(actual: pa.DataType, type_: str) -> bool:
    """Return whether a column of the Arrow type can be read as `type_`.

    `type_` is one of the constants INTEGER, TEXT and BLOB.
    """
    if pa.types.is_null(actual):
        return True
    if type_ == INTEGER:
        return bool(pa.types.is_integer(actual) or pa.types.is_boolean(actual))
    if type_ == BLOB:
        # Exports of 2026 label blobs as text.
        return bool(pa.types.is_binary(actual) or pa.types.is_string(actual))
    return bool(pa.types.is_string(actual) or pa.types.is_large_string(actual))


_ARROW = {INTEGER: pa.int64(), TEXT: pa.string(), BLOB: pa.binary()}
_NO_VALUE = {INTEGER: NULL, TEXT: "", BLOB: b""}


def _typed(column: pa.ChunkedArray, type_: str) -> pa.ChunkedArray:
    """Return a column as `type_`; null becomes NULL, or an empty text or blob.

    Integers above those of int64 keep their bits, as in SQLite.
    """
    if type_ == INTEGER and column.type == pa.uint64():
        chunks = [chunk.view(pa.int64()) for chunk in column.chunks]
        column = pa.chunked_array(chunks, pa.int64())
    column = column.cast(_ARROW[type_])
    return pc.fill_null(column, _NO_VALUE[type_]) if column.null_count else column


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayColumns:
    """A dataclass of columns: NumPy arrays with one value per row."""

    def at(self, rows: Ints) -> Self:
        """Return some rows, by number; fields that are not arrays stay as they are."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {name: v[rows] for name, v in values.items() if isinstance(v, np.ndarray)}
        return replace(self, **arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Points(ArrayColumns):
    """Where and when on the host something happened; NULL is unknown."""

    thread: Ints  # globalTid
    start: Ints
    stop: Ints


class ExportRows:
    """Some columns of some rows of a table; a column that the file lacks is null."""

    def __init__(self, count: int, columns: dict[str, pa.ChunkedArray]) -> None:
        self.count = count
        self._columns = columns

    def __getitem__(self, name: str) -> Ints:
        """Return a column of integers; NULL is null."""
        if name not in self._columns:
            return np.full(self.count, NULL, np.int64)
        whole: Ints = self._columns[name].to_numpy()
        return whole

    def texts(self, name: str) -> pa.ChunkedArray:
        """Return a column of texts or blobs; null, or an absent column, is empty texts."""
        if name not in self._columns:
            return pa.chunked_array([pa.array([""] * self.count, pa.string())])
        return _readable(self._columns[name])

    def has(self, name: str) -> bool:
        """Return whether the file has the column."""
        return name in self._columns

    def where(self, mask: NDArray[np.bool_]) -> "ExportRows":
        """Return the rows where the mask, a flag per row, is true."""
        if mask.all():
            return self
        chosen = pa.array(mask)
        columns = {name: column.filter(chosen) for name, column in self._columns.items()}
        return ExportRows(int(mask.sum()), columns)


def _readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of texts with invalid UTF-8 replaced."""
    if column.type != pa.string():
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        texts = column.cast(pa.binary()).to_pylist()
        return pa.chunked_array([[text.decode(errors="replace") for text in texts]])
    return column


class Export:
    """One export: a file or a directory. No file stays open between two reads."""

    def __init__(self, path: Path) -> None:
        """Open a directory of tables or an SQLite file, and read the names of all columns."""
        self.path = path
        self._tables = Folder(path) if path.is_dir() else sqlite.Database(path)
        self.kind = self._tables.kind
        columns = self._tables.columns()
        self._names = self._by_table(columns)
        self._columns = {table: columns[name] for table, name in self._names.items()}
        self._others = sorted(columns.keys() - set(self._names.values()))

    def _by_table(self, columns: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the name of each table in the file.

        Of several versions it is the plain name, else the newest, that has rows.
        """
        names: dict[str, str] = {}
        newest_first = sorted(columns, key=lambda name: (len(name), name), reverse=True)
        for name in sorted(newest_first, key=lambda name: name not in schema.TABLES):
            table = schema.table_of(name)
            if table is not None and (
                table not in names or not self._has_rows(names[table], columns)
            ):
                names[table] = name
        return names

    def _has_rows(self, name: str, columns: Mapping[str, Sequence[str]]) -> bool:
        column = columns[name][0]
        type_ = schema.TYPES.get(column, INTEGER)
        return bool(self._tables.read(name, {column: type_}).num_rows)

    def has(self, table: str) -> bool:
        """Return whether the export has the table; an absent one has no rows."""
        return table in self._columns

    def has_column(self, table: str, column: str) -> bool:
        """Return whether the export has the table, with the column."""
        return column in self._columns.get(table, ())

    @property
    def tables(self) -> str:
        """Names of the first tables, for error messages."""
        return ", ".join(sorted([*self._names.values(), *self._others])[:8]) or "none"

    @property
    def is_foreign(self) -> bool:
        """Whether the file has no table of an Nsight Systems export."""
        expected = (schema.EXPORT, schema.STRINGS, schema.NVTX, *schema.DEVICE_WORK)
        return not any(self.has(table) for table in expected)

    def rows(
        self,
        table: str,
        columns: Iterable[str],
        *,
        process: int | None = None,
        where: Iterable[str] = (),
    ) -> ExportRows:
        """Read columns of a table.

        Parameters
        ----------
        table, columns
            Names of the table and its columns; absent ones are null.
        process
            Process (`g >> 24`) whose rows to return; None returns all.
        where
            SQL conditions that save a database work; a directory ignores them.

        Raises
        ------
        TraceFileError
            If the table lacks a required column, a column has another type, or a row has an
            impossible time.

        """
        if not self.has(table):
            return ExportRows(0, {})
        present = self._columns[table]
        required = schema.REQUIRED.get(table, ())
        if missing := [name for name in required if name not in present]:
            raise TraceFileError(
                f"{self.path}: table {table} has no column {', '.join(missing)}: this "
                f"version of the export is not supported; its columns are {', '.join(present)}"
            )
        owner = schema.PROCESS_COLUMN.get(table) if process is not None else None
        names = dict.fromkeys((*columns, *([owner] if owner else [])))
        types = {name: schema.TYPES.get(name, INTEGER) for name in names if name in present}
        where = list(where)
        if owner in present:
            where.append(f'"{owner}" >> {schema.THREAD_BITS} = {process}')
        rows = self._read(table, types, where)
        if owner is not None and owner in present:
            rows = rows.where(rows[owner] >> schema.THREAD_BITS == process)
        if table in schema.SPANS:
            self.check_spans(table, rows)
        return rows

    def _read(
        self, table: str, types: Mapping[str, str], where: Iterable[str] = (), **options: bool
    ) -> ExportRows:
        """Read columns as their types, without nulls; TraceFileError for another type."""
        rows = self._tables.read(self._names[table], types, where, **options)
        columns = {}
        for name, type_ in types.items():
            column = rows[name]
            if not _fits(column.type, type_):
                raise TraceFileError(
                    f"{self.path}: {table}.{name} holds values of type {column.type}, "
                    f"expected {type_}"
                )
            columns[name] = _typed(column, type_)
        return ExportRows(rows.num_rows if types else 0, columns)

    def check_spans(self, table: str, rows: ExportRows) -> None:
        """Raise TraceFileError if a row has no time, or an impossible one."""
        for name in ("start", "end"):
            if rows.has(name) and (absent := int((rows[name] == NULL).sum())):
                raise TraceFileError(
                    f"{self.path}: {table}.{name}: {absent} rows without a value"
                )
        start, end = rows["start"], rows["end"]
        strange = np.flatnonzero((end < start) | (start < -LATEST) | (end > LATEST))
        if rows.has("end") and len(strange):
            first = strange[0]
            raise TraceFileError(
                f"{self.path}: {table}: {len(strange)} rows with impossible times; the first "
                f"has start = {start[first]}, end = {end[first]}"
            )

    def processes(self, table: str) -> set[int | None]:
        """Return the processes (`g >> 24`) with rows in a table; None: rows name no process."""
        column = schema.PROCESS_COLUMN[table]
        if not self.has_column(table, column):
            return set()
        owner = self._read(table, {column: schema.INTEGER}, distinct=True)[column]
        values = pa.array(owner).unique().to_pylist()
        return {None if value == NULL else value >> schema.THREAD_BITS for value in values}

    def kernel_devices(self) -> dict[int, dict[int, bool]]:
        """Return whether a device is a rank, by process (`g >> 24`) that drives several."""
        names = (schema.PROCESS_COLUMN[schema.KERNEL], "deviceId")
        if not all(self.has_column(schema.KERNEL, name) for name in names):
            return {}
        types = dict.fromkeys(names, schema.INTEGER)
        rows = self._read(schema.KERNEL, types, distinct=True)
        places = {
            (int(owner) >> schema.THREAD_BITS, int(device))
            for owner, device in zip(*(rows[name].tolist() for name in names), strict=True)
            if NULL not in (owner, device)
        }
        several = {process for process, _ in places if sum(p == process for p, _ in places) > 1}
        return {process: self._busy_devices(process) for process in sorted(several)}

    def _busy_devices(self, process: int) -> dict[int, bool]:
        """Return which devices with kernels of a process are ranks."""
        names = ("deviceId", "start", "end")
        of_kernels, *copies = (
            self.rows(table, names, process=process)
            for table in (schema.KERNEL, schema.MEMCPY, schema.MEMSET)
            if all(self.has_column(table, name) for name in names)
        )
        devices = np.unique(of_kernels["deviceId"])
        every = {
            name: np.concatenate([t[name] for t in (of_kernels, *copies)]) for name in names
        }
        is_told = np.isin(every["deviceId"], devices)
        index = np.searchsorted(devices, every["deviceId"][is_told])
        used = busy(index, (every["end"] - every["start"])[is_told], [process] * len(devices))
        return {
            device: n in used for n, device in enumerate(devices.tolist()) if device != NULL
        }

    def strings(self, ids: Ints) -> dict[int, str]:
        """Return texts of the table of strings by id.

        Parameters
        ----------
        ids
            Ids of the texts to read, in any order; NULL is ignored, and so is an unknown id.

        Raises
        ------
        TraceFileError
            If the table has two texts for one of them.

        """
        different = np.unique(ids[ids != NULL])
        if not len(different):
            return {}
        by_id: dict[int, str] = {}
        for condition in _id_conditions(different):
            rows = self.rows(schema.STRINGS, ("id", "value"), where=[condition])
            selected = rows.where(np.isin(rows["id"], different))
            texts = selected.texts("value").to_pylist()
            for id_, text in zip(selected["id"].tolist(), texts, strict=True):
                if by_id.setdefault(id_, text) != text:
                    raise TraceFileError(
                        f"{self.path}: table {schema.STRINGS} has two texts for id {id_}, so "
                        "that names are ambiguous; export the report again"
                    )
            if self.kind != "sqlite":
                break
        return by_id

    def ids_of(self, glob: str, prefix: str) -> Ints:
        """Return the ids of strings that begin with a prefix.

        Parameters
        ----------
        glob
            SQL pattern that selects at least these.
        prefix
            Beginning of the strings.

        """
        rows = self.rows(schema.STRINGS, ("id", "value"), where=[f"value GLOB '{glob}'"])
        has_prefix = pa.compute.starts_with(rows.texts("value"), prefix)
        ids: Ints = rows["id"][has_prefix.to_numpy()]
        return ids


_MOST_IDS = 20_000
# ns, about 73 years: as a duration, or since 1970.
LATEST = 1 << 61


def _id_conditions(ids: Ints) -> Iterable[str]:
    """Yield SQL conditions that together select all ids."""
    for start in range(0, len(ids), _MOST_IDS):
        part = ids[start : start + _MOST_IDS].tolist()
        yield f"id IN ({', '.join(map(str, part))})"
