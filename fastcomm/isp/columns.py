"""Feasible strategies as columns: one array a field, one row a strategy."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

Columns = dict[str, NDArray[np.generic]]


def taken(
    shape: tuple[int, ...], kept: NDArray[np.bool_], fields: Mapping[str, ArrayLike]
) -> Columns:
    """The kept cells of a block, flat: each field has the block's shape, or fewer axes."""
    where = np.nonzero(kept)
    found: Columns = {}
    for name, value in fields.items():
        whole = np.broadcast_to(np.asarray(value), shape)
        found[name] = whole[where]
    return found


def joined(parts: list[Columns]) -> Columns:
    """Several blocks under one another."""
    if not parts:
        return {}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def rows(columns: Columns, places: ArrayLike) -> Columns:
    """Some rows, in the order of `places`."""
    return {name: column[np.asarray(places)] for name, column in columns.items()}


def length(columns: Columns) -> int:
    """How many strategies there are."""
    return len(next(iter(columns.values()), ()))
