"""Flow events of Chrome-trace JSON: the two ends of arrows between points of lanes.

A row of one has these columns of `json_events`: KIND, PROCESS, THREAD, START (its time) and
OFFSET. Its args are the columns below.
"""

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, byte, get, put, put8
from fastcomm_kernels.arrays import NULL
from fastcomm_kernels.json_events import (
    ARGS,
    DETAIL,
    KIND,
    NAME,
    OTHER,
    PROCESS,
    START,
    THREAD,
    Into,
    clear,
    kind_of,
    number,
    read_lane,
    text_of,
)
from fastcomm_kernels.json_text import (
    CLOSE,
    QUOTE,
    THOUSANDTHS,
    behind_colon,
    next_member,
    skip_blanks,
    skip_rest,
    skip_value,
    string_end,
)
from fastcomm_kernels.string_tables import first_word

# The args of a row: code of the text of its id; letter of its phase, _BEGIN or _END; NULL if
# the row does not say that the arrow ends at the event around its time.
COLUMNS = ("id", "phase", "is_inside")
_ID, _PHASE, _INSIDE, _STOP = range(ARGS, ARGS + len(COLUMNS) + 1)
BEGIN, END = map(ord, "sf")
_LETTER_E = ord("e")


def _key(text: bytes) -> int:
    return int.from_bytes(text, "little")


_PH, _TS, _CAT, _PID, _TID = map(_key, (b"ph", b"ts", b"cat", b"pid", b"tid"))
_ID_KEY, _ID2_KEY, _BP = map(_key, (b"id", b"id2", b"bp"))
_LONGEST_KEY = 7


@kernel
def read_flow(text: Address, i: int, plan: Address, into: Into) -> int:
    """Read the event whose brace is at `i`, and return the index behind it, or ``~index``.

    Parameters
    ----------
    text, i
        The text, and the index of the opening brace.
    plan
        Selection, see `ScanColumns.plan`: the last kind is not kept.
    into
        The row to write. Its KIND becomes NULL for what is no flow event of a selected kind.

    """
    rows, at, event, kind = into.rows, into.at, i, NULL
    put8(rows, at, NULL)
    put(rows, at + DETAIL, NULL)
    clear(into, ARGS, _STOP)
    i = skip_blanks(text, i + 1)
    while byte(text, i) != CLOSE:
        if byte(text, i) != QUOTE:
            return ~i
        end = string_end(text, i + 1)
        if end < 0:
            return end
        size = end - i - 1
        key = first_word(text, i + 1, size) if size <= _LONGEST_KEY else 0
        i = behind_colon(text, end + 1)
        if i < 0:
            return i
        if key in (_PH, _CAT, _BP):
            end = skip_value(text, i)
            if end < 0:
                return end
            if key == _CAT:
                kind = kind_of(plan, text, i + 1, end - i - 2)
            else:
                cell = at + (_PHASE if key == _PH else _INSIDE)
                put(rows, cell, byte(text, i + 1))
            i = end
            if kind == get(plan, OTHER) or get(rows, at + _PHASE) not in (NULL, BEGIN, END):
                return skip_rest(text, i, event)
        elif key == _TS:
            i = number(text, i, THOUSANDTHS, rows, at + START)
        elif key in (_PID, _TID):
            i = read_lane(text, i, into, at + (PROCESS if key == _PID else THREAD))
        elif key in (_ID_KEY, _ID2_KEY):
            i = text_of(text, i, into, at + _ID)
        else:
            i = skip_value(text, i)
        if i >= 0:
            i = next_member(text, i)
        if i < 0:
            return i
    has_end = get(rows, at + START) != NULL and get(rows, at + _ID) != NULL
    if kind != NULL and has_end and get(rows, at + _PHASE) != NULL:
        put(rows, at + KIND, kind)
        put(rows, at + NAME, 0)
        if get(rows, at + _INSIDE) != _LETTER_E:
            put(rows, at + _INSIDE, NULL)
    return i + 1
