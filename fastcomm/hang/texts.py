"""Texts that lie beside dumps, read in bounds: whole, or the last part of a long one."""

import os
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_LARGEST = 4 << 20  # bytes of a file that are read
_LARGEST_JSON = 64 << 20
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

    @cached_property
    def _breaks(self) -> list[int]:
        """Places of the ends of lines."""
        return [match.start() for match in re.finditer("\n", self.text)]

    def line(self, number: int) -> str:
        """Return file and line, by the number of lines before it."""
        if self.skipped:
            return f"{self.path}, near its end"
        return f"{self.path}:{number + 1}"


def read_text(path: Path) -> FileText | None:
    """Return the text of a file; None for one that is no text, or cannot be read.

    Of a file that is too long for it, only the end is read: there is the reason why a job
    ended. JSON has to be whole.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            if b"\0" in head:
                return None
            first = head.lstrip()[:1]
            is_json = first == b"{" or (first == b"[" and path.suffix == ".json")
            if is_json and b'"nccl_version"' not in head:
                return None  # a trace or configuration
            most = _LARGEST_JSON if is_json else _LARGEST
            state = os.fstat(file.fileno())
            size, written = state.st_size, int(state.st_mtime)
            skipped = max(0, size - most)
            if skipped and is_json:
                return None
            file.seek(skipped)
            text = file.read(most)
    except OSError:
        return None
    return FileText(
        path=path,
        text=text.decode("utf-8", "replace"),
        skipped=skipped,
        written=written if written > _FIRST else None,
    )
