"""Text of a Chrome-trace JSON, block by block, into rows of integers.

Strict where it tells a whole event from a broken one (a member is a key, a colon, a value, then
a comma or a brace; no string holds a line break), lenient where real profilers are wrong
(values that are missing, bytes that are not printable). A text is `n` bytes and `STEP` NULs
behind them. A reading function returns the index behind what it read, or ``~index`` of the byte
that did not fit; at `n` or beyond, that byte is only not there yet.

These kernels write into their arguments: what one block leaves, the next goes on from.
"""

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import (
    HALF,
    STEP,
    Address,
    Text,
    address,
    breaks,
    byte,
    closes,
    count,
    delimiters,
    escapes,
    get,
    insides,
    not_blanks,
    opens,
    put,
    quotes,
    string_stops,
    top,
    trailing_zeros,
    up,
)
from fastcomm_kernels.words import (
    SLOT,
    Column,
    Strings,
    StringsAt,
    find,
    first_word,
    intern,
    strings_at,
)

Rows = NDArray[np.int64]

NULL = -(1 << 63)

# Columns of a row; those from ARGS on are filled from the event's args, by the word table.
KIND, NAME, PROCESS, THREAD, START, STOP, OFFSET, DETAIL, ARGS = range(9)

# A thread or process that is no number but a word: its code, counted down from here.
WORD = -(1 << 62)

# What the state holds between two calls: where in the block to go on, how much is filled, whole
# and broken events, whether the next has to be found, whether this block is the last, where in
# the file it begins, and the places of the first broken events.
AT, ROWS, DETAILS, SEEN, DROPPED, LOST, LAST, BASE, DROPS = range(9)
STATE_SIZE = DROPS + 8

# Why `scan` came back.
MORE, DONE, ROWS_FULL, STRINGS_FULL = range(4)

# Which events of a kind are kept: none, all, those whose name begins with a wanted word.
KEEP_NONE, KEEP_ALL, KEEP_NAMED = range(3)

_QUOTE, _ESCAPE, _COMMA, _COLON = ord('"'), ord("\\"), ord(","), ord(":")
_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = ord("{"), ord("}"), ord("["), ord("]")
_MINUS, _POINT, _ZERO, _SPACE = ord("-"), ord("."), ord("0"), ord(" ")
_BIG_E, _SMALL_E, _PLUS = ord("E"), ord("e"), ord("+")
_LINE_BREAKS = (ord("\n"), ord("\r"), 0)
_COMPLETE = ord("X")


def _key(word: bytes) -> int:
    return int.from_bytes(word, "little")


_PH, _CAT, _NAME, _PID, _TID = map(_key, (b"ph", b"cat", b"name", b"pid", b"tid"))
_TS, _DUR, _ARGS = map(_key, (b"ts", b"dur", b"args"))

_PH_START, _NAME_START, _CAT_START = map(_key, (b'"ph"', b'"nam', b'"cat'))

_POWER = tuple(10**n for n in range(19))
_LARGEST = (1 << 63) - 1

# No plain integers: Numba compiles a function anew for each of those that it is called with.
_Pair = tuple[int, int]
_WHOLE, _THOUSANDTHS = cast("_Pair", (np.int64(0), np.int64(3)))
_OUTSIDE, _INSIDE = cast("_Pair", (np.int64(0), np.int64(1)))


class Wanted(NamedTuple):
    """What to keep: data, so that every analysis can ask for its own columns."""

    kinds: Column  # `word_table`: value of `cat` -> kind
    args: Column  # `word_table`: key in `args` -> place and column, made by `placed`
    keep: Column  # by kind: KEEP_NONE, KEEP_ALL or KEEP_NAMED; the last is for unknown kinds
    prefixes: Column  # for KEEP_NAMED: pairs of up to eight bytes of a name, and their mask


class WantedAt(NamedTuple):
    """The addresses of `Wanted`, and how much there is."""

    kinds: Address
    args: Address
    keep: Address
    prefixes: Address
    last_kind: int
    last_arg: int
    other: int
    prefix_count: int
    columns: int
    detail_columns: int


class Row(NamedTuple):
    """Where the event at hand goes: the addresses of all rows, and its first cell in each."""

    rows: Address
    at: int
    details: Address
    detail_at: int


