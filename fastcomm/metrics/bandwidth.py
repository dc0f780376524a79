"""METRIC 3: the bandwidth of each communication event, and how much of the link that is."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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

    def chosen(self, which: NDArray[np.bool_]) -> "Events":
        """Some of them."""
        return Events(
            self.tag[which],
            self.duration[which],
            self.bytes[which],
            self.rate[which],
            self.bus_rate[which],
        )


def _rate(count: NDArray[np.int64], duration: NDArray[np.int64]) -> NDArray[np.float64]:
    known = (count != UNKNOWN) & (duration > 0)
    rate = np.full(len(count), np.nan)
    rate[known] = count[known] / duration[known] * NS
    return rate


def bandwidth(table: pa.Table, link: float | None) -> dict[str, Bandwidth]:
    """The bandwidth of each tag that has events. `link` in bytes per second."""
    events = Events.of(table)
    return {
        TAGS[tag]: _of_one_tag(events.chosen(events.tag == tag), link)
        for tag in np.unique(events.tag)
    }


def _of_one_tag(events: Events, link: float | None) -> Bandwidth:
    rated, known = ~np.isnan(events.rate), events.bytes != UNKNOWN
    rate, bus_rate = events.rate[rated], events.bus_rate[~np.isnan(events.bus_rate)]
    avg, avg_bus = _mean(rate), _mean(bus_rate)
    total = int(events.bytes[known].sum()) if known.any() else None
    overall = None
    if len(rate):
        overall = int(events.bytes[rated].sum()) / int(events.duration[rated].sum()) * NS
    p95 = float(np.percentile(rate, 95)) if len(rate) else None
    return Bandwidth(
        avg_bw=avg,
        avg_util=_share(avg, link),
        p95_util=_share(p95, link),
        global_avg_util=_share(overall, link),
        total_bytes=total,
        avg_bus_bw=avg_bus,
        avg_bus_util=_share(avg_bus, link),
        events=len(events.tag),
        events_without_bytes=int((~known).sum()),
        events_without_duration=int((events.duration == 0).sum()),
    )


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def _share(value: float | None, link: float | None) -> float | None:
    return None if value is None or link is None else value / link


def by_rank(table: pa.Table, link: float | None) -> pa.Table:
    """`bandwidth` of each rank and tag, a row each."""
    ranks = table["rank"].to_numpy()
    records = []
    for rank in np.unique(ranks).tolist():
        for tag, found in bandwidth(table.filter(pa.array(ranks == rank)), link).items():
            values = {name: getattr(found, name) for name in Bandwidth.__slots__}
            records.append({"rank": rank, "tag": tag, **values})
    return pa.Table.from_pylist(records, schema=_BY_RANK)


_WHOLE = ("total_bytes", "events", "events_without_bytes", "events_without_duration")
_BY_RANK = pa.schema(
    [("rank", pa.int64()), ("tag", pa.string())]
    + [(name, pa.int64() if name in _WHOLE else pa.float64()) for name in Bandwidth.__slots__]
)


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
    keys, index = np.unique(np.stack([op, size, power], axis=1), axis=0, return_inverse=True)
    records = []
    for place, (op_, size_, power_) in enumerate(keys.tolist()):
        own = bus_rate[index.reshape(-1) == place]
        rated = own[~np.isnan(own)]
        records.append(
            {
                "op": OPS[op_],
                "group_size": size_ if size_ >= 0 else None,
                "size_from": 1 << power_,
                "count": len(own),
                "p50_bus_bw": float(np.median(rated)) if len(rated) else None,
            }
        )
    return pa.Table.from_pylist(records, schema=_COLLECTIVES)


_COLLECTIVES = pa.schema(
    [
        ("op", pa.string()),
        ("group_size", pa.int64()),
        ("size_from", pa.int64()),
        ("count", pa.int64()),
        ("p50_bus_bw", pa.float64()),
    ]
)


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
