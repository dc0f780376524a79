"""METRIC 3: the bandwidth of each communication event, and how much of the link that is."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.groups import Groups
from fastcomm.metrics.view import UNKNOWN, View
from fastcomm.trace.schema import OPS, TAGS

NS = 1e9  # of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Of the events of one tag; bytes per second, utilisation as a fraction of the link.

    Events of unknown bytes or of no duration are in no average. A value is null where no event
    tells it, or where the link's bandwidth is not known.
    """

    avg_bw: float | None  # mean over events of bytes / duration
    avg_util: float | None
    p95_util: float | None
    global_avg_util: float | None  # sum of bytes / sum of durations / link
    total_bytes: int | None
    avg_bus_bw: float | None  # mean over events of bus bytes / duration
    avg_bus_util: float | None
    events: int
    events_without_bytes: int
    events_without_duration: int


def rows(view: View) -> pa.Table:
    """One row a communication event inside of an iteration."""
    comm = view.comm
    return pa.table(
        {
            "rank": np.full(len(comm.start), view.rank),
            "iteration": view.number[comm.iteration],
            "tag": comm.tag,
            "op": comm.op,
            "group": _nullable(comm.group),
            "seq": _nullable(comm.seq),
            "group_size": _nullable(comm.group_size),
            "start_ns": comm.start,
            "duration_ns": comm.stop - comm.start,
            "alone_ns": comm.alone,
            "bytes": _nullable(comm.bytes),
            "bus_bytes": _nullable(comm.bus_bytes),
        }
    )


def _nullable(column: NDArray[np.int64]) -> pa.Array:
    return pa.array(column, mask=column == UNKNOWN)


@dataclass(frozen=True, slots=True)
class Events:
    """The columns of `rows`, with NaN where a rate is not known."""

    tag: NDArray[np.int8]
    duration: NDArray[np.int64]
    bytes: NDArray[np.int64]  # UNKNOWN where null
    rate: NDArray[np.float64]  # bytes per second
    bus_rate: NDArray[np.float64]

    @classmethod
    def of(cls, table: pa.Table) -> "Events":
        """Take the columns and divide."""
        duration = table["duration_ns"].to_numpy()
        count, bus = (
            table[name].fill_null(UNKNOWN).to_numpy() for name in ("bytes", "bus_bytes")
        )
        return cls(
            tag=table["tag"].to_numpy(),
            duration=duration,
            bytes=count,
            rate=_rate(count, duration),
            bus_rate=_rate(bus, duration),
        )


def _rate(count: NDArray[np.int64], duration: NDArray[np.int64]) -> NDArray[np.float64]:
    known = (count != UNKNOWN) & (duration > 0)
    rate = np.full(len(count), np.nan)
    rate[known] = count[known] / duration[known] * NS
    return rate


def bandwidth(table: pa.Table, link: float | None) -> dict[str, Bandwidth]:
    """The bandwidth of each tag that has events. `link` in bytes per second."""
    tags, found = _by_key(Events.of(table), table["tag"].to_numpy(), link)
    rows = zip(*(found[name].to_pylist() for name in Bandwidth.__slots__), strict=True)
    return {
        TAGS[tag]: Bandwidth(**dict(zip(Bandwidth.__slots__, row, strict=True)))
        for tag, row in zip(tags.tolist(), rows, strict=True)
    }


def by_rank(table: pa.Table, link: float | None) -> pa.Table:
    """`bandwidth` of each rank and tag, a row each."""
    key = table["rank"].to_numpy() * len(TAGS) + table["tag"].to_numpy()
    keys, found = _by_key(Events.of(table), key, link)
    rank, tag = np.divmod(keys, len(TAGS))
    return pa.table({"rank": rank, "tag": pa.array(TAGS).take(pa.array(tag)), **found})


