"""One rank's trace in memory; its tables are validated here and nowhere else."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.errors import SchemaError
from fastcomm.trace import schema
from fastcomm.trace.bytes import LARGEST


def only_message(sends_to: pa.Array, receives_from: pa.Array) -> tuple[pa.Array, pa.Array]:
    """COMM's `peer` and `sends` of events with these lists; null unless it is one message."""
    lists, rows = (sends_to, receives_from), len(sends_to)
    if all(each.null_count == rows for each in lists):
        return pa.nulls(rows, pa.int32()), pa.nulls(rows, pa.bool_())
    counts = [each.value_lengths().fill_null(0).to_numpy() for each in lists]
    is_one = counts[0] + counts[1] == 1
    is_sent = counts[0] == 1
    # The lists lie one behind the other: an event's only peer is where its list ends.
    last = [np.cumsum(count) - 1 for count in counts]
    place = np.where(is_sent, last[0], last[1] + int(counts[0].sum()))
    peers = pa.concat_arrays([each.flatten() for each in lists])
    return (
        peers.take(pa.array(place, mask=~is_one)).cast(pa.int32()),
        pa.array(is_sent, mask=~is_one),
    )


# What an input may lack, and what is unknown without it.
LACKS = {
    "device": "no device work: compute, communication, overlap and idle time",
    "device_kinds": "device work of an unknown kind: compute, communication, overlap and idle "
    "time",
    "compute": "no compute kernels: compute, overlap, exposed communication and idle time",
    "times": "no times but durations: iterations, breakdown, windows and overlap",
    "bytes": "no sizes: bandwidth and volume",
}
# Words for traces in which how a device spends its time is not known at all.
NO_DEVICE = ("device", "device_kinds")
# With a larger share of device work that nobody understands, times are n/a.
SMALL = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What is known of a rank besides its events."""

    rank: int
    world_size: int | None = None
    format: str  # "kineto"
    path: str
    base: int = 0  # ns that a reader added to the times of the file
    clock: str | None = None  # "unix", or null where absolute times are unknown
    found_by: str = ""  # the rule that found the iterations
    warnings: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()  # of LACKS
    is_truncated: bool = False  # the file ends early, and the rest was read all the same
    unused: tuple[str, ...] = ()  # rules and options that have no effect on this rank, and why


def checked(table: pa.Table, wanted: pa.Schema, name: str) -> pa.Table:
    """`table` cast to the schema `wanted`; SchemaError where that fails or finds a null."""
    found = table.column_names
    if missing := [column for column in wanted.names if column not in found]:
        raise SchemaError(f"{name}: no column {', '.join(missing)}; found {found}")
    if not table.schema.equals(wanted):
        table = _cast(table, wanted, name)
    for place, field in enumerate(wanted):
        if not field.nullable and (nulls := table.column(place).null_count):
            raise SchemaError(f"{name}.{field.name}: {nulls} nulls, none allowed")
    return table.combine_chunks()


def _cast(table: pa.Table, wanted: pa.Schema, name: str) -> pa.Table:
    """The table with columns, types and nullability as wanted; nulls are not looked for."""
    try:
        pairs = [(table[field.name], field.type) for field in wanted]
        columns = [
            column if column.type == type_ else column.cast(type_) for column, type_ in pairs
        ]
    except (pa.ArrowException, ValueError) as error:
        raise SchemaError(f"{name}: {error}") from error
    return pa.Table.from_arrays(columns, schema=wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Events of one rank. `Trace.of` validates every table; later code relies on it."""

    events: pa.Table
    lanes: pa.Table
    comm: pa.Table
    groups: pa.Table
    iterations: pa.Table  # by the host's marks
    meta: Meta
    args: pa.Table | None = None  # columns of `schema.ARGS`, row by row of `events`
    device_iterations: pa.Table | None = None  # on the device's clock; null: use `iterations`
    device_notes: tuple[str, ...] = ()  # warnings about them, or why there are none
    device_begin: int | None = None  # start of the first of them where they are not used

    @classmethod
    def of(
        cls,
        *,
        events: pa.Table,
        lanes: pa.Table,
        comm: pa.Table,
        groups: pa.Table,
        iterations: pa.Table,
        meta: Meta,
        args: pa.Table | None = None,
    ) -> Self:
        """Check every table against its schema. Tables with `start` must be sorted by it."""
        return cls(
            events=_in_order(events, schema.EVENTS, "events"),
            lanes=checked(lanes, schema.LANES, "lanes"),
            comm=_sized(_in_order(_with_partners(comm), schema.COMM, "comm")),
            groups=checked(groups, schema.GROUPS, "groups"),
            iterations=_in_order(iterations, schema.ITERATIONS, "iterations"),
            args=None if args is None else _args(args, events.num_rows),
            meta=meta,
        )

    @classmethod
    def narrow(
        cls,
        *,
        events: pa.Table,
        comm: pa.Table,
        groups: pa.Table,
        iterations: pa.Table,
        meta: Meta,
    ) -> Self:
        """Build a trace with only the columns that metrics read: `schema.NARROW`, no lanes."""
        wanted = schema.NARROW
        return cls(
            events=_in_order(events, wanted["events"], "events"),
            lanes=_NO_LANES,
            comm=_sized(_in_order(_with_partners(comm), wanted["comm"], "comm")),
            groups=checked(groups, schema.GROUPS, "groups"),
            iterations=_in_order(iterations, schema.ITERATIONS, "iterations"),
            meta=meta,
        )

    def with_device_iterations(self, table: pa.Table | None, notes: tuple[str, ...]) -> Self:
        """Return the trace with these windows on the device's clock, once they are checked."""
        if table is not None:
            table = _in_order(table, schema.ITERATIONS, "device iterations")
        return replace(self, device_iterations=table, device_notes=notes)

    def on_host_clock(self) -> Self:
        """Return the trace without windows on the device's clock, but with their begin."""
        begin, windows = self.device_begin, self.device_iterations
        if windows is not None and windows.num_rows:
            begin = windows["start"][0].as_py()
        return replace(self, device_iterations=None, device_notes=(), device_begin=begin)

    def on_device_clock(self) -> Self:
        """Return the trace with device windows as its iterations; itself where it has none."""
        if self.device_iterations is None:
            return self
        return replace(self, iterations=self.device_iterations)


