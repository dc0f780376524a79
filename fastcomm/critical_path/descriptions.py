"""Descriptions of events: of a trace, or saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from fastcomm.trace.columns import filled
from fastcomm.trace.events import lane_streams
from fastcomm.trace.schema import KINDS, OPS, TAGS
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.graph import Numbers

# What is told of an event.
EVENT = pa.schema(
    [
        pa.field("id", pa.int64()),  # its place in the file
        pa.field("name", pa.string()),
        pa.field("kind", pa.string()),
        pa.field("process", pa.string()),
        pa.field("thread", pa.string()),
        pa.field("stream", pa.int64()),  # null on the host
        pa.field("start", pa.int64()),  # ns
        pa.field("stop", pa.int64()),
        pa.field("is_device", pa.bool_()),
        pa.field("op", pa.string()),  # of communication
        pa.field("tag", pa.string()),
    ]
)


class EventDescriptions(Protocol):
    """Where descriptions come from."""

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Columns of `EVENT` of the events of these rows; row -1 is all null."""
        ...

    def ids(self, rows: Numbers) -> Ints:
        """The ids of these rows."""
        ...


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """The events of a trace."""

    trace: Trace

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Columns of `EVENT` of the events of these rows; row -1 is all null."""
        at = pa.array(rows, mask=rows < 0)
        wanted = pa.schema([EVENT.field(name) for name in columns])
        return pa.table({name: self._column(name, rows, at) for name in columns}).cast(wanted)

    def _column(self, name: str, rows: Numbers, at: pa.Array) -> pa.Array | pa.ChunkedArray:
        events, lanes = self.trace.events, self.trace.lanes
        match name:
            case "id":
                return pa.array(self.ids(rows), mask=rows < 0)
            case "kind":
                return pa.array(KINDS).take(events["kind"].take(at).cast(pa.int32()))
            case "process" | "thread" | "is_device":
                return lanes[name].take(events["lane"].take(at))
            case "stream":
                return self._stream(rows)
            case "op" | "tag":
                return self._communication(name, rows)
            case _:
                return events[name].take(at)

    def ids(self, rows: Numbers) -> Ints:
        """The places of these rows in the file; of an unknown place the row itself."""
        args = self.trace.args
        if args is None or "position" not in args.column_names or not args.num_rows:
            return rows.astype(np.int64)
        return filled(args["position"])[rows]

    def _stream(self, rows: Numbers) -> pa.Array:
        args = self.trace.args
        if args is None or "on_stream" not in args.column_names:
            stream = np.append(lane_streams(self.trace), NULL)[rows]
            return pa.array(stream, mask=stream == NULL)
        return args["on_stream"].take(pa.array(rows, mask=rows < 0))

    def _communication(self, name: str, rows: Numbers) -> pa.Array | pa.ChunkedArray:
        """The operation or the tag of each row; null where it does not communicate."""
        comm = self.trace.comm
        place = np.full(self.trace.events.num_rows + 1, -1, np.int32)
        place[comm["event"].to_numpy()] = np.arange(comm.num_rows)
        at = place[rows]
        words = pa.array(OPS if name == "op" else TAGS)
        return words.take(comm[name].take(pa.array(at, mask=at < 0)).cast(pa.int32()))


@dataclass(frozen=True, slots=True)
class SavedEvents:
    """Events that were saved: a table of `EVENT`, by row."""

    table: pa.Table

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Columns of `EVENT` of the events of these rows; row -1 is all null."""
        return self.table.select(columns).take(pa.array(rows, mask=rows < 0))

    def ids(self, rows: Numbers) -> Ints:
        """The ids of these rows."""
        return filled(self.table["id"])[rows]
