"""The tables that a scan of a Perfetto trace fills: rows, interned values, sequences, clocks.

All are columns of int64, passed by address. A function that finds a table full sets cell FULL
of the state; the packet is then read again with a larger table.
"""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, get, mix, put
from fastcomm_kernels.arrays import NULL, Ints

# The state between two calls of a scan: index in the block to go on from, offset of the block
# in the file, whether the block is the last; numbers of filled marks, starts, args and tracks;
# of complete packets and of compressed ones; what is wrong, and where in the file.
AT, BASE, LAST, MARKS, STARTS, ARG_ROWS, TRACKS, PACKETS, COMPRESSED = range(9)
PROBLEM, PROBLEM_AT = 9, 10
# Entries of the tables of sequences and clocks, and their limits; number of generations;
# whether a table is full; row of an incremental clock that the packet moves, and its time.
SEQUENCES, CLOCKS, ROOM, GENERATIONS, FULL, MOVED, MOVED_TO = range(11, 18)
# The current packet: numbers, then begin and end of payloads (NULL: none).
TIMESTAMP, CLOCK, SEQUENCE, FLAGS, CLEARED = range(18, 23)
SNAPSHOT, SLICE, INTERNED, STAGE, TRACK, DEFAULTS = range(23, 35, 2)
# Whether the order of stages is kept; the cells before are cleared, eight at a time.
ORDERED = 39
STATE_SIZE = 40

# Room for marks, starts and args. Columns of marks and starts lie behind one another.
CHUNK = 1 << 11
# Columns of a mark, the begin or end of a slice or a stage: its type; ns; id of the track, or
# number of the GPU.
TYPE, TIME, PLACE, MARK_COLUMNS = range(4)
# Types of marks: those of Perfetto's slices, and a stage of device work.
BEGIN, END, DEVICE = 1, 2, 5
# Columns of a start, which all marks but ends have: kind, or code of the stage's name; name, as
# twice its code, plus 1 if the selection has its prefix; offset in the file; index of its args,
# or NONE; duration of a stage; code of its queue's name; its id; code of the bytes of its
# message that have the ids of stages that it waits for. Unknown ones are NULL.
KIND, NAME, OFFSET, ARG_ROW, LENGTH, QUEUE, EVENT, WAITS, START_COLUMNS = range(9)

# Columns of a track; codes of texts.
UUID, PARENT, PID, TID, LABEL, TRACK_COLUMNS = range(6)

# Of a sequence: its number, generation, default clock, default track. Of a clock: its sequence
# (0: of all), number, ns of a tick, ns to add, whether it is incremental, and its last time.
_ID, GENERATION, DEFAULT_CLOCK, DEFAULT_TRACK, SEQUENCE_COLUMNS = range(5)
_SCOPE, _CLOCK, UNIT, SHIFT, INCREMENTAL, LAST_TIME, CLOCK_COLUMNS = range(7)

# What is interned: names of events as twice their code, plus 1 if the selection has their
# prefix; categories as kinds; names of args as columns; texts and names of queues as codes.
NAMES, CATEGORIES, ARG_NAMES, VALUES, QUEUES, INTERNED_KINDS = range(6)
# Cells of the table of interned values: number of entries, last slot; then slots of key, number
# and value. An empty slot has the key -1.
_COUNT, _LAST_SLOT, _SLOTS = range(3)
_SLOT = 3


class Tables(NamedTuple):
    """Addresses of all that a scan reads and writes."""

    state: Address
    plan: Address  # see `json_events.ScanColumns.plan`
    strings: Address
    pool: Address
    interned: Address
    sequences: Address
    clocks: Address
    marks: Address
    starts: Address
    args: Address
    tracks: Address