# Where the value of an arg goes.
IN_ROW, IN_DETAIL, TEXT_IN_DETAIL = range(3)


def placed(place: int, column: int) -> int:
    """The value of an arg's key in `Wanted.args`."""
    return column * 3 + place


@kernel
def wanted_at(wanted: Wanted, columns: int, detail_columns: int) -> WantedAt:
    """Take the addresses."""
    return WantedAt(
        address(wanted.kinds),
        address(wanted.args),
        address(wanted.keep),
        address(wanted.prefixes),
        len(wanted.kinds) // SLOT - 1,
        len(wanted.args) // SLOT - 1,
        len(wanted.keep) - 1,
        len(wanted.prefixes) // 2,
        columns,
        detail_columns,
    )


@kernel
def skip_blanks(text: Address, i: int) -> int:
    """The next byte that is no blank."""
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
    """The quote that ends the string whose first byte is at `i`."""
    while True:
        stops = string_stops(text, i)
        if stops == 0:
            i += HALF
            continue
        i += trailing_zeros(stops)
        c = byte(text, i)
        if c == _QUOTE:
            return i
        if c in _LINE_BREAKS:
            # No JSON string holds a line break: a quote is missing, or one is too many.
            return ~i
        i += 2 if c == _ESCAPE else 1


@kernel
def skip_slowly(text: Address, i: int, depth: int) -> int:
    """Skip to behind the bracket that brings `depth` to 0, from outside of any string."""
    while True:
        c = byte(text, i)
        if c == _QUOTE:
            i = string_end(text, i + 1)
            if i < 0:
                return i
            i = skip_blanks(text, i + 1)
            c = byte(text, i)
            if c not in (_COMMA, _COLON, _CLOSE, _CLOSE_LIST):
                # A string ends before a delimiter, or it is no string.
                return ~i
            continue
        if c in (_OPEN, _OPEN_LIST):
            depth += 1
        elif c in (_CLOSE, _CLOSE_LIST):
            depth -= 1
            if depth == 0:
                return i + 1
        elif c == 0:
            return ~i
        i += 1


@kernel
def skip_to_depth(text: Address, i: int, depth: int) -> int:
    """`skip_slowly`, `STEP` bytes at a time as long as nothing is odd about them.

    Odd are an escape, a line break in a string, a quote without a delimiter on its outer side.
    From the last block before, outside of a string, the slow way decides.
    """
    start, start_depth = i, depth
    inside, before, after = 0, 1, 0
    while True:
        marks = quotes(text, i)
        strings = insides(marks, inside)
        edges = delimiters(text, i)
        opening, closing = marks & strings, marks & ~strings
        behind = up(closing, after)
        odd = escapes(text, i) | (breaks(text, i) & strings)
        odd |= (opening & ~up(edges, before)) | (behind & ~edges)
        if odd != 0 or byte(text, i + STEP - 1) == 0:
            return skip_slowly(text, start, start_depth)
        down = closes(text, i) & ~strings
        ups = opens(text, i) & ~strings
        if count(down) >= depth:
            both = down | ups
            while both != 0:
                k = trailing_zeros(both)
                depth += 1 if (ups >> k) & 1 else -1
                if depth == 0:
                    return i + k + 1
                both &= both - 1
        else:
            depth += count(ups) - count(down)
        inside, before, after = top(strings), top(edges), top(closing)
        i += STEP
        if inside == 0 and after == 0:
            start, start_depth = i, depth


@kernel
def skip_value(text: Address, i: int) -> int:
    """Skip any value; one that is missing has no length."""
    c = byte(text, i)
    if c == _QUOTE:
        i = string_end(text, i + 1)
        return i + 1 if i >= 0 else i
    if c in (_OPEN, _OPEN_LIST):
        return skip_to_depth(text, i, _OUTSIDE)
    while c > _SPACE and c not in (_COMMA, _CLOSE, _CLOSE_LIST, _QUOTE, _COLON):
        i += 1
        c = byte(text, i)
    return i


