"""Directory exports: one Parquet file (parquetdir) or one Arrow stream (arrowdir) a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import arrow_stream, inputs, parquet
from fastcomm.errors import TraceFileError
from fastcomm.readers.nsys.layout import BLOB, INTEGER, SUFFIXES, TEXT
from fastcomm_kernels.json_numbers import NULL


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
            return tuple(parquet.names(file))
        inputs.check(file)
        with inputs.opened(file) as stream, pa.ipc.open_stream(stream) as reader:
            return tuple(reader.schema.names)


def _table_of(file: Path, columns: Sequence[str]) -> pa.Table:
    with _errors_of(file):
        if file.suffix == ".parquet":
            return parquet.read(file, columns, utf8=False)
        table = _stream(file, columns)
        # A stream is taken as it is: what it says of its buffers has to be checked.
        for column in table.columns:
            for chunk in column.chunks:
                parquet.as_bytes(chunk).validate(full=True)
        return table


def _stream(file: Path, columns: Sequence[str]) -> pa.Table:
    """Columns of an Arrow stream.

    It is read, not mapped: a file that somebody cuts would end a program that has it mapped.
    """
    size, made = file.stat().st_size, 0
    limits = inputs.Limits.of_environment()
    inputs.check(file)
    with inputs.opened(file) as stream:
        arrow_stream.inflated(stream, lambda inflated: limits.check(inflated, size, file))
    with inputs.opened(file) as stream, pa.ipc.open_stream(stream) as reader:
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
