"""Read SQLite exports of nsys read-only, after a check of their pages."""

import os
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
from fastcomm.process import make_folder, remove_folder
from fastcomm.readers import described, unpack
from fastcomm.readers.nsys.layout import BLOB, INTEGER, MAGIC, TABLES, TEXT

Numbers = NDArray[np.int64]

_INNER = (2, 5)  # types of pages that lead to others: of an index, of a table
_HEADER, _FIRST_HEADER = 12, 100  # bytes of an inner page's; of the file, before that of page 1
_BLOCK = 1 << 22


class Pages:
    """The pages of one file, and which of them were reached."""

    def __init__(self, path: Path, page_size: int) -> None:
        self.path, self.page_size = path, page_size
        with opened(path) as file:
            self._types = _types(file, page_size)
        self._seen = np.zeros(len(self._types), np.bool_)

    def check(self, roots: Iterable[int]) -> None:
        """TraceFileError where what begins at one of these pages is no tree of its own."""
        with opened(self.path) as file:
            for root in roots:
                level = np.array([root], np.int64)
                while len(level):
                    _check_new(level, self._seen, self.path)
                    self._seen[level] = True
                    inner = level[np.isin(self._types[level], _INNER)].tolist()
                    below = [_children(file, page, self.page_size, self.path) for page in inner]
                    level = np.concatenate(below) if below else np.empty(0, np.int64)


