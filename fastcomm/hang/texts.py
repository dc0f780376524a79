"""Texts that lie beside dumps, read in bounds: whole, or the last part of a long one."""

import gzip
import os
import re
import zlib
from bisect import bisect_left
from codecs import BOM_UTF8
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

_LARGEST = 4 << 20  # bytes of a file that are read
_LARGEST_JSON = 64 << 20
_LARGEST_PACKED = 1 << 30  # bytes that are unpacked
_BLOCK = 1 << 20
_PACKED = ".gz"
_HEAD = 4096
_FIRST = 1_000_000_000  # s: archives without times set earlier ones


@dataclass(frozen=True, kw_only=True)
class FileText:
    """The text of a file, and where it begins."""

    path: Path
    text: str
    skipped: int = 0  # bytes before it
    written: int | None = None  # second, of a copy a later one; None where nothing tells

    def place(self, at: int) -> str:
        """Return file and line of a character, or its byte where lines are not counted."""
        if self.skipped:
            return f"{self.path}, about byte {self.skipped + at}"
        return self.line(bisect_left(self._breaks, at))

    @property
    def plain(self) -> Path:
        """The path without the ending of a packed file."""
        return self.path.with_suffix("") if self.path.suffix == _PACKED else self.path

    @cached_property
    def _breaks(self) -> list[int]:
        """Places of the ends of lines."""
        return [match.start() for match in re.finditer("\n", self.text)]

    def line(self, number: int) -> str:
        """Return file and line, by the number of lines before it."""
        if self.skipped:
            return f"{self.path}, near its end"
        return f"{self.path}:{number + 1}"


def _content(path: Path) -> tuple[bytes, int, int] | None:
    """Return the bytes of a text, how many before them are skipped, and its time."""
    with path.open("rb") as packed:
        state, head = os.fstat(packed.fileno()), packed.read(_HEAD)
        is_packed = head[:2] == b"\x1f\x8b"
        written = int.from_bytes(head[4:8], "little") if is_packed else 0
        packed.seek(0)
        unpacked = gzip.GzipFile(fileobj=packed) if is_packed else None
        file = unpacked or packed
        head = file.read(_HEAD)
        if b"\0" in head:
            return None
        first = head.removeprefix(BOM_UTF8).lstrip()[:1]
        is_json = first == b"{" or (first == b"[" and ".json" in path.suffixes)
        if is_json and b'"nccl_version"' not in head:
            return None  # a trace or configuration
        most = _LARGEST_JSON if is_json else _LARGEST
        if unpacked is not None:
            text, skipped = _end(unpacked, head, most)
        else:
            text, skipped = _end_of_plain(packed, state.st_size, most)
        return None if is_json and skipped else (text, skipped, written or int(state.st_mtime))


def _end_of_plain(file: BinaryIO, size: int, most: int) -> tuple[bytes, int]:
    skipped = max(0, size - most)
    file.seek(skipped)
    return file.read(most), skipped


def _end(file: gzip.GzipFile, head: bytes, most: int) -> tuple[bytes, int]:
    """Return the last bytes of a packed file, and the number of those before.

    What is beyond the largest packed text is not read.
    """
    text, skipped = head, 0
    while skipped < _LARGEST_PACKED and (block := file.read(_BLOCK)):
        text += block
        if len(text) > most + _BLOCK:
            skipped += len(text) - most
            text = text[-most:]
    return text, skipped


def read_text(path: Path) -> FileText | None:
    """Return the text of a file; None for one that is no text, or cannot be read.

    Of a file that is too long for it, only the end is read: there is the reason why a job
    ended. JSON has to be whole.
    """
    try:
        content = _content(path)
    except (OSError, EOFError, zlib.error):
        return None
    if content is None:
        return None
    text, skipped, written = content
    return FileText(
        path=path,
        text=text.removeprefix(BOM_UTF8).decode("utf-8", "replace"),
        skipped=skipped,
        written=written if written > _FIRST else None,
    )
