"""Heat maps of ranks and iterations, and the outliers in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.trace.columns import filled
from fastcomm.trace.parallelisms import TAGS
from fastcomm_kernels.arrays import NULL, Floats, Ints

HeatRows = tuple[tuple[int | None, ...], ...]

EXPOSED = (*(f"exact_exposed_{tag}_ns" for tag in TAGS), "exact_exposed_mixed_ns")
# Measures of a (rank, iteration): sums of columns of the table of iterations.
MEASURES = {
    "time_ns": ("time_ns",),
    "compute_ns": ("exact_compute_ns",),
    "exposed_ns": EXPOSED,
    "idle_ns": ("exact_idle_ns",),
}
# Measures by which ranks are judged, but that no heat map shows.
JUDGED = MEASURES | {"copies_ns": ("exact_memcpy_ns",)}


def lower_median(values: Floats) -> Floats:
    """Return the lower of two medians along the first axis; NaN where all values are NaN.

    Of two ranks the shorter time counts as usual, so that the other can stand out.
    """
    ordered = np.sort(values, axis=0)  # NaN last
    count = np.asarray((~np.isnan(values)).sum(axis=0))
    place = np.expand_dims((np.maximum(count, 1) - 1) // 2, 0)
    median: Floats = np.take_along_axis(ordered, place, axis=0)[0]
    return median


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """Times per rank and iteration in ns, null if unknown; a row per rank."""

    ranks: tuple[int, ...]
    iterations: tuple[int, ...]  # numbers
    time_ns: HeatRows
    compute_ns: HeatRows  # compute kernels run
    exposed_ns: HeatRows  # communication runs, and no compute kernel
    idle_ns: HeatRows  # nothing runs on the device

    def to_dict(self) -> dict[str, Any]:
        """Return the part of the JSON document."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class HeatArrays:
    """Times per rank and iteration as arrays, for computations."""

    ranks: Ints
    iterations: Ints
    values: dict[str, Ints]  # by measure: shape (ranks, iterations), ns; NULL if unknown

    @classmethod
    def of(cls, table: pa.Table) -> "HeatArrays":
        """Arrange the table of iterations as arrays of shape (ranks, iterations), in ns.

        Cells without a row, or with an unknown value, are NULL. Rows without an iteration
        number are ignored.
        """
        table = table.filter(table["iteration"].is_valid())
        ranks, row = np.unique(table["rank"].to_numpy(), return_inverse=True)
        numbers, column = np.unique(table["iteration"].to_numpy(), return_inverse=True)
        values = {}
        for name, parts in JUDGED.items():
            grid = np.full((len(ranks), len(numbers)), NULL, np.int64)
            grid[row, column] = _sum(table, parts)
            values[name] = grid
        return cls(ranks, numbers, values)

    def heat(self) -> Heat:
        """Return the arrays as lists, with None for NULL."""
        return Heat(
            ranks=tuple(self.ranks.tolist()),
            iterations=tuple(self.iterations.tolist()),
            **{name: _rows(self.values[name]) for name in MEASURES},
        )

    def mean_by_rank(self, name: str) -> NDArray[np.float64]:
        """Return the mean of a measure over each rank's known iterations in ns, or NaN.

        `name` is a key of `JUDGED`.
        """
        return _known_mean(self.values[name], axis=1)

    def common(self, name: str) -> "HeatArrays":
        """Return the iterations in which a measure of all ranks is known.

        `name` is a key of `JUDGED`.
        """
        is_common = (self.values[name] != NULL).all(axis=0)
        values = {key: column[:, is_common] for key, column in self.values.items()}
        return HeatArrays(self.ranks, self.iterations[is_common], values)

    def middle(self, name: str, rows: Ints) -> NDArray[np.float64]:
        """Return the median of a measure over some ranks, in ns per iteration; NaN if unknown.

        Parameters
        ----------
        name
            Key of `JUDGED`.
        rows
            Indices into `ranks`.

        """
        columns = (column[column != NULL] for column in self.values[name][rows].T)
        return np.array([np.median(values) if len(values) else np.nan for values in columns])

    def median_by_iteration(self, name: str) -> NDArray[np.float64]:
        """Return the median of a measure over all ranks, in ns per iteration; NaN if unknown.

        `name` is a key of `JUDGED`.
        """
        return self.middle(name, np.arange(len(self.ranks)))

    @property
    def step_ns(self) -> float | None:
        """Mean iteration time over all ranks and iterations, in ns."""
        times = self.values["time_ns"][self.values["time_ns"] != NULL]
        return int(times.sum()) / len(times) if len(times) else None


def table(grid: HeatArrays) -> pa.Table:
    """Return a row per rank and iteration with known time.

    The columns are `rank`, `iteration`, and each of `MEASURES` in ns; null if unknown.
    """
    shape = (len(grid.ranks), len(grid.iterations))
    is_timed = (grid.values["time_ns"] != NULL).reshape(-1)
    columns = {
        "rank": np.repeat(grid.ranks, shape[1])[is_timed],
        "iteration": np.tile(grid.iterations, shape[0])[is_timed],
    }
    for name in MEASURES:
        present = grid.values[name].reshape(-1)[is_timed]
        columns[name] = pa.array(present, mask=present == NULL)
    return pa.table(columns)