@kernel
def decimal(text: Address, i: int, scale: int) -> tuple[int, int]:
    """A number times 10^scale, rounded half away from zero, and the index behind it.

    NULL where there is no number, or none that 64 bits hold. No float is in between.
    """
    start = i
    negative = byte(text, i) == _MINUS
    if negative:
        i += 1
    first = i
    value = 0
    digit = byte(text, i) - _ZERO
    while 0 <= digit <= 9 and i < first + 18:
        value = 10 * value + digit
        i += 1
        digit = byte(text, i) - _ZERO
    known = i > first and not 0 <= digit <= 9
    places = scale
    if byte(text, i) == _POINT:
        i += 1
        digit = byte(text, i) - _ZERO
        while 0 <= digit <= 9 and places > 0 and value < _LARGEST // 10:
            value = 10 * value + digit
            places -= 1
            i += 1
            digit = byte(text, i) - _ZERO
        if 5 <= digit <= 9 and places == 0:
            value += 1
    if value > _LARGEST // _POWER[places]:
        known = False
    while 0 <= byte(text, i) - _ZERO <= 9:
        i += 1
    if byte(text, i) in (_BIG_E, _SMALL_E):
        return scientific(text, start, scale)
    if not known:
        return NULL, i
    value *= _POWER[places]
    return (-value if negative else value), i


@kernel
def scientific(text: Address, i: int, scale: int) -> tuple[int, int]:
    """`decimal` for a number with an exponent: "5e-05"."""
    negative = byte(text, i) == _MINUS
    if negative:
        i += 1
    value, digits, places, point = 0, 0, 0, False
    while byte(text, i) == _POINT or 0 <= byte(text, i) - _ZERO <= 9:
        if byte(text, i) == _POINT:
            point = True
        elif digits < 18:
            value = 10 * value + byte(text, i) - _ZERO
            digits += value > 0
            places += point
        else:
            places -= not point
        i += 1
    i += 1
    down = byte(text, i) == _MINUS
    if down or byte(text, i) == _PLUS:
        i += 1
    exponent = 0
    while 0 <= byte(text, i) - _ZERO <= 9:
        exponent = min(10 * exponent + byte(text, i) - _ZERO, 1000)
        i += 1
    shift = scale - places + (-exponent if down else exponent)
    if value == 0 or shift < -18:
        value = 0
    elif shift < 0:
        power = _POWER[-shift]
        value = value // power + (value % power >= power - power // 2)
    elif shift > 18 or value > _LARGEST // _POWER[shift]:
        return NULL, i
    else:
        value *= _POWER[shift]
    return (-value if negative else value), i


@kernel
def integer(text: Address, i: int) -> tuple[int, int]:
    """A whole number, in quotes or not; NULL for any other value. And the index behind it."""
    if byte(text, i) == _QUOTE:
        end = string_end(text, i + 1)
        if end < 0:
            return NULL, end
        value, stop = decimal(text, i + 1, _WHOLE)
        return (value if stop == end else NULL), end + 1
    value, stop = decimal(text, i, _WHOLE)
    return value, (stop if value != NULL else skip_value(text, i))


@kernel
def lane_part(text: Address, i: int, strings: StringsAt) -> tuple[int, int]:
    """A process or thread: a number, or `WORD` less the code of a word."""
    if byte(text, i) != _QUOTE:
        return integer(text, i)
    end = string_end(text, i + 1)
    if end < 0:
        return WORD, end
    code = intern(strings, text, i + 1, end - i - 1)
    return WORD - code, end + 1


@kernel
def keeps(wanted: WantedAt, kind: int, text: Address, name: int, size: int) -> bool:
    """Whether events of this kind and name are wanted."""
    keep = get(wanted.keep, kind)
    if keep != KEEP_NAMED:
        return keep == KEEP_ALL
    word = first_word(text, name, size)
    for k in range(wanted.prefix_count):
        if word & get(wanted.prefixes, 2 * k + 1) == get(wanted.prefixes, 2 * k):
            return True
    return False


@kernel
def clear(column: Address, first: int, stop: int) -> None:
    """Make the cells NULL."""
    for k in range(first, stop):
        put(column, k, NULL)


