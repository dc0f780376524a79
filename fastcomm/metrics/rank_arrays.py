"""Arrays from which metrics are computed: of one rank, or of several ranks stacked in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.idle.causes import CAUSES
from fastcomm.metrics.options import ByteKind
from fastcomm.ranks import clocks
from fastcomm.trace.columns import filled
from fastcomm.trace.iterations import are_numbered
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import KIND, NARROW
from fastcomm.trace.trace import IdleTimes, Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

_LATEST = 1 << 62  # ns
# Kinds of work of the device, or of the host where there is no device.
ON_DEVICE = ("kernel", "memcpy", "memset", "host_work")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Traces of several ranks as one: concatenated tables, with times shifted apart."""

    events: pa.Table
    comm: pa.Table
    groups: pa.Table
    iterations: pa.Table
    rank: Ints  # of each iteration
    moved: Ints  # of each iteration: ns by which its times were shifted
    is_numbered: Flags  # of each iteration: whether its number is the job's
    rank_of_group: Ints
    event_edges: Ints  # first row of each rank, then the number of rows
    comm_edges: Ints
    rank_of_comm: Ints
    idle: Ints  # ns by iteration and cause, CAUSES; NULL if unknown

    @classmethod
    def of(cls, traces: Sequence[Trace], idle: Sequence[IdleTimes | None]) -> Self | None:
        """Stack traces, with the columns of `schema.NARROW`, and the idle time of each.

        Returns None if the stacked times would exceed an int64.
        """
        moved = _moved(traces)
        if moved is None:
            return None
        ranks = np.array([trace.meta.rank for trace in traces], np.int64)
        events = [trace.events.select(NARROW["events"].names) for trace in traces]
        comm = [trace.comm.select(NARROW["comm"].names) for trace in traces]
        groups = [trace.groups for trace in traces]
        iterations = [trace.iterations for trace in traces]
        steps = _rows(iterations)
        return cls(
            events=_concatenated(events, start=moved, stop=moved),
            comm=_concatenated(
                comm, start=moved, stop=moved, event=_before(events), group=_before(groups)
            ),
            groups=_concatenated(groups),
            iterations=_concatenated(iterations, start=moved, stop=moved),
            rank=np.repeat(ranks, steps),
            moved=np.repeat(moved, steps),
            is_numbered=np.repeat(
                [are_numbered(trace.meta.found_by) for trace in traces], steps
            ),
            rank_of_group=np.repeat(ranks, _rows(groups)),
            event_edges=np.cumsum([0, *_rows(events)], dtype=np.int64),
            comm_edges=np.cumsum([0, *_rows(comm)], dtype=np.int64),
            rank_of_comm=np.repeat(ranks, _rows(comm)),
            idle=np.concatenate(
                [
                    np.full((count, len(CAUSES)), NULL) if times is None else times.ns
                    for times, count in zip(idle, steps, strict=True)
                ]
            ),
        )


def _moved(traces: Sequence[Trace]) -> Ints | None:
    """Return ns to add to each rank's times so that ranks do not overlap; None if too large."""
    if len(traces) == 1:
        return np.zeros(1, np.int64)
    shifts, at = list[int](), 0
    for trace in traces:
        tables = [table for table in (trace.events, trace.comm, trace.iterations) if len(table)]
        begin = min((table["start"][0].as_py() for table in tables), default=0)
        end = max((int(table["stop"].to_numpy().max()) for table in tables), default=0)
        shifts.append(at - begin)
        at += end - begin + 1
    fits = max(at, *map(abs, shifts)) <= _LATEST
    return np.array(shifts, np.int64) if fits else None


def _rows(tables: Sequence[pa.Table]) -> list[int]:
    return [table.num_rows for table in tables]


def _before(tables: Sequence[pa.Table]) -> Ints:
    """Return the number of rows before each table."""
    return np.cumsum([0, *_rows(tables)], dtype=np.int64)[:-1]


def _concatenated(tables: Sequence[pa.Table], **added: Ints) -> pa.Table:
    """Concatenate tables, and add a number to some columns.

    `added` has, by column, an integer per table that is added to the values of its rows. For a
    single table it has to be 0.
    """
    if len(tables) == 1:
        return tables[0]  # for one table the numbers are 0
    table = pa.concat_tables(tables).combine_chunks()
    for name, numbers in added.items():
        more = pa.array(np.repeat(numbers, _rows(tables)))
        place = table.column_names.index(name)
        table = table.set_column(place, name, pc.add(table[name], more))
    return table


