"""Words in a text of bytes: a table of known ones, and codes for the ones met.

A text is bytes with `STEP` readable ones behind its end, given by its address (see `_llvm`).
A hash finds a word and its bytes prove it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import (
    STEP,
    Address,
    Text,
    address,
    byte,
    get,
    load64,
    mix,
    mix_twin,
    put,
    put_byte,
)

Column = NDArray[np.int64]

# A slot of a table of known words: 32 bytes of it, its size (-1: there is none), its value.
_SIZE, _VALUE, SLOT = 4, 5, 6
_LONGEST = 32

# By size: which bits of eight bytes belong to a shorter word.
_LOW = tuple((1 << 8 * n) - 1 for n in range(8))


class Strings(NamedTuple):
    """Words met so far, numbered in the order of their first appearance."""

    slots: Column  # pairs of hash and code; the code is -1 where the slot is empty
    place: Column  # by code: where the word begins in `pool`; one more than there are words
    pool: Text
    used: Column  # how many words there are, and the size of one that found no room, plus 1


class StringsAt(NamedTuple):
    """The addresses of `Strings`, and the last slot and the room that there are."""

    slots: Any
    place: Any
    pool: Any
    used: Any
    last: int
    room: int


@kernel
def strings_at(strings: Strings) -> StringsAt:
    """Take the addresses."""
    return StringsAt(
        address(strings.slots),
        address(strings.place),
        address(strings.pool),
        address(strings.used),
        len(strings.slots) // 2 - 1,
        len(strings.pool) - STEP,
    )


@kernel
def first_word(text: Address, i: int, size: int) -> int:
    """The first eight bytes of a word as a number; a shorter word is padded with NULs."""
    word = load64(text, i)
    return word if size >= 8 else word & _LOW[size]


@kernel
def same(a: Address, i: int, b: Address, j: int, size: int) -> bool:
    """Whether two words of one size are the same bytes."""
    k = 0
    while k + 8 <= size:
        if load64(a, i + k) != load64(b, j + k):
            return False
        k += 8
    return first_word(a, i + k, size - k) == first_word(b, j + k, size - k)


@kernel
def find(table: Address, last: int, text: Address, i: int, size: int) -> int:
    """The value of the known word at `i`, or -1. The table has `last` + 1 slots."""
    first = first_word(text, i, size)
    slot = (mix(first, size) & last) * SLOT
    while get(table, slot + _SIZE) >= 0:
        if get(table, slot) == first and get(table, slot + _SIZE) == size:
            k = 8
            while k < size and get(table, slot + k // 8) == first_word(text, i + k, size - k):
                k += 8
            if k >= size:
                return get(table, slot + _VALUE)
        slot = (slot + SLOT) % ((last + 1) * SLOT)
    return -1


@kernel
def hash_of(text: Address, i: int, size: int) -> int:
    """A 64-bit hash of the word at `i`."""
    state, k = size, 0
    while k + 8 <= size:
        state = mix(state, load64(text, i + k))
        k += 8
    return mix(state, first_word(text, i + k, size - k))


@kernel
def intern(strings: StringsAt, text: Address, i: int, size: int) -> int:
    """The code of the word at `i`, a new one where it is new.

    Writes into `strings`: what is met in one block of a file must be known in the next. Where
    there is no room for a new word, `used[1]` tells and the answer is -1.
    """
    key = hash_of(text, i, size)
    slot = key & strings.last
    code = get(strings.slots, 2 * slot + 1)
    while code >= 0:
        if get(strings.slots, 2 * slot) == key:
            place = get(strings.place, code)
            size_there = get(strings.place, code + 1) - place
            if size_there == size and same(strings.pool, place, text, i, size):
                return code
        slot = (slot + 1) & strings.last
        code = get(strings.slots, 2 * slot + 1)
    code = get(strings.used, 0)
    place = get(strings.place, code)
    if 2 * (code + 1) > strings.last or place + size > strings.room:
        put(strings.used, 1, size + 1)
        return -1
    for k in range(size):
        put_byte(strings.pool, place + k, byte(text, i + k))
    put(strings.slots, 2 * slot, key)
    put(strings.slots, 2 * slot + 1, code)
    put(strings.place, code + 1, place + size)
    put(strings.used, 0, code + 1)
    return code


@kernel
def move_slots(slots: Column, larger: Column) -> None:
    """Enter what is in `slots` into `larger`, which is empty."""
    last = len(larger) // 2 - 1
    for old in range(0, len(slots), 2):
        if slots[old + 1] < 0:
            continue
        slot = slots[old] & last
        while larger[2 * slot + 1] >= 0:
            slot = (slot + 1) & last
        larger[2 * slot] = slots[old]
        larger[2 * slot + 1] = slots[old + 1]


def word_table(words: dict[bytes, int]) -> Column:
    """A table of known `words` of at most 32 bytes, a value for each, for `find`."""
    slots = 1 << max(4, (4 * len(words)).bit_length())
    table = np.full((slots, SLOT), -1, np.int64)
    for word, value in words.items():
        parts = np.frombuffer(word.ljust(_LONGEST, b"\0"), np.int64)
        slot = mix_twin(int(parts[0]), len(word)) & (slots - 1)
        while table[slot, _SIZE] >= 0:
            slot = (slot + 1) % slots
        table[slot] = [*parts, len(word), value]
    return table.reshape(-1)


def no_strings(slots: int = 1 << 12, pool: int = 1 << 18) -> Strings:
    """No words yet, and room for half as many as `slots` (a power of two)."""
    return Strings(
        slots=np.full(2 * slots, -1, np.int64),
        place=np.zeros(slots // 2 + 2, np.int64),
        pool=np.zeros(pool, np.uint8),
        used=np.zeros(2, np.int64),
    )


def grown(strings: Strings) -> Strings:
    """The same words with more than twice the room, the word that found none included."""
    pool = 2 * (len(strings.pool) + int(strings.used[1]))
    larger = no_strings(len(strings.slots), pool)
    count = strings.used[0]
    larger.used[0] = count
    larger.place[: count + 1] = strings.place[: count + 1]
    larger.pool[: len(strings.pool)] = strings.pool
    move_slots(strings.slots, larger.slots)
    return larger


def texts_of(strings: Strings) -> list[bytes]:
    """The words in the order of their codes."""
    count = int(strings.used[0])
    place = strings.place[: count + 1].tolist()
    pool = strings.pool[: place[count]].tobytes()
    return [pool[place[code] : place[code + 1]] for code in range(count)]
