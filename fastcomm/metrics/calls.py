"""Which communication of one rank is which of another: collectives, and messages of two."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.rates import column
from fastcomm.metrics.view import UNKNOWN
from fastcomm.trace.matching import NONE, Calls, Matches, match
from fastcomm.trace.messages import Messages, match_messages
from fastcomm.trace.schema import ENDS_TOGETHER, EVEN, FROM_ROOT, OP, TO_ROOT, numbers

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_TOGETHER, _EVEN, _ROOTED = map(numbers, (ENDS_TOGETHER, EVEN, FROM_ROOT + TO_ROOT))

_WHOLE = ("rank", "group", "group_size", "seq", "bytes", "bus_bytes", "partner")


@dataclass(frozen=True, slots=True)
class Events:
    """Columns of the table of events, of ranks whose times are known.

    UNKNOWN, or false, stands for null and for what is not in the table.
    """

    rank: Ints
    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    group: Ints
    group_size: Ints
    seq: Ints
    bytes: Ints
    bus_bytes: Ints
    partner: Ints
    sends: Flags
    start: Ints
    stop: Ints
    alone: Ints

    @classmethod
    def of(cls, table: pa.Table) -> "Events":
        """Take the columns."""
        if table["start_ns"].null_count:
            table = table.filter(table["start_ns"].is_valid())
        rows, given = table.num_rows, set(table.column_names)
        nothing, never = np.broadcast_to(UNKNOWN, rows), np.broadcast_to(False, rows)
        names = {name: name for name in _WHOLE} | {"alone": "alone_ns"}
        start = column(table, "start_ns")
        return cls(
            tag=table["tag"].to_numpy(),
            op=table["op"].to_numpy(),
            sends=table["sends"].to_numpy() if "sends" in given else never,
            start=start,
            stop=start + table["duration_ns"].to_numpy(),
            **{
                name: column(table, said) if said in given else nothing
                for name, said in names.items()
            },
        )

    @property
    def together(self) -> Ints:
        """The rows of collectives that end on all members at the same time."""
        return np.flatnonzero(self._of_several & np.isin(self.op, _TOGETHER))

    @property
    def collectives(self) -> Ints:
        """The rows of these, and of those whose root is known."""
        rooted = np.isin(self.op, _ROOTED) & (self.partner != UNKNOWN)
        return np.flatnonzero(self._of_several & (rooted | np.isin(self.op, _TOGETHER)))

    @property
    def messages(self) -> Ints:
        """The rows of events that are one message with a rank that is known."""
        is_message = (self.op == OP["SendRecv"]) & (self.partner != UNKNOWN)
        return np.flatnonzero(self._of_several & is_message & (self.partner != self.rank))

    @property
    def _of_several(self) -> Flags:
        several: Flags = (self.group != UNKNOWN) & (self.group_size != 1)
        return several


@dataclass(frozen=True, slots=True)
class Met:
    """Rows of events that met with others: in what, numbered from 0."""

    row: Ints
    number: Ints
    count: int


def matches_of(events: Events, rows: Ints) -> Matches:
    """Match the collectives among some rows."""
    op, partner = events.op[rows], events.partner[rows]
    return match(
        Calls(
            rank=events.rank[rows],
            group=events.group[rows],
            op=op.astype(np.int64),
            seq=events.seq[rows],
            size=np.where(np.isin(op, _EVEN), events.bytes[rows], UNKNOWN),
            stop=events.stop[rows],
            root=np.where(np.isin(op, _ROOTED), partner, UNKNOWN),
        )
    )


def met_in_collectives(events: Events, rows: Ints, matches: Matches) -> Met:
    """Those that were matched; of a rooted one, where the root is among them."""
    matched = np.flatnonzero(matches.instance != NONE)
    row, number = rows[matched], matches.instance[matched]
    counts = np.zeros(matches.count, np.bool_)
    rooted = np.isin(events.op[row], _ROOTED)
    counts[number[~rooted | (events.partner[row] == events.rank[row])]] = True
    kept = counts[number]
    again = np.cumsum(counts) - 1
    return Met(row[kept], again[number[kept]], int(counts.sum()))


def met_in_messages(events: Events, rows: Ints, ahead: Ints) -> Met:
    """The messages of which both sides are there; `ahead` is what each event's clock is."""
    found = match_messages(
        Messages(
            rank=events.rank[rows],
            peer=events.partner[rows],
            is_send=events.sends[rows],
            group=events.group[rows],
            seq=events.seq[rows],
            size=events.bytes[rows],
            stop=events.stop[rows] - ahead[rows],
        )
    )
    matched = np.flatnonzero(found.instance != NONE)
    return Met(rows[matched], found.instance[matched], found.count)


def joined(collectives: Met, messages: Met) -> Met:
    """Both, messages numbered behind the collectives."""
    return Met(
        np.concatenate([collectives.row, messages.row]),
        np.concatenate([collectives.number, messages.number + collectives.count]),
        collectives.count + messages.count,
    )