# Bits of the classes of activity.
COMPUTE, COPY, FIRST_TAG = 1 << 0, 1 << 1, 2
COMM = sum(1 << FIRST_TAG + tag for tag in range(len(TAGS)))

# All combinations of classes that can be active at once.
MASKS = np.arange(intervals.MASKS)
Sets = NDArray[np.int64]  # shape (sets, masks): 1 if the mask is in the set


def tag_bit(tag: int) -> int:
    """Return the bit of a tag's class."""
    return 1 << FIRST_TAG + tag


def sets(*conditions: NDArray[np.bool_]) -> Sets:
    """Return sets of masks; an argument has a Boolean per mask of `MASKS`."""
    return np.stack(conditions).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Communication events inside iterations, sorted by start; NULL stands for null."""

    row: Ints  # of `Stack.comm`
    start: Ints
    stop: Ints
    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    iteration: NDArray[np.int32]  # row of the iteration that holds the start
    group: Ints  # label, equal on all ranks; NULL if its members are unknown
    seq: Ints  # number in the group
    call_id: Ints  # equal on all members
    stream: Ints  # of the device
    group_size: Ints
    bytes: Ints  # of the selected kind
    payload_bytes: Ints
    bus_bytes: Ints
    alone: Ints  # ns before its end in which neither compute nor other communication runs
    exposed: Ints  # shape (events, 3), ns: see `exposed_times`
    partner: Ints  # root of the operation, or the other rank of a message
    sends: NDArray[np.bool_]  # whether it sends a message


class HostTime(NamedTuple):
    """Collectives of the host in a run with an accelerator, per iteration; times in ns."""

    events: Ints
    union: Ints  # time in which at least one of them runs
    alone: Ints  # of it, without any work of the device

    @classmethod
    def of(cls, events: pa.Table, start: Ints, stop: Ints) -> Self:
        """Measure them in iterations with these starts and stops."""
        kind = events["kind"].to_numpy()
        rows = np.flatnonzero(kind == KIND["host_comm"])
        if not len(rows):
            return cls(*np.zeros((3, len(start)), np.int64))
        times = [events[name].to_numpy() for name in ("start", "stop")]
        on_device = np.isin(kind, [KIND[name] for name in ON_DEVICE])
        classes = [tuple(column[chosen] for column in times) for chosen in (rows, on_device)]
        covered = intervals.coverage_by_class(classes, start, stop)
        of_iteration = intervals.segment_of(times[0][rows], start, stop)
        return cls(
            events=np.bincount(of_iteration[of_iteration >= 0], minlength=len(start)),
            union=covered[:, 1::2].sum(axis=1),
            alone=covered[:, 1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArrays:
    """Arrays of some ranks from which partials are computed; times are those of `Stack`."""

    rank: Ints  # of each iteration
    number: Ints
    start: Ints
    stop: Ints
    moved: Ints  # ns by which times of the iteration were shifted
    is_numbered: Flags  # whether the number is the job's
    labels: tuple[int | None, ...]  # of process groups, equal on all ranks
    coverage: Ints  # shape (iterations, masks): ns in which exactly these classes are active
    comm: Communication
    on_host: HostTime
    idle: Ints  # shape (iterations, causes): ns, NULL if unknown

    @classmethod
    def of(cls, stack: Stack, byte_kind: ByteKind, only: frozenset[int] | None) -> Self:
        """Convert the tables of stacked ranks to arrays.

        `byte_kind` is the kind of bytes that count; `only` are the numbers of the iterations to
        keep, by default all.
        """
        number, start, stop = (
            stack.iterations[name].to_numpy() for name in ("number", "start", "stop")
        )
        selected = slice(None) if only is None else np.isin(number, list(only))
        start, stop = start[selected], stop[selected]
        classes = _classes(stack)
        labels = tuple(clocks.labels(stack.groups, by_description=True))
        return cls(
            rank=stack.rank[selected],
            number=number[selected],
            start=start,
            stop=stop,
            moved=stack.moved[selected],
            is_numbered=stack.is_numbered[selected],
            labels=labels,
            coverage=intervals.coverage_by_class(classes, start, stop),
            comm=_communication(stack, byte_kind, (start, stop), classes[0], labels),
            on_host=HostTime.of(stack.events, start, stop),
            idle=stack.idle[selected],
        )

    def covered(self, sets_: Sets) -> Ints:
        """Return ns in which a mask of each set is active; shape (sets, iterations)."""
        covered: Ints = sets_ @ self.coverage.T
        return covered

    @property
    def time(self) -> Ints:
        """Duration of each iteration."""
        return self.stop - self.start


def _classes(stack: Stack) -> list[tuple[Ints, Ints]]:
    """Return starts and stops of compute, of copies, and of each tag's communication."""
    start, stop = (stack.events[name].to_numpy() for name in ("start", "stop"))
    kind = stack.events["kind"].to_numpy().copy()
    kind[stack.comm["event"].to_numpy()] = KIND["other"]
    compute = (kind == KIND["kernel"]) | (kind == KIND["host_work"])
    copies = (kind == KIND["memcpy"]) | (kind == KIND["memset"])
    classes = [(start[chosen], stop[chosen]) for chosen in (compute, copies)]
    tag, start, stop = (stack.comm[name].to_numpy() for name in ("tag", "start", "stop"))
    by_tag = np.argsort(tag, kind="stable")
    start, stop = start[by_tag], stop[by_tag]
    edges = np.searchsorted(tag[by_tag], np.arange(len(TAGS) + 1)).tolist()
    return classes + [(start[low:high], stop[low:high]) for low, high in pairwise(edges)]


