"""Read the payloads of a Perfetto trace into rows: slices, stages of device work, tracks.

Functions take the index of a payload and its end, and return the end, or ``~index`` of what
does not fit, with cell PROBLEM of the state set. `perfetto_tables` has the columns of rows.
Args are those of a selection; a value that is no plain text is interned as bytes, as -2 minus
its code, and decoded once per value.
"""

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, byte, digit_count, digits, get, load64, put, put8
from fastcomm_kernels.arrays import NONE, NULL
from fastcomm_kernels.json_events import (
    ARG_KEYS,
    ARGS,
    COLUMNS,
    DETAIL,
    DETAILS,
    KEEP_ALL,
    KEEP_NONE,
    LAST_ARG,
    OTHER,
    SPARE,
    Into,
    clear,
    is_selected,
    keep_of,
    kind_of,
)
from fastcomm_kernels.perfetto_tables import (
    ARG_NAMES,
    ARG_ROW,
    ARG_ROWS,
    BASE,
    BEGIN,
    CATEGORIES,
    CHUNK,
    DEVICE,
    END,
    EVENT,
    INTERNED_KINDS,
    KIND,
    LABEL,
    LENGTH,
    MARKS,
    NAME,
    NAMES,
    OFFSET,
    ORDERED,
    PARENT,
    PID,
    PLACE,
    PROBLEM,
    QUEUE,
    QUEUES,
    STARTS,
    TID,
    TIME,
    TRACK_COLUMNS,
    TRACKS,
    TYPE,
    UUID,
    VALUES,
    WAITS,
    Tables,
    interned_value,
)
from fastcomm_kernels.protobuf import BYTES, field
from fastcomm_kernels.string_tables import find, intern, string_place

# Tags, by the number of the field.
_MESSAGE = BYTES
_TYPE, _NAME_IID, _NAME, _TRACK = 9 << 3, 10 << 3, 23 << 3 | BYTES, 11 << 3
_CATEGORY_IID, _CATEGORY, _ANNOTATION = 3 << 3, 22 << 3 | BYTES, 4 << 3 | BYTES
_ARG_NAME, _ARG_IID = 10 << 3 | BYTES, 1 << 3
_UINT, _INT, _TEXT, _TEXT_IID = 3 << 3, 4 << 3, 6 << 3 | BYTES, 17 << 3
_ENTRY, _ITEM = 11 << 3 | BYTES, 12 << 3 | BYTES
_KEY, _VALUE = 1 << 3 | BYTES, 2 << 3 | BYTES
_DURATION, _EXTRA, _GPU = 2 << 3, 6 << 3 | BYTES, 11 << 3
_QUEUE_IID, _STAGE_IID, _STAGE_NAME_IID = 13 << 3, 14 << 3, 20 << 3
_EVENT_ID, _WAIT, _WAITS_PACKED = 1 << 3, 18 << 3, 18 << 3 | BYTES
_UUID, _PARENT, _PROCESS, _THREAD = 1 << 3, 5 << 3, 3 << 3 | BYTES, 4 << 3 | BYTES
_TRACK_NAME, _STATIC_NAME = 2 << 3 | BYTES, 10 << 3 | BYTES
_ONE, _TWO, _FIVE, _SIX = 1 << 3, 2 << 3, 5 << 3 | BYTES, 6 << 3 | BYTES
# How an annotation has its value: as none of the others, a number, a text, a code.
_OTHER_VALUE, _NUMBER, _AS_TEXT, _AS_CODE = range(4)
_MINUS = ord("-")
_MOST_DIGITS = 18
_POWERS = tuple(10**k for k in range(9))


@kernel
def whole_number(text: Address, i: int, size: int) -> int:
    """Return the number that `size` bytes at `i` spell; NULL if they are no whole number."""
    negative = int(size > 0 and byte(text, i) == _MINUS)
    i, size = i + negative, size - negative
    if not 0 < size <= _MOST_DIGITS:
        return NULL
    value = 0
    while size > 0:
        part = min(size, 8)
        word = load64(text, i)
        if digit_count(word) < part:
            return NULL
        value = value * _POWERS[part] + digits(word, part)
        i, size = i + part, size - part
    return -value if negative else value


