"""Scan a Perfetto trace, packet by packet, into rows of integers.

A trace is a chain of packets. A packet has a time, and payloads: interned texts, the
description of a track, a slice's begin or end, a stage of device work, a snapshot of clocks.
Numbers of fields are those of Perfetto's public protos; unknown fields are skipped.

What is interned belongs to a *generation* of a sequence of packets: a packet may clear what was
interned before on its sequence. Functions return the end of a message, or ``~index`` of what
does not fit, with cell PROBLEM of the state set.
"""

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, Text, address, get, put, put8
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.json_events import ARG_KEYS, LAST_ARG, kind_of
from fastcomm_kernels.perfetto_events import (
    coded,
    key_of,
    name_value,
    read_slice,
    read_stage,
    read_track,
)
from fastcomm_kernels.perfetto_tables import (
    ARG_NAMES,
    ARG_ROWS,
    AT,
    BASE,
    CATEGORIES,
    CHUNK,
    CLEARED,
    CLOCK,
    COMPRESSED,
    DEFAULT_CLOCK,
    DEFAULT_TRACK,
    DEFAULTS,
    FLAGS,
    FULL,
    GENERATION,
    GENERATIONS,
    INCREMENTAL,
    INTERNED,
    LAST,
    LAST_TIME,
    MARKS,
    MOVED,
    MOVED_TO,
    NAMES,
    PACKETS,
    PROBLEM,
    PROBLEM_AT,
    QUEUES,
    SEQUENCE,
    SHIFT,
    SLICE,
    SNAPSHOT,
    STAGE,
    STARTS,
    TIMESTAMP,
    TRACK,
    TRACKS,
    UNIT,
    VALUES,
    Tables,
    added_clock,
    clock_row,
    intern_value,
    sequence_row,
)
from fastcomm_kernels.protobuf import BYTES, PAST_END, field
from fastcomm_kernels.string_tables import REFUSED, Strings, find

# Why `scan` returned.
MORE, ROWS_FULL, STRINGS_FULL, TABLES_FULL, DAMAGED = range(5)

BOOT, REAL = 6, 1  # numbers of clocks: since the start of the machine, since 1970
_OWN, _OWN_END = 64, 128  # numbers of clocks that belong to one sequence

# Tags: of a trace, of a packet, of an interned text, of clocks, of defaults.
_PACKET = 1 << 3 | BYTES
_TIMESTAMP, _CLOCK, _SEQUENCE, _FLAGS, _CLEARED = (n << 3 for n in (8, 58, 10, 13, 41))
_SNAPSHOT, _SLICE, _INTERNED, _STAGE, _TRACK, _DEFAULTS, _ZLIB, _ZSTD = (
    n << 3 | BYTES for n in (6, 11, 12, 53, 60, 59, 50, 133)
)
_ONE, _TWO, _THREE, _FOUR = (n << 3 for n in (1, 2, 3, 4))
_FIRST, _SECOND = 1 << 3 | BYTES, 2 << 3 | BYTES
_CATEGORIES, _NAMES, _ARG_NAMES, _QUEUES, _VALUES = (n << 3 | BYTES for n in (1, 2, 3, 24, 29))
_TRACK_DEFAULTS, _DEFAULT_TRACK, _DEFAULT_CLOCK = 11 << 3 | BYTES, 11 << 3, 58 << 3
_IS_CLEARED = 1  # of flags


@kernel
def read_packet(text: Address, i: int, end: int, tables: Tables) -> int:
    """Write the numbers of a packet, and the places of its payloads, to the state."""
    state = tables.state
    put8(state, TIMESTAMP, 0)
    put8(state, SNAPSHOT, NULL)
    put8(state, SNAPSHOT + 8, NULL)
    while i < end:
        tag, value, after = field(text, i, end)
        if after < 0:
            put(state, PROBLEM, value)
            return after
        cell = NULL
        if tag == _TIMESTAMP:
            put(state, TIMESTAMP, value)
        elif tag == _SEQUENCE:
            put(state, SEQUENCE, value)
        elif tag == _FLAGS:
            put(state, FLAGS, value)
        elif tag == _CLOCK:
            put(state, CLOCK, value)
        elif tag == _CLEARED:
            put(state, CLEARED, value)
        elif tag == _SLICE:
            cell = SLICE
        elif tag == _STAGE:
            cell = STAGE
        elif tag == _INTERNED:
            cell = INTERNED
        elif tag == _TRACK:
            cell = TRACK
        elif tag == _SNAPSHOT:
            cell = SNAPSHOT
        elif tag == _DEFAULTS:
            cell = DEFAULTS
        elif tag in (_ZLIB, _ZSTD):
            put(state, COMPRESSED, get(state, COMPRESSED) + 1)
        if cell >= 0:
            put(state, cell, after - value)
            put(state, cell + 1, after)
        i = after
    return end


