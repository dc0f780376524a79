"""Scan the text of Chrome-trace JSON, block by block, into rows of integers.

`json_text` defines texts and addresses, and `json_events` what a row has.

Functions take the index `i` of a byte in the text and return the index to go on from, or
``~index`` at a byte that does not fit. They write into their arguments, so that the scan of a
block continues where the previous block ended.
"""

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import (
    STEP,
    Address,
    Text,
    address,
    byte,
    closes,
    get,
    load64,
    opens,
    trailing_zeros,
)
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.json_events import (
    BEGIN,
    FLOWS,
    INVALID,
    KIND,
    OFFSET,
    POSITION,
    Into,
    read_event,
)
from fastcomm_kernels.json_flows import read_flow
from fastcomm_kernels.json_text import (
    CLOSE,
    CLOSE_LIST,
    COLON,
    COMMA,
    OPEN,
    ends_list,
    skip_blanks,
    skip_with_care,
)
from fastcomm_kernels.string_tables import REFUSED, Strings

# The state between two calls: index in the block to go on from, offset of the block in the
# file, whether the block is the last; numbers of filled rows, of complete events and of broken
# events; whether the next event must still be searched, offset of the broken event before it,
# whether that event is only truncated; number of begins of events that are not selected;
# offsets of the first broken events.
AT, BASE, LAST, ROWS, EVENTS, DROPPED, SEARCHING, BROKEN, CUT, BEGINS, DROPS = range(11)
STATE_SIZE = DROPS + 8

# Why `scan` returned.
MORE, DONE, ROWS_FULL, STRINGS_FULL, HOPELESS = range(5)

# A scan gives up after more broken events than _MANY, if one in _SHARE is broken.
_MANY, _SHARE = 1000, 100


def _start(text: bytes) -> int:
    return int.from_bytes(text, "little")


_STARTS = tuple(
    map(_start, (b'"ph"', b'"ts"', b'"cat', b'"pid', b'"tid', b'"dur', b'"nam', b'"arg'))
)
_4_BYTES = (1 << 32) - 1
_SPACE = ord(" ")


@kernel
def checked_end(text: Address, event: int, end: int, n: int, last: bool) -> int:
    """Return `end`, the end of an event, or ``~index`` if a closer check contradicts it.

    Parameters
    ----------
    text
        Address of the text.
    event, end
        Index of the event's brace, and the index behind its end by a quick scan.
    n
        Number of bytes of the text.
    last
        Whether no more text follows. Otherwise ``~index`` may mean that more text is needed.

    """
    i = skip_blanks(text, end)
    if byte(text, i) in (COMMA, CLOSE_LIST, OPEN):
        return end
    if i >= n and not last:
        return ~i
    return end if skip_with_care(text, event) == end else ~event


@kernel
def next_event(text: Address, i: int, n: int, last: bool) -> int:
    """Return the index of the brace that begins the next event, or of the list's end.

    Parameters
    ----------
    text, i
        Address of the text, and the index to search from.
    n
        Number of bytes of the text.
    last
        Whether no more text follows.

    Returns
    -------
    int
        The index of a brace or of the closing bracket; or ``~index`` from which to search again
        with more text. An object is an event if its first key is one that all events have.

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
    block: Text, n: int, state: Ints, selection: Ints, strings: Strings, rows: Ints
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
            into = Into(index, pool, cells, row * columns)
            if get(plan, FLOWS):
                end = read_flow(text, i, plan, into)
            else:
                end = read_event(text, i, plan, into)
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
        if end >= 0 and rows[row, KIND] != INVALID:
            if rows[row, KIND] >= 0:
                rows[row, OFFSET] = state[BASE] + i
                rows[row, POSITION] = state[EVENTS] + state[DROPPED]
                state[ROWS] = row + 1
            elif rows[row, KIND] == BEGIN:
                state[BEGINS] += 1
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