def _communication(
    stack: Stack,
    byte_kind: ByteKind,
    iterations: tuple[Ints, Ints],
    compute: tuple[Ints, Ints],
    labels: Sequence[int | None],
) -> Communication:
    """Return the communication events inside some iterations."""
    comm = stack.comm
    times = comm["start"].to_numpy(), comm["stop"].to_numpy()
    iteration = intervals.segment_of(times[0], *iterations)
    is_inside = iteration >= 0
    # Usually all events are inside; a slice then avoids copies.
    inside = slice(None) if is_inside.all() else np.flatnonzero(is_inside)
    group = filled(comm["group"], NONE)[inside]
    peer = filled(comm["peer"])
    return Communication(
        row=np.arange(len(iteration))[inside],
        partner=np.where(peer == NULL, filled(comm["root"]), peer)[inside],
        sends=comm["sends"].fill_null(False).to_numpy()[inside],
        start=times[0][inside],
        stop=times[1][inside],
        alone=intervals.alone(*times, *compute)[inside],
        exposed=exposed_times(*times, *compute)[inside],
        iteration=iteration[inside],
        group=_by_place(labels)[group],
        seq=filled(comm["seq"])[inside],
        call_id=filled(comm["call_id"])[inside],
        stream=filled(comm["stream"])[inside],
        group_size=_by_place(stack.groups["size"].to_pylist())[group],
        bytes=filled(comm[f"{byte_kind}_bytes"])[inside],
        payload_bytes=filled(comm["payload_bytes"])[inside],
        bus_bytes=filled(comm["bus_bytes"])[inside],
        **{name: comm[name].to_numpy()[inside] for name in ("tag", "op")},
    )


def _by_place(values: Sequence[int | None]) -> Ints:
    """Return the values, NULL for None, and a final NULL for index NONE."""
    return np.array([NULL if value is None else value for value in (*values, None)], np.int64)


def exposed_times(start: Ints, stop: Ints, other_start: Ints, other_stop: Ints) -> Ints:
    """Return the exposed time of events, in ns: all of it, and that at their start and stop.

    A moment is exposed if no event of the other set runs. Of several events that run at once,
    it counts for the one that stops first, and never twice. Two sets of half-open intervals in
    ns, each sorted by start; an empty interval runs at no time.

    Returns
    -------
    ndarray
        Shape (events, 3): the exposed time, the part before the first gap in it (0 if the start
        is not exposed), and the part after the last.

    """
    exposed = np.zeros((len(start), 3), np.int64)
    runs = np.flatnonzero(start < stop)
    runs = runs[np.argsort(stop[runs], kind="stable")]
    if len(runs):
        others = intervals.merge(other_start, other_stop)
        exposed[runs] = intervals.exposed(start[runs], stop[runs], *others)
    return exposed
