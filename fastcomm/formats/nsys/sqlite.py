"""Read SQLite exports of nsys read-only, after a check of their pages."""

import os
import re
import shutil
import sqlite3
import weakref
from collections.abc import Iterable, Mapping
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.files import Limits, is_local, opened
from fastcomm.formats.nsys.schema import BLOB, INTEGER, MAGIC, TEXT, table_of
from fastcomm.formats.sources import described, unpack
from fastcomm.process import make_folder, remove_folder
from fastcomm_kernels.arrays import Ints

_INNER = (2, 5)  # page types with child pages: inner pages of an index, of a table
_HEADER, _FIRST_HEADER = 12, 100  # bytes of the header of an inner page; of the file
_BLOCK = 1 << 22


class Pages:
    """The pages of one file, and whether each was reached from a root."""

    def __init__(self, path: Path, page_size: int) -> None:
        """Read the type of every page of a file; no page is reached yet."""
        self.path, self.page_size = path, page_size
        with opened(path) as file:
            self._types = _types(file, page_size)
        self._is_reached = np.zeros(len(self._types), np.bool_)

    def check(self, roots: Iterable[int]) -> None:
        """Raise TraceFileError unless each page of `roots` begins a tree of its own.

        No page may be in two trees, or twice in one.
        """
        with opened(self.path) as file:
            for root in roots:
                level = np.array([root], np.int64)
                while len(level):
                    _check_new(level, self._is_reached, self.path)
                    self._is_reached[level] = True
                    inner = level[np.isin(self._types[level], _INNER)].tolist()
                    below = [_children(file, page, self.page_size, self.path) for page in inner]
                    level = np.concatenate(below) if below else np.empty(0, np.int64)


