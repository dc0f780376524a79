"""Rows that agree in every column, as one number each."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.kinds import kinds


def alike(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """The first row of each kind of row, in the order of the columns' values; each row's kind.

    What `np.unique` says of the stacked columns of integers, but only the kinds are sorted.
    """
    first, kind = first_seen(*columns)
    order = np.lexsort([column[first] for column in reversed(columns)])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return first[order], place[kind]


def first_seen(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """The first row of each kind of row, in the order of the rows; each row's kind."""
    whole = np.empty((len(columns), len(columns[0])), np.int64)
    for place, column in enumerate(columns):
        whole[place] = column
    kind, first = kinds(whole)
    return first, kind