@kernel
def read_arg(text: Address, i: int, to: int, strings: StringsAt, row: Row) -> int:
    """Read the value of one wanted arg to its column."""
    place, column = to % 3, to // 3
    if place != TEXT_IN_DETAIL:
        value, end = integer(text, i)
        if place == IN_ROW:
            put(row.rows, row.at + column, value)
        else:
            put(row.details, row.detail_at + column, value)
            if value != NULL:
                put(row.rows, row.at + DETAIL, 1)
        return end
    end = skip_value(text, i)
    if end > i:
        quoted = int(byte(text, i) == _QUOTE)
        code = intern(strings, text, i + quoted, end - i - 2 * quoted)
        put(row.details, row.detail_at + column, code)
        put(row.rows, row.at + DETAIL, 1)
    return end


@kernel
def read_args(text: Address, i: int, wanted: WantedAt, strings: StringsAt, row: Row) -> int:
    """Read the wanted members of the `args` object whose brace is at `i`; skip the others.

    The row's DETAIL becomes 1 where a detail was found.
    """
    # Of two `args` the last counts, as with any key.
    clear(row.rows, row.at + ARGS, row.at + wanted.columns)
    clear(row.details, row.detail_at, row.detail_at + wanted.detail_columns)
    put(row.rows, row.at + DETAIL, -1)
    i = skip_blanks(text, i + 1)
    while byte(text, i) != _CLOSE:
        if byte(text, i) != _QUOTE:
            return ~i
        end = string_end(text, i + 1)
        if end < 0:
            return end
        to = find(wanted.args, wanted.last_arg, text, i + 1, end - i - 1)
        if to < 0:
            marks = escapes(text, i + 1)
            if marks != 0 and trailing_zeros(marks) < end - i - 1:
                # A key may be spelled in escapes. None of ours ever was: say so, do not guess.
                return ~i
        i = skip_blanks(text, end + 1)
        if byte(text, i) != _COLON:
            return ~i
        i = skip_blanks(text, i + 1)
        i = skip_value(text, i) if to < 0 else read_arg(text, i, to, strings, row)
        if i < 0:
            return i
        i = skip_blanks(text, i)
        if byte(text, i) == _COMMA:
            i = skip_blanks(text, i + 1)
        elif byte(text, i) != _CLOSE:
            return ~i
    return i + 1


@kernel
def read_event(
    text: Address, i: int, wanted: WantedAt, strings: StringsAt, row: Row
) -> tuple[int, bool]:
    """Read the event whose brace is at `i`: the index behind it, and whether it is kept."""
    clear(row.rows, row.at, row.at + wanted.columns)
    put(row.rows, row.at + DETAIL, -1)
    at, kind, phase, start, length = i, -1, 0, NULL, 0
    name, name_size = i, -1
    i = skip_blanks(text, i + 1)
    while byte(text, i) != _CLOSE:
        if byte(text, i) != _QUOTE or byte(text, i + 1) == _ESCAPE:
            return ~i, False
        end = string_end(text, i + 1)
        if end < 0:
            return end, False
        key = first_word(text, i + 1, end - i - 1)
        i = skip_blanks(text, end + 1)
        if byte(text, i) != _COLON:
            return ~i, False
        i = skip_blanks(text, i + 1)
        c = byte(text, i)
        if key == _TS:
            start, i = decimal(text, i, _THOUSANDTHS)
        elif key == _DUR:
            length, i = decimal(text, i, _THOUSANDTHS)
        elif key in (_PID, _TID):
            value, i = lane_part(text, i, strings)
            put(row.rows, row.at + (PROCESS if key == _PID else THREAD), value)
        elif key == _ARGS and c == _OPEN:
            i = read_args(text, i, wanted, strings, row)
        elif c == _QUOTE and key in (_PH, _CAT, _NAME):
            end = string_end(text, i + 1)
            if end < 0:
                return end, False
            if key == _PH:
                phase = byte(text, i + 1) if end == i + 2 else 1
            elif key == _NAME:
                name, name_size = i + 1, end - i - 1
            else:
                kind = find(wanted.kinds, wanted.last_kind, text, i + 1, end - i - 1)
                kind = wanted.other if kind < 0 else kind
            i = end + 1
            if phase not in (0, _COMPLETE) or (
                kind >= 0
                and (name_size >= 0 or get(wanted.keep, kind) != KEEP_NAMED)
                and not keeps(wanted, kind, text, name, max(name_size, 0))
            ):
                return skip_to_depth(text, i, _INSIDE), False
        else:
            i = skip_value(text, i)
        if i < 0:
            return i, False
        i = skip_blanks(text, i)
        if byte(text, i) == _COMMA:
            i = skip_blanks(text, i + 1)
        elif byte(text, i) != _CLOSE:
            return ~i, False
    kind, name_size = (wanted.other if kind < 0 else kind), max(name_size, 0)
    if phase != _COMPLETE or not keeps(wanted, kind, text, name, name_size):
        return i + 1, False
    if start == NULL or length < 0 or start > _LARGEST - length:
        return ~at, False
    put(row.rows, row.at + KIND, kind)
    put(row.rows, row.at + START, start)
    put(row.rows, row.at + STOP, start + length)
    put(row.rows, row.at + NAME, intern(strings, text, name, name_size))
    return i + 1, True


