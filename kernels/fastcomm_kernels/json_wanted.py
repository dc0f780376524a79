"""What a scan keeps, as data: every analysis asks for its own columns."""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, get
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.words import SLOT, find, first_word, word_table

# Columns of a row; from ARGS on those that the event's args fill. Where DETAIL is NULL, the
# event has no details, and their columns hold nothing.
KIND, NAME, PROCESS, THREAD, START, STOP, OFFSET, DETAIL, POSITION, ARGS = range(10)

# Which events of a kind are kept: none, all, those whose name begins with a wanted word.
KEEP_NONE, KEEP_ALL, KEEP_NAMED = range(3)

# What is wanted is one column: these cells; then, where they say, a table of categories and one
# of args; how each kind is kept; pairs of a name's first eight bytes and their mask.
_KINDS, _LAST_KIND, ARG_KEYS, LAST_ARG, _KEEP, OTHER = range(6)
_PREFIXES, _PREFIXES_END, COLUMNS, DETAILS, _HEAD = range(6, 11)


class ScanColumns(NamedTuple):
    """What to keep."""

    kinds: dict[bytes, int]  # value of `cat` -> kind
    keep: list[int]  # by kind: KEEP_NONE, KEEP_ALL or KEEP_NAMED; the last is for unknown kinds
    prefixes: list[bytes]  # for KEEP_NAMED: at most eight bytes of a name
    numbers: list[bytes]  # args of every event, whole numbers
    detail_numbers: list[bytes]  # args of few events
    detail_texts: list[bytes]  # args of few events, any value as text

    def width(self) -> int:
        """The columns of a row; it is cleared by eights."""
        wanted = len(self.numbers) + len(self.detail_numbers) + len(self.detail_texts)
        return ARGS + wanted + 7

    def plan(self) -> Ints:
        """The same for `scan`."""
        numbers = [*self.numbers, *self.detail_numbers]
        args = {key: 2 * column for column, key in enumerate(numbers, ARGS)}
        first = ARGS + len(numbers)
        args |= {key: 2 * column + 1 for column, key in enumerate(self.detail_texts, first)}
        prefixes = [
            int.from_bytes(part.ljust(8, b"\0"), "little", signed=True)
            for word in self.prefixes
            for part in (word, b"\xff" * len(word))
        ]
        tables = [word_table(self.kinds), word_table(args)]
        parts = [*tables, np.array(self.keep, np.int64), np.array(prefixes, np.int64)]
        ends = np.cumsum([_HEAD, *map(len, parts)])
        head = np.zeros(_HEAD, np.int64)
        head[[_KINDS, ARG_KEYS, _KEEP, _PREFIXES, _PREFIXES_END]] = ends
        head[[_LAST_KIND, LAST_ARG]] = [len(table) // SLOT - 1 for table in tables]
        head[[OTHER, COLUMNS, DETAILS]] = (
            len(self.keep) - 1,
            first + len(self.detail_texts),
            ARGS + len(self.numbers),
        )
        return np.concatenate([head, *parts])


@kernel
def keeps(plan: Address, kind: int, text: Address, name: int, size: int) -> bool:
    """Whether events of this kind and name are wanted, or may be: size -1 is no name yet."""
    keep = get(plan, get(plan, _KEEP) + kind)
    if keep != KEEP_NAMED or size < 0:
        return keep != KEEP_NONE
    word = first_word(text, name, size)
    for k in range(get(plan, _PREFIXES), get(plan, _PREFIXES_END), 2):
        if word & get(plan, k + 1) == get(plan, k):
            return True
    return False


@kernel
def kind_of(plan: Address, text: Address, i: int, size: int) -> int:
    """The kind of a category."""
    kind = find(plan, get(plan, _KINDS), get(plan, _LAST_KIND), text, i, size)
    return get(plan, OTHER) if kind < 0 else kind
