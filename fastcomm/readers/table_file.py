"""Columns of a table of operations, in Parquet or CSV, and its times in nanoseconds."""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fastcomm import inputs, parquet, remote
from fastcomm.errors import TraceFileError
from fastcomm.inert import is_utf8
from fastcomm.readers.blocks import CutShortError, blocks
from fastcomm.readers.table_mapping import UNITS, TableMapping

Ints = NDArray[np.int64]

PARQUET = (".parquet", ".pq")
CSV = (".csv", ".csv.gz")
_LARGEST = float(1 << 63)
_COARSE = 10  # ns
_MOST_NAMED = 5  # rows


def is_table(path: Path) -> bool:
    """Whether a file is a table by its name."""
    return path.name.lower().endswith((*PARQUET, *CSV)) and path.is_file()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{path}: no readable Parquet or CSV table: {error}") from error


def columns_of(path: Path) -> list[str]:
    """The names of the columns; TraceFileError where the file is no table."""
    with _reading(path):
        if path.name.lower().endswith(PARQUET):
            return parquet.names(path)
        return list(_csv(path, None, ()).schema.names)


def batches(
    path: Path, columns: Sequence[str], texts: Sequence[str] = (), where: pc.Expression = None
) -> Iterator[pa.Table]:
    """These columns of the rows that fulfil `where`, some at a time; `texts` are text."""
    with _reading(path):
        if path.name.lower().endswith(PARQUET):
            inputs.check(path)
            yield from _rows(path, list(columns), where)
            return
        with _csv(path, columns, texts) as reader:
            for batch in reader:
                table = pa.Table.from_batches([batch])
                yield table if where is None else table.filter(where)


def _rows(path: Path, columns: list[str], where: pc.Expression) -> Iterator[pa.Table]:
    """The same of a Parquet file."""
    size = path.stat().st_size
    with remote.named(path) as source:
        texts = parquet.check(pq.read_metadata(source), size, path, columns)
    as_codes = pa_dataset.ParquetFileFormat(dictionary_columns=set(texts))
    place: Any = path
    rows: pa_dataset.Dataset | pa_dataset.Fragment
    if not remote.is_local(path):
        rows = pa_dataset.dataset(place.path, format=as_codes, filesystem=place.fs)
    elif is_utf8(str(path)):
        rows = pa_dataset.dataset(path, format=as_codes)
    else:
        rows = as_codes.make_fragment(pa.OSFile(os.fsencode(path)))
    spelled = parquet.Spelled(size, path, texts)
    for batch in rows.to_batches(columns=columns, filter=where):
        yield spelled.table(pa.Table.from_batches([batch]))


def _csv(
    path: Path, columns: Sequence[str] | None, texts: Sequence[str]
) -> pa_csv.CSVStreamingReader:
    options = pa_csv.ConvertOptions(
        include_columns=columns, column_types=dict.fromkeys(texts, pa.string())
    )
    return pa_csv.open_csv(pa.PythonFile(_Text(path), "r"), convert_options=options)


class _Text(io.RawIOBase):
    """The text of a file, decompressed, with the bounds of `blocks`."""

    def __init__(self, path: Path) -> None:
        self._blocks = blocks(path)
        self._path = path
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """At most so many bytes; none at the end."""
        try:
            if not self._rest:
                self._rest = memoryview(next(self._blocks, b""))
        except CutShortError as error:
            raise EOFError("the compressed file ends before its end") from error
        size = len(self._rest) if size < 0 else size
        found, self._rest = self._rest[:size], self._rest[size:]
        return bytes(found)


def times(table: pa.Table, mapping: TableMapping, path: Path) -> tuple[Ints, Ints]:
    """Start and stop of each row. An end that the table does not have is formed in its type."""
    start = _numbers(table, mapping.start, path)
    end = _numbers(table, mapping.stop or mapping.duration or "", path)
    if mapping.duration is not None:
        if len(strange := np.flatnonzero(~(end >= 0))):
            raise TraceFileError(
                f"{path}: column {mapping.duration}: found {end[strange[0]]} in "
                f"{_rows_of_rank(strange)}, wanted 0 or more"
            )
        if len(end) and not end.any():
            raise TraceFileError(
                f"{path}: column {mapping.duration}: all durations of a rank, its rows 0 to "
                f"{len(end) - 1}, are 0; wanted times"
            )
        end = start + end
    # Columns of times are in ns already.
    scale = 1 if pa.types.is_temporal(table[mapping.start].type) else UNITS[mapping.unit]
    begun = _to_ns(start, scale, mapping.start, path)
    ended = _to_ns(end, scale, mapping.stop or mapping.duration or "", path)
    if len(late := np.flatnonzero(ended < begun)):
        raise TraceFileError(
            f"{path}: an operation stops at {ended[late[0]]} ns before it starts at "
            f"{begun[late[0]]} ns, as {len(late)} do; wanted {mapping.start} <= {mapping.stop}"
        )
    return begun, ended


def _rows_of_rank(rows: Ints) -> str:
    """The first rows in words; what is read at once is the rows of a rank."""
    first = ", ".join(map(str, rows[:_MOST_NAMED].tolist()))
    return f"row {first}{', ...' if len(rows) > _MOST_NAMED else ''} of a rank's rows (from 0)"


def _numbers(table: pa.Table, name: str, path: Path) -> NDArray[Any]:
    """A column without nulls, as numbers; of a column of times, its nanoseconds."""
    column = table[name]
    if column.null_count:
        raise TraceFileError(f"{path}: column {name}: {column.null_count} nulls, wanted none")
    with _reading(path):
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns")).cast(pa.int64())
        elif pa.types.is_duration(column.type):
            column = column.cast(pa.duration("ns")).cast(pa.int64())
        elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise TraceFileError(f"{path}: column {name}: found {column.type}, wanted numbers")
    numbers: NDArray[Any] = column.to_numpy()
    return numbers


def _to_ns(numbers: NDArray[Any], scale: int, name: str, path: Path) -> Ints:
    """Numbers of a unit that is `scale` ns as whole ns, the half rounded to even."""
    exact = numbers.astype(np.float64) * scale
    if len(strange := np.flatnonzero(~(np.abs(exact) < _LARGEST))):
        raise TraceFileError(
            f"{path}: column {name}: a number is no time in this unit ({scale} ns), "
            f"{numbers[strange[0]]} in {_rows_of_rank(strange)}"
        )
    if np.issubdtype(numbers.dtype, np.integer):
        return numbers.astype(np.int64) * scale
    return np.rint(exact).astype(np.int64)


def resolution(table: pa.Table, mapping: TableMapping) -> str | None:
    """What to say of floating-point times that are coarse."""
    column = table[mapping.start]
    if not pa.types.is_floating(column.type) or not table.num_rows:
        return None
    largest = np.abs(column.to_numpy()).max()
    step = float(np.spacing(largest)) * UNITS[mapping.unit]
    if step < _COARSE:
        return None
    return f"times are {column.type.bit_width}-bit floats: up to {step:.0f} ns apart"


def whole_numbers(table: pa.Table, name: str, path: Path) -> Ints:
    """A column of whole numbers without nulls."""
    column = table[name]
    if column.null_count:
        raise TraceFileError(f"{path}: column {name}: {column.null_count} nulls, wanted none")
    with _reading(path):
        numbers: Ints = column.cast(pa.int64()).to_numpy()
    return numbers
