"""Parquet files and Arrow streams of strangers: read once their own words say that they fit.

Arrow is not asked for the metadata of a Parquet column: where it contradicts itself, the
process ends. A compressed body of a stream has the length of each buffer before it, and Arrow
takes that much memory. The words of a stream are flatbuffers: a table has a list of offsets
before it, one a field.
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
# Behind the path of a column in a footer: its codec, and how many values it has.
_CODEC_VALUES = rb"\x15[\x80-\xff]*[\x00-\x7f]\x16([\x80-\xff]*[\x00-\x7f])"


def names(path: Path) -> list[str]:
    """The names of the columns; OSError or ArrowException where the file is none."""
    files.check(path)
    with _words_of(path), files.named(path) as source:
        return list(pq.read_schema(source).names)


def read(path: Path, columns: Sequence[str] | None = None, *, utf8: bool = True) -> pa.Table:
    """Some columns, or all; raises as `names`, and TraceFileError where they cannot fit.

    Texts that are no UTF-8 are an error too, but without `utf8`.
    """
    files.check(path)
    with _words_of(path), files.named(path) as source:
        return read_open(source, path.stat().st_size, path, columns, utf8=utf8)


def write(table: pa.Table, path: Path, **options: Any) -> None:
    """Write a table to a file of any name; `options` are those of `pyarrow.parquet`."""
    with pa.OSFile(os.fsencode(path), "wb") as file:
        pq.write_table(table, file, **options)


@contextmanager
def writer(path: Path, schema: pa.Schema, **options: Any) -> Iterator[pq.ParquetWriter]:
    """Yield a writer of a file of any name; `options` are those of `ParquetWriter`."""
    with (
        pa.OSFile(os.fsencode(path), "wb") as file,
        pq.ParquetWriter(file, schema, **options) as made,
    ):
        yield made


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
        if len(set(found.names)) < len(found.names):
            raise TraceFileError(f"{path}: two columns of one name; found {found.names}")
        if missing := [name for name in columns or () if name not in found.names]:
            raise TraceFileError(f"{path}: no column {', '.join(missing)}; found {found.names}")
        wanted = list(found.names if columns is None else columns)
        if not (texts := check(metadata, size, path, wanted)):
            table = file.read(columns=wanted)
            check_words(table)
            return table
    if hasattr(source, "seek"):
        source.seek(0)
    with pq.ParquetFile(source, metadata=metadata, read_dictionary=texts) as file:
        return Spelled(size, path, texts, utf8=utf8).table(file.read(columns=wanted))


class Spelled:
    """Texts that were read as codes and words, as texts again, as long as those fit."""

    def __init__(
        self, size: int, path: Path, texts: Sequence[str], *, utf8: bool = True
    ) -> None:
        self.size, self.path, self.texts, self.utf8 = size, path, texts, utf8
        self.limits = files.Limits.of_environment()
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
) -> list[str]:
    """TraceFileError where columns of a file of `size` bytes would be a bomb in memory.

    A column of one value is as short for a billion rows as for ten. Returned are the columns of
    texts, of which one word may stand there a million times: read as codes and words, and
    `Spelled`, they are no bomb either. `groups`: the row groups that are to be read, where not
    all are.
    """
    with _words_of(path):
        leaves = _leaves(metadata.schema, columns)
    _check_nested(leaves, path)
    places = range(metadata.num_row_groups) if groups is None else groups
    found = [metadata.row_group(place) for place in places]
    if any(each.num_rows < 0 or each.total_byte_size < 0 for each in found):
        raise TraceFileError(f"{path}: damaged: a row group of less than no rows or bytes")
    width = sum(each.bytes for each in leaves if not each.many)
    made = sum(width * each.num_rows + each.total_byte_size for each in found)
    if many := [each for each in leaves if each.many]:
        made += _CELL * _values(metadata, many, path)
    files.Limits.of_environment().check(made, size, path)
    return [each.name for each in leaves if each.kind == _TEXT]


class _Leaf(NamedTuple):
    """A column of Parquet, which may be inside of one of Arrow."""

    name: str  # of Arrow's column
    path: str
    kind: str
    bytes: int  # of a value
    many: bool  # values in a row


def _leaves(schema: pq.ParquetSchema, wanted: Sequence[str] | None) -> list[_Leaf]:
    found = []
    for leaf in map(schema.column, range(len(schema))):
        path = leaf.path
        name = path if leaf.name == path else path.partition(".")[0]
        if wanted is None or name in wanted:
            kind = leaf.physical_type
            size = max(_CELL, leaf.length) if kind == _FIXED else _CELL
            found.append(_Leaf(name, path, kind, size, leaf.max_repetition_level > 0))
    return found


def _check_nested(leaves: Iterable[_Leaf], path: Path) -> None:
    for leaf in leaves:
        if leaf.name != leaf.path and leaf.kind in (_TEXT, _FIXED):
            raise TraceFileError(
                f"{path}: column {leaf.path}: texts inside of others; wanted plain columns, or "
                "lists of numbers"
            )


def _values(metadata: pq.FileMetaData, leaves: Iterable[_Leaf], path: Path) -> int:
    """Values of columns that have many in a row, in all row groups.

    They stand in the footer, which Arrow writes again for whoever wants to pickle it. The same
    bytes elsewhere in it would only count as more.
    """
    _, (text,) = metadata.__reduce__()
    values = 0
    for leaf in leaves:
        parts = [each.encode() for each in leaf.path.split(".")]
        words = b"".join(bytes([len(each) & 0x7F]) + each for each in parts)
        mark = re.escape(bytes([0x19, len(parts) << 4 & 0xF0 | 8]) + words)
        counts = re.findall(mark + _CODEC_VALUES, text, re.DOTALL)
        if len(counts) < metadata.num_row_groups:
            raise TraceFileError(
                f"{path}: column {leaf.path}: nothing says how many values it has; wanted a "
                "list with a short name, without dots"
            )
        values += sum(map(_unsigned, counts))
    return values


def _unsigned(varint: bytes) -> int:
    """A number of Thrift, seven bits a byte; its sign is its last bit."""
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(varint)) >> 1


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


_MORE = 0xFFFFFFFF  # before the length of a message, since 2019
# Fields of a message, of a batch of dictionary words, of a record batch; and kinds of messages.
_KIND, _HEADER, _BODY, _WORDS, _BUFFERS, _COMPRESSION = 1, 2, 3, 1, 2, 3
_DICTIONARY, _RECORDS = 2, 3
_BUFFER = 16  # bytes of one: where it is in the body, and its length


def inflated(file: BinaryIO, check: Callable[[int], None]) -> None:
    """Call `check` with the bytes of all compressed buffers up to each; ValueError for damage.

    The file is read from where it is, and its bodies are skipped.
    """
    made = 0
    for words, body in _messages(file):
        for place in _compressed(words):
            file.seek(body + place)
            head = file.read(8)
            # Of a buffer that did not shrink, or has nothing, that is no length.
            made += max(0, int.from_bytes(head, "little", signed=True))
        check(made)


def _messages(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """The words of each message, and where its body begins."""
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
        words, body = file.read(size), file.tell()
        yield words, body
        length = _value(words, _follow(words, 0), _BODY, "q")
        # Arrow takes that much memory before it reads.
        if not 0 <= length <= end - body:
            raise ValueError(f"a body of {length} bytes, and {end - body} are left")
        file.seek(body + length)


def _compressed(words: bytes) -> list[int]:
    """Where in its body the compressed buffers of a message begin."""
    message = _follow(words, 0)
    kind = _value(words, message, _KIND, "B")
    if kind not in (_DICTIONARY, _RECORDS):
        return []
    batch = _table(words, message, _HEADER)
    if kind == _DICTIONARY:
        batch = _table(words, batch, _WORDS)
    if not _field(words, batch, _COMPRESSION) or not _field(words, batch, _BUFFERS):
        return []
    first = _table(words, batch, _BUFFERS)
    count = _number(words, first, "I")
    if first + 4 + count * _BUFFER > len(words):
        raise ValueError(f"{count} buffers in {len(words)} bytes")
    pairs = struct.iter_unpack("<qq", words[first + 4 : first + 4 + _BUFFER * count])
    found = [place for place, length in pairs if length]
    if found and min(found) < 0:
        raise ValueError("a buffer before its body")
    return found


def _table(words: bytes, table: int, number: int) -> int:
    """Where a table or list begins that is a field of a table."""
    if not (place := _field(words, table, number)):
        raise ValueError(f"a message without field {number}")
    return _follow(words, place)


def _value(words: bytes, table: int, number: int, kind: str) -> int:
    """A number that is a field; 0 where the table lacks it."""
    place = _field(words, table, number)
    return _number(words, place, kind) if place else 0


def _field(words: bytes, table: int, number: int) -> int:
    """Where a field of a table is; 0 where the table lacks it."""
    offsets = table - _number(words, table, "i")
    slot = 4 + 2 * number
    if slot >= _number(words, offsets, "H"):
        return 0
    offset = _number(words, offsets + slot, "H")
    return table + offset if offset else 0


def _follow(words: bytes, place: int) -> int:
    return place + _number(words, place, "I")


def _number(words: bytes, place: int, kind: str) -> int:
    if place < 0:
        raise ValueError("an offset before the message")
    try:
        (value,) = struct.unpack_from(f"<{kind}", words, place)
    except struct.error as error:
        raise ValueError("an offset behind the message") from error
    return int(value)
