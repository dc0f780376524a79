"""Step times, where each step's time goes, windows between phases, and overlap.

These are METRIC 0, 1, 2 and 5 of the specification.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics import spill_files
from fastcomm.metrics.outliers import lower_median
from fastcomm.metrics.rank_arrays import COMM, COMPUTE, COPY, MASKS, RankArrays, sets, tag_bit
from fastcomm.trace.columns import Groups, percentile
from fastcomm.trace.parallelisms import TAGS
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Floats, Ints

SPEC = ("compute", *(f"comm_{tag}" for tag in TAGS), "idle")
EXACT = ("compute", *(f"exposed_{tag}" for tag in TAGS), "exposed_mixed", "memcpy", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Fractions of the iteration time, summed over ranks and iterations before the division.

    `spec` (the specification's formula): comm_X is the sum of event durations, compute is all
    time without communication, idle is the remainder, negative where communication overlaps
    itself. `exact`: a partition of the time; under compute, communication and copies do not
    count, and copies do not count under communication.
    """

    spec: dict[str, float | None]
    exact: dict[str, float | None]

    @property
    def parts(self) -> dict[str, float] | None:
        """Shares (0 to 1) of compute, exposed communication, copies, idle; None if unknown."""
        shares = {name: share for name, share in self.exact.items() if share is not None}
        if len(shares) < len(self.exact):
            return None
        exposed = sum(share for name, share in shares.items() if name.startswith("exposed_"))
        return {
            "compute": shares["compute"],
            "exposed": exposed,
            "memcpy": shares["memcpy"],
            "idle": shares["idle"],
        }

    @property
    def largest_tag(self) -> str:
        """The parallelism with the most exposed communication; unknown shares count as 0."""
        return max(TAGS, key=lambda tag: self.exact[f"exposed_{tag}"] or 0.0)


def _category_columns(arrays: RankArrays) -> dict[str, pa.Array]:
    """Return the ns of each category, of both breakdowns, per iteration."""
    comm = arrays.comm
    values = np.zeros(len(comm.start), np.int64)
    shape = (len(arrays.number), len(TAGS))
    lengths = intervals.totals(comm.start, comm.stop, values, comm.iteration, comm.tag, shape)[
        1
    ]
    spec = dict(zip((f"comm_{tag}" for tag in TAGS), lengths.T, strict=True))
    communicating, *parts = arrays.covered(_SETS)
    spec["compute"] = arrays.time - communicating
    spec["idle"] = arrays.time - spec["compute"] - lengths.sum(axis=1)
    return {
        **{f"spec_{name}_ns": pa.array(spec[name]) for name in SPEC},
        **{f"exact_{name}_ns": pa.array(part) for name, part in zip(EXACT, parts, strict=True)},
    }


def _exact() -> list[NDArray[np.bool_]]:
    """Return masks of the categories of `EXACT`, a partition of all combinations of classes."""
    computes, comm = MASKS & COMPUTE != 0, MASKS & COMM
    exposed = [~computes & (comm == tag_bit(tag)) for tag in range(len(TAGS))]
    mixed = ~computes & (comm != 0) & ~np.any(exposed, axis=0)
    return [computes, *exposed, mixed, MASKS == COPY, MASKS == 0]


# All communication, then the partition.
_SETS = sets(MASKS & COMM != 0, *_exact())


