"""One rank as the metrics see it: its iterations, what covers them, its communication."""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.exposure import alone
from fastcomm.trace import clocks
from fastcomm.trace.schema import KIND, TAGS
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals, segments

Ints = NDArray[np.int64]
ByteKind = Literal["payload", "bus", "msg"]

UNKNOWN = segments.UNKNOWN

# Bits of the classes whose coverage is asked for.
COMPUTE, COPY, FIRST_TAG = 1 << 0, 1 << 1, 2
COMM = sum(1 << FIRST_TAG + tag for tag in range(len(TAGS)))

# Each set of classes that can be active at once.
MASKS = np.arange(intervals.MASKS)


def tag_bit(tag: int) -> int:
    """The bit of a tag's class."""
    return 1 << FIRST_TAG + tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Communication events inside of iterations, sorted by start; UNKNOWN for null."""

    start: Ints
    stop: Ints
    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    iteration: NDArray[np.int32]  # row of the iteration that holds the start
    group: Ints  # its label, the same on every rank; UNKNOWN where nothing tells its members
    seq: Ints  # number in the group
    group_size: Ints
    bytes: Ints  # of the kind that was asked for
    bus_bytes: Ints
    alone: Ints  # ns before its end in which no compute runs, and no other communication


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A rank's numbers before any question is asked."""

    rank: int
    number: Ints  # of each iteration
    start: Ints
    stop: Ints
    coverage: Ints  # by iteration and mask of classes: ns in which exactly these are active
    comm: Communication

    @classmethod
    def of(cls, trace: Trace, byte_kind: ByteKind, only: frozenset[int] | None) -> Self:
        """See a trace; of the iterations, only those of these numbers."""
        number, start, stop = (
            trace.iterations[name].to_numpy() for name in ("number", "start", "stop")
        )
        if only is not None:
            kept = np.isin(number, list(only))
            number, start, stop = number[kept], start[kept], stop[kept]
        classes = _classes(trace)
        return cls(
            rank=trace.meta.rank,
            number=number,
            start=start,
            stop=stop,
            coverage=intervals.coverage_by_class(classes, start, stop),
            comm=_communication(trace, byte_kind, (start, stop), classes[0]),
        )

    def covered(self, wanted: NDArray[np.bool_]) -> Ints:
        """Per iteration: how long one of the wanted masks holds. Clipped to the iteration."""
        covered: Ints = self.coverage[:, wanted].sum(axis=1)
        return covered

    @property
    def time(self) -> Ints:
        """How long each iteration is."""
        return self.stop - self.start


def _classes(trace: Trace) -> list[tuple[Ints, Ints]]:
    """Intervals of compute, of copies, and of each tag."""
    start, stop = (trace.events[name].to_numpy() for name in ("start", "stop"))
    kind = trace.events["kind"].to_numpy().copy()
    kind[trace.comm["event"].to_numpy()] = KIND["other"]
    compute = kind == KIND["kernel"]
    copies = (kind == KIND["memcpy"]) | (kind == KIND["memset"])
    classes = [(start[chosen], stop[chosen]) for chosen in (compute, copies)]
    tag, start, stop = (trace.comm[name].to_numpy() for name in ("tag", "start", "stop"))
    return classes + [(start[tag == t], stop[tag == t]) for t in range(len(TAGS))]


def _communication(
    trace: Trace, byte_kind: ByteKind, found: tuple[Ints, Ints], compute: tuple[Ints, Ints]
) -> Communication:
    """The events inside of the iterations that were found."""
    comm = trace.comm
    iteration = segments.segment_of(comm["start"].to_numpy(), *found)
    inside = iteration >= 0
    size = trace.groups["size"].combine_chunks()
    label = pa.array(clocks.labels(trace.groups, described=True), pa.int64())
    group = comm["group"].combine_chunks()
    times = comm["start"].to_numpy(), comm["stop"].to_numpy()
    return Communication(
        start=times[0][inside],
        stop=times[1][inside],
        alone=alone(times, compute)[inside],
        iteration=iteration[inside],
        group=_filled(label.take(group))[inside],
        seq=_filled(comm["seq"])[inside],
        group_size=_filled(size.take(group))[inside],
        bytes=_filled(comm[f"{byte_kind}_bytes"])[inside],
        bus_bytes=_filled(comm["bus_bytes"])[inside],
        **{name: comm[name].to_numpy()[inside] for name in ("tag", "op")},
    )


def _filled(column: pa.Array | pa.ChunkedArray) -> Ints:
    whole: Ints = column.cast(pa.int64()).fill_null(UNKNOWN).to_numpy()
    return whole
