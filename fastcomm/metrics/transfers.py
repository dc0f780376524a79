"""What the collectives of a group, and the messages of a pair, moved and how long they took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.classes import classes, sums
from fastcomm.metrics.collectives import Collectives

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

LABEL = 4  # the row of `keys` that has the groups


@dataclass(frozen=True, slots=True)
class Transfers:
    """Sums by class and group, which add up over collectives; columns go together."""

    keys: Ints  # rows: tag, op, power of two of the size, ranks of the group, label, pair
    counts: Ints
    took: Ints  # ns
    rated: Ints  # how many are of known sizes, and move anything
    rated_moved: Ints  # bytes, of the member of each that moves the most
    rated_took: Ints

    @classmethod
    def of(cls, all_: Collectives) -> Self:
        """Those of some collectives."""
        columns = (all_.tag, all_.op, all_.power, all_.group_size, all_.group)
        keys, place = classes(*columns, all_.low, all_.high)
        is_rated = ((all_.bus_bytes > 0) & (all_.power >= 0)).astype(np.int64)
        rows = (
            np.ones(len(place), np.int64),
            all_.transfer,
            is_rated,
            all_.bus_bytes * is_rated,
            all_.transfer * is_rated,
        )
        return cls(keys, *(sums(place, row, keys.shape[1]) for row in rows))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Those of all, by their keys."""
        keys, place = classes(*np.concatenate([part.keys for part in parts], axis=1))
        names = ("counts", "took", "rated", "rated_moved", "rated_took")
        rows = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(keys, *(sums(place, row, keys.shape[1]) for row in rows))

    def of_kind(self, tag: int, op: int) -> Flags:
        """Which are of one tag and operation."""
        chosen: Flags = (self.keys[0] == tag) & (self.keys[1] == op)
        return chosen
