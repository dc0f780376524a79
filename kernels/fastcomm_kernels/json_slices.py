"""Where the events of a Chrome-trace JSON begin and end, so that they can be cut and put."""

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Text, address, byte
from fastcomm_kernels.graph import Column
from fastcomm_kernels.json_text import COMMA, skip_blanks, skip_value


@kernel
def slices(block: Text, begin: Column) -> tuple[Column, Column]:
    """Where the objects that begin at `begin` end, and where what follows each begins.

    What follows is behind the comma and blanks. ``~index`` where an object does not end.
    """
    text = address(block)
    end, behind = np.empty_like(begin), np.empty_like(begin)
    for k in range(len(begin)):
        i = skip_value(text, begin[k])
        end[k] = behind[k] = i
        if i >= 0:
            i = skip_blanks(text, i)
            if byte(text, i) == COMMA:
                i = skip_blanks(text, i + 1)
            behind[k] = i
    return end, behind


@kernel
def list_end(block: Text, i: int, n: int) -> int:
    """The bracket that ends the list of objects that goes on at `i`, or ``~index``."""
    text = address(block)
    i = skip_blanks(text, i)
    while i < n and (byte(text, i) == COMMA or byte(text, i) == _OPEN):
        i = skip_value(text, i) if byte(text, i) == _OPEN else i + 1
        if i < 0:
            return i
        i = skip_blanks(text, i)
    return i if i < n and byte(text, i) == _CLOSE_LIST else ~i


_OPEN, _CLOSE_LIST = map(ord, "{]")
