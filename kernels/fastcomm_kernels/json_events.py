"""Events of Chrome-trace JSON: which ones a scan keeps, and reading of one into a row.

Keys, phases and categories are compared as bytes, and an event with escapes in these counts as
broken. Of repeated keys the last value counts, except that the first category, name or duration
that rules an event out does so at once.

Functions take the index `i` of a byte in the text and return the index to go on from, or
``~index`` at a byte that does not fit. They write into their arguments. The selection of a scan
is a column of integers, so that kernels pass one address.
"""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, byte, digit_count, digits, get, load64, put, put8
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.json_text import (
    CLOSE,
    COMMA,
    OPEN,
    QUOTE,
    THOUSANDTHS,
    WHOLE,
    behind_colon,
    decimal,
    has_phase,
    next_member,
    skip_blanks,
    skip_rest,
    skip_value,
    spells_letters,
    string_end,
)
from fastcomm_kernels.string_tables import SLOT, find, first_word, intern, string_table

# Columns of a row; from ARGS on those of the event's args. If DETAIL is NULL, the event has no
# details, and their columns are undefined.
KIND, NAME, PROCESS, THREAD, START, STOP, OFFSET, DETAIL, POSITION, ARGS = range(10)
# Which events of a kind are kept: none, all, those whose name has a selected prefix, or these
# and those of at least LONG ns. Args of the latter are not read.
KEEP_NONE, KEEP_ALL, KEEP_NAMED, KEEP_LONG = range(4)
LONG = 20_000
# A selection is one column: these cells; then, at the places in them, a table of categories and
# one of args; how each kind is kept; pairs of a prefix of names (eight bytes) and its mask. The
# last cells are whether flow events are kept, instead of others, and whether begins and ends of
# events are, beside complete ones.
_KINDS, _LAST_KIND, ARG_KEYS, LAST_ARG, _KEEP, OTHER = range(6)
_PREFIXES, _PREFIXES_END, COLUMNS, DETAILS, FLOWS, HALVES, _HEAD = range(6, 13)

# A thread or process that is text, not a number: this minus the code of the text.
TEXT_LANE = -(1 << 62)

# Cells behind a row's last column, since eight are cleared at a time.
SPARE = 7

# Times are less than this, so that a base time can be added.
_FAR = 1 << 62
# As the kind of a row: the event has invalid values; it is the begin of an event that is not
# selected.
INVALID, BEGIN = -1, -2
# As the stop of a row: the event is the begin or the end of one, on its lane.
AT_BEGIN, AT_END = NULL + 1, NULL + 2


def _key(text: bytes) -> int:
    return int.from_bytes(text, "little")


_PH, _TS = map(_key, (b'ph"', b'ts"'))
_CAT, _PID, _TID, _DUR = map(_key, (b'cat"', b'pid"', b'tid"', b'dur"'))
_NAME, _ARGS = map(_key, (b'name"', b'args"'))
_3_BYTES, _4_BYTES, _5_BYTES = ((1 << 8 * n) - 1 for n in (3, 4, 5))
_COMPLETE, _N = map(ord, "Xn")
_PHASE_BEGIN, _PHASE_END = map(ord, "BE")
_POWER = tuple(10**n for n in range(8))
_OTHER = 1  # a phase that is not a single character