@kernel
def next_event(text: Address, i: int, n: int, last: bool) -> int:
    """The brace at or behind `i` that begins an event, or the bracket that ends the list.

    An event's first key is its phase, its name or its category; behind the list stands the
    outer object's brace or its next key. Where there is none, ``~index`` of where to look again
    when there is more text.
    """
    while i < n:
        stops = opens(text, i) | closes(text, i)
        if stops == 0:
            i += STEP
            continue
        i += trailing_zeros(stops)
        before = i - 1
        while before >= 0 and byte(text, before) <= _SPACE:
            before -= 1
        after = skip_blanks(text, i + 1)
        if after + STEP > n and not last:
            return ~min(i, n)
        if byte(text, i) == _OPEN and (
            before < 0 or byte(text, before) in (_COMMA, _OPEN_LIST)
        ):
            key = first_word(text, after, 4)
            if key in (_PH_START, _NAME_START, _CAT_START):
                return i
        if byte(text, i) == _CLOSE_LIST and before >= 0 and byte(text, before) == _CLOSE:
            c, behind = byte(text, after), skip_blanks(text, after + 1)
            if after >= n or (c == _COMMA and byte(text, behind) == _QUOTE):
                return i
            if c == _CLOSE and behind >= n:
                return i
        i += 1
    return ~n


@kernel
def scan(
    block: Text,
    n: int,
    state: Column,
    wanted_words: Wanted,
    met: Strings,
    rows: Rows,
    details: Rows,
) -> int:
    """Read events from `state[AT]` on, the wanted into `rows` and `details`; say why it ends.

    An event that does not parse is counted and its offset kept (the first eight); the search
    for the next begins right behind its brace, so that it swallows nothing.
    """
    columns, detail_columns = rows.shape[1], details.shape[1]
    text, strings = address(block), strings_at(met)
    wanted = wanted_at(wanted_words, columns, detail_columns)
    rows_at, details_at = address(rows), address(details)
    i = state[AT]
    while True:
        if state[LOST]:
            i = next_event(text, i, n, state[LAST] != 0)
            if i < 0:
                state[AT] = ~i
                return MORE
            state[LOST] = 0
        i = skip_blanks(text, i)
        while byte(text, i) == _COMMA:
            i = skip_blanks(text, i + 1)
        state[AT] = min(i, n)
        if i >= n:
            return MORE
        if byte(text, i) == _CLOSE_LIST:
            state[AT] = i + 1
            return DONE
        r, d = state[ROWS], state[DETAILS]
        if r == len(rows) or d == len(details):
            return ROWS_FULL
        end, kept = ~i, False
        if byte(text, i) == _OPEN:
            row = Row(rows_at, r * columns, details_at, d * detail_columns)
            end, kept = read_event(text, i, wanted, strings, row)
        if met.used[1] > 0:
            return STRINGS_FULL
        if end >= 0:
            state[SEEN] += 1
            if kept:
                rows[r, OFFSET] = state[BASE] + i
                state[ROWS] = r + 1
                if rows[r, DETAIL] > 0:
                    rows[r, DETAIL] = d
                    state[DETAILS] = d + 1
            i = end
        elif ~end >= n:
            return MORE
        else:
            state[DROPS + min(state[DROPPED], STATE_SIZE - DROPS - 1)] = state[BASE] + i
            state[DROPPED] += 1
            state[LOST] = 1
            i += 1
