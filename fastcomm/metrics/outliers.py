"""Ranks and iterations that stand apart from their peers, by a rule that outliers cannot bend.

A value stands apart if it is above the median of its peers, itself left out, by more than
`SCORE` of their standard deviations, estimated as 1.4826 times their median deviation, and by
more than `LEAST_SHARE` of a step (an iteration: `LEAST_LONGER`, as steps differ anyhow). Peers
of a rank are the ranks of its pipeline stage: other stages do other work.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.heat import MEASURES, Grid

Floats = NDArray[np.float64]

SCORE = 5.0
LEAST_SHARE = 0.01
LEAST_LONGER = 0.05
NORMAL = 1.4826  # standard deviations of a normal distribution in its median deviation
# Candidates beyond so many are not looked at: where everything stands apart, nothing does.
_MOST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A rank (its mean over iterations) or an iteration (its median over ranks), in ns."""

    of: Literal["rank", "iteration"]
    number: int  # of the rank or the iteration
    measure: str  # as `Heat` calls it
    value_ns: float
    median_ns: float  # of its peers
    above_ns: float
    score: float | None  # deviations above; null where the peers do not deviate
    peers: int


def above_peers(values: Floats, least: float) -> list[tuple[int, float, float]]:
    """(index, median of the others, their deviation) of what stands apart, highest first.

    `least` is the smallest difference that counts. NaN is nobody's peer.
    """
    known = np.flatnonzero(~np.isnan(values))
    if len(known) < 2:  # noqa: PLR2004 - nobody to compare with
        return []
    near = float(np.median(values[known])) if len(known) > 2 else float(values[known].min())  # noqa: PLR2004
    candidates = known[values[known] > near + least / 2]
    candidates = candidates[np.argsort(-values[candidates], kind="stable")][:_MOST]
    found = []
    for index in candidates.tolist():
        others = values[known[known != index]]
        middle = float(np.median(others))
        deviation = NORMAL * float(np.median(np.abs(others - middle)))
        if values[index] - middle > max(SCORE * deviation, least):
            found.append((index, middle, deviation))
    return found


def outliers(grid: Grid, stage: Mapping[int, int]) -> tuple[Outlier, ...]:
    """All that stand apart: ranks first, then iterations; by measure and number."""
    step = grid.step_ns
    if step is None:
        return ()
    found = [
        each
        for name in MEASURES
        for each in (*_ranks(grid, name, stage, step), *_iterations(grid, name, step))
    ]
    order = {name: place for place, name in enumerate(MEASURES)}
    return tuple(
        sorted(found, key=lambda each: (each.of != "rank", order[each.measure], each.number))
    )


def peers_of(grid: Grid, stage: Mapping[int, int]) -> list[NDArray[np.int64]]:
    """The rows of the ranks of each stage."""
    stages = np.array([stage.get(rank, 0) for rank in grid.ranks.tolist()], np.int64)
    return [np.flatnonzero(stages == each) for each in np.unique(stages)]


def _ranks(grid: Grid, name: str, stage: Mapping[int, int], step: float) -> list[Outlier]:
    means = grid.mean_by_rank(name)
    return [
        _outlier("rank", int(grid.ranks[rows[index]]), name, means[rows], index, about)
        for rows in peers_of(grid, stage)
        for index, *about in above_peers(means[rows], LEAST_SHARE * step)
    ]


def _iterations(grid: Grid, name: str, step: float) -> list[Outlier]:
    medians = grid.median_by_iteration(name)
    return [
        _outlier("iteration", int(grid.iterations[index]), name, medians, index, about)
        for index, *about in above_peers(medians, LEAST_LONGER * step)
    ]


def _outlier(
    of: Literal["rank", "iteration"],
    number: int,
    measure: str,
    values: Floats,
    index: int,
    about: list[float],
) -> Outlier:
    middle, deviation = about
    above = float(values[index]) - middle
    return Outlier(
        of=of,
        number=number,
        measure=measure,
        value_ns=float(values[index]),
        median_ns=middle,
        above_ns=above,
        score=above / deviation if deviation else None,
        peers=int((~np.isnan(values)).sum()) - 1,
    )
