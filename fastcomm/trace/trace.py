"""One rank's trace in memory; its tables are validated here and nowhere else."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.errors import SchemaError
from fastcomm.trace import schema
from fastcomm.trace.bytes import LARGEST


def only_message(sends_to: pa.Array, receives_from: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return columns `peer` and `sends` of COMM: null unless an event is one message.

    Parameters
    ----------
    sends_to, receives_from
        List columns of COMM.

    """
    lists, rows = (sends_to, receives_from), len(sends_to)
    if all(ranks.null_count == rows for ranks in lists):
        return pa.nulls(rows, pa.int32()), pa.nulls(rows, pa.bool_())
    counts = [ranks.value_lengths().fill_null(0).to_numpy() for ranks in lists]
    is_one = counts[0] + counts[1] == 1
    is_sent = counts[0] == 1
    # Flattened lists are contiguous: an event's only peer is where its list ends.
    last = [np.cumsum(count) - 1 for count in counts]
    place = np.where(is_sent, last[0], last[1] + int(counts[0].sum()))
    peers = pa.concat_arrays([ranks.flatten() for ranks in lists])
    return (
        peers.take(pa.array(place, mask=~is_one)).cast(pa.int32()),
        pa.array(is_sent, mask=~is_one),
    )


# Data that an input may not have, and what is unknown without it.
MISSING_DATA = {
    "device": "no device work: compute, communication, overlap and idle time",
    "device_kinds": "device work of an unknown kind: compute, communication, overlap and idle "
    "time",
    "devices": "device work of several devices: compute, communication, overlap and idle time",
    "graphs": "CUDA graphs without the kernels inside: compute, communication, overlap and "
    "idle time",
    "kernels": "no kernels, although some were launched: compute, communication, overlap and "
    "idle time",
    "compute": "no compute kernels: compute, overlap, exposed communication and idle time",
    "times": "no times but durations: iterations, breakdown, windows and overlap",
    "bytes": "no sizes: bandwidth and volume",
}
# Keys of MISSING_DATA for traces in which the use of the device is unknown.
NO_DEVICE = ("device", "device_kinds", "devices", "graphs", "kernels")
# Maximum share of device work of unknown kind; above it, times are n/a.
SMALL = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """Facts about a rank besides its events."""

    rank: int
    world_size: int | None = None
    format: str  # "kineto"
    path: str
    base: int = 0  # ns that a reader added to the times of the file
    clock: str | None = None  # "unix", or null where absolute times are unknown
    found_by: str = ""  # the rule that found the iterations
    warnings: tuple[str, ...] = ()
    missing_data: tuple[str, ...] = ()  # missing data, keys of MISSING_DATA
    is_truncated: bool = False  # whether the file ends early
    is_host_run: bool = False  # whether the host computes and communicates, without a device
    unused: tuple[str, ...] = ()  # rules and options without effect on this rank, and why
    gpu: str | None = None  # name of the device, as the trace has it
    host: str | None = None  # digest of its host's name, equal for the ranks of one host


_LONGEST_GPU = 200  # letters of the name of a GPU
_ANY_HOST = ("", "localhost", "localhost.localdomain")  # names that tell no host from another


def gpu_name(names: Iterable[object]) -> str | None:
    """Return the name that all devices have, shortened; None if they differ or have none."""
    names = list(names)
    name = names[0] if names else None
    is_common = isinstance(name, str) and name and all(other == name for other in names)
    return str(name)[:_LONGEST_GPU] if is_common else None


def host_digest(name: object) -> str | None:
    """Return a digest of a host's name, which is private; None if it tells no host."""
    if not isinstance(name, str) or name.strip().lower() in _ANY_HOST:
        return None
    return blake2b(name.encode(), digest_size=8).hexdigest()


def validate(table: pa.Table, schema_: pa.Schema, name: str) -> pa.Table:
    """Cast a table to a schema.

    Parameters
    ----------
    table
        May have more columns, in any order.
    schema_
        Columns, types and nullability of the result.
    name
        Name of the table in errors.

    Raises
    ------
    SchemaError
        If a column is missing, has another type, or has nulls where none are allowed.

    """
    present = table.column_names
    if missing := [column for column in schema_.names if column not in present]:
        raise SchemaError(f"{name}: no column {', '.join(missing)}; found {present}")
    if not table.schema.equals(schema_):
        table = _cast(table, schema_, name)
    for place, column in enumerate(schema_):
        if not column.nullable and (nulls := table.column(place).null_count):
            raise SchemaError(f"{name}.{column.name}: {nulls} nulls, none allowed")
    return table.combine_chunks()


