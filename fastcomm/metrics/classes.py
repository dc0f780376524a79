"""Rows by the values of several columns at once."""

import numpy as np
from numpy.typing import NDArray

from fastcomm.trace.alike import alike

Ints = NDArray[np.int64]


def classes(*columns: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """The distinct rows, sorted, a column each; and which of them each row is."""
    first, place = alike(*columns)
    return np.stack([column[first].astype(np.int64) for column in columns]), place


def sums(place: Ints, values: Ints, count: int) -> Ints:
    """The sum of the values of each class."""
    found = np.zeros(count, np.int64)
    np.add.at(found, place, values)
    return found


def members(place: Ints, count: int) -> list[Ints]:
    """The rows of each class."""
    order = np.argsort(place, kind="stable")
    edges = np.searchsorted(place[order], np.arange(1, count))
    return np.split(order, edges) if count else []