def _by_key(
    events: Events, key: NDArray[Any], link: float | None
) -> tuple[NDArray[Any], dict[str, pa.Array]]:
    """The different keys in their order, and the columns of `Bandwidth`, an entry a key."""
    groups = Groups.of(key)
    rated, known = ~np.isnan(events.rate), events.bytes != UNKNOWN
    of_rated, of_known = groups.only(rated), groups.only(known)
    of_bus = groups.only(~np.isnan(events.bus_rate))
    rated_bytes, rated_ns = of_rated.sums(events.bytes), of_rated.sums(events.duration)
    rates = {
        "avg_bw": of_rated.means(events.rate),
        "p95": of_rated.percentiles(events.rate, 95),
        "global": _divided(rated_bytes, rated_ns, NS),
        "avg_bus_bw": of_bus.means(events.bus_rate),
    }
    shares = {name: rate / link if link else rate * np.nan for name, rate in rates.items()}
    columns = {
        "avg_bw": _known(rates["avg_bw"]),
        "avg_util": _known(shares["avg_bw"]),
        "p95_util": _known(shares["p95"]),
        "global_avg_util": _known(shares["global"]),
        "total_bytes": pa.array(of_known.sums(events.bytes), mask=of_known.counts == 0),
        "avg_bus_bw": _known(rates["avg_bus_bw"]),
        "avg_bus_util": _known(shares["avg_bus_bw"]),
        "events": pa.array(groups.counts),
        "events_without_bytes": pa.array(groups.counts - of_known.counts),
        "events_without_duration": pa.array(groups.only(events.duration == 0).counts),
    }
    return groups.keys, columns


def _divided(
    count: NDArray[np.int64], duration: NDArray[np.int64], scale: float
) -> NDArray[np.float64]:
    """Quotients times a scale; NaN where nothing is divided by."""
    with np.errstate(invalid="ignore"):
        return (
            np.where(duration > 0, count / np.where(duration > 0, duration, 1), np.nan) * scale
        )


def _known(values: NDArray[np.float64]) -> pa.Array:
    """Null for NaN."""
    return pa.array(values, mask=np.isnan(values))


def collectives(table: pa.Table) -> pa.Table:
    """One row an operation, group size and power of two of the size: events, median bus rate.

    `size_from` is the power of two; the sizes reach up to the next. Events of unknown size or
    without a duration are left out; a bus bandwidth that no event tells is null.
    """
    events = Events.of(table)
    known = ~np.isnan(events.rate)
    op = table["op"].to_numpy()[known]
    size = table["group_size"].fill_null(-1).to_numpy()[known]
    power = np.frexp(np.maximum(events.bytes[known], 1).astype(np.float64))[1] - 1
    bus_rate = events.bus_rate[known]
    groups = Groups.of((op * np.int64(1 << 32) + size + 1) * _POWERS + power)
    keys, power = np.divmod(groups.keys, _POWERS)
    op, size = np.divmod(keys, 1 << 32)
    median = groups.only(~np.isnan(bus_rate)).percentiles(bus_rate, 50)
    return pa.table(
        {
            "op": pa.array(OPS).take(pa.array(op)),
            "group_size": pa.array(size - 1, mask=size == 0),
            "size_from": np.left_shift(1, power),
            "count": groups.counts,
            "p50_bus_bw": _known(median),
        }
    )


_POWERS = 64  # of two that an int64 may hold


def iteration_columns(view: View) -> dict[str, pa.Array]:
    """One row an iteration: bytes of its events; null where one is unknown."""
    comm = view.comm
    known = comm.bytes != UNKNOWN
    total = np.zeros(len(view.number), np.int64)
    np.add.at(total, comm.iteration[known], comm.bytes[known])
    silent = np.zeros(len(view.number), np.int64)
    np.add.at(silent, comm.iteration[~known], 1)
    return {
        "comm_bytes": pa.array(total, mask=silent > 0),
        "events_without_bytes": pa.array(silent),
    }


def iteration_rates(iterations: pa.Table, link: float | None) -> pa.Table:
    """The table with bytes over the union of communication, and their share of the link."""
    union = iterations["comm_union_ns"].fill_null(0).to_numpy()
    total = iterations["comm_bytes"].fill_null(UNKNOWN).to_numpy()
    rate = _rate(total, union)
    missing = np.isnan(rate)
    util = rate / link if link else np.full(len(rate), np.nan)
    return iterations.append_column("iteration_bw", pa.array(rate, mask=missing)).append_column(
        "iteration_util", pa.array(util, mask=np.isnan(util))
    )
