"""The part of a text that is at hand while a kernel scans it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.kineto.stream import CutShortError, UnreadBytesError
from fastcomm_kernels._llvm import PADDING

# Most of it is never touched; but an allocator that has seen it freed once keeps as much at
# hand, and the next of thousands of files finds its pages there.
_WINDOW = 1 << 23


@dataclass(slots=True)
class TextWindow:
    """The part of the text that is at hand: `n` bytes, and NULs that a kernel may look at."""

    source: Iterator[bytes]
    text: NDArray[np.uint8] = field(default_factory=lambda: np.empty(_WINDOW, np.uint8))
    n: int = 0
    base: int = 0  # where in the file the window begins
    cut: bool = False  # a compressed file ended early
    behind: UnreadBytesError | None = None  # what follows the end of the gzip data

    def more(self, keep_from: int) -> bool:
        """Forget what is before `keep_from` and append a block; False at the end.

        At least as much comes as is left: what is long is not read over and over.
        """
        rest = self.n - keep_from
        self.text[:rest] = self.text[keep_from : self.n].copy()
        self.base += keep_from
        self.n = rest
        while self.n < max(1, 2 * rest) and (block := self._next()):
            self._append(block)
        self.text[self.n : self.n + PADDING] = 0
        return self.n > rest

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
        """Return a copy of the text at hand."""
        return self.text[: self.n].tobytes()
