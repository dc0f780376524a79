"""Datasets that read only what DuckDB scans: the columns and the ranks of a query."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from fastcomm.sql.events import EventScan
from fastcomm.sql.run_tables import ReadLog, RunTables
from fastcomm.sql.views import EVENTS, RunView
from fastcomm.trace.schema import KINDS


def possible(
    values: Sequence[Any], name: str, schema: pa.Schema, condition: Any | None
) -> list[Any]:
    """Return the values of a column for which a condition may hold, whatever the others are.

    pyarrow decides it as it does for the partitions of a dataset.

    Parameters
    ----------
    values
        Values of the column.
    name
        The column.
    schema
        All columns of the condition.
    condition
        An expression of pyarrow; None holds for all.

    """
    if condition is None:
        return list(values)
    form, files = ds.ParquetFileFormat(), fs.LocalFileSystem()
    # Files that are never opened: each has one value of the column.
    fragments = [
        form.make_fragment(
            str(place),
            filesystem=files,
            partition_expression=ds.field(name) == pa.scalar(value, _plain_type(schema, name)),
        )
        for place, value in enumerate(values)
    ]
    plain = pa.schema([(field.name, _plain_type(schema, field.name)) for field in schema])
    dataset = ds.FileSystemDataset(fragments, plain, form, files)
    return [values[int(part.path)] for part in dataset.get_fragments(filter=condition)]


def _plain_type(schema: pa.Schema, name: str) -> pa.DataType:
    """Return the type of a column; that of its values for dictionaries."""
    kind = schema.field(name).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def fields_of(condition: Any | None, schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns that a condition names."""
    if condition is None:
        return ()
    return tuple(name for name in schema.names if not _holds_without(condition, schema, name))


def _holds_without(condition: Any, schema: pa.Schema, name: str) -> bool:
    """Whether a condition can be evaluated on a table that lacks a column."""
    others = pa.schema([field for field in schema if field.name != name])
    try:
        ds.InMemoryDataset(others.empty_table()).scanner(filter=condition)
    except pa.ArrowInvalid:
        return False
    return True


class LazyDataset(ds.InMemoryDataset):  # type: ignore[misc]
    """A dataset without rows that reads them when DuckDB scans it.

    DuckDB asks each dataset of a query for its columns and for the rows of a condition, which
    it derives from the query. `scan` gets both.
    """

    def __init__(
        self, view: RunView, scan: Callable[[Sequence[str], Any | None], pa.RecordBatchReader]
    ) -> None:
        """Make the dataset of a view."""
        super().__init__(view.schema.empty_table())
        self._names = view.schema.names
        self._scan = scan

    def scanner(self, columns: Any = None, filter: Any = None, **_: Any) -> "_Scanned":  # noqa: A002
        """Return the rows to scan, as `pyarrow.dataset.Dataset.scanner` does."""
        names = self._names if columns is None else list(columns)
        return _Scanned(self._scan(names, filter))


@dataclass(frozen=True, slots=True)
class _Scanned:
    """A scan as DuckDB takes it; a scanner of pyarrow would read ranks ahead."""

    reader: pa.RecordBatchReader

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the reader of the rows."""
        return self.reader


def event_reader(
    tables: RunTables,
    names: Sequence[str],
    condition: Any | None,
    log: ReadLog,
    ask: Callable[[Callable[[], pa.Table]], pa.Table],
) -> pa.RecordBatchReader:
    """Return a reader of events that reads a rank when its rows are needed.

    Parameters
    ----------
    tables
        The run.
    names
        Columns of the rows.
    condition
        Which rows; an expression of pyarrow, or None.
    log
        Notes what was read.
    ask
        Calls a function in the thread that asked the query.

    """
    needed = dict.fromkeys((*names, *fields_of(condition, EVENTS.schema)))
    scan = EventScan(
        columns=tuple(names),
        needed=tuple(needed),
        condition=condition,
        kinds=frozenset(possible(KINDS, "kind", EVENTS.schema, condition)),
    )
    ranks = set(possible(tables.run.ranks, "rank", EVENTS.schema, condition))
    sources = [source for source in tables.run.sources if source.rank in ranks]
    log.note(EVENTS.name, scan.needed)

    def rows() -> Iterator[pa.RecordBatch]:
        for batch in tables.batches(sources):
            yield from ask(partial(tables.read_events, batch, scan, log)).to_batches()

    return pa.RecordBatchReader.from_batches(scan.schema, rows())