class ScanColumns(NamedTuple):
    """The selection of a scan: which events and args to keep."""

    kinds: dict[bytes, int]  # value of `cat` -> kind
    keep: list[int]  # by kind: a constant KEEP_*; the last is for unknown kinds
    prefixes: list[bytes]  # for KEEP_NAMED and KEEP_LONG: at most eight bytes of a name
    numbers: list[bytes]  # args that are integers, a column each
    detail_numbers: list[bytes]  # args that are integers and that few events have
    detail_texts: list[bytes]  # args of few events, any value as text
    aliases: tuple[tuple[bytes, bytes], ...] = ()  # other names of args, and the names above
    flows: bool = False  # flow events rather than complete ones; `json_flows` has their columns
    halves: bool = False  # begins and ends of events, too

    def width(self) -> int:
        """Return the columns of a row, with room to clear eight at a time."""
        args = len(self.numbers) + len(self.detail_numbers) + len(self.detail_texts)
        return ARGS + args + SPARE

    def plan(self) -> Ints:
        """Return the selection as one int64 array, the `plan` that `scan` takes."""
        numbers = [*self.numbers, *self.detail_numbers]
        args = {key: 2 * column for column, key in enumerate(numbers, ARGS)}
        first = ARGS + len(numbers)
        args |= {key: 2 * column + 1 for column, key in enumerate(self.detail_texts, first)}
        args |= {alias: args[key] for alias, key in self.aliases if key in args}
        prefixes = [
            int.from_bytes(part.ljust(8, b"\0"), "little", signed=True)
            for word in self.prefixes
            for part in (word, b"\xff" * len(word))
        ]
        tables = [string_table(self.kinds), string_table(args)]
        parts = [*tables, np.array(self.keep, np.int64), np.array(prefixes, np.int64)]
        ends = np.cumsum([_HEAD, *map(len, parts)])
        head = np.zeros(_HEAD, np.int64)
        head[[_KINDS, ARG_KEYS, _KEEP, _PREFIXES, _PREFIXES_END]] = ends
        head[[_LAST_KIND, LAST_ARG]] = [len(table) // SLOT - 1 for table in tables]
        head[[OTHER, COLUMNS, DETAILS, FLOWS, HALVES]] = (
            len(self.keep) - 1,
            first + len(self.detail_texts),
            ARGS + len(self.numbers),
            self.flows,
            self.halves,
        )
        return np.concatenate([head, *parts])


@kernel
def keep_of(plan: Address, kind: int) -> int:
    """Return which events of a kind a selection keeps: a constant KEEP_*."""
    return get(plan, get(plan, _KEEP) + kind)


@kernel
def keeps(plan: Address, kind: int, text: Address, name: int, size: int, length: int) -> bool:
    """Return whether events of a kind, name and length are kept, as far as these are known.

    Parameters
    ----------
    plan
        Selection, see `ScanColumns.plan`.
    kind
        Number of the kind, as `kind_of` returns it.
    text, name, size
        The text, and index and size in bytes of the name; -1 if unknown, which keeps the event
        unless its kind is KEEP_NONE.
    length
        Duration of the event in ns; NULL if unknown.

    """
    keep = keep_of(plan, kind)
    if keep in (KEEP_NONE, KEEP_ALL) or size < 0:
        return keep != KEEP_NONE
    if keep == KEEP_LONG and (length == NULL or length >= LONG):
        return True
    return is_selected(plan, text, name, size)


@kernel
def is_selected(plan: Address, text: Address, name: int, size: int) -> bool:
    """Return whether a name of `size` bytes has one of the selected prefixes."""
    word = first_word(text, name, size)
    for k in range(get(plan, _PREFIXES), get(plan, _PREFIXES_END), 2):
        if word & get(plan, k + 1) == get(plan, k):
            return True
    return False


@kernel
def is_only_long(plan: Address, kind: int, text: Address, name: int, size: int) -> bool:
    """Return whether only its length keeps an event, so that its args are not read."""
    keep = keep_of(plan, kind)
    return keep == KEEP_LONG and not is_selected(plan, text, name, size)


@kernel
def kind_of(plan: Address, text: Address, i: int, size: int) -> int:
    """Return the kind of a category; one that the selection does not name has the last kind.

    Parameters
    ----------
    plan
        Selection, see `ScanColumns.plan`.
    text, i, size
        Text that has the category, and index and size of it in bytes.

    """
    kind = find(plan, get(plan, _KINDS), get(plan, _LAST_KIND), text, i, size)
    return get(plan, OTHER) if kind < 0 else kind


class Into(NamedTuple):
    """Where the values of the current event go."""

    strings: Address
    pool: Address
    rows: Address
    at: int  # index of the first cell of the event's row


@kernel
def clear(into: Into, first: int, stop: int) -> None:
    """Set the columns `first` to `stop` of the row to NULL, eight at a time.

    So up to seven columns behind `stop` are overwritten, too: a row has room for that.
    """
    while first < stop:
        put8(into.rows, into.at + first, NULL)
        first += 8


@kernel
def integer(text: Address, i: int, to: Address, cell: int) -> int:
    """Read an integer, in quotes or not; return the index behind it, or ``~index``.

    Parameters
    ----------
    text, i
        The text, and the index of the value.
    to, cell
        Column, and the cell of it that gets the number; NULL for any other value.

    """
    word = load64(text, i)
    size = digit_count(word)
    if 0 < size < 8 and byte(text, i + size) in (COMMA, CLOSE):
        put(to, cell, digits(word, size))
        return i + size
    return number(text, i, WHOLE, to, cell)


@kernel
def number(text: Address, i: int, scale: int, to: Address, cell: int) -> int:
    """Read a number, in quotes or not; return the index behind it, or ``~index``.

    Parameters
    ----------
    text, i
        The text, and the index of the value.
    scale
        A power of ten: the number is multiplied by it, and rounded.
    to, cell
        Column, and the cell of it that gets the number; NULL for any other value.

    """
    quoted = int(byte(text, i) == QUOTE)
    stop = decimal(text, i + quoted, scale, to, cell)
    if quoted == 0 and get(to, cell) != NULL:
        return stop
    end = skip_value(text, i)
    if stop != end - quoted:
        put(to, cell, NULL)
    return end


@kernel
def text_of(text: Address, i: int, into: Into, cell: int) -> int:
    """Read a value as text, without quotes; return the index behind it, or ``~index``.

    Parameters
    ----------
    text, i
        The text, and the index of the value.
    into, cell
        Cell of `into.rows` that gets the code of the text, see `intern`; NULL if the value is
        missing or null.

    """
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
    """Read the value of a selected arg into its column, and return the index behind it.

    Parameters
    ----------
    text, i
        The text, and the index of the value.
    to
        Twice the column, plus 1 for texts.
    plan
        Selection, see `ScanColumns.plan`.
    into
        The row to write. Its first detail sets the row's DETAIL, and the other details to NULL.

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
    """Read the members of the `args` object at `i` that the selection `plan` names into a row.

    Return the index behind the object, or ``~index`` at an unfit byte or a key with escaped
    letters.
    """
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
    """Read a process or thread; return the index behind the value, or ``~index``.

    Parameters
    ----------
    text, i
        The text, and the index of the value.
    into, cell
        Cell of `into.rows` that gets the number, also of a text that is one, or `TEXT_LANE`
        minus the code of another text; NULL for any other value.

    """
    if byte(text, i) == QUOTE:
        word = load64(text, i + 1)
        size = digit_count(word)
        if 0 < size < 8 and byte(text, i + 1 + size) == QUOTE:
            value = digits(word, size)
            # Other texts, as 007, are names.
            if size == 1 or value >= _POWER[size - 1]:
                put(into.rows, cell, value)
                return i + size + 2
        i = text_of(text, i, into, cell)
        put(into.rows, cell, TEXT_LANE - get(into.rows, cell))
        return i
    i = integer(text, i, into.rows, cell)
    if get(into.rows, cell) <= TEXT_LANE:
        put(into.rows, cell, NULL)
    return i


@kernel
def known_key(text: Address, i: int) -> tuple[int, int]:
    """Return the key of an event in quotes at `i`, and the index of its last quote.

    Another key is 0 here. A branch for each size of a key, which the processor predicts.
    """
    key = load64(text, i + 1)
    if key & _3_BYTES in (_PH, _TS):
        return key & _3_BYTES, i + 3
    if key & _4_BYTES in (_CAT, _PID, _TID, _DUR):
        return key & _4_BYTES, i + 4
    if key & _5_BYTES in (_NAME, _ARGS):
        return key & _5_BYTES, i + 5
    return 0, i


@kernel
def is_half(plan: Address, phase: int) -> bool:
    """Return whether events of a phase are begins or ends, and are selected."""
    return phase in (_PHASE_BEGIN, _PHASE_END) and get(plan, HALVES) != 0


@kernel
def read_event(text: Address, i: int, plan: Address, into: Into) -> int:
    """Read the event whose brace is at `i`, and return the index behind it, or ``~index``.

    Parameters
    ----------
    text, i
        The text, and the index of the opening brace.
    plan
        Selection, see `ScanColumns.plan`.
    into
        The row to write. Its KIND becomes NULL for an event that is not selected, BEGIN for
        such a begin, and INVALID for an event with invalid values.

    """
    rows, at, event = into.rows, into.at, i
    put8(rows, at, NULL)
    kind, phase, name, size, has_args = -1, 0, i, -1, False
    i = skip_blanks(text, i + 1)
    while byte(text, i) != CLOSE:
        if byte(text, i) != QUOTE:
            return ~i
        key, end = known_key(text, i)
        if key == 0:
            end = string_end(text, i + 1)
            if end < 0:
                return end
            if spells_letters(text, i + 1, end):
                put(rows, at + KIND, INVALID)
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
                put(rows, at + KIND, INVALID)
                return skip_rest(text, end + 1, event)
            i = end + 1
            if phase not in (0, _COMPLETE) and not is_half(plan, phase):
                put(rows, at + KIND, BEGIN if phase == _PHASE_BEGIN else NULL)
                end = skip_rest(text, i, event)
                if end < 0 or not has_phase(text, i, end):
                    return end
            elif kind >= 0 and not keeps(plan, kind, text, name, size, get(rows, at + STOP)):
                return skip_rest(text, i, event)
        elif key == _TS:
            i = number(text, i, THOUSANDTHS, rows, at + START)
        elif key == _DUR:
            i = number(text, i, THOUSANDTHS, rows, at + STOP)
            length = get(rows, at + STOP)
            if kind >= 0 and i >= 0 and not keeps(plan, kind, text, name, size, length):
                return skip_rest(text, i, event)
        elif key in (_PID, _TID):
            i = read_lane(text, i, into, at + (PROCESS if key == _PID else THREAD))
        elif key == _ARGS:
            has_args = True
            clear(into, ARGS, get(plan, DETAILS))
            put(rows, at + DETAIL, NULL)
            is_read = byte(text, i) == OPEN and not (
                kind >= 0 and size >= 0 and is_only_long(plan, kind, text, name, size)
            )
            i = read_args(text, i, plan, into) if is_read else skip_value(text, i)
        else:
            phase = _OTHER if key == _PH else phase
            i = skip_value(text, i)
        if i >= 0:
            i = next_member(text, i)
        if i < 0:
            return i
    kind = get(plan, OTHER) if kind < 0 else kind
    start, length = get(rows, at + START), get(rows, at + STOP)
    if phase != _COMPLETE and not is_half(plan, phase):
        return i + 1
    if not keeps(plan, kind, text, name, max(size, 0), length):
        return i + 1
    if not -_FAR < start < _FAR or not 0 <= length < _FAR:
        if phase == _COMPLETE or not -_FAR < start < _FAR:
            put(rows, at + KIND, INVALID)
            return i + 1
        length = (AT_BEGIN if phase == _PHASE_BEGIN else AT_END) - start
    if not has_args or is_only_long(plan, kind, text, name, max(size, 0)):
        clear(into, ARGS, get(plan, DETAILS))
        put(rows, at + DETAIL, NULL)
    put(rows, at + KIND, kind)
    put(rows, at + STOP, start + length)
    put(rows, at + NAME, intern(into.strings, into.pool, text, name, max(size, 0)))
    return i + 1