@kernel
def read_text(
    text: Address, i: int, end: int, tables: Tables, generation: int, kind: int
) -> int:
    """Intern a number and its text; `kind` is what it is the text of.

    `generation` is that of the sequence.
    """
    number, at, size = 0, i, 0
    while i < end:
        tag, value, after = field(text, i, end)
        if after < 0:
            put(tables.state, PROBLEM, value)
            return after
        if tag == _ONE:
            number = value
        elif tag == _SECOND:
            at, size = after - value, value
        i = after
    plan = tables.plan
    if kind == NAMES:
        value = name_value(tables, text, at, size)
    elif kind == CATEGORIES:
        value = kind_of(plan, text, at, size)
    elif kind == ARG_NAMES:
        value = find(plan, get(plan, ARG_KEYS), get(plan, LAST_ARG), text, at, size)
    else:
        value = coded(tables, text, at, size)
    intern_value(tables, key_of(generation, kind), number, value)
    return end


@kernel
def read_interned(text: Address, i: int, end: int, tables: Tables, generation: int) -> int:
    """Intern all texts of a packet; `generation` is that of the sequence."""
    while i < end:
        tag, size, after = field(text, i, end)
        if after < 0:
            put(tables.state, PROBLEM, size)
            return after
        kind = -1
        if tag == _NAMES:
            kind = NAMES
        elif tag == _CATEGORIES:
            kind = CATEGORIES
        elif tag == _ARG_NAMES:
            kind = ARG_NAMES
        elif tag == _VALUES:
            kind = VALUES
        elif tag == _QUEUES:
            kind = QUEUES
        if kind >= 0:
            result = read_text(text, after - size, after, tables, generation, kind)
            if result < 0:
                return result
        i = after
    return end


@kernel
def scope_of(clock: int, sequence: int) -> int:
    """Return the sequence that a clock belongs to; 0 for one of all sequences."""
    return sequence if _OWN <= clock < _OWN_END else 0


@kernel
def read_clock(text: Address, i: int, end: int, tables: Tables, boot: int) -> int:
    """Read a clock of a snapshot, or the boot clock alone.

    Parameters
    ----------
    text, i, end
        The text, and begin and end of the clock.
    tables
        The tables. Cell MOVED_TO of the state gets the time of the boot clock, if it is this.
    boot
        Time of the boot clock in the snapshot; NULL to search it.

    """
    state, clocks = tables.state, tables.clocks
    number, time, incremental, unit = 0, 0, 0, 1
    while i < end:
        tag, value, after = field(text, i, end)
        if after < 0:
            put(state, PROBLEM, value)
            return after
        if tag == _ONE:
            number = value
        elif tag == _TWO:
            time = value
        elif tag == _THREE:
            incremental = value
        elif tag == _FOUR:
            unit = max(value, 1)
        i = after
    if boot == NULL:
        if number == BOOT:
            put(state, MOVED_TO, time)
        return end
    row = added_clock(tables, scope_of(number, get(state, SEQUENCE)), number)
    put(clocks, row + UNIT, unit)
    put(clocks, row + SHIFT, boot - time * unit)
    put(clocks, row + INCREMENTAL, incremental)
    put(clocks, row + LAST_TIME, boot)
    return end


@kernel
def read_clocks(text: Address, i: int, end: int, tables: Tables, boot: int) -> int:
    """Read all clocks of a snapshot; `boot` as for `read_clock`."""
    while i < end:
        tag, size, after = field(text, i, end)
        if after < 0:
            put(tables.state, PROBLEM, size)
            return after
        if tag == _FIRST:
            result = read_clock(text, after - size, after, tables, boot)
            if result < 0:
                return result
        i = after
    return end


@kernel
def read_snapshot(text: Address, i: int, end: int, tables: Tables) -> int:
    """Read a snapshot of clocks, which tells them from the boot clock."""
    put(tables.state, MOVED_TO, NULL)
    result = read_clocks(text, i, end, tables, NULL)
    boot = get(tables.state, MOVED_TO)
    if result < 0 or boot == NULL:
        return result
    return read_clocks(text, i, end, tables, boot)


@kernel
def read_defaults(text: Address, i: int, end: int, tables: Tables, sequence: int) -> int:
    """Read the default clock and track into the row `sequence` of the sequences."""
    while i < end:
        tag, value, after = field(text, i, end)
        if after >= 0 and tag == _DEFAULT_CLOCK:
            put(tables.sequences, sequence + DEFAULT_CLOCK, value)
        elif after >= 0 and tag == _TRACK_DEFAULTS:
            i = after - value
            while i < after:
                tag, value, i = field(text, i, after)
                if i < 0:
                    after = i
                    break
                if tag == _DEFAULT_TRACK:
                    put(tables.sequences, sequence + DEFAULT_TRACK, value)
        if after < 0:
            put(tables.state, PROBLEM, value)
            return after
        i = after
    return end


