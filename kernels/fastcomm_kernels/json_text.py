"""Scan JSON text: decimal numbers, ends of strings and values, slices of events.

A text is a column of bytes with `PADDING` more behind its end, accessed by its address.
Functions take the index `i` of a byte and return the index to go on from, or ``~index`` at a
byte that does not fit.
"""

from typing import cast

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import (
    HALF,
    STEP,
    Address,
    Text,
    address,
    byte,
    closes,
    controls,
    count,
    digit_count,
    digits,
    escapes,
    gaps,
    insides,
    load64,
    not_blanks,
    opens,
    put,
    quotes,
    scalar_ends,
    string_stops,
    top,
    trailing_zeros,
    up,
)
from fastcomm_kernels.arrays import NULL, Ints

# Scales. Not Python integers, because numba would compile a function for each of these.
_Scales = tuple[int, int]
WHOLE, THOUSANDTHS = cast("_Scales", (np.int64(0), np.int64(3)))

_LARGEST = (1 << 63) - 1
_POWER = tuple(10**n for n in range(19))
# By scale: numbers below this can be scaled without overflow.
_MOST = tuple(_LARGEST // 10**n for n in range(19))
_MINUS, _PLUS, _POINT, _ZERO, _NINE = map(ord, "-+.09")
_BIG_E, _SMALL_E = ord("E"), ord("e")
# Larger than any number of digits, and far below an overflow of the exponent.
_FAR = 1 << 40


@kernel
def is_digit(text: Address, i: int) -> bool:
    """Return whether the byte at `i` is a decimal digit."""
    return _ZERO <= byte(text, i) <= _NINE


@kernel
def decimal(text: Address, i: int, scale: int, to: Address, cell: int) -> int:
    """Write the number at `i` times 10^scale, rounded, into a cell; return the index behind it.

    The cell gets NULL for no number or one beyond int64. Unusual numbers are read by `exactly`.
    """
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
    """Read any number as `decimal` does: with many digits, an exponent, or too large (NULL)."""
    negative = byte(text, i) == _MINUS
    if negative:
        i += 1
    first, point = i, -1
    while is_digit(text, i) or (byte(text, i) == _POINT and point < 0):
        if byte(text, i) == _POINT:
            point = i
        i += 1
    end = i
    digit_total = (point if point >= 0 else end) - first + scale
    if byte(text, i) in (_BIG_E, _SMALL_E):
        i += 1
        down = byte(text, i) == _MINUS
        if down or byte(text, i) == _PLUS:
            i += 1
        exponent = 0
        while is_digit(text, i):
            exponent = min(10 * exponent + byte(text, i) - _ZERO, _FAR)
            i += 1
        digit_total += -exponent if down else exponent
    value, read_count, place = 0, 0, first
    while value >= 0 and read_count < digit_total and (value > 0 or place < end):
        place += place == point
        digit = byte(text, place) - _ZERO if place < end else 0
        value = 10 * value + digit if value <= (_LARGEST - digit) // 10 else NULL
        read_count += 1
        place += 1
    place += place == point
    if (
        value >= 0
        and read_count == digit_total
        and place < end
        and byte(text, place) >= _ZERO + 5
    ):
        value = value + 1 if value < _LARGEST else NULL
    put(to, cell, -value if negative and value >= 0 else value)
    return i


QUOTE, ESCAPE, COMMA, COLON = map(ord, '"\\,:')
_U, _JSON_TEXT_ZERO, _TWO, _THREE, _FOUR, _SEVEN, _JSON_TEXT_NINE, _A, _P, _H = map(
    ord, "u023479aph"
)
OPEN, CLOSE, OPEN_LIST, CLOSE_LIST = map(ord, "{}[]")
_SPACE = ord(" ")
_LINE_BREAKS = (ord("\n"), ord("\r"), 0)

# Longer values are parsed in full, so that damage does not extend to the end of the file.
_QUICK = 1 << 14
# Most nested brackets that `skip_with_care` accepts.
_DEEPEST = 60


@kernel
def skip_blanks(text: Address, i: int) -> int:
    """Return the index of the first byte from `i` on that is not blank."""
    if byte(text, i) > _SPACE:
        return i
    if byte(text, i + 1) > _SPACE and byte(text, i) != 0:
        return i + 1
    stops = not_blanks(text, i)
    while stops == 0:
        i += HALF
        stops = not_blanks(text, i)
    return i + trailing_zeros(stops)


@kernel
def string_end(text: Address, i: int) -> int:
    """Return the index of the quote that ends a string, from its first byte, or ``~index``."""
    while True:
        stops = string_stops(text, i)
        if stops == 0:
            i += HALF
            continue
        i += trailing_zeros(stops)
        c = byte(text, i)
        if c == QUOTE:
            return i
        if c in _LINE_BREAKS:
            # A quote is missing, or there is one too many.
            return ~i
        i += 2 if c == ESCAPE else 1


@kernel
def spells_letters(text: Address, i: int, end: int) -> bool:
    """Return whether the text from `i` to `end` has an escape of a letter, digit or blank.

    These are u0020, u0030 to u0039 and u0040 to u007a; careful writers escape other
    punctuation.
    """
    while i < end:
        marks = escapes(text, i)
        if marks == 0:
            i += STEP
            continue
        i += trailing_zeros(marks)
        high, low = byte(text, i + 4), byte(text, i + 5)
        if (
            i < end
            and (byte(text, i + 1) == _U and byte(text, i + 2) == _JSON_TEXT_ZERO)
            and byte(text, i + 3) == _JSON_TEXT_ZERO
            and (
                (high == _TWO and low == _JSON_TEXT_ZERO)
                or (high == _THREE and low <= _JSON_TEXT_NINE)
                or (_FOUR <= high < _SEVEN)
                or (high == _SEVEN and low | 32 <= _A)
            )
        ):
            return True
        i += 2
    return False


@kernel
def has_phase(text: Address, i: int, end: int) -> bool:
    """Return whether the text from `i` to `end` contains `"ph"`."""
    while i < end:
        marks = quotes(text, i)
        marks &= marks >> 3
        while marks != 0:
            k = i + trailing_zeros(marks)
            if k < end and byte(text, k + 1) == _P and byte(text, k + 2) == _H:
                return True
            marks &= marks - 1
        i += STEP - 3
    return False


@kernel
def behind_colon(text: Address, i: int) -> int:
    """Return the index of the value of a member whose key ends before `i`, or ``~index``."""
    i = skip_blanks(text, i)
    return skip_blanks(text, i + 1) if byte(text, i) == COLON else ~i


@kernel
def next_member(text: Address, i: int) -> int:
    """Return the index of the key or brace behind a value that ends before `i`; or ``~i``."""
    i = skip_blanks(text, i)
    if byte(text, i) == COMMA:
        return skip_blanks(text, i + 1)
    return i if byte(text, i) == CLOSE else ~i


@kernel
def ends_list(text: Address, i: int, n: int) -> int:
    """Return whether the bracket at `i` ends the events: 1 yes, 0 no, -1 not yet known.

    The list is followed by the outer object's brace or next key, another document, or nothing.
    """
    i = skip_blanks(text, i + 1)
    c = byte(text, i)
    ends = c in (QUOTE, OPEN, OPEN_LIST, 0)
    if c in (COMMA, CLOSE):
        i = skip_blanks(text, i + 1)
        behind = byte(text, i)
        ends = behind == QUOTE if c == COMMA else behind not in (COMMA, CLOSE, CLOSE_LIST)
    return int(ends) if i < n else -1


@kernel
def skip_scalar(text: Address, i: int) -> int:
    """Return the index behind the value without brackets at `i`, which may be empty."""
    if byte(text, i) == QUOTE:
        i = string_end(text, i + 1)
        return i + 1 if i >= 0 else i
    ends = scalar_ends(text, i)
    while ends == 0:
        i += HALF
        ends = scalar_ends(text, i)
    return i + trailing_zeros(ends)


@kernel
def skip_value(text: Address, i: int) -> int:
    """Return the index behind the value of any kind at `i`, or ``~index`` if it is damaged."""
    if byte(text, i) in (OPEN, OPEN_LIST):
        return skip_rest(text, i + 1, i)
    return skip_scalar(text, i)


@kernel
def skip_rest(text: Address, i: int, bracket: int) -> int:
    """Return the index behind the bracket that closes the one at `bracket`; `i` is behind that.

    Takes `STEP` bytes at a time unless they are unusual: an escape, a line break in a string, a
    quote without a delimiter on its outer side, or a bracket closed by one of the other kind.
    """
    stop, depth, inside, before = i + _QUICK, 1, 0, 1
    after = int(byte(text, i - 1) == QUOTE)
    while i < stop:
        marks = quotes(text, i)
        strings = insides(marks, inside)
        downs, ups = closes(text, i), opens(text, i)
        edges = downs | ups | gaps(text, i)
        opening, closing = marks & strings, marks & ~strings
        odd = escapes(text, i) | (controls(text, i) & strings)
        odd |= (opening & ~up(edges, before)) | (up(closing, after) & ~edges)
        if odd != 0 or byte(text, i + STEP - 1) == 0:
            break
        downs &= ~strings
        ups &= ~strings
        if count(downs) >= depth:
            both = downs | ups
            while both != 0:
                k = trailing_zeros(both)
                depth += 1 if (ups >> k) & 1 else -1
                if depth == 0:
                    # In ASCII, a closing bracket is two above the opening one.
                    if byte(text, i + k) != byte(text, bracket) + 2:
                        return skip_with_care(text, bracket)
                    return i + k + 1
                both &= both - 1
        else:
            depth += count(ups) - count(downs)
        inside, before, after = top(strings), top(edges), top(closing)
        i += STEP
    return skip_with_care(text, bracket)


@kernel
def skip_with_care(text: Address, i: int) -> int:
    """Return the index behind the object or list at `i`, all checked; else ``~index``."""
    kinds, depth = 0, 0
    while True:
        c = byte(text, i)
        is_complete = c not in (OPEN, OPEN_LIST)
        if is_complete:
            i = skip_scalar(text, i)
            if i < 0:
                return i
        else:
            if depth == _DEEPEST:
                return ~i
            kinds, depth = 2 * kinds + int(c == OPEN_LIST), depth + 1
            i += 1
        i = skip_blanks(text, i)
        while byte(text, i) == (CLOSE_LIST if kinds & 1 else CLOSE):
            kinds, depth, is_complete = kinds >> 1, depth - 1, True
            if depth == 0:
                return i + 1
            i = skip_blanks(text, i + 1)
        if is_complete:
            if byte(text, i) != COMMA:
                return ~i
            i = skip_blanks(text, i + 1)
        if not kinds & 1:
            if byte(text, i) != QUOTE:
                return ~i
            i = string_end(text, i + 1)
            if i >= 0:
                i = behind_colon(text, i + 1)
            if i < 0:
                return i


@kernel
def slices(block: Text, begin: Ints) -> tuple[Ints, Ints]:
    """Return the end of each object that begins at `begin`, and the begin of the next value.

    All are indices of bytes in `block`. An end is the byte behind the object; the next value
    is behind the comma and blanks. If an object does not end, both are ``~index`` of the byte
    where the scan stopped.
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
    """Return the index of the bracket that ends a list of objects, or ``~index`` without one.

    The list continues at `i`, before an object or a comma; the text `block` has `n` bytes.
    """
    text = address(block)
    i = skip_blanks(text, i)
    while i < n and (byte(text, i) == COMMA or byte(text, i) == _OPEN):
        i = skip_value(text, i) if byte(text, i) == _OPEN else i + 1
        if i < 0:
            return i
        i = skip_blanks(text, i)
    return i if i < n and byte(text, i) == _CLOSE_LIST else ~i


_OPEN, _CLOSE_LIST = map(ord, "{]")
