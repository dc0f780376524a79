"""Read Parquet files of others, whose columns must not exhaust the memory.

Sizes are checked by the numbers of rows and bytes in the footer before data are read. Arrow
must not parse the metadata of a Parquet column chunk: contradictions in it end the process.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fastcomm import files
from fastcomm.errors import TraceFileError

_CELL = 8  # bytes of most values in memory
_TEXT, _FIXED = "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"


def names(path: Path) -> list[str]:
    """Return the column names of a Parquet file.

    Raises `OSError`, `ArrowException` or `TraceFileError` if it is not one.
    """
    files.check(path)
    with _checked_names(path), files.named(path) as source:
        return list(pq.read_schema(source).names)


def read(path: Path, columns: Sequence[str] | None = None, *, utf8: bool = True) -> pa.Table:
    """Read a Parquet file; only the columns named `columns` if these are given.

    Without `utf8`, texts need not be valid UTF-8.

    Raises
    ------
    OSError, ArrowException
        If the file is not Parquet.
    TraceFileError
        If a column is missing, the names are damaged, or the table is too large for memory.

    """
    files.check(path)
    with _checked_names(path), files.named(path) as source:
        return read_open(source, path.stat().st_size, path, columns, utf8=utf8)


def write(table: pa.Table, path: Path, **options: Any) -> None:
    """Write a table as Parquet; `options` are those of `pyarrow.parquet.write_table`."""
    with pa.OSFile(os.fsencode(path), "wb") as file:
        pq.write_table(table, file, **options)


@contextmanager
def writer(path: Path, schema: pa.Schema, **options: Any) -> Iterator[pq.ParquetWriter]:
    """Yield a writer of a Parquet file; `options` are those of `pyarrow`'s `ParquetWriter`."""
    with (
        pa.OSFile(os.fsencode(path), "wb") as file,
        pq.ParquetWriter(file, schema, **options) as opened,
    ):
        yield opened


def read_open(
    source: Any,
    size: int,
    path: Path,
    columns: Sequence[str] | None = None,
    *,
    utf8: bool = True,
) -> pa.Table:
    """Read an open Parquet file of `size` bytes; `path` is its name in errors.

    Only the columns named `columns` are read if these are given. Without `utf8`, texts need not
    be valid UTF-8. Raises the errors of `read`.
    """
    with pq.ParquetFile(source) as file:
        metadata, present = file.metadata, file.schema_arrow.names
        if len(set(present)) < len(present):
            raise TraceFileError(f"{path}: duplicate column names (columns: {present})")
        if missing := [name for name in columns or () if name not in present]:
            raise TraceFileError(
                f"{path}: no column {', '.join(missing)} (columns present: {present})"
            )
        selected = list(present if columns is None else columns)
        if not (texts := check(metadata, size, path, selected)):
            table = file.read(columns=selected)
            check_codes(table)
            return table
    if hasattr(source, "seek"):
        source.seek(0)
    with pq.ParquetFile(source, metadata=metadata, read_dictionary=texts) as file:
        decoder = DictionaryDecoder(size, path, texts, utf8=utf8)
        return decoder.decode(file.read(columns=selected))


class DictionaryDecoder:
    """Decodes dictionary columns of one file into texts, as long as they fit into memory.

    `size` is the size of the file in bytes, `texts` are the names of the columns. Without
    `utf8`, texts need not be valid UTF-8.
    """

    def __init__(
        self, size: int, path: Path, texts: Sequence[str], *, utf8: bool = True
    ) -> None:
        self.size, self.path, self.texts, self.utf8 = size, path, texts, utf8
        self.limits = files.Limits.of_environment()
        self.expanded = 0.0  # bytes of all texts so far

    def decode(self, table: pa.Table) -> pa.Table:
        """Return a table with texts for codes. TraceFileError if these are too large a bomb."""
        for name in self.texts:
            column = table[name]
            texts = pa.chunked_array(map(self._chunk, column.chunks), column.type.value_type)
            table = table.set_column(table.schema.get_field_index(name), name, texts)
        check_codes(table)
        return table

    def _chunk(self, chunk: pa.DictionaryArray) -> pa.Array:
        values = as_bytes(chunk.dictionary)
        (chunk.dictionary if self.utf8 else values).validate(full=True)
        _check_chunk(chunk)
        self.expanded += _decoded_bytes(chunk)
        self.limits.check(self.expanded, self.size, self.path)
        return _with_type(values.take(chunk.indices), chunk.type.value_type)