@kernel
def time_of(tables: Tables, sequence: int) -> int:
    """Return the ns of the packet on the boot clock.

    `sequence` is the row of its sequence. Cells MOVED and MOVED_TO are the incremental clock
    that the packet moves, if any.
    """
    state, clocks = tables.state, tables.clocks
    time, clock = get(state, TIMESTAMP), get(state, CLOCK)
    put(state, MOVED, NULL)
    if clock == 0:
        clock = get(tables.sequences, sequence + DEFAULT_CLOCK)
    if clock in (0, BOOT):
        return time
    row = clock_row(tables, scope_of(clock, get(state, SEQUENCE)), clock)
    if row == NULL:
        return time
    if not get(clocks, row + INCREMENTAL):
        return time * get(clocks, row + UNIT) + get(clocks, row + SHIFT)
    time = get(clocks, row + LAST_TIME) + time * get(clocks, row + UNIT)
    put(state, MOVED, row)
    put(state, MOVED_TO, time)
    return time


@kernel
def read_payloads(text: Address, end: int, tables: Tables) -> int:
    """Read what the current packet has; the first that does not fit ends it."""
    state = tables.state
    sequence = sequence_row(tables, get(state, SEQUENCE))
    result = end
    if get(state, FLAGS) & _IS_CLEARED or get(state, CLEARED):
        put(tables.sequences, sequence + GENERATION, get(state, GENERATIONS))
        put(state, GENERATIONS, get(state, GENERATIONS) + 1)
    generation = get(tables.sequences, sequence + GENERATION)
    at, stop = get(state, DEFAULTS), get(state, DEFAULTS + 1)
    if at >= 0:
        result = read_defaults(text, at, stop, tables, sequence)
    at, stop = get(state, SNAPSHOT), get(state, SNAPSHOT + 1)
    if at >= 0 and result >= 0:
        result = read_snapshot(text, at, stop, tables)
    at, stop = get(state, INTERNED), get(state, INTERNED + 1)
    if at >= 0 and result >= 0:
        result = read_interned(text, at, stop, tables, generation)
    at, stop = get(state, TRACK), get(state, TRACK + 1)
    if at >= 0 and result >= 0:
        result = read_track(text, at, stop, tables)
    time = time_of(tables, sequence)
    at, stop = get(state, SLICE), get(state, SLICE + 1)
    if at >= 0 and result >= 0:
        track = get(tables.sequences, sequence + DEFAULT_TRACK)
        result = read_slice(text, at, stop, tables, generation, time, track)
    at, stop = get(state, STAGE), get(state, STAGE + 1)
    if at >= 0 and result >= 0:
        result = read_stage(text, at, stop, tables, generation, time)
    return result


@kernel
def scan(
    block: Text,
    n: int,
    state: Ints,
    selection: Ints,
    strings: Strings,
    sets: tuple[Ints, Ints, Ints],
    output: tuple[Ints, Ints, Ints, Ints],
) -> int:
    """Read packets from `state[AT]` on, and return why the scan ends.

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
    sets
        Tables of interned values, sequences and clocks; written.
    output
        Columns of marks and of starts, and rows of args and of tracks; written.

    Returns
    -------
    int
        MORE, ROWS_FULL, STRINGS_FULL, TABLES_FULL or DAMAGED.

    """
    text, index, cells = address(block), address(strings.cells), address(state)
    marks, starts, args, tracks = output
    tables = Tables(
        cells,
        address(selection),
        index,
        address(strings.pool),
        address(sets[0]),
        address(sets[1]),
        address(sets[2]),
        address(marks),
        address(starts),
        address(args),
        address(tracks),
    )
    i = state[AT]
    while i < n:
        state[AT] = i
        # A packet has at most one slice, one stage and one track.
        if state[MARKS] + 2 > CHUNK or state[TRACKS] == len(tracks):
            return ROWS_FULL
        tag, value, end = field(text, i, n)
        if end < 0 and value == PAST_END:
            if not state[LAST]:
                return MORE
            end = ~i
        state[PROBLEM] = value
        if end >= 0 and tag == _PACKET:
            before = state[MARKS], state[STARTS], state[ARG_ROWS], state[TRACKS]
            compressed = state[COMPRESSED]
            end = read_packet(text, end - value, end, tables)
            if end >= 0:
                end = read_payloads(text, end, tables)
            is_full = get(index, REFUSED) > 0 or state[FULL] > 0
            if is_full or end < 0:
                state[MARKS], state[STARTS], state[ARG_ROWS], state[TRACKS] = before
                state[COMPRESSED] = compressed
            if is_full:
                return STRINGS_FULL if get(index, REFUSED) > 0 else TABLES_FULL
        if end < 0:
            state[PROBLEM_AT] = state[BASE] + ~end
            return DAMAGED
        if tag == _PACKET and state[MOVED] >= 0:
            put(tables.clocks, state[MOVED] + LAST_TIME, state[MOVED_TO])
        state[PACKETS] += tag == _PACKET
        i = end
    state[AT] = min(i, n)
    return MORE
