"""What an event is called, where it ran and what it did: for those that somebody asks for."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from fastcomm.critical_path.rows import ints, lane_streams
from fastcomm.trace.schema import KINDS, OPS, TAGS
from fastcomm.trace.trace import Trace
from fastcomm_kernels.graph import Column, Numbers
from fastcomm_kernels.json_numbers import NULL

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


class Events(Protocol):
    """Where descriptions come from."""

    def describe(self, rows: Numbers) -> pa.Table:
        """The events of these rows as a table of `EVENT`; row -1 is all null."""
        ...

    def ids(self, rows: Numbers) -> Column:
        """The ids of these rows."""
        ...


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """The events of a trace."""

    trace: Trace

    def describe(self, rows: Numbers) -> pa.Table:
        """The events of these rows; row -1 is all null."""
        events, lanes = self.trace.events, self.trace.lanes
        at = pa.array(rows, mask=rows < 0)
        lane = events["lane"].take(at)
        stream = self._stream(rows)
        op, tag = self._communication(rows)
        kinds = pa.array(KINDS)
        columns = {
            "id": pa.array(self.ids(rows), mask=rows < 0),
            "name": events["name"].take(at).cast(pa.string()),
            "kind": kinds.take(events["kind"].take(at).cast(pa.int32())),
            "process": lanes["process"].take(lane),
            "thread": lanes["thread"].take(lane),
            "stream": stream,
            "start": events["start"].take(at),
            "stop": events["stop"].take(at),
            "is_device": lanes["is_device"].take(lane),
            "op": op,
            "tag": tag,
        }
        return pa.table(columns).cast(EVENT)

    def ids(self, rows: Numbers) -> Column:
        """The places of these rows in the file; of an unknown place the row itself."""
        args = self.trace.args
        if args is None or "position" not in args.column_names or not args.num_rows:
            return rows.astype(np.int64)
        return ints(args["position"])[rows]

    def _stream(self, rows: Numbers) -> pa.Array:
        args = self.trace.args
        if args is None or "on_stream" not in args.column_names:
            stream = np.append(lane_streams(self.trace), NULL)[rows]
            return pa.array(stream, mask=stream == NULL)
        return args["on_stream"].take(pa.array(rows, mask=rows < 0))

    def _communication(self, rows: Numbers) -> tuple[pa.Array, pa.Array]:
        """The operation and the tag of each row; null where it does not communicate."""
        comm = self.trace.comm
        place = np.full(self.trace.events.num_rows + 1, -1, np.int64)
        place[comm["event"].to_numpy()] = np.arange(comm.num_rows)
        at = pa.array(place[rows], mask=place[rows] < 0)
        return (
            pa.array(OPS).take(comm["op"].take(at).cast(pa.int32())),
            pa.array(TAGS).take(comm["tag"].take(at).cast(pa.int32())),
        )


@dataclass(frozen=True, slots=True)
class SavedEvents:
    """Events that were saved: a table of `EVENT`, by row."""

    table: pa.Table

    def describe(self, rows: Numbers) -> pa.Table:
        """The events of these rows; row -1 is all null."""
        return self.table.take(pa.array(rows, mask=rows < 0))

    def ids(self, rows: Numbers) -> Column:
        """The ids of these rows."""
        return ints(self.table["id"])[rows]
