"""Keep the part of a text in memory that a kernel scans."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.kineto.stream import CutShortError, UnreadBytesError
from fastcomm_kernels._llvm import PADDING

# Larger than most files need: allocators reuse a buffer of this size, with its pages, for the
# next of thousands of files.
_WINDOW = 1 << 23


@dataclass(slots=True)
class TextWindow:
    """A moving part of the text: `n` bytes, followed by NULs that kernels may read."""

    source: Iterator[bytes]
    text: NDArray[np.uint8] = field(default_factory=lambda: np.empty(_WINDOW, np.uint8))
    n: int = 0
    base: int = 0  # offset of the window in the text
    cut: bool = False  # whether a compressed file ended early
    behind: UnreadBytesError | None = None  # other bytes follow the gzip data

    def more(self, keep_from: int) -> bool:
        """Drop the text before `keep_from` and append blocks; return False at the end.

        At least as much text is appended as is kept, so that long events are not scanned
        repeatedly.
        """
        remaining = self.n - keep_from
        self.text[:remaining] = self.text[keep_from : self.n].copy()
        self.base += keep_from
        self.n = remaining
        while self.n < max(1, 2 * remaining) and (block := self._next()):
            self._append(block)
        self.text[self.n : self.n + PADDING] = 0
        return self.n > remaining

    def _next(self) -> bytes:
        try:
            return next(self.source, b"")
        except CutShortError:
            self.cut = True
        except UnreadBytesError as error:
            self.behind = error
        return b""

    def _append(self, block: bytes) -> None:
        size = self.n + len(block)
        if size + PADDING > len(self.text):
            wider = np.empty(2 * size + PADDING, np.uint8)
            wider[: self.n] = self.text[: self.n]
            self.text = wider
        self.text[self.n : size] = np.frombuffer(block, np.uint8)
        self.n = size

    def bytes(self) -> bytes:
        """Return a copy of the text in the window."""
        return self.text[: self.n].tobytes()
