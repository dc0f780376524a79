"""Queries on a run by DuckDB: which are allowed, how they read the run, and how they end.

A query runs in a thread of its own. What it reads of the run is read by the thread that asked
it, as by any other analysis, so that a signal or the time limit ends both.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pyarrow as pa

from fastcomm.errors import ConfigError, FastcommError, is_utf8
from fastcomm.process import make_folder, remove_folder
from fastcomm.sql.options import SqlOptions
from fastcomm.sql.result import QueryResult, plain_table
from fastcomm.sql.run_tables import ReadLog, RunTables
from fastcomm.sql.scans import LazyDataset, event_reader, fields_of
from fastcomm.sql.views import BY_NAME, EVENTS, VIEWS, RunView
from fastcomm.units import format_binary_bytes

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")
_MOST_LETTERS = 1 << 20  # of a query
_SHARE = 4  # of the machine's memory: one in so many
_ROWS = 1 << 14  # of a batch of the result
_ENDS_S = 0.5  # within which an interrupted query ends, nearly always
_POLL_S = 0.05
_PLAN = "EXPLAIN "
_NEEDS = "sql needs DuckDB: pip install 'fastcomm[sql]'"
_READ_ONLY = (
    "only SELECT, FROM, WITH, VALUES, DESCRIBE, SUMMARIZE and SHOW are allowed: "
    "a query reads the run and changes nothing"
)
_SETTINGS = {
    "enable_external_access": False,
    "autoload_known_extensions": False,
    "autoinstall_known_extensions": False,
    "allow_persistent_secrets": False,
    "python_enable_replacements": False,  # a variable of Python is no table
}


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _StoppedError(Exception):
    """The query has ended; what it still reads is of no use."""


class _TimeOut(BaseException):
    """The time limit is over; no handler of errors may catch it."""


class _Requests:
    """Functions that the threads of a query leave to the thread that asked it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._is_over = False

    def ask(self, function: Callable[[], T]) -> T:
        """Have a function called, and return its result or raise its error."""
        future: Future[T] = Future()
        self._queue.put((function, future))
        if self._is_over:
            self.end()
        return future.result()

    def close(self) -> None:
        """Tell the thread that asked that the query has ended."""
        self._queue.put(None)

    def serve(self, deadline: float) -> None:
        """Call functions until the query has ended. Raises the first error of one.

        Raises `_TimeOut` where it waits after the deadline, in s of `monotonic`.
        """
        while (request := self._next(deadline)) is not None:
            function, future = request
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(_StoppedError())
                raise error from None

    def _next(self, deadline: float) -> tuple[Callable[[], Any], Future[Any]] | None:
        """Return the next request; waiting in short turns lets signals in."""
        while True:
            if monotonic() > deadline:
                raise _TimeOut
            with suppress(Empty):
                return self._queue.get(timeout=_POLL_S)

    def end(self) -> None:
        """Refuse all further requests."""
        self._is_over = True
        with suppress(Empty):
            while True:
                request = self._queue.get_nowait()
                if request is not None:
                    request[1].set_exception(_StoppedError())


@dataclass(slots=True)
class _Rows:
    """The rows of a query as far as they are kept, and their number."""

    schema: pa.Schema | None = None
    batches: list[pa.RecordBatch] = field(default_factory=list)
    count: int = 0


def answered(
    tables: RunTables, query: str, options: SqlOptions, *, most: int | None = None
) -> QueryResult:
    """Return the answer to a query of one statement; see `RunDatabase` for errors."""
    with RunDatabase(tables, options) as database:
        statements = database.statements(query)
        if len(statements) != 1:
            raise ConfigError(f"sql: {len(statements)} statements; pass one")
        return database.query(statements[0], most=most)