def _types(file: BinaryIO, page_size: int) -> NDArray[np.uint8]:
    """Return the type of each page, which is its first byte, by number; page 0 is none."""
    block = max(_BLOCK // page_size, 1) * page_size
    parts = [np.zeros(1, np.uint8)]
    while data := file.read(block):
        parts.append(np.frombuffer(data, np.uint8)[::page_size].copy())
    types = np.concatenate(parts)
    file.seek(_FIRST_HEADER)
    types[1:2] = np.frombuffer(file.read(1), np.uint8)
    return types


def _check_new(level: Ints, is_reached: NDArray[np.bool_], path: Path) -> None:
    """Raise TraceFileError if a page is not in the file, or was reached before."""
    outside = level[(level < 1) | (level >= len(is_reached))]
    again = level[:0] if len(outside) else level[is_reached[level]]
    if len(outside) or len(again) or len(np.unique(level)) != len(level):
        bad = next(iter([*outside.tolist(), *again.tolist()]), int(level[0]))
        raise TraceFileError(
            f"{path}: malformed: page {bad} of {len(is_reached) - 1} does not exist, or is "
            "reached twice; export it again"
        )


def _children(file: BinaryIO, page: int, page_size: int, path: Path) -> Ints:
    """Return the numbers of the pages that an inner page leads to."""
    file.seek((page - 1) * page_size)
    data = file.read(page_size)
    header = _FIRST_HEADER if page == 1 else 0
    count = int.from_bytes(data[header + 3 : header + 5], "big")
    if header + _HEADER + 2 * count > len(data):
        raise TraceFileError(f"{path}: malformed: page {page} has {count} cells")
    offsets = np.frombuffer(data, ">u2", count, header + _HEADER).astype(np.int64)
    cells = np.append(offsets, header + 8)  # the header has the last child
    if (cells + 4 > len(data)).any():
        raise TraceFileError(f"{path}: malformed: a cell of page {page} is outside of it")
    text = np.frombuffer(data, np.uint8)
    quads = text[cells[:, None] + np.arange(4)].astype(np.int64)
    children: Ints = quads @ np.array([1 << 24, 1 << 16, 1 << 8, 1], np.int64)
    return children


_SQLITE_HEADER = 100
_NO_COLUMN = re.compile(r"no such column: (\w+)")
_LOGGED = 2  # format version of a file in write-ahead logging mode (WAL)
_BATCH_ROWS = 1 << 16
_COPIED = 1 << 24  # bytes copied at a time
# The driver infers a column's type from the first rows, so that a null there would change it.
# SQLite parses a literal below -2**63 + 1 as a float, hence the subtraction.
_NULL = {INTEGER: "(-9223372036854775807 - 1)", TEXT: "''", BLOB: "x''"}
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
# Root pages of tables and of their indices.
_ROOTS = "SELECT tbl_name, rootpage FROM sqlite_master WHERE rootpage > 0"


class Database:
    """The tables of one SQLite file."""

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        """Check a file and prepare to read it; a remote file is copied first."""
        self.path = path
        page_size, is_logged = _check_file(path)
        file = path if is_local(path) else self._staged()
        self._pages = Pages(file, page_size)
        self._pages.check([1])  # the schema, which SQLite reads before all else
        _check_unlocked(path, is_logged=is_logged)
        # immutable: no lock is taken and no journal looked for, on any file system.
        self._uri = f"file:{quote(os.fsencode(file.resolve()))}?mode=ro&immutable=1"

    def _staged(self) -> Path:
        """Copy a remote file, as SQLite needs a local one, for the life of this object."""
        try:
            folder = make_folder()
            weakref.finalize(self, remove_folder, folder)
            copy = folder / "export.sqlite"
            with opened(self.path) as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target, _COPIED)
        except OSError as error:
            raise TraceFileError(
                f"{self.path}: cannot copy the file to this machine: {error.strerror or error}"
            ) from error
        return copy

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return the column names of every table.

        Raises `TraceFileError` for a damaged file, or one with computed tables.
        """
        tables: dict[str, list[str]] = {}
        query = (
            "SELECT t.name, c.name FROM sqlite_master t JOIN pragma_table_info(t.name) c "
            "WHERE t.type = 'table' AND t.rootpage > 0 ORDER BY t.name, c.cid"
        )
        # Views, virtual tables and computed columns run code; the first two have no pages.
        programs = (
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND NOT rootpage "
            "UNION SELECT t.name FROM sqlite_master t JOIN pragma_table_xinfo(t.name) c "
            "WHERE t.type = 'table' AND c.hidden"
        )
        try:
            with closing(sqlite3.connect(self._uri, uri=True)) as connection:
                roots = connection.execute(_ROOTS)
                self._pages.check(page for name, page in roots if table_of(name))
                computed = {name for (name,) in connection.execute(programs) if table_of(name)}
                for table, column in () if computed else connection.execute(query):
                    tables.setdefault(table, []).append(column)
        except (sqlite3.Error, ValueError) as error:
            raise TraceFileError(
                f"{self.path}: cannot be read as an SQLite file ({error}); "
                "export the report again"
            ) from error
        if computed:
            raise TraceFileError(
                f"{self.path}: {min(computed)} is a view, a virtual table or has computed "
                "columns, which fastcomm does not run; export the report again"
            )
        return {table: tuple(names) for table, names in tables.items()}

    def read(
        self,
        table: str,
        types: Mapping[str, str],
        where: Iterable[str] = (),
        *,
        distinct: bool = False,
    ) -> pa.Table:
        """Read columns of a table; null becomes NULL, or an empty text or blob.

        Parameters
        ----------
        table
            Name of the table.
        types
            Type of each column, by name: INTEGER, TEXT or BLOB.
        where
            SQL conditions that all hold for the rows.
        distinct
            Whether to drop equal rows.

        Raises
        ------
        TraceFileError
            The file cannot be read.

        """
        expressions = ", ".join(
            f'IFNULL("{name}", {_NULL[type_]}) AS "{name}"' for name, type_ in types.items()
        )
        conditions = " AND ".join(f"({condition})" for condition in where)
        query = f'SELECT {"DISTINCT " if distinct else ""}{expressions} FROM "{table}"'
        rows = self._query(query + (f" WHERE {conditions}" if conditions else ""), table)
        # Without rows the driver does not tell the types.
        return rows if rows.num_rows else pa.table(dict.fromkeys(types, pa.nulls(0)))

    def _query(self, query: str, table: str) -> pa.Table:
        """Run a query; TraceFileError if it fails, or returns far more than the file holds."""
        from adbc_driver_manager import Error
        from adbc_driver_sqlite import dbapi

        limits, size = Limits.of_environment(), self.path.stat().st_size
        batches, total = [], 0
        option = {"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)}
        try:
            with (
                dbapi.connect(self._uri) as connection,
                connection.cursor(adbc_stmt_kwargs=option) as cursor,
            ):
                cursor.execute(query)
                reader = cursor.fetch_record_batch()
                # A cycle of pages would return rows without end.
                for batch in reader:
                    total += batch.nbytes
                    limits.check(total, size, self.path)
                    batches.append(batch)
                return pa.Table.from_batches(batches, reader.schema)
        except (Error, pa.ArrowException, OSError) as error:
            absent = _NO_COLUMN.search(str(error))
            reason = (
                f"has no column {absent[1]}: this version of the export is not supported; "
                "export the report again with a newer nsys"
                if absent
                else f"cannot be read: {error}"
            )
            raise TraceFileError(f"{self.path}: table {table} {reason}") from error


def _check_file(path: Path) -> tuple[int, bool]:
    """Return the page size in bytes, and whether the file uses a write-ahead log.

    Raises `TraceFileError` if the file is not SQLite, or is truncated.
    """
    try:
        with opened(path) as file:
            header = file.read(_SQLITE_HEADER)
        size = path.stat().st_size
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error
    if not header.startswith(MAGIC) or len(header) < _SQLITE_HEADER:
        raise TraceFileError(
            f"{path}: no SQLite file: {unpack(header, path) or 'found ' + described(header)}"
        )
    page = int.from_bytes(header[16:18], "big")
    page = 1 << 16 if page == 1 else page
    if page not in _PAGE_SIZES:
        raise TraceFileError(f"{path}: malformed: pages of {page} bytes; export it again")
    # The page count is valid if the two change counters agree (SQLite file format, 1.3.8).
    pages = int.from_bytes(header[28:32], "big") if header[24:28] == header[92:96] else 0
    if size < page * pages:
        raise TraceFileError(
            f"{path}: truncated: {size} bytes, its header states {page * pages}; "
            "export it again"
        )
    if pages and size > page * pages:
        with opened(path) as file:
            file.seek(page * pages)
            if file.read(len(MAGIC)) == MAGIC:
                raise TraceFileError(
                    f"{path}: a second document begins at byte {page * pages}; "
                    "export each report to a file of its own"
                )
    return page, _LOGGED in header[18:20]


def _is_in_use(journal: Path) -> bool:
    """Return whether a journal has content, or is not a regular file.

    SQLite would use a file that is not regular as its journal, and write beside it.
    """
    if not is_local(journal):
        return journal.exists() and journal.stat().st_size > 0
    return os.path.lexists(journal) and not (journal.is_file() and not journal.stat().st_size)


def _check_unlocked(path: Path, *, is_logged: bool) -> None:
    # SQLite writes its journal beside the target of a link.
    """Raise TraceFileError if another program is writing to the file."""
    files = {path, path.resolve()} if is_local(path) else {path}
    for file, suffix in product(files, ("-journal", "-wal")):
        journal = file.with_name(file.name + suffix)
        if _is_in_use(journal):
            raise TraceFileError(
                f"{path}: {journal.name} lies beside it: the export is still being written, or "
                "was interrupted; wait for it, or export the report again"
            )
    # In logging mode, a lock check would create log files; a writer has created them already.
    if is_logged or not is_local(path):
        return
    try:
        uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=0)) as connection:
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise TraceFileError(
                f"{path}: locked: another program is writing to it; wait for it to end"
            ) from error
    except (sqlite3.Error, ValueError):
        pass  # other faults are reported when its tables are read
