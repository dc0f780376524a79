"""What is left of the events of a collective, or message, once they are compared: one row."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.calls import Events
from fastcomm.metrics.meetings import Meetings
from fastcomm.metrics.view import UNKNOWN
from fastcomm.trace.schema import OP

Ints = NDArray[np.int64]

NO_PAIR = (-1, -1)  # of what is no message


@dataclass(frozen=True, slots=True)
class Collectives:
    """A row a collective or message that several ranks were matched in; times in ns."""

    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    power: NDArray[np.int8]  # of two, below the size of the largest member; -1 if unknown
    group: Ints  # label
    group_size: Ints
    bus_bytes: Ints  # of the member that moves the most; UNKNOWN
    members: NDArray[np.int32]  # that were matched
    skew: Ints  # last arrival - first
    transfer: Ints
    wait: Ints  # of all members together
    low: NDArray[np.int32]  # the lower rank of a message; as in NO_PAIR
    high: NDArray[np.int32]  # the other

    @classmethod
    def of(cls, events: Events, meetings: Meetings) -> Self:
        """Those that were met in."""
        one = meetings.row[meetings.first]  # stands for all of them
        is_message = events.op[one] == OP["SendRecv"]
        low, high = meetings.smallest(events.rank), meetings.largest(events.rank)
        return cls(
            tag=events.tag[one],
            op=events.op[one],
            power=_power(meetings.largest(events.bytes)),
            group=events.group[one],
            group_size=events.group_size[one],
            bus_bytes=meetings.largest(events.bus_bytes),
            members=meetings.size.astype(np.int32),
            skew=meetings.arrived - meetings.start[meetings.first],
            transfer=meetings.transfer,
            wait=meetings.total(meetings.wait),
            low=np.where(is_message, low, NO_PAIR[0]).astype(np.int32),
            high=np.where(is_message, high, NO_PAIR[1]).astype(np.int32),
        )


def _power(count: Ints) -> NDArray[np.int8]:
    power = np.frexp(np.maximum(count, 1).astype(np.float64))[1] - 1
    return np.where(count == UNKNOWN, -1, power).astype(np.int8)
