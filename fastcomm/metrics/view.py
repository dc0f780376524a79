"""The arrays that metrics are computed from: of one rank, or of ranks stacked in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.exchange import clocks
from fastcomm.options import ByteKind
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import KIND, NARROW, TAGS
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NULL, Ints

_LATEST = 1 << 62  # ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The tables of one trace that stands for all, rank behind rank in each."""

    events: pa.Table
    comm: pa.Table
    groups: pa.Table
    iterations: pa.Table
    rank: Ints  # of each iteration
    moved: Ints  # ns that times of each iteration's rank are later than in its trace
    rank_of_group: Ints
    event_edges: Ints  # rows of the events where each rank begins, and their end
    comm_edges: Ints
    rank_of_comm: Ints

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Self | None:
        """Put them one behind the other, with the columns of `schema.NARROW`.

        None where they take more time together than a number holds.
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
            events=_behind(events, start=moved, stop=moved),
            comm=_behind(
                comm, start=moved, stop=moved, event=_before(events), group=_before(groups)
            ),
            groups=_behind(groups),
            iterations=_behind(iterations, start=moved, stop=moved),
            rank=np.repeat(ranks, steps),
            moved=np.repeat(moved, steps),
            rank_of_group=np.repeat(ranks, _rows(groups)),
            event_edges=np.cumsum([0, *_rows(events)], dtype=np.int64),
            comm_edges=np.cumsum([0, *_rows(comm)], dtype=np.int64),
            rank_of_comm=np.repeat(ranks, _rows(comm)),
        )


def _moved(traces: Sequence[Trace]) -> Ints | None:
    """What is added to the times of each rank, so that it begins behind the one before it."""
    if len(traces) == 1:
        return np.zeros(1, np.int64)
    found, at = list[int](), 0
    for trace in traces:
        tables = [each for each in (trace.events, trace.comm, trace.iterations) if len(each)]
        begin = min((each["start"][0].as_py() for each in tables), default=0)
        end = max((int(each["stop"].to_numpy().max()) for each in tables), default=0)
        found.append(at - begin)
        at += end - begin + 1
    fits = max(at, *map(abs, found)) <= _LATEST
    return np.array(found, np.int64) if fits else None


def _rows(tables: Sequence[pa.Table]) -> list[int]:
    return [table.num_rows for table in tables]


def _before(tables: Sequence[pa.Table]) -> Ints:
    """Of each table how many rows there are in those before it."""
    return np.cumsum([0, *_rows(tables)], dtype=np.int64)[:-1]


def _behind(tables: Sequence[pa.Table], **added: Ints) -> pa.Table:
    """All in one; to some columns something is added, by table."""
    if len(tables) == 1:
        return tables[0]  # to which nothing is added: it need not be copied
    whole = pa.concat_tables(tables).combine_chunks()
    for name, of_each in added.items():
        more = pa.array(np.repeat(of_each, _rows(tables)))
        place = whole.column_names.index(name)
        whole = whole.set_column(place, name, pc.add(whole[name], more))
    return whole


# Bits of the classes whose coverage is asked for.
COMPUTE, COPY, FIRST_TAG = 1 << 0, 1 << 1, 2
COMM = sum(1 << FIRST_TAG + tag for tag in range(len(TAGS)))

# Each mask of classes that can be active at once.
MASKS = np.arange(intervals.MASKS)
Sets = NDArray[np.int64]  # of masks: a row a set, 1 for each mask that is in it


def tag_bit(tag: int) -> int:
    """The bit of a tag's class."""
    return 1 << FIRST_TAG + tag