def breakdown(iterations: pa.Table) -> Breakdown:
    """Return both breakdowns as shares of time (0 to 1), of iterations with known times."""

    def shares(prefix: str, names: tuple[str, ...]) -> dict[str, float | None]:
        timed = iterations.filter(iterations[f"{prefix}_{names[0]}_ns"].is_valid())
        total = int(timed["time_ns"].to_numpy().sum())
        sums = {n: int(timed[f"{prefix}_{n}_ns"].to_numpy().sum()) for n in names}
        return {name: value / total if total else None for name, value in sums.items()}

    return Breakdown(spec=shares("spec", SPEC), exact=shares("exact", EXACT))


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """Statistics of all iterations of all ranks, in ns; null without any."""

    mean_ns: float | None
    p99_ns: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Statistics of the iterations of one rank."""

    rank: int
    iterations: int  # number
    mean_ns: float
    p99_ns: float
    max_ns: int


def iteration_columns(arrays: RankArrays) -> dict[str, pa.Array]:
    """Return rank, number, times (ns), categories and overlap, a value per iteration each."""
    return {
        "rank": pa.array(arrays.rank),
        "iteration": pa.array(arrays.number),
        "start_ns": pa.array(arrays.start - arrays.moved),
        "stop_ns": pa.array(arrays.stop - arrays.moved),
        "time_ns": pa.array(arrays.time),
        **_category_columns(arrays),
        **_overlap_columns(arrays),
    }


def iteration_times(iterations: pa.Table) -> IterationTimes:
    """Return mean and exact 99th percentile of the known iteration times; None without any."""
    time = iterations["time_ns"].drop_null().to_numpy()
    if not len(time):
        return IterationTimes(mean_ns=None, p99_ns=None)
    return IterationTimes(mean_ns=int(time.sum()) / len(time), p99_ns=percentile(time, 99))


def rank_times(iterations: pa.Table) -> tuple[RankTime, ...]:
    """Return times of the known iterations of each rank that has some, sorted by rank."""
    iterations = iterations.filter(iterations["time_ns"].is_valid())
    time, groups = iterations["time_ns"].to_numpy(), Groups.of(iterations["rank"].to_numpy())
    counts = groups.counts
    most = np.zeros(len(counts), np.int64)
    np.maximum.at(most, groups.group, time)
    columns = (groups.keys, counts, groups.sums(time), groups.percentiles(time, 99), most)
    return tuple(
        RankTime(rank=rank, iterations=count, mean_ns=total / count, p99_ns=p99, max_ns=longest)
        for rank, count, total, p99, longest in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeans:
    """Mean times per iteration of each rank, in ns.

    Keys of `ns` are the categories of `EXACT`, "exposed" and "time"; unknown values are NaN.
    """

    ranks: Ints
    ns: dict[str, Floats]  # by category, a value per rank

    @classmethod
    def of(cls, iterations: pa.Table) -> Self:
        """Average the table of iterations by rank; NaN for a rank with an unknown value."""
        ranks, at = np.unique(iterations["rank"].to_numpy(), return_inverse=True)
        steps = np.maximum(np.bincount(at, minlength=len(ranks)), 1)
        sums = {
            name: np.bincount(at, weights=values, minlength=len(ranks)) / steps
            for name, values in _times(iterations).items()
        }
        return cls(ranks=ranks, ns=sums)

    @property
    def is_known(self) -> bool:
        """Whether the compute time of every rank is known."""
        return len(self.ranks) > 0 and not bool(np.isnan(self.ns["compute"]).any())

    @property
    def by_compute(self) -> Ints:
        """Indices into `ranks`, by ascending compute time; of ties the higher rank first."""
        return np.lexsort((-self.ranks, self.ns["compute"]))

    @property
    def median_compute(self) -> float:
        """The lower median of the compute times; 0 if unknown."""
        return float(lower_median(self.ns["compute"])) if self.is_known else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeans:
    """Mean times over all ranks, and over several consecutive steps, in ns."""

    steps: tuple[tuple[int, int], ...]  # first and last number of each interval
    width: int  # steps per interval
    ns: dict[str, Floats]  # by category, a value per interval

    @classmethod
    def of(cls, iterations: pa.Table, most: int) -> Self:
        """Average the table of iterations over at most `most` equally long ranges of steps."""
        iterations = iterations.filter(iterations["iteration"].is_valid())
        numbers, at = np.unique(iterations["iteration"].to_numpy(), return_inverse=True)
        width = max(1, -(-len(numbers) // most))
        ends = np.minimum(np.arange(width, len(numbers) + width, width), len(numbers)) - 1
        return cls(
            steps=tuple(zip(numbers[::width].tolist(), numbers[ends].tolist(), strict=True)),
            width=width,
            ns={name: _means(ns, at // width) for name, ns in _times(iterations).items()},
        )


def _times(iterations: pa.Table) -> dict[str, Floats]:
    """Return times of each iteration in ns by name.

    The names are those of `EXACT`, "exposed" (the sum of all exposed communication), and "time"
    (the length of the iteration).
    """
    times = {name: _floats(iterations[f"exact_{name}_ns"]) for name in EXACT}
    exposed = [name for name in EXACT if name.startswith("exposed_")]
    times["exposed"] = np.sum([times[name] for name in exposed], axis=0)
    times["time"] = _floats(iterations["time_ns"])
    return times


def _floats(column: pa.ChunkedArray) -> Floats:
    """Return a column as floats, NaN for null."""
    values: Floats = column.cast(pa.float64()).fill_null(float("nan")).to_numpy()
    return values


def _means(values: Floats, bins: Ints) -> Floats:
    """Return the mean of the known values per bin; 0 without any. `bins` is per value."""
    is_known = ~np.isnan(values)
    sums = np.bincount(
        bins[is_known], weights=values[is_known], minlength=bins.max(initial=-1) + 1
    )
    return sums / np.maximum(np.bincount(bins[is_known], minlength=len(sums)), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Share of communication time that is overlapped by compute.

    It is the mean of the ratios of all iterations of all ranks that communicate; null without
    any.
    """

    average_overlap_ratio: float | None
    by_tag: dict[str, float | None]  # tags that communicate; null if unknown


_ACTIVE = {
    name: MASKS & bits != 0
    for name, bits in (("comm", COMM), *((tag, tag_bit(t)) for t, tag in enumerate(TAGS)))
}
_NAMES = [f"{name}_{kind}_ns" for name in _ACTIVE for kind in ("union", "overlapped")]
_OVERLAP_SETS = sets(
    *(
        masks
        for active in _ACTIVE.values()
        for masks in (active, active & (MASKS & COMPUTE != 0))
    )
)


