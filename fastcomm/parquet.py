"""Parquet files of which nothing is trusted: read once their own words say that they fit.

Arrow is not asked for the metadata of a column: where it contradicts itself, the process ends.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fastcomm import inputs, remote, thrift
from fastcomm.errors import TraceFileError

_CELL = 8  # bytes of most values in memory
_TEXT, _FIXED = "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"
# Of the footer, a row group, a column and its metadata, by their numbers in Parquet's Thrift.
_GROUPS, _COLUMNS, _METADATA, _PATH, _VALUES = 4, 1, 3, 3, 5


def names(path: Path) -> list[str]:
    """The names of the columns; OSError or ArrowException where the file is none."""
    inputs.check(path)
    with _words_of(path), remote.named(path) as source:
        return list(pq.read_schema(source).names)


def read(path: Path, columns: Sequence[str] | None = None, *, utf8: bool = True) -> pa.Table:
    """Some columns, or all; raises as `names`, and TraceFileError where they cannot fit.

    Texts that are no UTF-8 are an error too, but without `utf8`.
    """
    inputs.check(path)
    with _words_of(path), remote.named(path) as source:
        return read_open(source, path.stat().st_size, path, columns, utf8=utf8)


def read_open(
    source: Any,
    size: int,
    path: Path,
    columns: Sequence[str] | None = None,
    *,
    utf8: bool = True,
) -> pa.Table:
    """The same of an open file of `size` bytes, that errors call `path`."""
    with pq.ParquetFile(source) as file:
        metadata, found = file.metadata, file.schema_arrow
        if missing := [name for name in columns or () if name not in found.names]:
            raise TraceFileError(f"{path}: no column {', '.join(missing)}; found {found.names}")
        wanted = list(found.names if columns is None else columns)
        check(metadata, size, path, wanted)
        if not (texts := plain_texts(metadata, wanted)):
            table = file.read(columns=wanted)
            check_words(table)
            return table
    if hasattr(source, "seek"):
        source.seek(0)
    with pq.ParquetFile(source, metadata=metadata, read_dictionary=texts) as file:
        return Spelled(size, path, texts, utf8=utf8).table(file.read(columns=wanted))


def plain_texts(metadata: pq.FileMetaData, wanted: Iterable[str]) -> list[str]:
    """Columns of texts, of which one word may stand there a million times."""
    leaves = map(metadata.schema.column, range(len(metadata.schema)))
    texts = {each.path for each in leaves if each.physical_type == _TEXT}
    return [name for name in wanted if name in texts]


class Spelled:
    """Texts that were read as codes and words, as texts again, as long as those fit."""

    def __init__(
        self, size: int, path: Path, texts: Sequence[str], *, utf8: bool = True
    ) -> None:
        self.size, self.path, self.texts, self.utf8 = size, path, texts, utf8
        self.limits = inputs.Limits.of_environment()
        self.made = 0.0

    def table(self, table: pa.Table) -> pa.Table:
        """A table, or one more part of it; TraceFileError where its texts would be a bomb."""
        for name in self.texts:
            column = table[name]
            found = pa.chunked_array(map(self._chunk, column.chunks), column.type.value_type)
            table = table.set_column(table.schema.get_field_index(name), name, found)
        check_words(table)
        return table

    def _chunk(self, chunk: pa.DictionaryArray) -> pa.Array:
        words = as_bytes(chunk.dictionary)
        (chunk.dictionary if self.utf8 else words).validate(full=True)
        _check_codes(chunk)
        self.made += _spelled_bytes(chunk)
        self.limits.check(self.made, self.size, self.path)
        return _with_type(words.take(chunk.indices), chunk.type.value_type)


def as_bytes(array: pa.Array) -> pa.Array:
    """Texts as bytes, which need not be UTF-8; anything else as it is."""
    return _with_type(array, pa.binary()) if array.type == pa.string() else array


def _with_type(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(
        kind, len(array), array.buffers(), array.null_count, array.offset
    )


def _spelled_bytes(chunk: pa.DictionaryArray) -> float:
    """Bytes of the words that the codes of a chunk stand for."""
    codes = chunk.indices.drop_null().to_numpy()
    if not len(codes):
        return 0
    often = np.bincount(codes, minlength=len(chunk.dictionary)).astype(np.float64)
    length = pc.fill_null(pc.binary_length(chunk.dictionary), 0).to_numpy()
    return float(often @ length.astype(np.float64))


def check(
    metadata: pq.FileMetaData,
    size: int,
    path: Path,
    columns: Sequence[str] | None = None,
    groups: Iterable[int] | None = None,
) -> None:
    """TraceFileError where columns of a file of `size` bytes would be a bomb in memory.

    A column of one value is as short for a billion rows as for ten. What texts become is not
    known before they are read: see `Spelled`. `groups`: the row groups that are to be read,
    where not all are.
    """
    with _words_of(path):
        width, nested = _leaves(metadata.schema, columns, path)
    places = range(metadata.num_row_groups) if groups is None else groups
    found = [metadata.row_group(place) for place in places]
    if any(each.num_rows < 0 or each.total_byte_size < 0 for each in found):
        raise TraceFileError(f"{path}: damaged: a row group of less than no rows or bytes")
    made = sum(width * each.num_rows + each.total_byte_size for each in found)
    if nested:
        made += _CELL * _values(metadata, nested)
    inputs.Limits.of_environment().check(made, size, path)


def _leaves(
    schema: pq.ParquetSchema, wanted: Sequence[str] | None, path: Path
) -> tuple[int, set[bytes]]:
    """Bytes of a row of plain columns, and the names of those that are lists of numbers."""
    width, nested = 0, set()
    for leaf in map(schema.column, range(len(schema))):
        plain = leaf.name == leaf.path
        name = leaf.name if plain else leaf.path.partition(".")[0]
        if wanted is not None and name not in wanted:
            continue
        if not plain and leaf.physical_type in (_TEXT, _FIXED):
            raise TraceFileError(
                f"{path}: column {leaf.path}: texts inside of others; wanted plain columns, or "
                "lists of numbers"
            )
        if leaf.max_repetition_level:
            nested.add(name.encode())
        else:
            width += max(_CELL, leaf.length if leaf.physical_type == _FIXED else 0)
    return width, nested


def _values(metadata: pq.FileMetaData, names: set[bytes]) -> int:
    """Values of columns that are lists, in all row groups."""
    _, (text,) = metadata.__reduce__()
    every = [
        column.get(_METADATA, {})
        for group in thrift.struct(bytes(text)).get(_GROUPS, [])
        for column in group.get(_COLUMNS, [])
    ]
    return sum(
        max(each.get(_VALUES, 0), 0) for each in every if each.get(_PATH, [b""])[0] in names
    )


def check_words(table: pa.Table) -> None:
    """ArrowInvalid where a code stands for no word: Arrow would look behind its memory."""
    for column in table.columns:
        for chunk in column.chunks if pa.types.is_dictionary(column.type) else ():
            chunk.dictionary.validate(full=True)
            _check_codes(chunk)


def _check_codes(chunk: pa.DictionaryArray) -> None:
    if len(chunk) == chunk.null_count:
        return
    ends = pc.min_max(chunk.indices)
    if ends["min"].as_py() < 0 or ends["max"].as_py() >= len(chunk.dictionary):
        raise pa.ArrowInvalid(f"a code {ends}, and {len(chunk.dictionary)} words")


@contextmanager
def _words_of(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path}: damaged: a name that is no UTF-8") from error
