"""Look up byte strings in text: tables of known strings, and codes for those that occur.

A text is a column of bytes with `PADDING` more behind its end, accessed by its address (see
`_llvm`). Strings are found by a hash and confirmed by their bytes. Tables are
plain columns of integers, so that kernels pass one address.
"""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import (
    PADDING,
    Address,
    Text,
    byte,
    get,
    load64,
    mix,
    mix_twin,
    put,
    put_byte,
)
from fastcomm_kernels.arrays import Ints

# A slot of a table of known strings: 40 bytes of the string, its size (-1: none), its value.
_SIZE, _VALUE, SLOT = 5, 6, 7
LONGEST = 40

# The first cells of `Strings`: number of strings; size, plus 1, of a string that did not fit;
# where the slots begin, and the number of the last slot; capacity of the pool in bytes. Then by
# code where the string begins in the pool, and the end of the last; then the slots, pairs of
# hash and code, with the code -1 if empty.
_COUNT, REFUSED, _SLOTS, _LAST, _ROOM, _PLACES = range(6)


class Strings(NamedTuple):
    """Strings that occurred so far, numbered in the order of their first appearance."""

    cells: Ints
    pool: Text


@kernel
def first_word(text: Address, i: int, size: int) -> int:
    """Return the first eight bytes of a string as a number, the first byte lowest.

    Parameters
    ----------
    text, i, size
        Text that has the string, and index and size of it in bytes. Bytes behind the end of a
        shorter string count as 0.

    """
    word = load64(text, i)
    return word if size >= 8 else word & ((1 << 8 * size) - 1)


@kernel
def same(a: Address, i: int, b: Address, j: int, size: int) -> bool:
    """Return whether two strings are equal: `size` bytes at `i` of `a`, and at `j` of `b`."""
    k = 0
    while k + 8 <= size:
        if load64(a, i + k) != load64(b, j + k):
            return False
        k += 8
    return first_word(a, i + k, size - k) == first_word(b, j + k, size - k)