def as_bytes(array: pa.Array) -> pa.Array:
    """Return an array of texts as bytes, which need not be UTF-8; other arrays unchanged."""
    return _with_type(array, pa.binary()) if array.type == pa.string() else array


def _with_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(
        kind, len(array), array.buffers(), array.null_count, array.offset
    )


def _decoded_bytes(chunk: pa.DictionaryArray) -> float:
    """Return the total length of the texts of a chunk, in bytes."""
    codes = chunk.indices.drop_null().to_numpy()
    if not len(codes):
        return 0
    count = np.bincount(codes, minlength=len(chunk.dictionary)).astype(np.float64)
    length = pc.fill_null(pc.binary_length(chunk.dictionary), 0).to_numpy()
    return float(count @ length.astype(np.float64))


def check(
    metadata: pq.FileMetaData,
    size: int,
    path: Path,
    columns: Sequence[str] | None = None,
    groups: Iterable[int] | None = None,
) -> list[str]:
    """Refuse a Parquet file whose columns are too large for memory.

    A column of one repeated value is as short on disk for a billion rows as for ten. A list
    counts as one value, and as its bytes.

    Parameters
    ----------
    metadata
        The footer of the file.
    size
        Bytes of the file.
    path
        The file, for messages.
    columns
        The columns to read; None for all.
    groups
        The row groups to read; None for all.

    Returns
    -------
    list of str
        The columns of texts. One text may be repeated a million times: read them as
        dictionaries, and decode them with `DictionaryDecoder`.

    Raises
    ------
    TraceFileError
        If the columns exceed the limits, or the footer is damaged.

    """
    with _checked_names(path):
        leaves = _leaves(metadata.schema, columns)
    _check_nested(leaves, path)
    places = range(metadata.num_row_groups) if groups is None else groups
    row_groups = [metadata.row_group(place) for place in places]
    if any(group.num_rows < 0 or group.total_byte_size < 0 for group in row_groups):
        raise TraceFileError(
            f"{path}: damaged: a row group with a negative number of rows or bytes"
        )
    width = sum(leaf.bytes for leaf in leaves)
    expanded = sum(width * group.num_rows + group.total_byte_size for group in row_groups)
    files.Limits.of_environment().check(expanded, size, path)
    return [leaf.name for leaf in leaves if leaf.kind == _TEXT]


class _Leaf(NamedTuple):
    """A column of Parquet, which may be part of a nested column of Arrow."""

    name: str  # of Arrow's column
    path: str
    kind: str
    bytes: int  # of a value


def _leaves(schema: pq.ParquetSchema, columns: Sequence[str] | None) -> list[_Leaf]:
    """Return the physical columns of the chosen columns; None chooses all."""
    leaves = []
    for leaf in map(schema.column, range(len(schema))):
        path = leaf.path
        name = path if leaf.name == path else path.partition(".")[0]
        if columns is None or name in columns:
            kind = leaf.physical_type
            size = max(_CELL, leaf.length) if kind == _FIXED else _CELL
            leaves.append(_Leaf(name, path, kind, size))
    return leaves


def _check_nested(leaves: Iterable[_Leaf], path: Path) -> None:
    for leaf in leaves:
        if leaf.name != leaf.path and leaf.kind in (_TEXT, _FIXED):
            raise TraceFileError(
                f"{path}: column {leaf.path}: nested texts are not supported; expected plain "
                "columns, or lists of numbers"
            )


def check_codes(table: pa.Table) -> None:
    """Raise `ArrowInvalid` for a dictionary code out of range, which Arrow does not check."""
    for column in table.columns:
        for chunk in column.chunks if pa.types.is_dictionary(column.type) else ():
            chunk.dictionary.validate(full=True)
            _check_chunk(chunk)


def _check_chunk(chunk: pa.DictionaryArray) -> None:
    if len(chunk) == chunk.null_count:
        return
    ends = pc.min_max(chunk.indices)
    if ends["min"].as_py() < 0 or ends["max"].as_py() >= len(chunk.dictionary):
        raise pa.ArrowInvalid(f"codes {ends} of a dictionary of {len(chunk.dictionary)} values")


@contextmanager
def _checked_names(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path}: damaged: a column name is not UTF-8") from error