def _overlap_columns(arrays: RankArrays) -> dict[str, pa.Array]:
    """Return ns of communication, and of its overlap with compute, in total and by tag."""
    covered = arrays.covered(_OVERLAP_SETS)
    return {name: pa.array(row) for name, row in zip(_NAMES, covered, strict=True)}


def overlap(iterations: pa.Table, tags: Collection[str]) -> Overlap:
    """Compute the overlap from the table of iterations; `tags` of unknown times have None."""
    is_known = iterations["comm_overlapped_ns"].is_valid()
    timed = iterations.filter(is_known)
    unknown = tags if timed.num_rows < iterations.num_rows else ()
    by_tag = {tag: _mean_ratio(timed, tag) for tag in TAGS}
    return Overlap(
        average_overlap_ratio=_mean_ratio(timed, "comm"),
        by_tag={
            tag: ratio for tag, ratio in by_tag.items() if ratio is not None or tag in unknown
        },
    )


def _mean_ratio(iterations: pa.Table, name: str) -> float | None:
    """Return the mean over iterations of the share of communication that compute overlaps.

    `name` is the prefix of the columns of a parallelism, as in "DP". Iterations without its
    communication do not count; None if all are without.
    """
    union, overlapped = (
        iterations[f"{name}_{kind}_ns"].to_numpy() for kind in ("union", "overlapped")
    )
    busy = union > 0
    return float(np.mean(overlapped[busy] / union[busy])) if busy.any() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWindows:
    """Windows between phases of two tags, in ns; negative where the phases overlap."""

    source: str
    target: str
    count: int
    mean_ns: float
    p50_ns: float
    p95_ns: float


def window_rows(arrays: RankArrays) -> pa.Table:
    """Return a row per window: rank, iteration, tags as indices into TAGS, length in ns."""
    comm = arrays.comm
    columns = intervals.phases(comm.start, comm.stop, comm.tag, comm.iteration)
    length, source, target, segment = intervals.windows(*columns)
    return pa.table(
        {
            "rank": arrays.rank[segment],
            "iteration": arrays.number[segment],
            "from": source,
            "to": target,
            "window_ns": length,
        }
    )


WindowTables = Sequence[pa.Table | Path]  # windows of ranks, in memory or in spill files


def merged_windows(tables: WindowTables) -> pa.Table:
    """Merge tables of windows into one, a row per window, sorted by rank.

    It has the columns `rank`, `iteration`, `from`, `to` (parallelisms) and `window_ns`.
    """
    names = ("rank", "iteration", "from", "to", "window_ns")
    table = pa.concat_tables(
        [spill_files.columns(part, names) for part in tables]
    ).combine_chunks()
    return table.take(pa.array(np.argsort(table["rank"].to_numpy(), kind="stable")))


def windows_from(tables: WindowTables, source: int) -> list[PhaseWindows]:
    """Return statistics of the windows after a tag (index into TAGS), in the order of TAGS."""
    parts = [
        _own(spill_files.columns(part, ("from", "to", "window_ns")), source) for part in tables
    ]
    target, length = (np.concatenate(values) for values in zip(*parts, strict=True))
    return [_statistics(source, to, length[target == to]) for to in np.unique(target).tolist()]


def _own(table: pa.Table, source: int) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    own = table["from"].to_numpy() == source
    return table["to"].to_numpy()[own], table["window_ns"].to_numpy()[own]


def _statistics(source: int, target: int, length: NDArray[np.int64]) -> PhaseWindows:
    """Return statistics of windows between two tags (codes); `length` is in ns."""
    return PhaseWindows(
        source=TAGS[source],
        target=TAGS[target],
        count=len(length),
        mean_ns=int(length.sum()) / len(length),
        p50_ns=percentile(length, 50),
        p95_ns=percentile(length, 95),
    )


def windows_cdf(table: pa.Table) -> pa.Table:
    """Return, by pair of tags, the sorted windows in ns, and the share that is not longer."""
    parts = [
        pa.table(
            {
                "from": pa.array([TAGS[source]] * len(length)),
                "to": pa.array([TAGS[target]] * len(length)),
                "window_ns": np.sort(length),
                "share": np.arange(1, len(length) + 1) / len(length),
            }
        )
        for (source, target), length in _by_pair(table)
    ]
    empty = pa.schema(
        [("from", pa.string()), ("to", pa.string()), ("window_ns", "i8"), ("share", "f8")]
    )
    return pa.concat_tables([empty.empty_table(), *parts])


Pair = tuple[int, int]


def _by_pair(table: pa.Table) -> list[tuple[Pair, NDArray[np.int64]]]:
    source, target, length = (table[name].to_numpy() for name in ("from", "to", "window_ns"))
    key = source.astype(np.int64) * len(TAGS) + target
    return [(divmod(int(pair), len(TAGS)), length[key == pair]) for pair in np.unique(key)]
