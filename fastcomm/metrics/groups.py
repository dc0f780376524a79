"""Statistics of rows by a key, in one pass: thousands of ranks are as many keys."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_NARROW = 1 << 15


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by their key; a key may have no row."""

    keys: Ints  # sorted, each once
    group: Ints  # of each row in `rows`: an index into `keys`
    rows: Ints | slice  # those that count

    @classmethod
    def of(cls, key: NDArray[Any]) -> Self:
        """Group all rows by an integer each."""
        # Hashing is linear; only the different keys are sorted.
        found = pa.array(key.astype(np.int64, copy=False)).dictionary_encode()
        keys: Ints = found.dictionary.to_numpy()
        order = np.argsort(keys)
        rank = np.empty(len(keys), np.int64)
        rank[order] = np.arange(len(keys))
        return cls(keys[order], rank[found.indices.to_numpy()], slice(None))

    def only(self, which: NDArray[np.bool_]) -> "Groups":
        """The same keys, of these rows alone."""
        return Groups(self.keys, self.group[which], np.flatnonzero(which))

    @property
    def counts(self) -> Ints:
        """How many rows a key has."""
        return np.bincount(self.group, minlength=len(self.keys))

    def sums(self, values: Ints) -> Ints:
        """The exact sum a key."""
        total = np.zeros(len(self.keys), np.int64)
        np.add.at(total, self.group, values[self.rows])
        return total

    def means(self, values: Floats) -> Floats:
        """The mean a key; NaN where it has no row."""
        total = np.bincount(self.group, values[self.rows], len(self.keys))
        return total / np.where(self.counts > 0, self.counts, np.nan)

    def percentiles(self, values: NDArray[Any], percent: float) -> Floats:
        """The percentile a key, by NumPy's linear rule; NaN where it has no row."""
        count = self.counts
        if not len(self.group):
            return np.full(len(count), np.nan)
        # Few keys are a narrow number, which sorts in linear time.
        narrow = self.group.astype(np.int16) if len(count) < _NARROW else self.group
        own = values[self.rows].astype(np.float64)[np.argsort(narrow, kind="stable")]
        found = np.full(len(count), np.nan)
        stops = np.cumsum(count)
        for key in np.flatnonzero(count).tolist():
            part = own[stops[key] - count[key] : stops[key]]
            # Selects in place; NumPy's rule for what lies between two values.
            found[key] = np.percentile(part, percent, overwrite_input=True)
        return found