def sets(*wanted: NDArray[np.bool_]) -> Sets:
    """Sets of masks, each by the truth of every mask."""
    return np.stack(wanted).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Communication events inside of iterations, sorted by start; NULL for null."""

    start: Ints
    stop: Ints
    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    iteration: NDArray[np.int32]  # row of the iteration that holds the start
    group: Ints  # its label, the same on every rank; NULL where nothing tells its members
    seq: Ints  # number in the group
    stream: Ints  # of the device
    group_size: Ints
    bytes: Ints  # of the kind that was asked for
    payload_bytes: Ints
    bus_bytes: Ints
    alone: Ints  # ns before its end in which no compute runs, and no other communication
    partner: Ints  # the root of the operation, or the other rank of an event of one message
    sends: NDArray[np.bool_]  # whether it sends that message


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The numbers of some ranks before any question is asked; times are those of `Stack`."""

    rank: Ints  # of each iteration
    number: Ints
    start: Ints
    stop: Ints
    moved: Ints  # ns that it is later than in its trace
    labels: tuple[int | None, ...]  # of the process groups, the same on every rank
    coverage: Ints  # by iteration and mask of classes: ns in which exactly these are active
    comm: Communication

    @classmethod
    def of(cls, stack: Stack, byte_kind: ByteKind, only: frozenset[int] | None) -> Self:
        """See ranks; of their iterations, only those of these numbers."""
        number, start, stop = (
            stack.iterations[name].to_numpy() for name in ("number", "start", "stop")
        )
        kept = slice(None) if only is None else np.isin(number, list(only))
        start, stop = start[kept], stop[kept]
        classes = _classes(stack)
        labels = tuple(clocks.labels(stack.groups, described=True))
        return cls(
            rank=stack.rank[kept],
            number=number[kept],
            start=start,
            stop=stop,
            moved=stack.moved[kept],
            labels=labels,
            coverage=intervals.coverage_by_class(classes, start, stop),
            comm=_communication(stack, byte_kind, (start, stop), classes[0], labels),
        )

    def covered(self, wanted: Sets) -> Ints:
        """A row a set, of each iteration: how long one of its masks holds, clipped to it."""
        covered: Ints = wanted @ self.coverage.T
        return covered

    @property
    def time(self) -> Ints:
        """How long each iteration is."""
        return self.stop - self.start


def _classes(stack: Stack) -> list[tuple[Ints, Ints]]:
    """Intervals of compute, of copies, and of each tag."""
    start, stop = (stack.events[name].to_numpy() for name in ("start", "stop"))
    kind = stack.events["kind"].to_numpy().copy()
    kind[stack.comm["event"].to_numpy()] = KIND["other"]
    compute = kind == KIND["kernel"]
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
    found: tuple[Ints, Ints],
    compute: tuple[Ints, Ints],
    labels: Sequence[int | None],
) -> Communication:
    """The events inside of the iterations that were found."""
    comm = stack.comm
    times = comm["start"].to_numpy(), comm["stop"].to_numpy()
    iteration = intervals.segment_of(times[0], *found)
    is_inside = iteration >= 0
    # Most often all are: then nothing has to be copied.
    inside = slice(None) if is_inside.all() else np.flatnonzero(is_inside)
    group = filled(comm["group"], -1)[inside]
    peer = filled(comm["peer"])
    return Communication(
        partner=np.where(peer == NULL, filled(comm["root"]), peer)[inside],
        sends=comm["sends"].fill_null(False).to_numpy()[inside],
        start=times[0][inside],
        stop=times[1][inside],
        alone=intervals.alone(*times, *compute)[inside],
        iteration=iteration[inside],
        group=_by_place(labels)[group],
        seq=filled(comm["seq"])[inside],
        stream=filled(comm["stream"])[inside],
        group_size=_by_place(stack.groups["size"].to_pylist())[group],
        bytes=filled(comm[f"{byte_kind}_bytes"])[inside],
        payload_bytes=filled(comm["payload_bytes"])[inside],
        bus_bytes=filled(comm["bus_bytes"])[inside],
        **{name: comm[name].to_numpy()[inside] for name in ("tag", "op")},
    )


def _by_place(values: Sequence[int | None]) -> Ints:
    """The values with NULL for none, and behind the last: at place -1."""
    return np.array([NULL if each is None else each for each in (*values, None)], np.int64)