@kernel
def key_of(generation: int, kind: int) -> int:
    """Return the key of a kind of interned value in a generation."""
    return generation * INTERNED_KINDS + kind


@kernel
def coded(tables: Tables, text: Address, i: int, size: int) -> int:
    """Return the code of a text, which is interned if it is new."""
    return intern(tables.strings, tables.pool, text, i, size)


@kernel
def name_value(tables: Tables, text: Address, i: int, size: int) -> int:
    """Return twice the code of a name, plus 1 if the selection has its prefix."""
    code = coded(tables, text, i, size)
    return 2 * code + int(is_selected(tables.plan, text, i, size))


@kernel
def into_args(tables: Tables) -> Into:
    """Return the next row of args, all columns NULL."""
    plan = tables.plan
    at = get(tables.state, ARG_ROWS) * (get(plan, COLUMNS) + SPARE)
    into = Into(tables.strings, tables.pool, tables.args, at)
    put8(tables.args, at, NULL)
    clear(into, ARGS, get(plan, DETAILS))
    return into


@kernel
def put_arg(
    text: Address, value: tuple[int, int, int], to: int, raw: tuple[int, int], into: Into
) -> None:
    """Write the value of an arg to its column of a row.

    Parameters
    ----------
    text
        The text.
    value
        How the value is there; then the number or code, or index and size of a text.
    to
        Twice the column, plus 1 for texts.
    raw
        Begin and end of the message that has the value.
    into
        The row to write.

    """
    kind, number, size = value
    result = NULL
    if to & 1 and kind == _AS_TEXT:
        result = intern(into.strings, into.pool, text, number, size)
    elif to & 1 and kind == _AS_CODE:
        result = number
    elif to & 1:
        begin, end = raw
        result = -2 - intern(into.strings, into.pool, text, begin, end - begin)
    elif kind == _NUMBER:
        result = number
    elif kind == _AS_TEXT:
        result = whole_number(text, number, size)
    elif kind == _AS_CODE and number >= 0:
        at, length = string_place(into.strings, number)
        result = whole_number(into.pool, at, length)
    put(into.rows, into.at + (to >> 1), result)


@kernel
def prepare_details(plan: Address, to: int, into: Into) -> None:
    """Set the details of a row to NULL before the first of them is written."""
    if to >> 1 >= get(plan, DETAILS) and get(into.rows, into.at + DETAIL) < 0:
        clear(into, get(plan, DETAILS), get(plan, COLUMNS))
        put(into.rows, into.at + DETAIL, 1)


@kernel
def read_annotation(
    text: Address, i: int, end: int, tables: Tables, generation: int, into: Into
) -> int:
    """Read a debug annotation into its column, if it is one of the selection."""
    plan = tables.plan
    begin, to, kind, number, size = i, -1, _OTHER_VALUE, 0, 0
    while i < end:
        tag, value, after = field(text, i, end)
        if after < 0:
            put(tables.state, PROBLEM, value)
            return after
        if tag == _ARG_NAME:
            keys, last = get(plan, ARG_KEYS), get(plan, LAST_ARG)
            to = find(plan, keys, last, text, after - value, value)
            if to < 0:
                return end
        elif tag == _ARG_IID:
            to = interned_value(tables.interned, key_of(generation, ARG_NAMES), value)
            if to < 0:
                return end
        elif tag in (_UINT, _INT):
            kind, number = _NUMBER, value
        elif tag == _TEXT:
            kind, number, size = _AS_TEXT, after - value, value
        elif tag == _TEXT_IID:
            number = interned_value(tables.interned, key_of(generation, VALUES), value)
            kind = _AS_CODE
        elif tag in (_ENTRY, _ITEM) and to >= 0:
            kind = _OTHER_VALUE  # of many items, which are read once per value
            break
        i = after
    if to >= 0:
        prepare_details(plan, to, into)
        put_arg(text, (kind, number, size), to, (begin, end), into)
    return end