def _cast(table: pa.Table, schema_: pa.Schema, name: str) -> pa.Table:
    """Cast columns and types to the schema; nulls are not checked."""
    try:
        pairs = [(table[field.name], field.type) for field in schema_]
        columns = [
            column if column.type == type_ else column.cast(type_) for column, type_ in pairs
        ]
    except (pa.ArrowException, ValueError) as error:
        raise SchemaError(f"{name}: {error}") from error
    return pa.Table.from_arrays(columns, schema=schema_)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTimes:
    """Idle time of a rank by step and cause; `idle.causes` has the causes.

    `evidence` has a row for each of the largest names of a step and cause: `step` (index),
    `cause` (index into CAUSES), `name`, `ns`, `intervals` (number).
    """

    ns: NDArray[np.int64]  # shape (steps, causes)
    evidence: pa.Table  # schema `schema.IDLE_EVIDENCE`


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace:
    """The trace of one rank. `Trace.of` validates every table; later code relies on it."""

    events: pa.Table
    lanes: pa.Table
    comm: pa.Table
    groups: pa.Table
    iterations: pa.Table  # by the host's marks
    meta: Meta
    args: pa.Table | None = None  # see `arguments`; columns of `schema.ARGS`; None: not read
    device_iterations: pa.Table | None = None  # on the device's clock; null: use `iterations`
    device_notes: tuple[str, ...] = ()  # warnings about these, or why they are null
    device_begin: int | None = None  # start of the first device iteration if they are unused
    # By clock, "host" or "device": of a store, whose metrics read no events of the host.
    stored_idle: Mapping[str, IdleTimes] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return one line with the rank and the numbers of events and iterations."""
        counts = f"{self.events.num_rows} events, {self.iterations.num_rows} iterations"
        return f"<Trace: rank {self.meta.rank}, {counts}>"

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
        """Build a trace from tables, after checking each against its schema.

        Parameters
        ----------
        events, lanes, comm, groups, iterations
            Tables of `trace.schema`, of the schema with that name. Those with `start` are
            sorted by it; times are ns.
        meta
            Facts about the rank.
        args
            Further columns of the events, a row each; None without any.

        Raises
        ------
        SchemaError
            A table does not fit its schema or is not sorted.

        """
        return cls(
            events=_in_order(events, schema.EVENTS, "events"),
            lanes=validate(lanes, schema.LANES, "lanes"),
            comm=_sized(_in_order(_with_partners(comm), schema.COMM, "comm")),
            groups=validate(groups, schema.GROUPS, "groups"),
            iterations=_in_order(iterations, schema.ITERATIONS, "iterations"),
            args=None if args is None else _args(args, events.num_rows),
            meta=meta,
        )

    @classmethod
    def narrow(  # noqa: PLR0913 - one keyword per table
        cls,
        *,
        events: pa.Table,
        comm: pa.Table,
        groups: pa.Table,
        iterations: pa.Table,
        meta: Meta,
        columns: schema.ColumnSet = "metrics",
        lanes: pa.Table | None = None,
        args: pa.Table | None = None,
    ) -> Self:
        """Build a trace with only some columns, after checking each table.

        Parameters
        ----------
        events, comm, groups, iterations, meta, args
            As for `of`, with the columns of the set.
        columns
            Key of `schema.COLUMN_SETS`.
        lanes
            None, as for metrics, leaves a trace without lanes.

        Raises
        ------
        SchemaError
            A table does not fit its schema or is not sorted.

        """
        schemas = schema.COLUMN_SETS[columns]
        has_sizes = "payload_bytes" in schemas["comm"].names
        comm = _in_order(_with_partners(comm) if has_sizes else comm, schemas["comm"], "comm")
        return cls(
            events=_in_order(events, schemas["events"], "events"),
            lanes=_NO_LANES if lanes is None else validate(lanes, schema.LANES, "lanes"),
            comm=_sized(comm) if has_sizes else comm,
            groups=validate(groups, schema.GROUPS, "groups"),
            iterations=_in_order(iterations, schema.ITERATIONS, "iterations"),
            args=None if args is None else _args(args, events.num_rows),
            meta=meta,
        )

    @property
    def is_whole(self) -> bool:
        """Whether all events were read, and not only the columns for metrics."""
        return self.args is not None

    @property
    def arguments(self) -> pa.Table:
        """Arguments of the events, row by row; without columns unless the trace is whole."""
        return self.events.select([]) if self.args is None else self.args

    def with_device_iterations(self, table: pa.Table | None, notes: tuple[str, ...]) -> Self:
        """Return the trace with iterations on the device's clock, and notes on them.

        Parameters
        ----------
        table
            Of schema `schema.ITERATIONS`, times in ns, sorted by start; None if unknown.
        notes
            What a reader of results should know about them.

        Raises
        ------
        SchemaError
            The table does not fit.

        """
        if table is not None:
            table = _in_order(table, schema.ITERATIONS, "device iterations")
        return replace(self, device_iterations=table, device_notes=notes)

    def on_host_clock(self) -> Self:
        """Return the trace without device iterations, but with the start of the first."""
        begin, windows = self.device_begin, self.device_iterations
        if windows is not None and windows.num_rows:
            begin = windows["start"][0].as_py()
        return replace(self, device_iterations=None, device_notes=(), device_begin=begin)

    def on_device_clock(self) -> Self:
        """Return the trace with device iterations as its iterations, if it has any."""
        if self.device_iterations is None:
            return self
        return replace(self, iterations=self.device_iterations)


_NO_LANES = schema.LANES.empty_table()


def _in_order(table: pa.Table, schema_: pa.Schema, name: str) -> pa.Table:
    """Validate a table; SchemaError if rows are not sorted, or stop before they start."""
    table = validate(table, schema_, name)
    start = table["start"].to_numpy()
    if (start[1:] < start[:-1]).any():
        raise SchemaError(f"{name}: rows are not sorted by start")
    if (table["stop"].to_numpy() < start).any():
        raise SchemaError(f"{name}: an interval stops before it starts")
    return table


def _sized(comm: pa.Table) -> pa.Table:
    """Return the table; SchemaError if sizes are negative, or too large to be added up."""
    for name in ("msg_bytes", "payload_bytes", "bus_bytes"):
        ends = pc.min_max(comm[name])
        least, most = (ends[side].as_py() or 0 for side in ("min", "max"))
        is_large = most * comm.num_rows > LARGEST  # the sum is that at most
        if is_large:
            is_large = pc.sum(comm[name].cast(pa.float64(), safe=False)).as_py() > 2 * LARGEST
        if least < 0 or is_large:
            raise SchemaError(
                f"comm.{name}: invalid sizes {least} to {most}: expected at least 0 bytes, and "
                f"at most {LARGEST} in total"
            )
    return comm


def _with_partners(comm: pa.Table) -> pa.Table:
    """Add missing columns: `call_id`, `schema.SPLITS` and PARTNERS as null, and OF_ONE."""
    has_sides = set(schema.OF_ONE).issubset(comm.column_names)
    for name in ("call_id", *schema.SPLITS, *(() if has_sides else schema.PARTNERS)):
        if name not in comm.column_names:
            nulls = pa.nulls(comm.num_rows, schema.COMM.field(name).type)
            comm = comm.append_column(name, nulls)
    if has_sides:
        return comm
    lists = validate(comm, _LISTS, "comm")
    columns = only_message(*(column.combine_chunks() for column in lists.columns))
    for name, column in zip(schema.OF_ONE, columns, strict=True):
        comm = comm.append_column(schema.COMM.field(name), column)
    return comm


_LISTS = pa.schema([schema.COMM.field(name) for name in ("sends_to", "receives_from")])


def _args(table: pa.Table, rows: int) -> pa.Table:
    """Return the columns of `schema.ARGS`; SchemaError if their number of rows is wrong."""
    if table.num_rows != rows:
        raise SchemaError(f"args: {table.num_rows} rows, but events have {rows}")
    fields = [field for field in schema.ARGS if field.name in table.column_names]
    return validate(table, pa.schema(fields), "args")