def _sum(table: pa.Table, parts: tuple[str, ...]) -> Ints:
    """Return the sum of some columns per row; NULL where one is null."""
    columns = [filled(table[part]) for part in parts]
    is_null = np.any([column == NULL for column in columns], axis=0)
    values = [np.where(is_null, 0, column) for column in columns]
    return np.where(is_null, NULL, np.sum(values, axis=0))


def _rows(values: Ints) -> HeatRows:
    return tuple(
        tuple(None if value == NULL else value for value in row) for row in values.tolist()
    )


def _known_mean(values: Ints, axis: int) -> NDArray[np.float64]:
    """Return the mean of the values that are not NULL; NaN without any."""
    is_known = values != NULL
    count = is_known.sum(axis=axis)
    total = np.where(is_known, values, 0).sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


SCORE = 5.0
LEAST_SHARE = 0.01
LEAST_LONGER = 0.05
NORMAL = 1.4826  # standard deviations of a normal distribution in its median deviation
# Maximum number of candidates: where everything stands apart, nothing does.
_MAX_CANDIDATES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A rank (mean over iterations) or an iteration (median over ranks) that stands apart."""

    of: Literal["rank", "iteration"]
    number: int  # of the rank or the iteration
    measure: str  # a key of MEASURES
    value_ns: float
    median_ns: float  # of its peers
    above_ns: float
    score: float | None  # in deviations of the peers; null if these are equal
    peers: int  # number of others


def above_peers(values: Floats, least: float) -> list[tuple[int, float, float]]:
    """Find values that are far above the others, the highest first.

    Parameters
    ----------
    values
        NaN values are ignored.
    least
        Minimum difference from the median of the others.

    Returns
    -------
    list of tuple
        Index, median of the others, and their deviation: 1.4826 times the median absolute
        deviation, an estimate of the standard deviation. A value counts from five deviations
        on.

    """
    present = np.flatnonzero(~np.isnan(values))
    if len(present) < 2:  # noqa: PLR2004 - nobody to compare with
        return []
    is_pair = len(present) == 2  # noqa: PLR2004
    near = float(values[present].min() if is_pair else np.median(values[present]))
    candidates = present[values[present] > near + least / 2]
    candidates = candidates[np.argsort(-values[candidates], kind="stable")][:_MAX_CANDIDATES]
    above = []
    for index in candidates.tolist():
        others = values[present[present != index]]
        middle = float(np.median(others))
        deviation = NORMAL * float(np.median(np.abs(others - middle)))
        if values[index] - middle > max(SCORE * deviation, least):
            above.append((index, middle, deviation))
    return above


def outliers(grid: HeatArrays, stage: Mapping[int, int]) -> tuple[Outlier, ...]:
    """Find the ranks and iterations that exceed their peers by far.

    Parameters
    ----------
    grid
        Measures by rank and iteration, ns.
    stage
        Pipeline stage by rank; a rank is compared with those of its stage.

    Returns
    -------
    tuple of Outlier
        Ranks first, then iterations; by measure and number. Empty without iterations.

    """
    step = grid.step_ns
    if step is None:
        return ()
    all_outliers = [
        outlier
        for name in MEASURES
        for outlier in (*_ranks(grid, name, stage, step), *_iterations(grid, name, step))
    ]
    order = {name: place for place, name in enumerate(MEASURES)}
    return tuple(
        sorted(
            all_outliers,
            key=lambda outlier: (outlier.of != "rank", order[outlier.measure], outlier.number),
        )
    )


def peers_of(grid: HeatArrays, stage: Mapping[int, int]) -> list[NDArray[np.int64]]:
    """Return the rows of `grid` of the ranks of each pipeline stage, by ascending stage.

    Parameters
    ----------
    grid
        Has the ranks.
    stage
        Pipeline stage by rank; a rank without one is in stage 0.

    """
    stages = np.array([stage.get(rank, 0) for rank in grid.ranks.tolist()], np.int64)
    return [np.flatnonzero(stages == number) for number in np.unique(stages)]


def _ranks(grid: HeatArrays, name: str, stage: Mapping[int, int], step: float) -> list[Outlier]:
    """Return ranks far above their stage in the mean of a measure; `step` is in ns."""
    means = grid.mean_by_rank(name)
    return [
        _outlier("rank", int(grid.ranks[rows[index]]), name, means[rows], index, about)
        for rows in peers_of(grid, stage)
        for index, *about in above_peers(means[rows], LEAST_SHARE * step)
    ]


def _iterations(grid: HeatArrays, name: str, step: float) -> list[Outlier]:
    """Return iterations far above the others in the median of ranks; `step` is in ns."""
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
    """Return the outlier at an index; `about` is the median of the others and deviation, ns."""
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