@kernel
def read_extra(text: Address, i: int, end: int, tables: Tables, into: Into) -> int:
    """Read an entry of a stage's extra data, name and value, both texts."""
    plan = tables.plan
    begin, to, at, length = i, -1, i, 0
    while i < end:
        tag, size, after = field(text, i, end)
        if after < 0:
            put(tables.state, PROBLEM, size)
            return after
        if tag == _KEY:
            keys, last = get(plan, ARG_KEYS), get(plan, LAST_ARG)
            to = find(plan, keys, last, text, after - size, size)
        elif tag == _VALUE:
            at, length = after - size, size
        i = after
    if to >= 0:
        prepare_details(plan, to, into)
        put_arg(text, (_AS_TEXT, at, length), to, (begin, end), into)
    return end


@kernel
def read_args(
    text: Address, i: int, end: int, tag_of_arg: int, tables: Tables, generation: int
) -> int:
    """Read all args of a slice or stage into the next row of args.

    Parameters
    ----------
    text, i, end
        The text, index of the first arg, and end of the payload.
    tag_of_arg
        Tag of the args among the fields.
    tables, generation
        The tables, and the generation of the sequence.

    """
    into = into_args(tables)
    while i < end:
        # Whoever found the first arg has walked these fields before.
        tag, size, after = field(text, i, end)
        if tag == tag_of_arg:
            if tag == _EXTRA:
                result = read_extra(text, after - size, after, tables, into)
            else:
                result = read_annotation(text, after - size, after, tables, generation, into)
            if result < 0:
                return result
        i = after
    put(tables.state, ARG_ROWS, get(tables.state, ARG_ROWS) + 1)
    return end


@kernel
def add_mark(tables: Tables, type_: int, time: int, place: int) -> None:
    """Fill the next mark."""
    row = get(tables.state, MARKS)
    put(tables.marks, TYPE * CHUNK + row, type_)
    put(tables.marks, TIME * CHUNK + row, time)
    put(tables.marks, PLACE * CHUNK + row, place)
    put(tables.state, MARKS, row + 1)


@kernel
def add_start(tables: Tables, kind: int, name: int, offset: int, arg_row: int) -> int:
    """Fill the next start, and return its row; `offset` is that in the block."""
    row = get(tables.state, STARTS)
    starts = tables.starts
    put(starts, KIND * CHUNK + row, kind)
    put(starts, NAME * CHUNK + row, name)
    put(starts, OFFSET * CHUNK + row, get(tables.state, BASE) + offset)
    put(starts, ARG_ROW * CHUNK + row, arg_row)
    put(tables.state, STARTS, row + 1)
    return row


@kernel
def wants_args(plan: Address, kind: int, selected: int) -> bool:
    """Return whether the selection keeps the args of a kind, with a name it selects or not."""
    keep = keep_of(plan, kind)
    return keep == KEEP_ALL or (keep != KEEP_NONE and selected > 0)


@kernel
def read_slice(
    text: Address, i: int, end: int, tables: Tables, generation: int, time: int, track: int
) -> int:
    """Read a slice's begin or end; instants and counters have no mark.

    Parameters
    ----------
    text, i, end
        The text, and begin and end of the payload.
    tables, generation
        The tables, and the generation of the sequence.
    time, track
        ns of the packet, and default track of the sequence.

    """
    plan, interned, start = tables.plan, tables.interned, i
    type_, name, kind, first = 0, NULL, NULL, NONE
    while i < end:
        tag, value, after = field(text, i, end)
        if after < 0:
            put(tables.state, PROBLEM, value)
            return after
        if tag == _ANNOTATION:
            first = i if first < 0 else first
        elif tag == _TYPE:
            type_ = value
        elif tag == _TRACK:
            track = value
        elif tag == _NAME_IID:
            name = interned_value(interned, key_of(generation, NAMES), value)
        elif tag == _NAME:
            name = name_value(tables, text, after - value, value)
        elif tag == _CATEGORY_IID and kind in (NULL, get(plan, OTHER)):
            kind = interned_value(interned, key_of(generation, CATEGORIES), value)
        elif tag == _CATEGORY and kind in (NULL, get(plan, OTHER)):
            kind = kind_of(plan, text, after - value, value)
        i = after
    arg_row = NONE
    if type_ == BEGIN:
        selection_kind = get(plan, OTHER) if kind == NULL else kind
        if first >= 0 and wants_args(plan, selection_kind, name & 1 if name >= 0 else 0):
            arg_row = get(tables.state, ARG_ROWS)
            result = read_args(text, first, end, _ANNOTATION, tables, generation)
            if result < 0:
                return result
        add_start(tables, kind, name, start, arg_row)
    if type_ in (BEGIN, END):
        add_mark(tables, type_, time, track)
    return end


