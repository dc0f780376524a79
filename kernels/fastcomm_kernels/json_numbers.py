"""Decimal text into 64-bit integers; no float is in between.

A number is scaled by a power of ten, rounded half away from zero, and written to a cell of a
column: NULL where there is none, or none that 64 bits hold. The answer is the index behind it.
"""

from typing import cast

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, byte, digit_count, digits, load64, put

NULL = -(1 << 63)

# Scales. Not plain integers, for Numba compiles a function anew for each of those.
_Scales = tuple[int, int]
WHOLE, THOUSANDTHS = cast("_Scales", (np.int64(0), np.int64(3)))

_LARGEST = (1 << 63) - 1
_POWER = tuple(10**n for n in range(19))
# By scale: what is less than this can be scaled.
_MOST = tuple(_LARGEST // 10**n for n in range(19))
_MINUS, _PLUS, _POINT, _ZERO, _NINE = map(ord, "-+.09")
_BIG_E, _SMALL_E = ord("E"), ord("e")
# More than any text has digits, and far from where an exponent itself overflows.
_FAR = 1 << 40


@kernel
def is_digit(text: Address, i: int) -> bool:
    """Whether the byte at `i` is a decimal digit."""
    return _ZERO <= byte(text, i) <= _NINE


@kernel
def decimal(text: Address, i: int, scale: int, to: Address, cell: int) -> int:
    """A number times 10^scale. Eight digits at a time; what is odd goes to `exactly`."""
    start, value = i, 0
    if byte(text, i) == _MINUS:
        i += 1
    first = i
    while is_digit(text, i):
        word = load64(text, i)
        size = digit_count(word)
        if i + size > first + 18:
            return exactly(text, start, scale, to, cell)
        value = value * _POWER[size] + digits(word, size)
        i += size
    if i == first:
        put(to, cell, NULL)
        return i
    places, size = scale, 0
    if byte(text, i) == _POINT:
        word = load64(text, i + 1)
        size = digit_count(word)
        used = min(size, scale)
        if value < _MOST[scale]:
            value = value * _POWER[used] + digits(word, used)
            value += size > used and (word >> 8 * used) & 0xFF >= _ZERO + 5
            places -= used
        i += 1 + size
    if value >= _MOST[places] or size == 8 or byte(text, i) in (_BIG_E, _SMALL_E):
        return exactly(text, start, scale, to, cell)
    value *= _POWER[places]
    put(to, cell, -value if byte(text, start) == _MINUS else value)
    return i


@kernel
def exactly(text: Address, i: int, scale: int, to: Address, cell: int) -> int:
    """`decimal` of any number: of many digits, with an exponent, too large."""
    negative = byte(text, i) == _MINUS
    if negative:
        i += 1
    first, point = i, -1
    while is_digit(text, i) or (byte(text, i) == _POINT and point < 0):
        if byte(text, i) == _POINT:
            point = i
        i += 1
    end = i
    take = (point if point >= 0 else end) - first + scale
    if byte(text, i) in (_BIG_E, _SMALL_E):
        i += 1
        down = byte(text, i) == _MINUS
        if down or byte(text, i) == _PLUS:
            i += 1
        exponent = 0
        while is_digit(text, i):
            exponent = min(10 * exponent + byte(text, i) - _ZERO, _FAR)
            i += 1
        take += -exponent if down else exponent
    value, taken, place = 0, 0, first
    while value >= 0 and taken < take and (value > 0 or place < end):
        place += place == point
        digit = byte(text, place) - _ZERO if place < end else 0
        value = 10 * value + digit if value <= (_LARGEST - digit) // 10 else NULL
        taken += 1
        place += 1
    place += place == point
    if value >= 0 and taken == take and place < end and byte(text, place) >= _ZERO + 5:
        value = value + 1 if value < _LARGEST else NULL
    put(to, cell, -value if negative and value >= 0 else value)
    return i
