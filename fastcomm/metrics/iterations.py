"""METRIC 0: how long an iteration takes."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

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
        "rank": pa.array(np.full(len(view.number), view.rank)),
        "iteration": pa.array(view.number),
        "start_ns": pa.array(view.start),
        "stop_ns": pa.array(view.stop),
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
    rank, time = iterations["rank"].to_numpy(), iterations["time_ns"].to_numpy()
    times = {int(each): time[rank == each] for each in np.unique(rank)}
    return tuple(
        RankTime(
            rank=each,
            iterations=len(own),
            mean_ns=int(own.sum()) / len(own),
            p99_ns=float(np.percentile(own, 99)),
            max_ns=int(own.max()),
        )
        for each, own in times.items()
    )
