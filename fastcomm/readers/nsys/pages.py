"""Pages of an SQLite file: those of a table form a tree, in which nothing is reached twice.

SQLite trusts that. Pages that lead to each other would give rows without end, which no limit of
ours could see while a condition keeps none of them. The format is section 1.6 of SQLite's
"Database File Format".
"""

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.inputs import opened

Numbers = NDArray[np.int64]

_INNER = (2, 5)  # types of pages that lead to others: of an index, of a table
_HEADER, _FIRST_HEADER = 12, 100  # bytes of an inner page's; of the file, before that of page 1
_BLOCK = 1 << 22


class Pages:
    """The pages of one file, and which of them were reached."""

    def __init__(self, path: Path, page_size: int) -> None:
        self.path, self.page_size = path, page_size
        with opened(path) as file:
            self._types = _types(file, page_size)
        self._seen = np.zeros(len(self._types), np.bool_)

    def check(self, roots: Iterable[int]) -> None:
        """TraceFileError where what begins at one of these pages is no tree of its own."""
        with opened(self.path) as file:
            for root in roots:
                level = np.array([root], np.int64)
                while len(level):
                    _check_new(level, self._seen, self.path)
                    self._seen[level] = True
                    inner = level[np.isin(self._types[level], _INNER)].tolist()
                    below = [_children(file, page, self.page_size, self.path) for page in inner]
                    level = np.concatenate(below) if below else np.empty(0, np.int64)


def _types(file: BinaryIO, page_size: int) -> NDArray[np.uint8]:
    """The type of each page, its first byte, by number; there is no page 0."""
    block = max(_BLOCK // page_size, 1) * page_size
    parts = [np.zeros(1, np.uint8)]
    while data := file.read(block):
        parts.append(np.frombuffer(data, np.uint8)[::page_size].copy())
    types = np.concatenate(parts)
    file.seek(_FIRST_HEADER)
    types[1:2] = np.frombuffer(file.read(1), np.uint8)
    return types


def _check_new(level: Numbers, seen: NDArray[np.bool_], path: Path) -> None:
    """TraceFileError where a page is not in the file, or was reached before."""
    outside = level[(level < 1) | (level >= len(seen))]
    again = level[:0] if len(outside) else level[seen[level]]
    if len(outside) or len(again) or len(np.unique(level)) != len(level):
        strange = next(iter([*outside.tolist(), *again.tolist()]), int(level[0]))
        raise TraceFileError(
            f"{path}: malformed: page {strange} of {len(seen) - 1} is none, or is reached "
            "twice; export it again"
        )


def _children(file: BinaryIO, page: int, page_size: int, path: Path) -> Numbers:
    """The pages that an inner page leads to."""
    file.seek((page - 1) * page_size)
    data = file.read(page_size)
    at = _FIRST_HEADER if page == 1 else 0
    count = int.from_bytes(data[at + 3 : at + 5], "big")
    if at + _HEADER + 2 * count > len(data):
        raise TraceFileError(f"{path}: malformed: page {page} has {count} cells")
    offsets = np.frombuffer(data, ">u2", count, at + _HEADER).astype(np.int64)
    cells = np.append(offsets, at + 8)  # the last child stands in the header
    if (cells + 4 > len(data)).any():
        raise TraceFileError(f"{path}: malformed: a cell of page {page} is outside of it")
    text = np.frombuffer(data, np.uint8)
    quads = text[cells[:, None] + np.arange(4)].astype(np.int64)
    found: Numbers = quads @ np.array([1 << 24, 1 << 16, 1 << 8, 1], np.int64)
    return found