@kernel
def find(table: Address, at: int, last: int, text: Address, i: int, size: int) -> int:
    """Return the value of a string in a table of known strings, or -1 if it is not there.

    Parameters
    ----------
    table, at, last
        Column that has the table (see `string_table`), its first cell, and its slots minus 1.
    text, i, size
        Text that has the string, and index and size of the string in bytes.

    """
    first = first_word(text, i, size)
    slot = mix(first, size) & last
    while True:
        cell = at + slot * SLOT
        if get(table, cell + _SIZE) < 0:
            return -1
        if get(table, cell) == first and get(table, cell + _SIZE) == size:
            k = 8
            while k < size and get(table, cell + k // 8) == first_word(text, i + k, size - k):
                k += 8
            if k >= size:
                return get(table, cell + _VALUE)
        slot = (slot + 1) & last


@kernel
def hash_of(text: Address, i: int, size: int) -> int:
    """Return a 64-bit hash of the string of `size` bytes at `i`.

    Two independent chains hide the latency of multiplications.
    """
    even, odd, k = size, 0, 0
    while k + 16 <= size:
        even = mix(even, load64(text, i + k))
        odd = mix(odd, load64(text, i + k + 8))
        k += 16
    if k + 8 <= size:
        odd = mix(odd, load64(text, i + k))
        k += 8
    return mix(mix(even, first_word(text, i + k, size - k)), odd)


@kernel
def intern(cells: Address, pool: Address, text: Address, i: int, size: int) -> int:
    """Return the code of a string, after adding it if it is new.

    Parameters
    ----------
    cells, pool
        Addresses of the columns of `Strings`; written, so that codes last over blocks of a
        file.
    text, i, size
        Text that has the string, and index and size of the string in bytes.

    Returns
    -------
    int
        Number of the string, in order of first appearance; -1 if it is new and does not fit.
        Cell REFUSED is then its size plus 1.

    """
    key, last, slots = hash_of(text, i, size), get(cells, _LAST), get(cells, _SLOTS)
    slot = slots + 2 * (key & last)
    code = get(cells, slot + 1)
    while code >= 0:
        if get(cells, slot) == key:
            place = get(cells, _PLACES + code)
            size_there = get(cells, _PLACES + code + 1) - place
            if size_there == size and same(pool, place, text, i, size):
                return code
        slot = slots + ((slot - slots + 2) & (2 * last + 1))
        code = get(cells, slot + 1)
    code = get(cells, _COUNT)
    place = get(cells, _PLACES + code)
    if 2 * (code + 1) > last or place + size > get(cells, _ROOM):
        put(cells, REFUSED, size + 1)
        return -1
    for k in range(size):
        put_byte(pool, place + k, byte(text, i + k))
    put(cells, slot, key)
    put(cells, slot + 1, code)
    put(cells, _PLACES + code + 1, place + size)
    put(cells, _COUNT, code + 1)
    return code


@kernel
def string_place(cells: Address, code: int) -> tuple[int, int]:
    """Return where in the pool the string of a code begins, and its size in bytes."""
    place = get(cells, _PLACES + code)
    return place, get(cells, _PLACES + code + 1) - place


@kernel
def move_slots(slots: Ints, larger: Ints) -> None:
    """Copy the entries of a hash table into a larger empty one; `larger` is written.

    A slot is two cells, hash and code, -1 where empty. Numbers of slots are powers of two.
    """
    last = len(larger) // 2 - 1
    for old in range(0, len(slots), 2):
        if slots[old + 1] < 0:
            continue
        slot = slots[old] & last
        while larger[2 * slot + 1] >= 0:
            slot = (slot + 1) & last
        larger[2 * slot] = slots[old]
        larger[2 * slot + 1] = slots[old + 1]


def string_table(entries: dict[bytes, int]) -> Ints:
    """Return a table for `find`.

    Parameters
    ----------
    entries
        Value of each string, of at most `LONGEST` bytes.

    Raises
    ------
    ValueError
        A string is longer.

    """
    slots = 1 << max(4, (4 * len(entries)).bit_length())
    table = np.full((slots, SLOT), -1, np.int64)
    for key, value in entries.items():
        if len(key) > LONGEST:
            raise ValueError(f"{key!r} has more than {LONGEST} bytes")
        parts = np.frombuffer(key.ljust(LONGEST, b"\0"), np.int64)
        slot = mix_twin(int(parts[0]), len(key)) & (slots - 1)
        while table[slot, _SIZE] >= 0:
            slot = (slot + 1) % slots
        table[slot] = [*parts, len(key), value]
    return table.reshape(-1)


def no_strings(slots: int = 1 << 12, pool: int = 1 << 18) -> Strings:
    """Return an empty set of strings.

    Parameters
    ----------
    slots
        Size of the hash table, a power of two; there is room for half as many strings.
    pool
        Room for the texts, bytes.

    """
    places = slots // 2 + 1
    cells = np.full(_PLACES + places + 2 * slots, -1, np.int64)
    cells[: _PLACES + 1] = 0, 0, _PLACES + places, slots - 1, pool, 0
    return Strings(cells=cells, pool=np.zeros(pool + PADDING, np.uint8))


def grown(strings: Strings) -> Strings:
    """Return a copy with over twice the room, and enough for the string that did not fit."""
    cells, pool = strings
    larger = no_strings(
        2 * (int(cells[_LAST]) + 1), 2 * (int(cells[_ROOM]) + int(cells[REFUSED]))
    )
    count = int(cells[_COUNT])
    larger.cells[_COUNT] = count
    larger.cells[_PLACES:][: count + 1] = cells[_PLACES:][: count + 1]
    larger.pool[: len(pool)] = pool
    move_slots(cells[int(cells[_SLOTS]) :], larger.cells[int(larger.cells[_SLOTS]) :])
    return larger


def is_full(strings: Strings) -> bool:
    """Return whether a string did not fit."""
    return bool(strings.cells[REFUSED])


def texts_of(strings: Strings) -> list[bytes]:
    """Return the strings in the order of their codes."""
    count = int(strings.cells[_COUNT])
    place = strings.cells[_PLACES:][: count + 1].tolist()
    pool = strings.pool[: place[count]].tobytes()
    return [pool[place[code] : place[code + 1]] for code in range(count)]
