"""The rates of single events, and their percentiles over all ranks."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.pieces import Piece, columns
from fastcomm.metrics.view import UNKNOWN
from fastcomm.trace.schema import OPS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NS = 1e9  # of a second
_POWERS = 64  # of two that an int64 may hold

COLLECTIVES = pa.schema(
    [
        ("op", pa.string()),
        ("group_size", pa.int64()),
        ("size_from", pa.int64()),
        ("count", pa.int64()),
        ("p50_bus_bw", pa.float64()),
    ]
)


def rate(count: Ints, duration: Ints) -> Floats:
    """Bytes per second; NaN where bytes are UNKNOWN, or time did not pass."""
    known = (count != UNKNOWN) & (duration > 0)
    found = np.full(len(count), np.nan)
    found[known] = count[known] / duration[known] * NS
    return found


def column(table: pa.Table, name: str) -> Ints:
    """A column of whole numbers, UNKNOWN for null."""
    found = table[name]
    whole: Ints = (found.fill_null(UNKNOWN) if found.null_count else found).to_numpy()
    return whole


def p95(pieces: Sequence[Piece], tag: int) -> float:
    """The 95th percentile of the rates of a tag's events, by NumPy's linear rule; NaN: none."""
    parts = []
    for piece in pieces:
        table = columns(piece.where, ("tag", "duration_ns", "bytes"))
        own = table["tag"].to_numpy() == tag
        found = rate(column(table, "bytes")[own], table["duration_ns"].to_numpy()[own])
        parts.append(found[~np.isnan(found)])
    rates = np.concatenate(parts)
    return float(np.percentile(rates, 95, overwrite_input=True)) if len(rates) else np.nan


def of_op(pieces: Sequence[Piece], op: int) -> pa.Table:
    """One row a group size and power of two of the size: events, median bus rate.

    `size_from` is the power of two; the sizes reach up to the next. Events of unknown size or
    without a duration are left out; a bus bandwidth that no event tells is null.
    """
    parts = [_of_op(piece, op) for piece in pieces]
    key, bus_rate = (np.concatenate(each) for each in zip(*parts, strict=True))
    # One key after another: of millions of events little more is held than rate and key.
    keys, count = np.unique(key, return_counts=True)
    median = np.array([_median(bus_rate[key == each]) for each in keys], np.float64)
    size, power = np.divmod(keys.astype(np.int64), _POWERS)
    return pa.table(
        {
            "op": [OPS[op]] * len(size),
            "group_size": pa.array(size - 1, mask=size == 0),
            "size_from": np.left_shift(1, power),
            "count": count,
            "p50_bus_bw": pa.array(median, mask=np.isnan(median)),
        },
        schema=COLLECTIVES,
    )


def _median(rates: Floats) -> float:
    """Of those that are known; NaN where none is."""
    known = rates[~np.isnan(rates)]
    return float(np.percentile(known, 50, overwrite_input=True)) if len(known) else np.nan


def _of_op(piece: Piece, op: int) -> tuple[Ints, Floats]:
    """Of the events of an operation: a number for group size and power; the bus rate."""
    table = columns(piece.where, ("op", "group_size", "duration_ns", "bytes", "bus_bytes"))
    duration, size = table["duration_ns"].to_numpy(), column(table, "bytes")
    chosen = (table["op"].to_numpy() == op) & (size != UNKNOWN) & (duration > 0)
    power = np.frexp(np.maximum(size[chosen], 1).astype(np.float64))[1] - 1
    members = np.maximum(column(table, "group_size")[chosen], -1)
    key = (members + 1) * _POWERS + power
    return key, rate(column(table, "bus_bytes")[chosen], duration[chosen])
