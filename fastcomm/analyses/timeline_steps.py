"""The steps of a timeline: which, when each begins on the clock of each rank, and its events.

Times of a step are int64 ns from its first begin on any rank, on aligned clocks.
NULL is unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from fastcomm.analyses.timeline_events import (
    EVENTS,
    KINDS,
    Arrays,
    StepMatches,
    append,
    joined,
    known_offsets,
    merge_short,
    occupancy,
    take,
    work,
)
from fastcomm.critical_path import CriticalPath
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.exchange.clocks import offset_by_row
from fastcomm.metrics.result import Metrics
from fastcomm.trace.columns import lookup
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NULL, Flags, Ints

PATH = ("rank", "kind", "start", "duration")  # kind NULL: of the host, or a gap

_MOST_EVENTS = 150_000  # of all ranks and steps
_MOST_CELLS = 1_200_000  # bins of all ranks and steps
_MOST_BINS = 400
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStep:
    """One step of all ranks."""

    number: int
    label: str  # why it was chosen: "slowest"
    length: int  # to the last end on any rank
    spans: Arrays  # a row per rank of `Timeline.ranks`: begin, stop; NULL without the step
    events: Arrays  # EVENTS, by rank, compute and copies before communication, then by start
    instances: Arrays  # INSTANCES
    path: Arrays  # PATH: edges of the critical path, if it is the path's step
    bins: NDArray[np.uint8]  # a row per rank of `Timeline.binned`: kind * LEVELS + share
    resolution: int  # ns: merged events are shorter, and closer to each other

    @property
    def merged(self) -> int:
        """Number of recorded events that are drawn merged with others."""
        count = self.events["count"]
        return int(count[count > 1].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What a worker keeps of one rank: per step its events, or its occupancy."""

    is_host_run: bool
    names: tuple[str, ...] = ()
    events: tuple[Arrays, ...] = ()  # without what needs other ranks
    resolutions: tuple[int, ...] = ()
    bins: tuple[NDArray[np.uint8], ...] = ()


RankParts = dict[int, RankPart]


def time_zero(begin: Ints, stop: Ints, ahead: Ints) -> tuple[Ints, Flags]:
    """Return the moment on the clock of each rank that is time 0, and whose clock is apart.

    That is the first begin on any rank. A clock is apart if it differs from the median by more
    than the longest duration; its rank begins at 0.

    Parameters
    ----------
    begin, stop
        Of each rank on its clock, ns; NULL where it has none.
    ahead
        By how much the clock of each rank is ahead, ns.

    """
    is_present, aligned = begin != NULL, begin - ahead
    middle = int(np.median(aligned[is_present]))
    longest = int((stop - begin)[is_present].max())
    is_far = is_present & (np.abs(aligned - middle) > longest)
    first = np.where(is_present & ~is_far, aligned, np.iinfo(np.int64).max)
    return np.where(is_far, begin, first.min() + ahead), is_far


