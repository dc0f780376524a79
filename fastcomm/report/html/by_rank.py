"""What each rank spends its steps on: means over its iterations, in ns, NaN where unknown."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.breakdown import EXACT
from fastcomm.metrics.result import Metrics

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MEASURES = {
    "time": "iteration time",
    "compute": "compute",
    "exposed": "exposed communication",
    "idle": "idle",
}


@dataclass(frozen=True, kw_only=True)
class ByRank:
    """A row a rank; `ns` has every category of the exact partition, and `MEASURES`."""

    ranks: Ints
    ns: dict[str, Floats]
    steps: Ints  # iterations of each rank

    @classmethod
    def of(cls, found: Metrics) -> Self:
        """Sum each rank's iterations and divide by how many they are."""
        table = found.tables["iterations"]
        rank = table["rank"].to_numpy()
        ranks, at = np.unique(rank, return_inverse=True)
        steps = np.bincount(at, minlength=len(ranks))
        sums = {
            name: np.bincount(at, weights=values, minlength=len(ranks)) / np.maximum(steps, 1)
            for name, values in measured(table).items()
        }
        return cls(ranks=ranks, ns=sums, steps=steps)

    @cached_property
    def known(self) -> bool:
        """Whether compute is known of every rank."""
        return len(self.ranks) > 0 and not bool(np.isnan(self.ns["compute"]).any())

    @cached_property
    def by_compute(self) -> Ints:
        """Rows from the rank that computes the least to that which computes the most."""
        return np.lexsort((-self.ranks, self.ns["compute"]))


def measured(table: pa.Table) -> dict[str, Floats]:
    """By iteration and rank: ns of each category and measure, NaN for null."""
    found = {name: _floats(table[f"exact_{name}_ns"]) for name in EXACT}
    exposed = [name for name in EXACT if name.startswith("exposed_")]
    found["exposed"] = np.sum([found[name] for name in exposed], axis=0)
    found["time"] = _floats(table["time_ns"])
    return found


def _floats(column: pa.ChunkedArray) -> Floats:
    values: Floats = column.cast(pa.float64()).fill_null(float("nan")).to_numpy()
    return values


def label(name: str) -> str:
    """A category in words: "exposed TP"."""
    return name.replace("_", " ")


def kind(name: str) -> str:
    """The colour of a category: that of its tag."""
    return name.removeprefix("exposed_")
