"""What an Arrow stream becomes in memory, by its own words, before any of it is read.

A compressed body has the length of each buffer before it, and Arrow takes that much memory.
The words are flatbuffers: a table has a list of offsets before it, one a field.
"""

import os
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO

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