def _types(file: BinaryIO, page_size: int) -> NDArray[np.uint8]:
    """The type of each page, its first byte, by number; there is no page 0."""
    block = max(_BLOCK // page_size, 1) * page_size
    parts = [np.zeros(1, np.uint8)]
    while data := file.read(block):
        parts.append(np.frombuffer(data, np.uint8)[::page_size].copy())
    types = np.concatenate(parts)
    file.seek(_FIRST_HEADER)
    types[1:2] = np.frombuffer(file.read(1), np.uint8)
    return types


def _check_new(level: Numbers, seen: NDArray[np.bool_], path: Path) -> None:
    """TraceFileError where a page is not in the file, or was reached before."""
    outside = level[(level < 1) | (level >= len(seen))]
    again = level[:0] if len(outside) else level[seen[level]]
    if len(outside) or len(again) or len(np.unique(level)) != len(level):
        strange = next(iter([*outside.tolist(), *again.tolist()]), int(level[0]))
        raise TraceFileError(
            f"{path}: malformed: page {strange} of {len(seen) - 1} is none, or is reached "
            "twice; export it again"
        )


def _children(file: BinaryIO, page: int, page_size: int, path: Path) -> Numbers:
    """The pages that an inner page leads to."""
    file.seek((page - 1) * page_size)
    data = file.read(page_size)
    at = _FIRST_HEADER if page == 1 else 0
    count = int.from_bytes(data[at + 3 : at + 5], "big")
    if at + _HEADER + 2 * count > len(data):
        raise TraceFileError(f"{path}: malformed: page {page} has {count} cells")
    offsets = np.frombuffer(data, ">u2", count, at + _HEADER).astype(np.int64)
    cells = np.append(offsets, at + 8)  # the last child stands in the header
    if (cells + 4 > len(data)).any():
        raise TraceFileError(f"{path}: malformed: a cell of page {page} is outside of it")
    text = np.frombuffer(data, np.uint8)
    quads = text[cells[:, None] + np.arange(4)].astype(np.int64)
    found: Numbers = quads @ np.array([1 << 24, 1 << 16, 1 << 8, 1], np.int64)
    return found


_SQLITE_HEADER = 100
_LOGGED = 2  # the format's version of a file that is written by way of a log (WAL)
_BATCH_ROWS = 1 << 16
_COPIED = 1 << 24  # bytes at a time

# What stands for null: the driver takes a column's type from the first rows, so that a null
# there would make it a column of another type. Written so, for a literal below -2**63 + 1 is a
# float to SQLite.
_NULL = {INTEGER: "(-9223372036854775807 - 1)", TEXT: "''", BLOB: "x''"}
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
# Where the tables that are read begin, and their indices.
_ROOTS = (
    "SELECT rootpage FROM sqlite_master WHERE rootpage > 0 "
    f"AND tbl_name IN ({', '.join('?' * len(TABLES))})"
)
_ARROW = {INTEGER: pa.int64(), TEXT: pa.string(), BLOB: pa.binary()}


class Database:
    """The tables of one file."""

    kind = "sqlite"

    def __init__(self, path: Path) -> None:
        self.path = path
        page_size, is_logged = _check_file(path)
        file = path if is_local(path) else self._staged()
        self._pages = Pages(file, page_size)
        self._pages.check([1])  # the schema, which SQLite reads before all else
        _check_unlocked(path, is_logged=is_logged)
        # immutable: no lock is taken and no journal looked for, on any file system.
        self._uri = f"file:{quote(os.fsencode(file.resolve()))}?mode=ro&immutable=1"

    def _staged(self) -> Path:
        """A copy on this machine, which SQLite needs; it goes with this object."""
        try:
            folder = make_folder()
            weakref.finalize(self, remove_folder, folder)
            copy = folder / "export.sqlite"
            with opened(self.path) as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target, _COPIED)
        except OSError as error:
            raise TraceFileError(
                f"{self.path}: cannot be copied to this machine: {error.strerror or error}"
            ) from error
        return copy

    def columns(self) -> dict[str, tuple[str, ...]]:
        """The columns of every table."""
        found: dict[str, list[str]] = {}
        query = (
            "SELECT t.name, c.name FROM sqlite_master t JOIN pragma_table_info(t.name) c "
            "WHERE t.type = 'table' AND t.rootpage > 0 ORDER BY t.name, c.cid"
        )
        # Views, virtual tables and computed columns are programs; the first two have no pages.
        programs = (
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND NOT rootpage "
            "UNION SELECT t.name FROM sqlite_master t JOIN pragma_table_xinfo(t.name) c "
            "WHERE t.type = 'table' AND c.hidden"
        )
        try:
            with closing(sqlite3.connect(self._uri, uri=True)) as connection:
                self._pages.check(page for (page,) in connection.execute(_ROOTS, [*TABLES]))
                strange = {name for (name,) in connection.execute(programs)} & TABLES
                for table, column in () if strange else connection.execute(query):
                    found.setdefault(table, []).append(column)
        except (sqlite3.Error, ValueError) as error:
            raise TraceFileError(f"{self.path}: no readable SQLite file ({error})") from error
        if strange:
            raise TraceFileError(
                f"{self.path}: {min(strange)} is a view, a virtual table or computed; "
                "wanted tables as nsys exports them: nothing of the file is run"
            )
        return {table: tuple(names) for table, names in found.items()}

    def read(
        self,
        table: str,
        types: Mapping[str, str],
        where: Iterable[str] = (),
        *,
        distinct: bool = False,
    ) -> dict[str, pa.ChunkedArray]:
        """Columns of a table; null is the least integer, and the empty text or blob."""
        words = ", ".join(
            f'IFNULL("{name}", {_NULL[type_]}) AS "{name}"' for name, type_ in types.items()
        )
        conditions = " AND ".join(f"({condition})" for condition in where)
        query = f'SELECT {"DISTINCT " if distinct else ""}{words} FROM "{table}"'
        rows = self._query(query + (f" WHERE {conditions}" if conditions else ""), table)
        return {
            name: self._typed(rows[name], type_, f"{table}.{name}")
            for name, type_ in types.items()
        }

    def _query(self, query: str, table: str) -> pa.Table:
        from adbc_driver_manager import Error
        from adbc_driver_sqlite import dbapi

        limits, size = Limits.of_environment(), self.path.stat().st_size
        batches, made = [], 0
        option = {"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)}
        try:
            with (
                dbapi.connect(self._uri) as connection,
                connection.cursor(adbc_stmt_kwargs=option) as cursor,
            ):
                cursor.execute(query)
                reader = cursor.fetch_record_batch()
                # Pages that lead to each other would give rows without end.
                for batch in reader:
                    made += batch.nbytes
                    limits.check(made, size, self.path)
                    batches.append(batch)
                return pa.Table.from_batches(batches, reader.schema)
        except (Error, pa.ArrowException, OSError) as error:
            raise TraceFileError(f"{self.path}: table {table}: {error}") from error

    def _typed(self, column: pa.ChunkedArray, type_: str, place: str) -> pa.ChunkedArray:
        wanted = _ARROW[type_]
        if column.type == wanted:
            return column
        if not len(column):
            return pa.chunked_array([], wanted)  # without rows the driver has no type to tell
        if wanted == pa.binary() and column.type == pa.string():
            return column.cast(wanted)
        raise TraceFileError(
            f"{self.path}: {place} holds values of type {column.type}, wanted {type_}"
        )


def _check_file(path: Path) -> tuple[int, bool]:
    """The size of its pages, and whether a log beside it takes what is written.

    Raises `TraceFileError` where the file is none, or is cut short.
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
    # The count of pages holds where the two change counters agree (SQLite's format, 1.3.8).
    pages = int.from_bytes(header[28:32], "big") if header[24:28] == header[92:96] else 0
    if size < page * pages:
        raise TraceFileError(
            f"{path}: cut short: {size} bytes, its header says {page * pages}; export it again"
        )
    if pages and size > page * pages:
        with opened(path) as file:
            file.seek(page * pages)
            if file.read(len(MAGIC)) == MAGIC:
                raise TraceFileError(
                    f"{path}: a second document begins at byte {page * pages}; "
                    "wanted a file each"
                )
    return page, _LOGGED in header[18:20]


def _is_in_use(journal: Path) -> bool:
    """Whether a journal has something in it, or is no regular file.

    SQLite would take one that is none for its own, and write beside it.
    """
    if not is_local(journal):
        return journal.exists() and journal.stat().st_size > 0
    return os.path.lexists(journal) and not (journal.is_file() and not journal.stat().st_size)


def _check_unlocked(path: Path, *, is_logged: bool) -> None:
    # Behind a link, SQLite writes beside the file itself.
    files = {path, path.resolve()} if is_local(path) else {path}
    for file, suffix in product(files, ("-journal", "-wal")):
        journal = file.with_name(file.name + suffix)
        if _is_in_use(journal):
            raise TraceFileError(
                f"{path}: {journal.name} lies beside it: the export is still being written, or "
                "was interrupted; wait for it, or export the report again"
            )
    # To look at a lock SQLite makes the files of a log; whoever writes to one has them there.
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
        pass  # what is wrong with it shows when its tables are asked for
