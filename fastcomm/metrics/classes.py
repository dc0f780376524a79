"""Rows by the values of several columns at once."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def classes(*columns: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """The distinct rows, sorted, a column each; and which of them each row is."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        code = code * max(1, len(values)) + place
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
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
