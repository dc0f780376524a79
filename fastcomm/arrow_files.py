"""Read Parquet files and check Arrow streams of others, so that no file exhausts the memory.

Sizes are checked by the metadata before data are read. Arrow must not parse the metadata of a
Parquet column chunk: contradictions in it end the process. In a stream, the length of each
compressed buffer precedes it, and Arrow allocates that much memory. The metadata of a stream
are flatbuffers: a table is preceded by a list of offsets, one per field.
"""

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fastcomm import files
from fastcomm.errors import TraceFileError

_CELL = 8  # bytes of most values in memory
_TEXT, _FIXED = "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"
# Follows the path of a column in a footer: its codec and its number of values.
_CODEC_VALUES = rb"\x15[\x80-\xff]*[\x00-\x7f]\x16([\x80-\xff]*[\x00-\x7f])"


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

    A column of one repeated value is as short on disk for a billion rows as for ten.

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
    width = sum(leaf.bytes for leaf in leaves if not leaf.many)
    expanded = sum(width * group.num_rows + group.total_byte_size for group in row_groups)
    if many := [leaf for leaf in leaves if leaf.many]:
        expanded += _CELL * _values(metadata, many, path)
    files.Limits.of_environment().check(expanded, size, path)
    return [leaf.name for leaf in leaves if leaf.kind == _TEXT]


class _Leaf(NamedTuple):
    """A column of Parquet, which may be part of a nested column of Arrow."""

    name: str  # of Arrow's column
    path: str
    kind: str
    bytes: int  # of a value
    many: bool  # whether a row may have several values


def _leaves(schema: pq.ParquetSchema, columns: Sequence[str] | None) -> list[_Leaf]:
    """Return the physical columns of the chosen columns; None chooses all."""
    leaves = []
    for leaf in map(schema.column, range(len(schema))):
        path = leaf.path
        name = path if leaf.name == path else path.partition(".")[0]
        if columns is None or name in columns:
            kind = leaf.physical_type
            size = max(_CELL, leaf.length) if kind == _FIXED else _CELL
            leaves.append(_Leaf(name, path, kind, size, leaf.max_repetition_level > 0))
    return leaves


def _check_nested(leaves: Iterable[_Leaf], path: Path) -> None:
    for leaf in leaves:
        if leaf.name != leaf.path and leaf.kind in (_TEXT, _FIXED):
            raise TraceFileError(
                f"{path}: column {leaf.path}: nested texts are not supported; expected plain "
                "columns, or lists of numbers"
            )


def _values(metadata: pq.FileMetaData, leaves: Iterable[_Leaf], path: Path) -> int:
    """Return the number of values of list columns in all row groups.

    It is read from the footer, which Arrow serializes for pickle. Equal bytes elsewhere in the
    footer only make the result larger.
    """
    _, (text,) = metadata.__reduce__()
    values = 0
    for leaf in leaves:
        parts = [part.encode() for part in leaf.path.split(".")]
        name = b"".join(bytes([len(part) & 0x7F]) + part for part in parts)
        mark = re.escape(bytes([0x19, len(parts) << 4 & 0xF0 | 8]) + name)
        counts = re.findall(mark + _CODEC_VALUES, text, re.DOTALL)
        if len(counts) < metadata.num_row_groups:
            raise TraceFileError(
                f"{path}: column {leaf.path}: unknown number of values; expected a list with a "
                "short name, without dots"
            )
        values += sum(map(_unsigned, counts))
    return values


def _unsigned(varint: bytes) -> int:
    """Decode a zigzag varint of Thrift, of a number from 0."""
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint)) >> 1


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


_MORE = 0xFFFFFFFF  # precedes the length of a message since Arrow 0.15
# Fields of a message, of a dictionary batch, of a record batch; and kinds of messages.
_KIND, _HEADER, _BODY, _VALUES, _BUFFERS, _COMPRESSION = 1, 2, 3, 1, 2, 3
_DICTIONARY, _RECORDS = 2, 3
_BUFFER = 16  # bytes of a buffer entry: its offset in the body and its length


def check_inflated(file: BinaryIO, check: Callable[[int], None]) -> None:
    """Call `check` with the decompressed bytes so far after each message of a stream.

    The file is read from its position; the bodies of messages are skipped. Raises `ValueError`
    for a damaged stream.
    """
    inflated = 0
    for metadata, body in _messages(file):
        for place in _compressed(metadata):
            file.seek(body + place)
            head = file.read(8)
            # -1: the buffer is not compressed.
            inflated += max(0, int.from_bytes(head, "little", signed=True))
        check(inflated)


def _messages(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the metadata of each message, and the position of its body."""
    begin, end = file.tell(), file.seek(0, os.SEEK_END)
    file.seek(begin)
    while len(head := file.read(4)) == 4:  # noqa: PLR2004
        if int.from_bytes(head, "little") == _MORE:
            head = file.read(4)
        size = int.from_bytes(head, "little")
        if not size:
            return
        if size > end:
            raise ValueError("the stream ends inside of a message")
        metadata, body = file.read(size), file.tell()
        yield metadata, body
        length = _value(metadata, _follow(metadata, 0), _BODY, "q")
        # Arrow allocates that much memory before it reads.
        if not 0 <= length <= end - body:
            raise ValueError(f"a body of {length} bytes, but only {end - body} remain")
        file.seek(body + length)


def _compressed(metadata: bytes) -> list[int]:
    """Return the offsets of the compressed buffers of a message in its body."""
    message = _follow(metadata, 0)
    kind = _value(metadata, message, _KIND, "B")
    if kind not in (_DICTIONARY, _RECORDS):
        return []
    batch = _table(metadata, message, _HEADER)
    if kind == _DICTIONARY:
        batch = _table(metadata, batch, _VALUES)
    if not _field(metadata, batch, _COMPRESSION) or not _field(metadata, batch, _BUFFERS):
        return []
    first = _table(metadata, batch, _BUFFERS)
    count = _number(metadata, first, "I")
    if first + 4 + count * _BUFFER > len(metadata):
        raise ValueError(f"{count} buffers in {len(metadata)} bytes of metadata")
    pairs = struct.iter_unpack("<qq", metadata[first + 4 : first + 4 + _BUFFER * count])
    places = [place for place, length in pairs if length]
    if places and min(places) < 0:
        raise ValueError("a buffer before its body")
    return places


def _table(metadata: bytes, table: int, number: int) -> int:
    """Return the position of the table or list that is a field of a table."""
    if not (place := _field(metadata, table, number)):
        raise ValueError(f"a message without field {number}")
    return _follow(metadata, place)


def _value(metadata: bytes, table: int, number: int, kind: str) -> int:
    """Return a number that is a field of a table; 0 if the field is absent."""
    place = _field(metadata, table, number)
    return _number(metadata, place, kind) if place else 0


def _field(metadata: bytes, table: int, number: int) -> int:
    """Return the position of a field of a table; 0 if the field is absent."""
    offsets = table - _number(metadata, table, "i")
    slot = 4 + 2 * number
    if slot >= _number(metadata, offsets, "H"):
        return 0
    offset = _number(metadata, offsets + slot, "H")
    return table + offset if offset else 0


def _follow(metadata: bytes, place: int) -> int:
    return place + _number(metadata, place, "I")


def _number(metadata: bytes, place: int, kind: str) -> int:
    """Read a number of a `struct` format at an offset in bytes."""
    if place < 0:
        raise ValueError("an offset before the message")
    try:
        (value,) = struct.unpack_from(f"<{kind}", metadata, place)
    except struct.error as error:
        raise ValueError("an offset behind the message") from error
    return int(value)
