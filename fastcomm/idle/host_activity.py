"""What the threads of a host do at each instant, by rules on the names of its events.

A thread has layers of disjoint intervals, each with a cause of idle time. Of several that cover
an instant, the first counts. `causes` has them.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fastcomm import regexes
from fastcomm.idle.causes import (
    CAUSE,
    ENQUEUING_ON_HOST,
    GARBAGE,
    LAUNCHING,
    LAYERS,
    LOADING,
    STEP_MARK,
    SYNCHRONIZING,
    WAITING,
    WAITING_ON_HOST,
    NameRule,
)
from fastcomm.trace.columns import filled
from fastcomm.trace.events import EventRows
from fastcomm.trace.trace import Trace
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NONE, Flags, Ints
from fastcomm_kernels.json_events import LONG

# Calls of a thread, to launch or to synchronize, that are at most this far apart have no pause
# between them: what the host does there is the cost of launching.
LAUNCH_GAP_NS = 100_000
# Operators and Python functions shorter than this are no cause: readers may leave them out.
LEAST_RANGE_NS = LONG


_ON_HOST = ("cpu_op", "runtime", "annotation", "python", "host_comm")


class Pieces(NamedTuple):
    """Pieces of intervals before a launch; times in ns."""

    interval: Ints  # index
    start: Ints
    stop: Ints
    cause: Ints
    name: Ints


# The ranks of a run have the same names.
@lru_cache(1 << 13)
def _has_match(pattern: str, text: str) -> bool:
    """Return whether a pattern is found in a text."""
    return regexes.search(pattern, text) is not None


@dataclass(frozen=True, kw_only=True)
class HostActivity:
    """What the threads of the host do, by the rules above."""

    events: EventRows
    trace: Trace

    @property
    def times(self) -> tuple[Ints, Ints]:
        """Starts and stops of all events."""
        return self.events.start, self.events.stop

    @cached_property
    def is_comm(self) -> Flags:
        """Whether each event is communication; the last element, at NONE, is False."""
        flags = np.zeros(len(self.events) + 1, np.bool_)
        flags[self.trace.comm["event"].to_numpy()] = True
        return flags

    @cached_property
    def rows(self) -> Ints:
        """Rows of the host that may be causes, sorted by lane, then start."""
        events = self.events
        rows = events.rows(*_ON_HOST)
        long_enough = events.stop[rows] - events.start[rows] >= LEAST_RANGE_NS
        may_be_short = ~events.of_kind("cpu_op", "python", rows=rows)
        rows = rows[(long_enough | may_be_short) & (events.start[rows] < events.stop[rows])]
        order: Ints = rows[
            np.lexsort((-events.stop[rows], events.start[rows], events.lane[rows]))
        ]
        return order

    def of_lane(self, lane: int) -> Ints:
        """Return the rows of a lane, by start, outer ones first."""
        low, high = np.searchsorted(self._lanes, [lane, lane + 1])
        return self.rows[low:high]

    @cached_property
    def _lanes(self) -> NDArray[np.int32]:
        """Lane of each of the rows."""
        return self.events.lane[self.rows]

    @cached_property
    def communication(self) -> Ints:
        """Rows of communication on the host, of all threads."""
        return self.events.rows("host_comm")

    @cached_property
    def _used(self) -> Ints:
        return np.unique(self.events.name[self.rows])

    def named(self, rows: Ints, rule: NameRule) -> Flags:
        """Return whether a rule applies to each row."""
        is_kind = self.events.of_kind(*rule.kinds, rows=rows)
        return is_kind & self._matches(rule)[self.events.name[rows]]

    @cached_property
    def _by_rule(self) -> dict[NameRule, Flags]:
        return {}

    def _matches(self, rule: NameRule) -> Flags:
        """Return whether each name matches a rule; names of the device are not searched."""
        if rule not in self._by_rule:
            texts = self.events.texts
            flags = np.zeros(len(texts), np.bool_)
            flags[self._used] = [
                _has_match(rule.pattern, texts[c]) for c in self._used.tolist()
            ]
            self._by_rule[rule] = flags
        return self._by_rule[rule]

    @cached_property
    def is_linked(self) -> Flags:
        """Whether each event is a call that launched recorded work."""
        events = self.events
        flags = np.zeros(len(events) + 1, np.bool_)
        flags[events.launch_of(events.rows("kernel", "memcpy", "memset"))] = True
        return flags[:-1]

    def is_mark(self, rows: Ints) -> Flags:
        """Return whether each annotation marks a step, or encloses a whole one."""
        begin, end = (filled(self.trace.iterations[name]) for name in ("start", "stop"))
        place = np.searchsorted(begin, self.events.start[rows])
        end = np.append(end, np.iinfo(np.int64).max)
        return self.named(rows, STEP_MARK) | (end[place] <= self.events.stop[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadLayers:
    """The layers of one thread: disjoint sorted intervals, one layer after another."""

    host: HostActivity
    start: Ints
    stop: Ints
    name: Ints
    edges: Ints  # first index of each layer, then the number of intervals
    cause: tuple[str, ...]  # of each layer
    functions: Ints  # rows of Python functions

    @classmethod
    def of(cls, host: HostActivity, lane: int) -> Self:
        """Build the layers of a thread that launches device work."""
        events, rows = host.events, host.of_lane(lane)
        of = partial(events.of_kind, rows=rows)
        calls, functions = of("runtime"), rows[of("python")]
        syncs = host.named(rows, SYNCHRONIZING)
        launches = calls & ~syncs & (host.is_linked[rows] | host.named(rows, LAUNCHING))
        ops = rows[of("cpu_op")]
        ranges = rows[of("annotation")]
        work = np.concatenate(
            [ops, ranges[~host.is_mark(ranges)], rows[calls & ~syncs & ~launches]]
        )
        waiting = [rows[host.named(rows, WAITING)], host.communication]
        layers = {
            **{one.name: rows[host.named(rows, one.rule)] for one in LAYERS if one.rule},
            "synchronizing": rows[syncs],
            # Its pauses begin after synchronizing calls, too; the calls are in a layer above.
            "launching": rows[launches | syncs],
            "waiting": np.concatenate(waiting),
            "work": work,
            "functions": functions,
        }
        return cls._built(host, layers, functions, ops)

    @classmethod
    def of_host_run(cls, host: HostActivity) -> Self:
        """Build the layers of all threads of a run without an accelerator."""
        rows = host.rows
        is_op = host.events.of_kind("cpu_op", rows=rows)
        functions = rows[host.events.of_kind("python", rows=rows)]
        layers = {
            "garbage": rows[host.named(rows, GARBAGE)],
            # The time of operators is compute, that of loaders included.
            "loading": rows[host.named(rows, LOADING) & ~is_op],
            "waiting": rows[host.named(rows, WAITING_ON_HOST)],
            "work": rows[host.named(rows, ENQUEUING_ON_HOST)],
            "functions": functions,
        }
        return cls._built(host, layers, functions, rows[:0])

    @classmethod
    def _built(
        cls, host: HostActivity, layers: dict[str, Ints], functions: Ints, operators: Ints
    ) -> Self:
        start, stop = host.times
        parts = []
        order = [layer for layer in LAYERS if layer.name in layers]
        for name in (layer.name for layer in order):
            rows = layers[name]
            end = _extended(start[rows], stop[rows]) if name == "launching" else stop[rows]
            place, begin, end = _disjoint(start[rows], end)
            names = host.events.name[rows[place]].astype(np.int64)
            if name == "synchronizing":
                names = _operator_names(host.events, rows[place], operators, names)
            parts.append((begin, end, names))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return cls(
            host=host,
            start=columns[0],
            stop=columns[1],
            name=columns[2],
            edges=np.cumsum([0, *(len(part[0]) for part in parts)]),
            cause=tuple(layer.cause for layer in order),
            functions=functions,
        )

    def synchronization_at(self, moments: Ints) -> Ints:
        """Return the name of the synchronizing call that covers each moment, or NONE."""
        place = [layer.name for layer in LAYERS].index("synchronizing")
        own = slice(*self.edges[place : place + 2].tolist())
        start, stop, name = self.start[own], self.stop[own], self.name[own]
        at = np.searchsorted(stop, moments, side="right")
        covers = np.append(start, np.iinfo(np.int64).max)[at] <= moments
        return np.where(covers, np.append(name, NONE)[at], NONE)

    def pieces(self, start: Ints, stop: Ints, launched: Ints) -> Pieces:
        """Divide disjoint sorted intervals by what the thread does.

        `launched` is the name of the work that ends each interval, the evidence of launches.
        """
        interval, end, owner = matching.owners(start, stop, self.start, self.stop, self.edges)
        is_next = np.append(False, interval[1:] == interval[:-1])[: len(end)]
        begin = np.where(is_next, np.roll(end, 1), start[interval])
        layer = np.searchsorted(self.edges, owner, side="right") - 1
        causes = np.array([CAUSE[cause] for cause in (*self.cause, "unknown")], np.int64)
        cause = np.where(owner >= 0, causes[layer], CAUSE["unknown"])
        name = np.where(owner >= 0, np.append(self.name, NONE)[owner], NONE)
        name = np.where(cause == CAUSE["launch_bound"], launched[interval], name)
        return Pieces(interval, begin, end, cause, self._inner(begin, end, cause, name))

    def _inner(self, start: Ints, stop: Ints, cause: Ints, name: Ints) -> Ints:
        """Return the names; of pieces of Python, that of the innermost function around."""
        events, at = self.host.events, np.flatnonzero(cause == CAUSE["python"])
        if not len(self.functions) or not len(at):
            return name
        lanes = np.zeros(max(len(at), len(self.functions)), np.int32)
        begin, end = (times[self.functions] for times in self.host.times)
        ranges = lanes[: len(begin)], begin, end
        place = matching.enclosing(*ranges, lanes[: len(at)], start[at], stop[at])
        inner = events.name[self.functions[place]]
        name[at] = np.where(place >= 0, inner, name[at])
        return name


def _extended(start: Ints, stop: Ints) -> Ints:
    """Return the stops of launches, sorted by start, each at the next start if that is close.

    Calls may be inside of others: a pause begins when all that began before have ended.
    """
    latest = np.maximum.accumulate(stop)
    following = np.append(start[1:], np.iinfo(np.int64).max)[: len(stop)]
    is_close = (following > latest) & (following - latest <= LAUNCH_GAP_NS)
    return np.where(is_close, following, stop)


def _disjoint(start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Return disjoint intervals that cover what some intervals cover, and the row of each.

    Each instant belongs to the interval around it that starts first, and of several to the
    longest.
    """
    if len(start) < 2:  # noqa: PLR2004 - as of most of many threads
        rows = np.flatnonzero(start < stop)
        return rows, start[rows], stop[rows]
    order = np.lexsort((-stop, start))
    start, stop = start[order], stop[order]
    before = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(stop))[:-1]
    begin = np.maximum(start, before[: len(start)])
    covers = begin < stop
    return order[covers], begin[covers], stop[covers]


def _operator_names(events: EventRows, calls: Ints, operators: Ints, names: Ints) -> Ints:
    """Return the name of the outermost operator around each call, or that of the call."""
    place, begin, end = _disjoint(events.start[operators], events.stop[operators])
    at = np.searchsorted(begin, events.start[calls], side="right") - 1
    if not len(place):
        return names
    inside = (at >= 0) & (end[at] >= events.stop[calls])
    return np.where(inside, events.name[operators[place[at]]], names)
