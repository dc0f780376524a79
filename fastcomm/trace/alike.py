"""Rows that agree in every column, as one number each."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def alike(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """The first row of each kind of row, in the order of the columns' values; each row's kind.

    What `np.unique` says of the stacked columns, several times faster: one sort a column.
    """
    kind = np.zeros(len(columns[0]), np.int64)
    first = kind[:0]
    for column in columns:
        values, code = np.unique(column, return_inverse=True)
        _, first, kind = np.unique(
            kind * len(values) + code, return_index=True, return_inverse=True
        )
    return first, kind
