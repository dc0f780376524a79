"""The events of a rank as NumPy columns, with their names, launches and enclosing ranges.

Events are sorted by start. NULL is unknown; row NONE is no event.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm import regexes
from fastcomm.errors import FastcommError
from fastcomm.trace.columns import block_starts, filled, lookup
from fastcomm.trace.host_names import WORK_LAUNCH
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

Spans = tuple[NDArray[np.int32], Ints, Ints]  # lane, start, stop


def enclosing(ranges: Spans, points: Spans) -> Ints:
    """Return the index of the innermost range around each point on its lane, or NONE.

    Parameters
    ----------
    ranges, points
        Lane, start and stop of each, in any order; times in ns. A range encloses a point if it
        neither starts later nor stops earlier.

    """
    inner = np.full(len(points[0]), NONE, np.int64)
    if len(ranges[0]) and len(inner):
        lane, start, stop = ranges
        outer_first = np.lexsort((-stop, start, lane))
        order = np.lexsort((points[1], points[0]))
        place = matching.enclosing(*_reordered(ranges, outer_first), *_reordered(points, order))
        inner[order] = np.where(place >= 0, outer_first[place], NONE)
    return inner


def outermost(ranges: Spans) -> Ints:
    """Return the indices of the ranges that start inside of no earlier one on their lane.

    Of ranges that start at once, the longest is the earliest. The result is sorted by lane,
    then by start.
    """
    lane, start, stop = ranges
    order = np.lexsort((-stop, start, lane))
    start, stop = start[order], stop[order]
    before = np.full(len(order), np.iinfo(np.int64).min)  # the latest stop of earlier ranges
    for first, end in pairwise([*block_starts(lane[order]).tolist(), len(order)]):
        np.maximum.accumulate(stop[first : end - 1], out=before[first + 1 : end])
    return order[start >= before]


def _reordered(spans: Spans, order: Ints) -> Spans:
    lane, start, stop = spans
    return lane[order], start[order], stop[order]


@dataclass(frozen=True, kw_only=True)
class EventColumns:
    """Columns that all events have."""

    start: Ints
    stop: Ints
    kind: NDArray[np.int8]
    name: NDArray[np.int32]  # index into the names
    lane: NDArray[np.int32]
    correlation: Ints

    def __len__(self) -> int:
        return len(self.start)

    def of_kind(self, *kinds: str, rows: Ints | None = None) -> Flags:
        """Return whether each event, or each of some rows, is of one of these kinds."""
        chosen = np.zeros(len(KIND), np.bool_)
        chosen[[KIND[kind] for kind in kinds]] = True
        return chosen[self.kind if rows is None else self.kind[rows]]

    def rows(self, *kinds: str) -> Ints:
        """Return the ascending rows of events whose `kind` is one of `kinds`."""
        return np.flatnonzero(self.of_kind(*kinds))

    @cached_property
    def _calls(self) -> tuple[Ints, Ints]:
        """Correlations of runtime calls, sorted, and the rows of the calls."""
        rows = self.rows("runtime")
        correlation = self.correlation[rows]
        order = np.argsort(correlation, kind="stable")
        return correlation[order], rows[order]

    def launch_of(self, rows: Ints) -> Ints:
        """Return, for each of some events of the device, the row of the call that launched it.

        It is the first call with the event's correlation; NONE without one.
        """
        correlation, calls = self._calls
        place = lookup(correlation, self.correlation[rows])
        return np.where(place >= 0, calls[place], NONE) if len(calls) else place

    def enclosing(self, ranges: Ints, points: Ints) -> Ints:
        """Return the row of the innermost range around each point on its lane, or NONE.

        `ranges` and `points` are rows of events; a point may be NONE.
        """
        inner = np.full(len(points), NONE, np.int64)
        present = np.flatnonzero(points >= 0)
        if len(ranges) and len(present):
            place = enclosing(self._spans(ranges), self._spans(points[present]))
            inner[present] = np.where(place >= 0, ranges[place], NONE)
        return inner

    def outermost(self, ranges: Ints) -> Ints:
        """Return the rows of ranges that start inside of no earlier one on their lane."""
        return ranges[outermost(self._spans(ranges))]

    def _spans(self, rows: Ints) -> Spans:
        return self.lane[rows], self.start[rows], self.stop[rows]


@dataclass(frozen=True, kw_only=True)
class Events(EventColumns):
    """Events from which a reader builds a trace."""

    texts: Sequence[str]  # names, and other texts of the file
    more: dict[str, NDArray[Any]]  # columns of `schema.ARGS`, and columns of the format
    details: dict[str, Ints] = field(default_factory=dict)  # the last element, at NONE, is NULL

    def rows_named(self, accept: Callable[[str], bool], *kinds: str) -> Ints:
        """Return the ascending rows of events of these kinds whose name `accept` accepts.

        It is called once per distinct name.
        """
        rows = self.rows(*kinds)
        is_accepted = self.by_text(self.name[rows], lambda text: int(accept(text)))
        chosen: Ints = rows[is_accepted == 1]
        return chosen

    def by_text(self, codes: NDArray[Any], function: Callable[[str], int]) -> Ints:
        """Return `function` of the text of each code; NULL for a code that is NULL.

        Parameters
        ----------
        codes
            Indices into `texts`, or NULL.
        function
            Called once per text.

        """
        if not len(codes):
            return np.empty(0, np.int64)
        codes = np.where(codes == NULL, len(self.texts), codes)
        is_used = np.zeros(len(self.texts) + 1, np.bool_)
        is_used[codes] = True
        used = np.flatnonzero(is_used[:-1])
        values = np.full(len(is_used), NULL, np.int64)
        values[used] = [function(self.texts[code]) for code in used.tolist()]
        by_row: Ints = values[codes]
        return by_row

    def text(self, code: int) -> str | None:
        """Return the text of a code; None for NULL."""
        return None if code == NULL else self.texts[code]

    def names(self, rows: Ints) -> list[str]:
        """Return the names of the events `rows`, in that order."""
        return [self.texts[code] for code in self.name[rows].tolist()]

    def detail(self, name: str, rows: Ints) -> Ints:
        """Return detail `name` of the events `rows`; NULL for events without details."""
        values: Ints = self.details[name][self.places(rows)]
        return values

    def places(self, rows: Ints) -> NDArray[np.int32]:
        """Return the index in the columns of `details` of each of `rows`; NONE for NONE."""
        return np.where(rows >= 0, self.more["detail"][rows], np.int32(NONE))

    def unanswered(self) -> Ints:
        """Return the starts (ns) of launches of kernels and graphs without recorded work."""
        calls = self.rows_named(
            lambda name: regexes.search(WORK_LAUNCH, name) is not None, "runtime"
        )
        work = self.rows("kernel", "memcpy", "memset")
        correlation = self.correlation[calls]
        is_absent = (correlation == NULL) | ~np.isin(correlation, self.correlation[work])
        starts: Ints = self.start[calls[is_absent]]
        return starts


@dataclass(frozen=True, kw_only=True)
class EventRows(EventColumns):
    """Events of a trace, or some of them."""

    row: Ints  # in the table of events
    position: Ints  # in the file
    stream: Ints  # NULL on the host
    wait_stream: Ints
    wait_record: Ints  # correlation of the event record that it waits for
    names: pa.Array
    lanes: pa.Table

    @classmethod
    def whole(cls, trace: Trace) -> Self:
        """Return all events.

        Raises
        ------
        FastcommError
            If only the columns for metrics were read.

        """
        if not trace.is_whole:
            raise FastcommError(
                f"{trace.meta.path}: only the columns for metrics were read. Read all events: "
                "fastcomm.open(...).read(rank)"
            )
        return cls.of(trace)

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Return all events of a trace, also if only the columns for metrics were read.

        Without these columns, `position` is the row, `stream` is that of the lane, and waits
        are NULL.
        """
        events, count = trace.events, trace.events.num_rows
        name = events["name"].combine_chunks()
        args = trace.arguments
        present = args.column_names

        def arg(key: str) -> Ints:
            return filled(args[key]) if key in present else np.full(count, NULL, np.int64)

        return cls(
            row=np.arange(count),
            start=filled(events["start"]),
            stop=filled(events["stop"]),
            position=arg("position") if "position" in present else np.arange(count),
            kind=events["kind"].to_numpy(),
            name=name.indices.to_numpy(),
            lane=events["lane"].to_numpy(),
            correlation=filled(events["correlation"])
            if "correlation" in events.column_names
            else np.full(count, NULL, np.int64),
            stream=arg("on_stream") if "on_stream" in present else lane_streams(trace),
            wait_stream=arg("wait_stream"),
            wait_record=arg("wait_correlation"),
            names=name.dictionary,
            lanes=trace.lanes,
        )

    @cached_property
    def texts(self) -> list[str]:
        """The names by code."""
        texts: list[str] = self.names.to_pylist()
        return texts

    def take(self, rows: Ints | Flags) -> Self:
        """Return some of the rows: their indices, or a flag per row."""
        if rows.dtype == np.bool_:
            if rows.all():
                return self
            rows = np.flatnonzero(rows)
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return replace(self, **{name: c[rows] for name, c in columns.items() if len(c)})

    def without(self, *names: str) -> Self:
        """Drop some columns, to free their memory."""
        empty: dict[str, Any] = dict.fromkeys(names, np.empty(0, np.int64))
        return replace(self, **empty)

    def named(self, names: Iterable[str]) -> Flags:
        """Return whether each row has one of these names."""
        values = pa.array(sorted(names), pa.string())
        return self.by_name(pc.is_in(self.names, value_set=values))

    def containing(self, text: str) -> Flags:
        """Return whether each row's name contains a text."""
        return self.by_name(pc.match_substring(self.names, text))

    def matching(self, regex: str) -> Flags:
        """Return whether each row's name matches a regular expression anywhere."""
        return self.by_name(regexes.matches(self.names, regex))

    def by_name(self, flags: pa.Array) -> Flags:
        """Return a flag per row, from a flag for each of the distinct `names`."""
        # Half the time of an index in brackets.
        by_row: Flags = flags.to_numpy(zero_copy_only=False).take(self.name)
        return by_row


_COLUMNS = (
    *("row", "start", "stop", "position", "kind", "name", "lane", "correlation"),
    *("stream", "wait_stream", "wait_record"),
)


def lane_streams(trace: Trace) -> Ints:
    """Return the stream number of each event, as its lane is named; NULL on the host."""
    streams = [
        int(thread) if is_device and thread.lstrip("-").isdecimal() else NULL
        for thread, is_device in zip(
            trace.lanes["thread"].to_pylist(),
            trace.lanes["is_device"].to_pylist(),
            strict=True,
        )
    ]
    by_row: Ints = np.array(streams, np.int64)[trace.events["lane"].to_numpy()]
    return by_row
