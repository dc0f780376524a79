"""Events of inputs that know device work alone: no host, no launches, no annotations.

A row is one event: its times, its kind, its name and its lane. Rows come in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.readers.communication import Collectives
from fastcomm.readers.patterns import Named
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.events import Events
from fastcomm.trace.schema import OP
from fastcomm.trace.tags import ProcessGroup
from fastcomm_kernels.arrays import NULL, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Device work, a row each; NULL is unknown."""

    start: Ints
    stop: Ints
    kind: NDArray[np.int8]  # index into KINDS
    name: Ints  # index into `texts`
    texts: Sequence[str]
    lane: Ints  # index into `lanes`
    lanes: Sequence[str]  # streams, or whatever events stand one after another on
    stream: Ints
    offset: Ints  # of the row's text in its file

    def events(self) -> tuple[Events, pa.Table, Ints]:
        """The events sorted by start, their lanes, and the row that each event was."""
        order = np.lexsort((self.stop, self.start))
        lanes = pa.table(
            {
                "process": [""] * len(self.lanes),
                "thread": list(self.lanes),
                "device": pa.nulls(len(self.lanes), pa.int32()),
                "is_device": [True] * len(self.lanes),
            }
        )
        events = Events(
            start=self.start[order],
            stop=self.stop[order],
            kind=self.kind[order],
            name=self.name[order].astype(np.int32),
            lane=self.lane[order].astype(np.int32),
            correlation=np.full(len(order), NULL, np.int64),
            texts=self.texts,
            more={"stream": self.stream[order], "offset": self.offset[order]},
        )
        return events, lanes, order


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationColumns:
    """What is known of each row of a `Work` that communicates; others have NULL as `op`."""

    op: Ints
    seq: Ints
    group: Ints  # index into `groups`, -1 where nothing is known
    groups: tuple[ProcessGroup, ...]
    message: Ints  # bytes, as handed to the library's call
    name: Ints  # index into `named`
    named: tuple[Named, ...]

    def collectives(self, order: Ints) -> Collectives:
        """The same of the sorted events, `order` being the row that each was."""
        row = np.flatnonzero(self.op[order] != NULL)
        chosen = order[row]
        op, group = self.op[chosen].astype(np.int8), self.group[chosen].astype(np.int32)
        members = [NULL if each.members is None else each.members for each in self.groups]
        size = np.array([*members, NULL], np.int64)[group]
        return Collectives(
            row=row,
            op=op,
            seq=self.seq[chosen],
            group=group,
            groups=self.groups,
            sizes=sizes_of_messages(op, self.message[chosen], size),
            named=self.named,
            name=self.name[chosen],
        )


def sizes_of_messages(op: NDArray[np.int8], message: Ints, size: Ints) -> byte_rules.Sizes:
    """The three counts of bytes, from what was handed to the call and the group's size.

    A message is what goes to, or comes from, one peer where an operation has a part for each.
    """
    whole = byte_rules.byte_counts(message, size)
    unknown = np.full(len(message), NULL, np.int64)
    given, got = message.copy(), message.copy()
    for name, gives, gets in (
        ("AllGather", message, unknown),
        ("ReduceScatter", unknown, message),
        ("AllToAll", whole, whole),
        ("Gather", message, unknown),
        ("Scatter", unknown, message),
    ):
        chosen = op == OP[name]
        given, got = np.where(chosen, gives, given), np.where(chosen, gets, got)
    return byte_rules.sizes(op, given, got, size)