_NO_LANES = schema.LANES.empty_table()


def _in_order(table: pa.Table, wanted: pa.Schema, name: str) -> pa.Table:
    """`checked`, and SchemaError where rows are not by start, or stop before it."""
    table = checked(table, wanted, name)
    start = table["start"].to_numpy()
    if (start[1:] < start[:-1]).any():
        raise SchemaError(f"{name}: rows are not sorted by start")
    if (table["stop"].to_numpy() < start).any():
        raise SchemaError(f"{name}: an interval stops before it starts")
    return table


def _sized(comm: pa.Table) -> pa.Table:
    """The table; SchemaError where sizes are negative, or cannot be added up."""
    for name in ("msg_bytes", "payload_bytes", "bus_bytes"):
        ends = pc.min_max(comm[name])
        least, most = (ends[side].as_py() or 0 for side in ("min", "max"))
        is_large = most * comm.num_rows > LARGEST  # the sum is that at most
        if is_large:
            is_large = pc.sum(comm[name].cast(pa.float64(), safe=False)).as_py() > 2 * LARGEST
        if least < 0 or is_large:
            raise SchemaError(
                f"comm.{name}: found {least} to {most}, wanted 0 to {LARGEST} in total"
            )
    return comm


def _with_partners(comm: pa.Table) -> pa.Table:
    """The table with all of `schema.PARTNERS`, null where nobody said them, and OF_ONE."""
    found = comm.column_names
    if set(schema.OF_ONE).issubset(found):
        return comm
    for name in schema.PARTNERS:
        if name not in found:
            nothing = pa.nulls(comm.num_rows, schema.COMM.field(name).type)
            comm = comm.append_column(name, nothing)
    lists = checked(comm, _LISTS, "comm")
    columns = only_message(*(each.combine_chunks() for each in lists.columns))
    for name, column in zip(schema.OF_ONE, columns, strict=True):
        comm = comm.append_column(schema.COMM.field(name), column)
    return comm


_LISTS = pa.schema([schema.COMM.field(name) for name in ("sends_to", "receives_from")])


def _args(table: pa.Table, rows: int) -> pa.Table:
    """The columns that `schema.ARGS` knows of; SchemaError where rows are missing."""
    if table.num_rows != rows:
        raise SchemaError(f"args: {table.num_rows} rows, wanted the {rows} of events")
    wanted = [field for field in schema.ARGS if field.name in table.column_names]
    return checked(table, pa.schema(wanted), "args")
