"""Sets of half-open intervals ``[start, stop)``: union, intersection, difference, length.

A set is two arrays of integers of equal length, in any order; intervals may overlap, and those
that are empty or stop before they start cover nothing. Results are merged: sorted int64 arrays
of intervals that neither touch nor overlap.
"""

import numpy as np
from numpy.typing import ArrayLike

from fastcomm.checks import shortened
from fastcomm.errors import FastcommError
from fastcomm_kernels import intervals as kernels
from fastcomm_kernels.arrays import Ints

__all__ = ["Intervals", "difference", "intersection", "length", "union"]

Intervals = tuple[ArrayLike, ArrayLike]  # starts, stops
Merged = tuple[Ints, Ints]

_ENDS = np.iinfo(np.int64)


def union(*sets: Intervals) -> Merged:
    """Return the intervals that at least one set covers.

    Parameters
    ----------
    *sets
        Starts and stops of each set, integers of one unit, such as ns.

    Returns
    -------
    tuple of ndarray
        Starts and stops, int64, merged.

    Raises
    ------
    FastcommError
        If starts or stops are not integers, their numbers differ, or the times span 2**63 or
        more.

    """
    pairs = [_sorted(one) for one in sets] or [_sorted(((), ()))]
    start, stop = (
        pairs[0]
        if len(pairs) == 1
        else _in_order(*map(np.concatenate, zip(*pairs, strict=True)))
    )
    return kernels.merge(start, stop)


def intersection(a: Intervals, b: Intervals) -> Merged:
    """Return the intervals that both sets cover. Arguments, result and errors as of `union`."""
    return _common(union(a), union(b))


def difference(a: Intervals, b: Intervals) -> Merged:
    """Return the intervals of `a` that `b` does not cover.

    Arguments, result and errors as of `union`.
    """
    start, stop = union(b)
    return _common(union(a), (np.append(_ENDS.min, stop), np.append(start, _ENDS.max)))


def length(intervals: Intervals) -> int:
    """Return the union length of a set, in the unit of its times; errors as of `union`."""
    return int(kernels.union_length(*_sorted(intervals)))


def _common(a: Merged, b: Merged) -> Merged:
    """Return the intersection of two merged sets."""
    # For each interval of `a`: the first of `b` that ends after its start, how many overlap it.
    first = np.searchsorted(b[1], a[0], side="right")
    count = np.searchsorted(b[0], a[1]) - first
    own = np.repeat(np.arange(len(count)), count)
    other = np.arange(len(own)) + np.repeat(first - np.cumsum(count) + count, count)
    return np.maximum(a[0][own], b[0][other]), np.minimum(a[1][own], b[1][other])


def _sorted(intervals: Intervals) -> Merged:
    """Return starts and stops as int64 arrays, by start."""
    try:
        start, stop = (np.asarray(column) for column in intervals)
    except (TypeError, ValueError) as error:
        raise FastcommError(
            f"intervals: invalid set {shortened(intervals)}: pass two arrays, starts and "
            "stops, as in ([0, 20], [10, 30])"
        ) from error
    if start.ndim != 1 or start.shape != stop.shape:
        raise FastcommError(
            f"intervals: starts of shape {start.shape}, stops of shape {stop.shape}; pass two "
            "flat arrays of one length"
        )
    for column in (start, stop):
        if len(column) and not np.can_cast(column.dtype, np.int64):
            raise FastcommError(f"intervals: times of type {column.dtype}; pass int64")
    if len(start) and int(stop.max()) - int(start.min()) > _ENDS.max:
        raise FastcommError("intervals: the times span more than int64 can count")
    return _in_order(start.astype(np.int64), stop.astype(np.int64))


def _in_order(start: Ints, stop: Ints) -> Merged:
    if (start[1:] >= start[:-1]).all():
        return start, stop
    order = np.argsort(start, kind="stable")
    return start[order], stop[order]