@kernel
def intern_value(tables: Tables, key: int, number: int, value: int) -> None:
    """Set the value of a number in a generation; `key` is that of `interned_key`."""
    table = tables.interned
    last = get(table, _LAST_SLOT)
    slot = mix(key, number) & last
    while True:
        cell = _SLOTS + _SLOT * slot
        if get(table, cell) == key and get(table, cell + 1) == number:
            put(table, cell + 2, value)
            return
        if get(table, cell) < 0:
            break
        slot = (slot + 1) & last
    if 2 * (get(table, _COUNT) + 1) > last:
        put(tables.state, FULL, 1)
        return
    put(table, _COUNT, get(table, _COUNT) + 1)
    put(table, cell, key)
    put(table, cell + 1, number)
    put(table, cell + 2, value)


@kernel
def interned_value(table: Address, key: int, number: int) -> int:
    """Return the value of a number in a generation; NULL if it was not interned."""
    last = get(table, _LAST_SLOT)
    slot = mix(key, number) & last
    while True:
        cell = _SLOTS + _SLOT * slot
        if get(table, cell) == key and get(table, cell + 1) == number:
            return get(table, cell + 2)
        if get(table, cell) < 0:
            return NULL
        slot = (slot + 1) & last


@kernel
def sequence_row(tables: Tables, number: int) -> int:
    """Return the index of the first cell of a sequence, which is added if it is new."""
    state, table = tables.state, tables.sequences
    count = get(state, SEQUENCES)
    for k in range(count):
        row = (count - 1 - k) * SEQUENCE_COLUMNS
        if get(table, row + _ID) == number:
            return row
    if count == get(state, ROOM):
        put(state, FULL, 1)
        return 0
    row = count * SEQUENCE_COLUMNS
    put(table, row + _ID, number)
    put(table, row + GENERATION, get(state, GENERATIONS))
    put(table, row + DEFAULT_CLOCK, 0)
    put(table, row + DEFAULT_TRACK, 0)
    put(state, GENERATIONS, get(state, GENERATIONS) + 1)
    put(state, SEQUENCES, count + 1)
    return row


@kernel
def clock_row(tables: Tables, scope: int, number: int) -> int:
    """Return the index of the first cell of a clock, or NULL if no snapshot has it.

    `scope` is the sequence of a clock that only one sequence has, else 0.
    """
    for k in range(get(tables.state, CLOCKS)):
        row = k * CLOCK_COLUMNS
        if (
            get(tables.clocks, row + _SCOPE) == scope
            and get(tables.clocks, row + _CLOCK) == number
        ):
            return row
    return NULL


@kernel
def added_clock(tables: Tables, scope: int, number: int) -> int:
    """Return the index of the first cell of a clock, which is added if it is new."""
    row = clock_row(tables, scope, number)
    if row != NULL:
        return row
    count = get(tables.state, CLOCKS)
    if count == get(tables.state, ROOM):
        put(tables.state, FULL, 1)
        return 0
    put(tables.state, CLOCKS, count + 1)
    row = count * CLOCK_COLUMNS
    put(tables.clocks, row + _SCOPE, scope)
    put(tables.clocks, row + _CLOCK, number)
    return row


@kernel
def move_interned(table: Ints, larger: Ints) -> None:
    """Copy all interned values into a larger empty table; `larger` is written."""
    last = larger[_LAST_SLOT]
    larger[_COUNT] = table[_COUNT]
    for cell in range(_SLOTS, len(table), _SLOT):
        if table[cell] < 0:
            continue
        slot = mix(table[cell], table[cell + 1]) & last
        while larger[_SLOTS + _SLOT * slot] >= 0:
            slot = (slot + 1) & last
        place = _SLOTS + _SLOT * slot
        larger[place : place + _SLOT] = table[cell : cell + _SLOT]


def no_interned(slots: int = 1 << 12) -> Ints:
    """Return an empty table of interned values; `slots` is a power of two."""
    table = np.full(_SLOTS + _SLOT * slots, -1, np.int64)
    table[[_COUNT, _LAST_SLOT]] = 0, slots - 1
    return table


def grown_interned(table: Ints) -> Ints:
    """Return a copy of a table of interned values with twice the room."""
    larger = no_interned(2 * (int(table[_LAST_SLOT]) + 1))
    move_interned(table, larger)
    return larger