@kernel
def read_stage(
    text: Address, i: int, end: int, tables: Tables, generation: int, time: int
) -> int:
    """Read a stage of device work; `time` is the ns of the packet.

    `generation` is that of the sequence.
    """
    start, gpu, length, queue, stage, name, first = i, 0, 0, NULL, NULL, NULL, NONE
    event, waits, first_wait, last_wait = NULL, NULL, NONE, NONE
    interned = tables.interned
    while i < end:
        tag, value, after = field(text, i, end)
        if after < 0:
            put(tables.state, PROBLEM, value)
            return after
        if tag == _EXTRA:
            first = i if first < 0 else first
        elif tag == _DURATION:
            length = value
        elif tag == _GPU:
            gpu = value
        elif tag == _QUEUE_IID:
            queue = interned_value(interned, key_of(generation, QUEUES), value)
        elif tag == _STAGE_IID:
            stage = interned_value(interned, key_of(generation, QUEUES), value)
        elif tag == _STAGE_NAME_IID:
            name = interned_value(interned, key_of(generation, NAMES), value)
        elif tag == _EVENT_ID:
            event = value
        elif tag in (_WAIT, _WAITS_PACKED):
            first_wait = i if first_wait < 0 else first_wait
            last_wait = after
        i = after
    if first_wait >= 0 and get(tables.state, ORDERED):
        waits = coded(tables, text, first_wait, last_wait - first_wait)
    arg_row = get(tables.state, ARG_ROWS)
    result = read_args(text, first if first >= 0 else end, end, _EXTRA, tables, generation)
    if result < 0:
        return result
    row = add_start(tables, stage, name, start, arg_row)
    put(tables.starts, LENGTH * CHUNK + row, length)
    put(tables.starts, QUEUE * CHUNK + row, queue)
    put(tables.starts, EVENT * CHUNK + row, event)
    put(tables.starts, WAITS * CHUNK + row, waits)
    add_mark(tables, DEVICE, time, gpu)
    return end


@kernel
def read_owner(
    text: Address, i: int, end: int, is_thread: bool, tables: Tables, row: int
) -> int:
    """Read the process or thread of a track into row `row` of the tracks."""
    tracks = tables.tracks
    while i < end:
        tag, value, after = field(text, i, end)
        if after < 0:
            put(tables.state, PROBLEM, value)
            return after
        if tag == _ONE:
            put(tracks, row + PID, value)
        elif tag == _TWO and is_thread:
            put(tracks, row + TID, value)
        elif tag == (_FIVE if is_thread else _SIX):
            put(tracks, row + LABEL, coded(tables, text, after - value, value))
        i = after
    return end


@kernel
def read_track(text: Address, i: int, end: int, tables: Tables) -> int:
    """Read the description of a track into the next row of tracks."""
    tracks = tables.tracks
    row = get(tables.state, TRACKS) * TRACK_COLUMNS
    for column in range(TRACK_COLUMNS):
        put(tracks, row + column, NULL)
    put(tracks, row + UUID, 0)
    while i < end:
        tag, value, after = field(text, i, end)
        if after < 0:
            put(tables.state, PROBLEM, value)
            return after
        if tag == _UUID:
            put(tracks, row + UUID, value)
        elif tag == _PARENT:
            put(tracks, row + PARENT, value)
        elif tag in (_TRACK_NAME, _STATIC_NAME):
            put(tracks, row + LABEL, coded(tables, text, after - value, value))
        elif tag in (_PROCESS, _THREAD):
            result = read_owner(text, after - value, after, tag == _THREAD, tables, row)
            if result < 0:
                return result
        i = after
    put(tables.state, TRACKS, get(tables.state, TRACKS) + 1)
    return end