class RunDatabase:
    """A run that answers SQL; what it has measured of the run is kept between queries.

    Parameters
    ----------
    tables
        The run.
    options
        Limits of each query.

    Raises
    ------
    FastcommError
        If DuckDB is not installed, or no directory for temporary files exists.

    """

    def __init__(self, tables: RunTables, options: SqlOptions) -> None:
        if find_spec("duckdb") is None:
            raise FastcommError(_NEEDS)
        self._tables = tables
        self._options = options
        chosen = options.memory_limit
        self._memory = machine_memory() // _SHARE if chosen is None else int(float(chosen))
        try:
            self._spill = make_folder()
        except OSError as error:
            raise FastcommError(f"no place for temporary files: {error}") from error
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._log = ReadLog()
        self._requests = _Requests()

    def __enter__(self) -> Self:
        """Return the database."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection and remove spilled rows."""
        self._disconnect()
        remove_folder(self._spill)

    def statements(self, text: str) -> list[str]:
        """Divide a text into its statements, and check that each only reads.

        Raises
        ------
        ConfigError
            If the text is no SQL, with line and column, or a statement could change something.

        """
        import duckdb

        if len(text) > _MOST_LETTERS:
            raise ConfigError(f"sql: a query of {len(text)} letters; at most {_MOST_LETTERS}")
        if not is_utf8(text):
            raise ConfigError("sql: the query is no valid text: bytes that are not UTF-8")
        try:
            statements = self._connected().extract_statements(text)
        except duckdb.Error as error:
            raise _as_ours(error, text) from error
        for statement in statements:
            if statement.type is not duckdb.StatementType.SELECT:
                raise ConfigError(f"sql: {_named(statement)} is refused; {_READ_ONLY}")
        return [statement.query for statement in statements]

    def query(self, sql: str, *, most: int | None = None) -> QueryResult:
        """Execute one statement of `statements`.

        Parameters
        ----------
        sql
            The statement.
        most
            Number of rows to keep; all rows are counted. None keeps all.

        Raises
        ------
        ConfigError
            If the statement names no view or column of the run, or is no valid SQL.
        FastcommError
            If a rank cannot be read, or a limit is exceeded.

        """
        self._log, self._requests = ReadLog(), _Requests()
        connection, rows = self._connected(), _Rows()
        timeout = self._options.timeout
        limit = inf if timeout is None else float(timeout) / 1e9
        future: Future[None] = Future()
        work = partial(self._execute, connection, sql, rows, most, future)
        threading.Thread(target=work, name="fastcomm-sql", daemon=True).start()
        try:
            with _time_limit(limit):
                self._requests.serve(monotonic() + limit)
        except BaseException as error:
            self._stop(connection, future)
            if isinstance(error, _TimeOut):
                message = f"sql: not done after {timeout}; --timeout sets the limit"
                raise FastcommError(message) from None
            raise
        finally:
            self._requests.end()
        self._raise_error(future, sql)
        assert rows.schema is not None
        return QueryResult(
            sql=sql,
            table=plain_table(pa.Table.from_batches(rows.batches, rows.schema)),
            row_count=rows.count,
            reads=self._log.reads(self._tables.run),
            skipped=self._tables.skipped,
            warnings=self._tables.warnings,
        )

    def _execute(
        self,
        connection: "duckdb.DuckDBPyConnection",
        sql: str,
        rows: _Rows,
        most: int | None,
        future: "Future[None]",
    ) -> None:
        """Execute a statement in a thread of its own, and keep its rows."""
        try:
            reader = connection.sql(sql).to_arrow_reader(_ROWS)
            rows.schema = reader.schema
            size = 0
            for batch in reader:
                part = batch if most is None else batch.slice(0, max(most - rows.count, 0))
                rows.count += batch.num_rows
                size += part.nbytes
                if size > self._memory:
                    raise _too_large(self._memory)
                if part.num_rows:
                    rows.batches.append(part)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._requests.close()

    def _raise_error(self, future: "Future[None]", sql: str) -> None:
        """Raise the error with which a query has ended, if any, as one of fastcomm."""
        import duckdb

        error = future.exception()
        if error is None:
            return
        if isinstance(error, duckdb.OutOfMemoryException | MemoryError):
            self._disconnect()
            raise _too_large(self._memory) from error
        if isinstance(error, duckdb.Error):
            raise self._placed(error, sql) from error
        raise error

    def _placed(self, error: Exception, sql: str) -> FastcommError:
        """Return an error of DuckDB as ours, with its place where planning shows it.

        Errors of `sql`, which executes without a copy of the rows, lack the place.
        """
        import duckdb

        before = 0
        try:
            self._connected().execute(f"{_PLAN}{sql}")
        except duckdb.Error as planned:
            if not isinstance(planned, duckdb.ParserException):
                error, before = planned, len(_PLAN)
        finally:
            self._disconnect()
        return _as_ours(error, sql, before)

    def _stop(self, connection: "duckdb.DuckDBPyConnection", future: "Future[None]") -> None:
        """End a running query, and give up its connection."""
        begin = monotonic()
        while not future.done() and monotonic() - begin < _ENDS_S:
            with suppress(KeyboardInterrupt):
                self._requests.end()
                connection.interrupt()
                sleep(_POLL_S)
        if future.done():
            self._disconnect()
        self._connection = None

    def _disconnect(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connected(self) -> "duckdb.DuckDBPyConnection":
        """Return a connection that has the views and nothing else."""
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> "duckdb.DuckDBPyConnection":
        """Open a database in memory, whose settings no query can change."""
        import duckdb

        config: dict[str, Any] = {
            **{name: str(value).lower() for name, value in _SETTINGS.items()},
            "memory_limit": f"{self._memory >> 10}KiB",
            "temp_directory": str(self._spill),
        }
        if self._options.threads is not None:
            config["threads"] = str(self._options.threads)
        connection = duckdb.connect(":memory:", config=config)
        connection.execute("SET errors_as_json = true")
        connection.execute("SET enable_progress_bar = false")
        connection.execute("SET TimeZone = 'UTC'")
        for view in VIEWS:
            connection.register(view.name, LazyDataset(view, partial(self._scan, view)))
        connection.execute("SET lock_configuration = true")
        return connection

    def _scan(
        self, view: RunView, columns: Sequence[str], condition: Any | None
    ) -> pa.RecordBatchReader:
        """Return the rows that a query scans; DuckDB calls this in its threads."""
        if view is EVENTS:
            return event_reader(self._tables, columns, condition, self._log, self._requests.ask)
        table = self._requests.ask(partial(self._read, view, columns, condition))
        return table.to_reader()

    def _read(self, view: RunView, columns: Sequence[str], condition: Any | None) -> pa.Table:
        """Return the rows of a computed view for which the condition holds."""
        needed = [*dict.fromkeys((*columns, *fields_of(condition, view.schema)))]
        table = self._tables.table(view, needed, self._log)
        if condition is not None:
            table = table.filter(condition)
        return table.select(columns)


def _too_large(memory: int) -> FastcommError:
    """Return the error of a query that needs more memory than it may have."""
    return FastcommError(
        f"sql: the query needs more than {format_binary_bytes(memory)} of memory. Sum up, "
        "filter or LIMIT its rows, or raise --memory-limit"
    )


@contextmanager
def _time_limit(limit: float) -> Iterator[None]:
    """Raise `_TimeOut` in this block after some seconds, also while a rank is read.

    Only in the main thread, which signals reach.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if limit == inf or not is_main:
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _TimeOut

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(limit, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _as_ours(error: Exception, sql: str, before: int = 0) -> FastcommError:
    """Return an error of DuckDB as one line with the place in the query.

    `before` is the number of bytes that DuckDB got before the query.
    """
    text = str(error)
    try:
        about = json.loads(text[text.index("{") :])
    except ValueError:
        return FastcommError(f"sql: {_line(text)}")
    message = _line(str(about.get("exception_message", text)))
    kind = about.get("exception_type")
    if kind == "Catalog" and about.get("type") == "Table":
        message = _no_view(str(about.get("name", "")))
    elif kind == "Permission" or "INSTALL " in message:  # of an extension
        message = "a query reads the views of the run alone, no file and no network"
    place = _place(about.get("position"), sql, before)
    return ConfigError(f"sql: {place}{message}")


def _named(statement: "duckdb.Statement") -> str:
    """Return the first word of a statement, or the kind that DuckDB gives it."""
    first = statement.query.split(maxsplit=1)[:1]
    kind = statement.type.name.replace("_", " ")
    return first[0].upper() if first and first[0].isalpha() else kind


def _line(text: str) -> str:
    """Return a text of several lines as one."""
    return " ".join(text.split())


def _no_view(name: str) -> str:
    """Return the message about a table that is no view of the run."""
    near = get_close_matches(name.lower(), BY_NAME, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"no view {name!r}{hint} Views: {', '.join(BY_NAME)}"


def _place(position: object, sql: str, skipped: int) -> str:
    """Return the line and column of a position in bytes: "line 1, column 8: "."""
    if not str(position).isdecimal():
        return ""
    size = max(int(str(position)) - skipped, 0)
    before = sql.encode("utf-8", "replace")[:size].decode("utf-8", "ignore")
    return (
        f"line {before.count(chr(10)) + 1}, column {len(before.rpartition(chr(10))[2]) + 1}: "
    )
