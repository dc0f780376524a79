"""Write packets of a Perfetto trace: a time and an event each."""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Bytes, Ints

_PACKET = 0x0A  # field 1 of a trace, bytes
_TIME = 0x40  # field 8 of a packet, a number
_EVENT = 0x5A  # field 11 of a packet, bytes
_LONGEST = 10  # bytes of a number
_ROOM = 3 * (1 + _LONGEST)  # of a packet, besides its contents


class Contents(NamedTuple):
    """Byte strings, one after the other."""

    first: Ints  # where each begins, and the end of the last
    text: Bytes


@kernel
def number_size(value: int) -> int:
    """Return how many bytes a number from 0 on takes, with seven bits in each."""
    size = 1
    while value > 127:
        value >>= 7
        size += 1
    return size


@kernel
def put_number(out: Bytes, at: int, value: int) -> int:
    """Write a number from 0 on into `out`; return the index behind it."""
    while value > 127:
        out[at] = value & 127 | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@kernel
def put_content(out: Bytes, at: int, contents: Contents, row: int) -> int:
    """Copy a string of `contents` into `out`; return the index behind it."""
    for i in range(contents.first[row], contents.first[row + 1]):
        out[at] = contents.text[i]
        at += 1
    return at


@kernel
def packets(time: Ints, prefix: Bytes, head: Ints, heads: Contents, tails: Contents) -> Bytes:
    """Return the packets of events.

    Parameters
    ----------
    time
        Timestamp of each packet, as it is written: on an incremental clock, the time since the
        packet before. From 0 on.
    prefix
        Fields that every packet has.
    head
        Row of `heads` of each event.
    heads
        Fields of an event that several have in common.
    tails
        Fields of each event besides.

    """
    sizes = heads.first[1:] - heads.first[:-1]
    room = len(tails.text) + (_ROOM + len(prefix)) * len(time)
    for row in head:
        room += sizes[row]
    out, at = np.empty(room, np.uint8), 0
    for k in range(len(time)):
        size = sizes[head[k]] + tails.first[k + 1] - tails.first[k]
        common = 2 + number_size(time[k]) + len(prefix) + number_size(size)
        out[at] = _PACKET
        at = put_number(out, at + 1, common + size)
        out[at] = _TIME
        at = put_number(out, at + 1, time[k])
        for value in prefix:
            out[at] = value
            at += 1
        out[at] = _EVENT
        at = put_number(out, at + 1, size)
        at = put_content(out, at, heads, head[k])
        at = put_content(out, at, tails, k)
    return out[:at]
