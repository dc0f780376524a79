"""METRIC 0: how long an iteration takes."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.metrics.groups import Groups
from fastcomm.metrics.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """Times of all (iteration, rank), in ns; null where there is none."""

    mean_ns: float | None
    p99_ns: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """The iterations of one rank."""

    rank: int
    iterations: int
    mean_ns: float
    p99_ns: float
    max_ns: int


def columns(view: View) -> dict[str, pa.Array]:
    """One row an iteration: where it lies."""
    return {
        "rank": pa.array(view.rank),
        "iteration": pa.array(view.number),
        "start_ns": pa.array(view.start - view.moved),
        "stop_ns": pa.array(view.stop - view.moved),
        "time_ns": pa.array(view.time),
    }


def iteration_times(iterations: pa.Table) -> IterationTimes:
    """The mean and the exact 99th percentile over all (iteration, rank) of known times."""
    time = iterations["time_ns"].drop_null().to_numpy()
    if not len(time):
        return IterationTimes(mean_ns=None, p99_ns=None)
    return IterationTimes(
        mean_ns=int(time.sum()) / len(time), p99_ns=float(np.percentile(time, 99))
    )


def rank_times(iterations: pa.Table) -> tuple[RankTime, ...]:
    """The same for each rank, by rank."""
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
