"""The events of a rank as NumPy columns, with their names, launches and enclosing ranges."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.errors import FastcommError
from fastcomm.trace.schema import KIND, KINDS, OPS, TAGS
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NULL, Flags, Ints
from fastcomm_kernels.graph import Numbers

Integers = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRows:
    """Columns of the events of a rank, or of some of them."""

    row: Ints  # in the table of events
    start: Ints
    stop: Ints
    position: Ints  # in the file
    kind: NDArray[np.int8]
    name: NDArray[np.int32]  # index into `names`
    lane: Numbers
    correlation: Ints
    stream: Ints  # NULL on the host
    wait_stream: Ints
    wait_record: Ints  # correlation of the record that is waited for
    names: pa.Array
    lanes: pa.Table

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """All events of a trace; FastcommError where only those for metrics were read."""
        if trace.args is None:
            raise FastcommError(
                f"{trace.meta.path}: read for metrics alone; open the run with every event"
            )
        events, args, count = trace.events, trace.args, trace.events.num_rows
        name = events["name"].combine_chunks()
        present = set(args.column_names)

        def arg(key: str) -> Ints:
            return ints(args[key]) if key in present else np.full(count, NULL, np.int64)

        return cls(
            row=np.arange(count),
            start=ints(events["start"]),
            stop=ints(events["stop"]),
            position=arg("position") if "position" in present else np.arange(count),
            kind=events["kind"].to_numpy(),
            name=name.indices.to_numpy(),
            lane=events["lane"].to_numpy(),
            correlation=ints(events["correlation"]),
            stream=arg("on_stream") if "on_stream" in present else lane_streams(trace),
            wait_stream=arg("wait_stream"),
            wait_record=arg("wait_correlation"),
            names=name.dictionary,
            lanes=trace.lanes,
        )

    def __len__(self) -> int:
        return len(self.row)

    def take(self, rows: Ints | Flags) -> Self:
        """Some of the rows."""
        if rows.dtype == np.bool_:
            if rows.all():
                return self
            rows = np.flatnonzero(rows)
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return replace(self, **{name: c[rows] for name, c in columns.items() if len(c)})

    def without(self, *columns: str) -> Self:
        """The same rows without some columns, which nobody will ask for."""
        empty: dict[str, Any] = dict.fromkeys(columns, np.empty(0, np.int64))
        return replace(self, **empty)

    def of_kind(self, *kinds: str) -> Flags:
        """Which rows are of one of these kinds."""
        wanted = np.zeros(len(KIND), np.bool_)
        wanted[[KIND[kind] for kind in kinds]] = True
        return wanted[self.kind]

    def named(self, names: Iterable[str]) -> Flags:
        """Which rows have one of these names."""
        known = pc.is_in(self.names, value_set=pa.array(sorted(names), pa.string()))
        return self.by_name(known)

    def by_name(self, known: pa.Array) -> Flags:
        """The answer to each row's name, from the answer to each of `names`."""
        answers: Flags = known.to_numpy(zero_copy_only=False)[self.name]
        return answers

    def containing(self, text: str) -> Flags:
        """Which rows have this text in their name."""
        return self.by_name(pc.match_substring(self.names, text))

    def matching(self, regex: str) -> Flags:
        """Which rows have a name in which the expression is found."""
        return self.by_name(pc.match_substring_regex(self.names, regex))


_COLUMNS = (
    *("row", "start", "stop", "position", "kind", "name", "lane", "correlation"),
    *("stream", "wait_stream", "wait_record"),
)


def ints(column: pa.ChunkedArray) -> Ints:
    """An integer column; NULL for null."""
    if column.null_count:
        column = column.fill_null(NULL)
    found: Ints = column.to_numpy()
    return found


def lane_streams(trace: Trace) -> Ints:
    """The stream of each event, by its lane."""
    streams = [
        int(thread) if device and thread.lstrip("-").isdecimal() else NULL
        for thread, device in zip(
            trace.lanes["thread"].to_pylist(),
            trace.lanes["is_device"].to_pylist(),
            strict=True,
        )
    ]
    found: Ints = np.array(streams, np.int64)[trace.events["lane"].to_numpy()]
    return found


def codes(*columns: Integers) -> tuple[list[Numbers], int]:
    """Small numbers instead of the columns' values, the same in all, and more than they are.

    NULL becomes -1.
    """
    known = [column[column != NULL] for column in columns]
    low = min((int(column.min()) for column in known if len(column)), default=0)
    high = max((int(column.max()) for column in known if len(column)), default=0)
    if high - low > _DENSE + 4 * sum(map(len, columns)):
        return codes_in_order(*columns)
    found = [np.where(c == NULL, -1, c - low).astype(np.int32) for c in columns]
    return found, high - low + 1


# Numbers so close to each other are taken as they are.
_DENSE = 1 << 10


def codes_in_order(*columns: Integers) -> tuple[list[Numbers], int]:
    """Small numbers in order of the values' first appearance, and how many; NULL becomes -1."""
    joined = np.concatenate(columns)
    encoded = pa.array(joined, mask=joined == NULL).dictionary_encode()
    code = encoded.indices.fill_null(-1).to_numpy().astype(np.int32)
    return np.split(code, np.cumsum([len(column) for column in columns])[:-1]), len(
        encoded.dictionary
    )


def pair_codes(
    left: tuple[Integers, Integers], right: tuple[Integers, Integers]
) -> tuple[Numbers, Numbers, int]:
    """Small numbers for pairs of numbers, the same on both sides, and more than they are."""
    firsts, count = codes(left[0], right[0])
    seconds, _ = codes(left[1], right[1])
    keys = [b.astype(np.int64) * (count + 1) + a for a, b in zip(firsts, seconds, strict=True)]
    (a, b), pairs = codes(*keys)
    return a, b, pairs


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
        return ints(args["position"])[rows]

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
        return ints(self.table["id"])[rows]
