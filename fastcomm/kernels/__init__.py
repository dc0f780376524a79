"""Statistics of device work by name: how often, how long, on which rank.

Durations are kept as distributions: by key, the distinct durations and how often each occurs.
Distributions of several ranks merge into one, in any order, and give exact percentiles.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.errors import SchemaError
from fastcomm.trace.columns import filled
from fastcomm_kernels.arrays import Floats, Ints
from fastcomm_kernels.grouping import Codes, grouped

_MOST_NS = 1 << 62  # of all durations together
_HALF = 0.5
_FLOAT_BITS = 53


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distinct durations by key, ascending within a key, and the number of each."""

    first: Ints  # of each key, the row of its least duration; then the number of rows
    duration: Ints  # ns
    number: Ints  # of events with this key and duration

    @classmethod
    def of(cls, key: Codes, duration: Ints, keys: int) -> Self:
        """Count the durations (ns) of events by their key, a number below `keys`."""
        first, ordered = grouped(key, duration, np.int64(keys))
        for low, high in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
            ordered[low:high].sort()
        row = _starts(first, ordered)
        number = np.diff(row, append=len(ordered))
        return cls(np.searchsorted(row, first), ordered[row], number)

    @classmethod
    def merged(cls, key: Codes, duration: Ints, number: Ints, keys: int) -> Self:
        """Add up distributions: `number` events of a key and a duration (ns) per element."""
        order = np.lexsort((duration, key))
        first = np.searchsorted(key[order], np.arange(keys + 1))
        ordered = duration[order]
        row = _starts(first, ordered)
        sums = np.add.reduceat(number[order], row) if len(row) else number[:0]
        return cls(np.searchsorted(row, first), ordered[row], sums)

    def rounded(self, bits: int) -> Self:
        """Return the distribution with durations rounded to `bits` significant bits."""
        exponent = np.frexp(self.duration.astype(np.float64))[1]
        shift = np.maximum(exponent - bits, 0)
        half = np.where(shift > 0, 1 << np.maximum(shift - 1, 0), 0)
        duration = ((self.duration + half) >> shift) << shift
        row = _starts(self.first, duration)
        sums = np.add.reduceat(self.number, row) if len(row) else self.number
        return type(self)(np.searchsorted(row, self.first), duration[row], sums)

    @property
    def keys(self) -> Codes:
        """The key of each row."""
        size = len(self.first) - 1
        return np.repeat(np.arange(size, dtype=np.int32), np.diff(self.first))

    @property
    def count(self) -> Ints:
        """Number of events by key."""
        behind = np.concatenate([[0], np.cumsum(self.number)])
        return np.diff(behind[self.first])

    @property
    def total(self) -> Ints:
        """Sum of the durations by key, in ns."""
        behind = np.concatenate([[0], np.cumsum(self.number * self.duration)])
        return np.diff(behind[self.first])

    @property
    def extremes(self) -> tuple[Ints, Ints]:
        """The least and the longest duration by key, in ns; every key has an event."""
        return self.duration[self.first[:-1]], self.duration[self.first[1:] - 1]

    def percentile(self, percent: float) -> Floats:
        """Return a percentile by key in ns, interpolated as NumPy does; NaN without events."""
        behind = np.cumsum(self.number)
        count = self.count
        before = np.concatenate([[0], np.cumsum(count)])[:-1]
        has = count > 0
        place = percent / 100 * (count[has] - 1)
        down = np.floor(place).astype(np.int64)
        rows = [
            np.searchsorted(behind, before[has] + at, side="right")
            for at in (down, np.ceil(place).astype(np.int64))
        ]
        low, high = (self.duration[row].astype(np.float64) for row in rows)
        share, gap = place - down, high - low
        values = np.full(len(count), np.nan)
        values[has] = np.where(share < _HALF, low + gap * share, high - gap * (1 - share))
        return values


def _starts(first: Ints, ordered: Ints) -> Ints:
    """Return the rows that begin a key or differ from the row before."""
    is_new = np.ones(len(ordered), np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    is_new[first[first < len(ordered)]] = True
    rows: Ints = np.flatnonzero(is_new)
    return rows


def check_durations(duration: Ints) -> None:
    """Raise SchemaError if durations are negative, or their sum may exceed an int64."""
    if not len(duration):
        return
    if int(duration.min()) < 0:
        raise SchemaError("a duration is negative")
    is_large = int(duration.max()) * len(duration) > _MOST_NS
    if is_large and float(duration.sum(dtype=np.float64)) > _MOST_NS:
        raise SchemaError("durations add up to more than 146 years")


def duration_statistics(table: pa.Table) -> pa.Table:
    """Return number, sum, mean and percentiles of durations by name.

    Parameters
    ----------
    table
        Columns `name` (text, or dictionary of texts) and `duration_ns` (int64), one row per
        event, without nulls.

    Returns
    -------
    pyarrow.Table
        A row per name, the longest sum first: `name`, `count`, `total_ns`, `mean_ns`,
        `median_ns`, `p95_ns`, `min_ns` and `max_ns`. Percentiles are interpolated linearly.

    Raises
    ------
    SchemaError
        If a column is missing or has nulls, or durations are negative or add up to more than
        an int64 holds.

    """
    for name in ("name", "duration_ns"):
        if name not in table.column_names or table[name].null_count:
            raise SchemaError(f"events need a column {name} without nulls")
    names = table["name"].combine_chunks()
    names = names if pa.types.is_dictionary(names.type) else names.dictionary_encode()
    duration = filled(table["duration_ns"])
    check_durations(duration)
    codes, texts = same_texts(names.indices.to_numpy(), names.dictionary)
    return statistics(Distribution.of(codes, duration, len(texts)), texts)


def same_texts(code: Codes, texts: pa.Array) -> tuple[Codes, pa.Array]:
    """Number texts so that each has one code and is used; return codes and texts."""
    is_used = np.zeros(len(texts), np.bool_)
    is_used[code] = True
    used = np.flatnonzero(is_used)
    encoded = texts.take(pa.array(used)).cast(pa.string()).dictionary_encode()
    number = np.zeros(len(texts), np.int32)
    number[used] = encoded.indices.to_numpy()
    return number[code], encoded.dictionary


def statistics(durations: Distribution, names: pa.Array) -> pa.Table:
    """Return a row per key of a distribution, the longest sum first; keys have `names`."""
    count, total = durations.count, durations.total
    least, most = durations.extremes
    table = pa.table(
        {
            "name": names,
            "count": count,
            "total_ns": total,
            "mean_ns": total / np.maximum(count, 1),
            "median_ns": durations.percentile(50),
            "p95_ns": durations.percentile(95),
            "min_ns": least,
            "max_ns": most,
        }
    )
    order = pc.sort_indices(table, [("total_ns", "descending"), ("name", "ascending")])
    return table.take(order)
