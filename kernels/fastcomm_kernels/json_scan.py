"""Scan the text of Chrome-trace JSON, block by block, into rows of integers.

`json_text` defines texts and addresses. Keys, phases and categories are compared as bytes, and
an event with escapes in these counts as broken. Of repeated keys the last value counts, except
that the first category or name that rules an event out does so at once.

Functions take the index `i` of a byte in the text and return the index to go on from, or
``~index`` at a byte that does not fit. They write into their arguments, so that the scan of a
block continues where the previous block ended.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import (
    STEP,
    Address,
    Text,
    address,
    byte,
    closes,
    digit_count,
    digits,
    get,
    load64,
    opens,
    put,
    put8,
    trailing_zeros,
)
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.json_text import (
    CLOSE,
    CLOSE_LIST,
    COLON,
    COMMA,
    OPEN,
    QUOTE,
    THOUSANDTHS,
    WHOLE,
    behind_colon,
    decimal,
    ends_list,
    has_phase,
    next_member,
    skip_blanks,
    skip_rest,
    skip_value,
    skip_with_care,
    spells_letters,
    string_end,
)
from fastcomm_kernels.words import (
    ARG_KEYS,
    ARGS,
    COLUMNS,
    DETAIL,
    DETAILS,
    KIND,
    LAST_ARG,
    NAME,
    OFFSET,
    OTHER,
    POSITION,
    PROCESS,
    REFUSED,
    START,
    STOP,
    THREAD,
    Strings,
    find,
    intern,
    keeps,
    kind_of,
)

Rows = NDArray[np.int64]

# A thread or process that is text, not a number: this minus the code of the text.
WORD = -(1 << 62)

# The state between two calls: index in the block to go on from, offset of the block in the
# file, whether the block is the last; numbers of filled rows, of complete events and of broken
# events; whether the next event must still be searched, offset of the broken event before it,
# whether that event is only truncated; offsets of the first broken events.
AT, BASE, LAST, ROWS, EVENTS, DROPPED, SEARCHING, BROKEN, CUT, DROPS = range(10)
STATE_SIZE = DROPS + 8

# Why `scan` returned.
MORE, DONE, ROWS_FULL, STRINGS_FULL, HOPELESS = range(5)

# Times are less than this, so that a base time can be added.
_FAR = 1 << 62
_REFUSED = -1
# A scan gives up after more broken events than _MANY, if one in _SHARE is broken.
_MANY, _SHARE = 1000, 100


def _key(text: bytes) -> int:
    return int.from_bytes(text, "little")


_PH, _TS = map(_key, (b'ph"', b'ts"'))
_CAT, _PID, _TID, _DUR = map(_key, (b'cat"', b'pid"', b'tid"', b'dur"'))
_NAME, _ARGS = map(_key, (b'name"', b'args"'))
_STARTS = tuple(
    map(_key, (b'"ph"', b'"ts"', b'"cat', b'"pid', b'"tid', b'"dur', b'"nam', b'"arg'))
)
_3_BYTES, _4_BYTES, _5_BYTES = ((1 << 8 * n) - 1 for n in (3, 4, 5))
_COMPLETE, _N, _SPACE = map(ord, "Xn ")
_OTHER = 1  # a phase that is not a single character


class Into(NamedTuple):
    """Where the values of the current event go."""

    strings: Address
    pool: Address
    rows: Address
    at: int  # index of the first cell of the event's row


@kernel
def clear(into: Into, first: int, stop: int) -> None:
    """Set columns of the row to NULL, and up to seven columns behind them."""
    while first < stop:
        put8(into.rows, into.at + first, NULL)
        first += 8


@kernel
def integer(text: Address, i: int, to: Address, cell: int) -> int:
    """Read an integer, in quotes or not, into a cell; NULL for any other value."""
    word = load64(text, i)
    size = digit_count(word)
    if 0 < size < 8 and byte(text, i + size) in (COMMA, CLOSE):
        put(to, cell, digits(word, size))
        return i + size
    quoted = int(byte(text, i) == QUOTE)
    stop = decimal(text, i + quoted, WHOLE, to, cell)
    if quoted == 0 and get(to, cell) != NULL:
        return stop
    end = skip_value(text, i)
    if stop != end - quoted:
        put(to, cell, NULL)
    return end


@kernel
def text_of(text: Address, i: int, into: Into, cell: int) -> int:
    """Read any value as text, and write its code into a cell; NULL if missing or null."""
    end = skip_value(text, i)
    quoted = int(byte(text, i) == QUOTE)
    if end <= i or (byte(text, i) == _N and end == i + 4):
        put(into.rows, cell, NULL)
    else:
        size = end - i - 2 * quoted
        put(into.rows, cell, intern(into.strings, into.pool, text, i + quoted, size))
    return end


@kernel
def read_arg(text: Address, i: int, to: int, plan: Address, into: Into) -> int:
    """Read the value of a selected arg into its column.

    `to` is twice the column, plus 1 for texts.
    """
    cell = into.at + (to >> 1)
    if to >> 1 >= get(plan, DETAILS) and get(into.rows, into.at + DETAIL) < 0:
        clear(into, get(plan, DETAILS), get(plan, COLUMNS))
        put(into.rows, into.at + DETAIL, 1)
    if to & 1:
        return text_of(text, i, into, cell)
    return integer(text, i, into.rows, cell)


@kernel
def read_args(text: Address, i: int, plan: Address, into: Into) -> int:
    """Read the selected members of the `args` object whose brace is at `i`."""
    keys, last = get(plan, ARG_KEYS), get(plan, LAST_ARG)
    i = skip_blanks(text, i + 1)
    while byte(text, i) != CLOSE:
        if byte(text, i) != QUOTE:
            return ~i
        end = string_end(text, i + 1)
        if end < 0:
            return end
        to = find(plan, keys, last, text, i + 1, end - i - 1)
        if to < 0 and spells_letters(text, i + 1, end):
            return ~i
        i = behind_colon(text, end + 1)
        if i >= 0:
            i = skip_value(text, i) if to < 0 else read_arg(text, i, to, plan, into)
        if i >= 0:
            i = next_member(text, i)
        if i < 0:
            return i
    return i + 1


@kernel
def read_lane(text: Address, i: int, into: Into, cell: int) -> int:
    """Read a process or thread into a cell: a number, or `WORD` minus the code of a text."""
    if byte(text, i) == QUOTE:
        i = text_of(text, i, into, cell)
        put(into.rows, cell, WORD - get(into.rows, cell))
        return i
    i = integer(text, i, into.rows, cell)
    if get(into.rows, cell) <= WORD:
        put(into.rows, cell, NULL)
    return i


@kernel
def read_event(text: Address, i: int, plan: Address, into: Into) -> int:
    """Read the event whose brace is at `i` into its row.

    KIND becomes NULL for an event that is not selected, and _REFUSED for one with invalid
    values.
    """
    rows, at, event = into.rows, into.at, i
    put8(rows, at, NULL)
    kind, phase, name, size, has_args = -1, 0, i, -1, False
    i = skip_blanks(text, i + 1)
    while byte(text, i) != CLOSE:
        if byte(text, i) != QUOTE:
            return ~i
        # A branch for each size of a key, which the processor predicts.
        key = load64(text, i + 1)
        if key & _3_BYTES in (_PH, _TS):
            key, end = key & _3_BYTES, i + 3
        elif key & _4_BYTES in (_CAT, _PID, _TID, _DUR):
            key, end = key & _4_BYTES, i + 4
        elif key & _5_BYTES in (_NAME, _ARGS):
            key, end = key & _5_BYTES, i + 5
        else:
            key, end = 0, string_end(text, i + 1)
            if end < 0:
                return end
            if spells_letters(text, i + 1, end):
                put(rows, at + KIND, _REFUSED)
                return skip_rest(text, end + 1, event)
        i = behind_colon(text, end + 1)
        if i < 0:
            return i
        if byte(text, i) == QUOTE and key in (_PH, _CAT, _NAME):
            end = string_end(text, i + 1)
            if end < 0:
                return end
            if key == _PH:
                phase = byte(text, i + 1) if end == i + 2 else _OTHER
            elif key == _NAME:
                name, size = i + 1, end - i - 1
            else:
                kind = kind_of(plan, text, i + 1, end - i - 1)
            is_strange = phase == _OTHER or kind == get(plan, OTHER)
            if is_strange and key != _NAME and spells_letters(text, i + 1, end):
                put(rows, at + KIND, _REFUSED)
                return skip_rest(text, end + 1, event)
            i = end + 1
            if phase not in (0, _COMPLETE):
                end = skip_rest(text, i, event)
                if end < 0 or not has_phase(text, i, end):
                    return end
            elif kind >= 0 and not keeps(plan, kind, text, name, size):
                return skip_rest(text, i, event)
        elif key in (_TS, _DUR):
            i = decimal(text, i, THOUSANDTHS, rows, at + (START if key == _TS else STOP))
        elif key in (_PID, _TID):
            i = read_lane(text, i, into, at + (PROCESS if key == _PID else THREAD))
        elif key == _ARGS:
            has_args = True
            clear(into, ARGS, get(plan, DETAILS))
            put(rows, at + DETAIL, NULL)
            is_object = byte(text, i) == OPEN
            i = read_args(text, i, plan, into) if is_object else skip_value(text, i)
        else:
            phase = _OTHER if key == _PH else phase
            i = skip_value(text, i)
        if i >= 0:
            i = next_member(text, i)
        if i < 0:
            return i
    kind = get(plan, OTHER) if kind < 0 else kind
    if phase != _COMPLETE or not keeps(plan, kind, text, name, max(size, 0)):
        return i + 1
    start, length = get(rows, at + START), get(rows, at + STOP)
    if not -_FAR < start < _FAR or not 0 <= length < _FAR:
        put(rows, at + KIND, _REFUSED)
        return i + 1
    if not has_args:
        clear(into, ARGS, get(plan, DETAILS))
    put(rows, at + KIND, kind)
    put(rows, at + STOP, start + length)
    put(rows, at + NAME, intern(into.strings, into.pool, text, name, max(size, 0)))
    return i + 1


@kernel
def checked_end(text: Address, event: int, end: int, n: int, last: bool) -> int:
    """Return `end`, the end of an event, or ``~index`` if a closer check contradicts it."""
    i = skip_blanks(text, end)
    if byte(text, i) in (COMMA, CLOSE_LIST, OPEN):
        return end
    if i >= n and not last:
        return ~i
    return end if skip_with_care(text, event) == end else ~event


@kernel
def next_event(text: Address, i: int, n: int, last: bool) -> int:
    """Return the index of the brace that begins the next event, or of the list's bracket.

    The first key of an event is one that all events have. If there is none, return ``~index``
    of where to search again with more text.
    """
    while i < n:
        stops = opens(text, i) | closes(text, i)
        if stops == 0:
            i += STEP
            continue
        i += trailing_zeros(stops)
        before, after = i - 1, skip_blanks(text, i + 1)
        while before >= 0 and byte(text, before) <= _SPACE:
            before -= 1
        if after + 8 > n and not last:
            return ~i
        if (
            byte(text, i) == OPEN
            and load64(text, after) & _4_BYTES in _STARTS
            and (before < 0 or byte(text, before) != COLON)
        ):
            return i
        if byte(text, i) == CLOSE_LIST and before >= 0 and byte(text, before) == CLOSE:
            ends = ends_list(text, i, n)
            if ends < 0 and not last:
                return ~i
            if ends != 0:
                return i
        i += 1
    return ~n


@kernel
def scan(
    block: Text, n: int, state: Ints, selection: Ints, strings: Strings, rows: Rows
) -> int:
    """Read events from `state[AT]` on into `rows`, and return why the scan ends.

    An event that does not parse is counted, and the offsets of the first eight are kept. The
    search for the next event begins behind its brace, so that no event is lost with it.

    Parameters
    ----------
    block
        Text with `PADDING` bytes behind its `n` bytes.
    n
        Bytes of the text.
    state
        The state between two calls; written.
    selection
        The plan of a selection.
    strings
        Texts and their codes; written.
    rows
        One row per selected event; written.

    Returns
    -------
    int
        MORE, DONE, ROWS_FULL, STRINGS_FULL or HOPELESS.

    """
    text, plan, cells, columns = (
        address(block),
        address(selection),
        address(rows),
        rows.shape[1],
    )
    index, pool = address(strings.cells), address(strings.pool)
    i, last = state[AT], state[LAST] != 0
    while True:
        if state[SEARCHING]:
            i = next_event(text, i, n, last)
            if i < 0:
                state[AT] = ~i
                return MORE
            state[SEARCHING] = 0
        i = skip_blanks(text, i)
        while byte(text, i) == COMMA:
            i = skip_blanks(text, i + 1)
        state[AT] = min(i, n)
        if i >= n:
            return MORE
        row = state[ROWS]
        if row == len(rows):
            return ROWS_FULL
        end = ~i
        if byte(text, i) == OPEN:
            end = read_event(text, i, plan, Into(index, pool, cells, row * columns))
            if end >= 0:
                end = checked_end(text, i, end, n, last)
        elif byte(text, i) == CLOSE_LIST:
            ends = ends_list(text, i, n)
            if ends > 0 or (ends < 0 and last):
                state[AT] = i + 1
                return DONE
            end = end if ends == 0 else ~n
        if get(index, REFUSED) > 0:
            return STRINGS_FULL
        if ~end >= n and not last:
            return MORE
        if end >= 0 and rows[row, KIND] != _REFUSED:
            if rows[row, KIND] >= 0:
                rows[row, OFFSET] = state[BASE] + i
                rows[row, POSITION] = state[EVENTS] + state[DROPPED]
                state[ROWS] = row + 1
            state[EVENTS] += 1
            i = end
            continue
        state[DROPS + min(state[DROPPED], STATE_SIZE - DROPS - 1)] = state[BASE] + i
        state[DROPPED] += 1
        if end >= 0:
            i = end
            continue
        state[SEARCHING], state[BROKEN] = 1, state[BASE] + i
        state[CUT] = int(byte(text, i) == OPEN and ~skip_with_care(text, i) >= n)
        if state[DROPPED] > _MANY and state[DROPPED] * _SHARE > state[EVENTS]:
            return HOPELESS
        i += 1