def together(parts: Sequence[RankParts]) -> RankParts:
    """Merge the parts of different ranks."""
    return reduce(lambda a, b: a | b, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The steps, when each begins on the clock of each rank, and which ranks have detail."""

    ranks: tuple[int, ...]
    detailed: frozenset[int]
    numbers: tuple[int, ...]  # of the steps
    labels: tuple[str, ...]
    begin: Ints  # shape (steps, ranks), on the rank's clock; NULL without the step
    stop: Ints
    zero: Ints  # what is time 0 of the step on the rank's clock
    length: Ints  # by step
    unaligned: frozenset[int]

    @classmethod
    def of(
        cls,
        metrics: Metrics,
        detailed: frozenset[int],
        critical: CriticalPath | None,
        more: Sequence[int] = (),
    ) -> "StepPlan":
        """Choose steps, and align their begins by the clock offsets of the metrics.

        `more` are the numbers of further steps. Raises ConfigError if the run lacks one.
        """
        iterations = metrics.tables["iterations"]
        columns = {
            name: iterations[name].to_numpy()
            for name in ("rank", "iteration", "start_ns", "stop_ns", "time_ns")
        }
        ranks = np.unique(columns["rank"])
        chosen = _chosen_steps(columns, critical, more)
        begin, stop = np.full((2, len(chosen), len(ranks)), NULL)
        for k, number in enumerate(chosen):
            own = columns["iteration"] == number
            place = np.searchsorted(ranks, columns["rank"][own])
            begin[k, place], stop[k, place] = columns["start_ns"][own], columns["stop_ns"][own]
        ahead = _offsets(metrics, ranks)
        of_steps = (time_zero(*row, ahead) for row in zip(begin, stop, strict=True))
        zero, is_far = map(np.stack, zip(*of_steps, strict=True))
        return cls(
            ranks=tuple(ranks.tolist()),
            detailed=detailed,
            numbers=tuple(chosen),
            labels=tuple(chosen.values()),
            begin=begin,
            stop=stop,
            zero=zero,
            length=np.where(begin != NULL, stop - zero, 0).max(axis=1),
            unaligned=frozenset(ranks[is_far.any(axis=0)].tolist()),
        )

    @property
    def bins(self) -> int:
        """Number of bins of a step."""
        rows = max(1, (len(self.ranks) - len(self.detailed)) * len(self.numbers))
        return max(16, min(_MOST_BINS, _MOST_CELLS // rows))

    @property
    def most(self) -> int:
        """Number of events of a rank in one step, at most."""
        return max(64, _MOST_EVENTS // max(1, len(self.detailed) * len(self.numbers)))

    def measure(self, trace: Trace) -> RankParts:
        """Return the part of one rank."""
        rank, steps = trace.meta.rank, range(len(self.numbers))
        place, columns = self.ranks.index(rank), work(trace)
        inside = [self._inside(columns, k, place) for k in steps]
        if rank not in self.detailed:
            bins = tuple(occupancy(of_step, self._edges(k)) for k, of_step in enumerate(inside))
            return {rank: RankPart(bins=bins, is_host_run=trace.meta.is_host_run)}
        merged = [self._merged_work(of_step, k) for k, of_step in enumerate(inside)]
        used = np.unique(np.concatenate([columns["name"] for columns, _ in merged]))
        for columns, _ in merged:
            columns["name"] = np.searchsorted(used, columns["name"])
        names = trace.events["name"].combine_chunks().dictionary.take(used).to_pylist()
        return {
            rank: RankPart(
                is_host_run=trace.meta.is_host_run,
                names=tuple(name[:_LONGEST_NAME] for name in names),
                events=tuple(columns for columns, _ in merged),
                resolutions=tuple(resolution for _, resolution in merged),
            )
        }

    def _inside(self, columns: Arrays, k: int, place: int) -> Arrays:
        """Return the events that start in step `k` of a rank, on the common clock."""
        start = columns["start"]
        own = (start >= self.begin[k, place]) & (start < self.stop[k, place])
        inside = take(columns, own)
        inside["start"] = inside["start"] - self.zero[k, place]
        return inside

    def _edges(self, k: int) -> Ints:
        """Return the edges of the bins of a step."""
        edges: Ints = np.arange(self.bins + 1) * int(self.length[k]) // self.bins
        return edges

    def _merged_work(self, columns: Arrays, k: int) -> tuple[Arrays, int]:
        """Merge compute and copies; communication still has to be matched."""
        is_comm = columns["op"] != NULL
        most = max(self.most // 2, self.most - int(is_comm.sum()))
        merged, resolution = merge_short(take(columns, ~is_comm), most, int(self.length[k]))
        return append(merged, take(columns, is_comm), tuple(columns)), resolution

    def step(
        self, k: int, parts: RankParts, names: Sequence[str], metrics: Metrics
    ) -> TimelineStep:
        """Return step `k` from the parts of all ranks that were read."""
        present = [rank for rank in self.ranks if rank in parts]
        detailed = [rank for rank in present if rank in self.detailed]
        matches = StepMatches.of(metrics, self.numbers[k], detailed, tuple(self.unaligned))
        rows = np.searchsorted(self.ranks, present)
        code = {name: number for number, name in enumerate(names)}
        pieces, resolution = list[Arrays](), 0
        for rank in detailed:
            piece, width = self._matched(k, parts[rank], matches.of_rank(rank), rank)
            codes = np.array([code[name] for name in parts[rank].names], np.int64)
            pieces.append({**piece, "name": codes[piece["name"]]})
            resolution = max(resolution, width)
        is_present = self.begin[k, rows] != NULL
        bins = [parts[rank].bins[k] for rank in present if rank not in self.detailed]
        last = lookup(np.array(self.ranks), matches.instances["last_rank"])
        last_start = matches.instances["last_start"] - self.zero[k, last]
        return TimelineStep(
            number=self.numbers[k],
            label=self.labels[k],
            length=int(self.length[k]),
            spans={
                name: np.where(is_present, (times - self.zero)[k, rows], NULL)
                for name, times in (("begin", self.begin), ("stop", self.stop))
            },
            events=joined(pieces, EVENTS),
            instances={
                **matches.instances,
                "last_start": np.where(last < 0, NULL, last_start),
            },
            path=joined([], PATH),
            bins=np.array(bins, np.uint8).reshape(len(bins), self.bins),
            resolution=resolution,
        )

    def _matched(
        self, k: int, part: RankPart, matches: Arrays, rank: int
    ) -> tuple[Arrays, int]:
        """Return a rank's events with their matches, and the resolution.

        Raises FastcommError if the matches are not those of its events.
        """
        columns, place = part.events[k], self.ranks.index(rank)
        is_comm = columns["op"] != NULL
        comm, others = take(columns, is_comm), take(columns, ~is_comm)
        if not np.array_equal(comm["start"] + self.zero[k, place], matches["start"]):
            raise FastcommError(f"rank {rank}: its file has changed while it was read")
        most = max(self.most // 2, self.most - len(others["start"]))
        matched = {**matches, **comm}
        matched, width = merge_short(matched, most, int(self.length[k]))
        events = append(others, matched, EVENTS)
        events["rank"] = np.full(len(events["start"]), rank)
        return events, max(width, part.resolutions[k])

    def path(self, critical: CriticalPath, k: int) -> Arrays:
        """Return the edges of the critical path inside step `k`, on the common clock."""
        table = critical.breakdown
        rank = (
            table["rank"].to_numpy()
            if critical.is_joined
            else np.full(table.num_rows, critical.about.rank)
        )
        place = lookup(np.array(self.ranks), rank)
        zero = self.zero[k, place] - offset_by_row(rank, critical.across.offsets)
        start, stop = (table[name].to_numpy() - zero for name in ("start_ns", "stop_ns"))
        own = (place >= 0) & (stop > start) & (start >= 0) & (stop <= self.length[k])
        kinds = zip(table["bound_by"].to_pylist(), table["tag"].to_pylist(), strict=True)
        columns = {
            "rank": rank,
            "kind": np.array([_path_kind(bound, tag) for bound, tag in kinds], np.int64),
            "start": start,
            "duration": stop - start,
        }
        return take(columns, own)


def _path_kind(bound_by: str, tag: str | None) -> int:
    """Return the kind of an edge of the path; NULL for time of the host, and gaps."""
    if bound_by == "gpu_communication_bound":
        return KINDS.index(tag or "OTHER")
    work_kinds = {"gpu_compute_bound": "compute", "gpu_memory_bound": "copy"}
    return KINDS.index(work_kinds[bound_by]) if bound_by in work_kinds else NULL


def _chosen_steps(
    columns: Mapping[str, Ints], critical: CriticalPath | None, more: Sequence[int]
) -> dict[int, str]:
    """Return the numbers of up to three steps and of `more`, and why each was chosen."""
    numbers, at, ranks = np.unique(
        columns["iteration"], return_inverse=True, return_counts=True
    )
    mean = np.bincount(at, columns["time_ns"]) / ranks
    complete = np.flatnonzero(ranks == ranks.max())
    order = complete[np.argsort(mean[complete], kind="stable")]
    rising = numbers[order].tolist()
    labels: dict[int, list[str]] = {rising[-1]: ["slowest"]}
    labels.setdefault(rising[(len(rising) - 1) // 2], []).append("median")
    if (number := _path_step(columns, critical)) is not None:
        labels.setdefault(number, []).append("critical path")
    if len(labels) < 3:  # noqa: PLR2004 - three steps
        labels.setdefault(rising[0], []).append("fastest")
    if absent := sorted(set(more) - set(numbers.tolist())):
        raise ConfigError(f"timeline_steps: step {absent[0]}: not in the run")
    for number in more:
        labels.setdefault(number, ["chosen"])
    return {number: ", ".join(reasons) for number, reasons in labels.items()}


def _path_step(columns: Mapping[str, Ints], critical: CriticalPath | None) -> int | None:
    """Return the step of a critical path: in which its middle is."""
    if critical is None or not len(critical.graph.time):
        return None
    time = critical.graph.time
    middle = int(time.min()) + (int(time.max()) - int(time.min())) // 2
    own = columns["rank"] == critical.ranks[0]
    inside = own & (columns["start_ns"] <= middle) & (middle < columns["stop_ns"])
    return int(columns["iteration"][inside][0]) if inside.any() else None


def _offsets(metrics: Metrics, ranks: Ints) -> Ints:
    """Return how far the clock of each rank is ahead, in ns; 0 where it is unknown."""
    if metrics.across.clock_alignment == "none":
        return np.zeros(len(ranks), np.int64)
    return offset_by_row(ranks, known_offsets(metrics))
