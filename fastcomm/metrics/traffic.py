"""Bytes and bandwidths of communication, by rank and parallelism (METRIC 3 and 4).

Also the exposed communication of each parallelism, divided into wait and transfer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.pieces import NS, rate
from fastcomm.metrics.skew import Wait
from fastcomm.metrics.view import View
from fastcomm.trace.columns import Groups, filled, nullable
from fastcomm.trace.schema import OP, TAGS
from fastcomm_kernels.arrays import NULL, Floats

# What is added up over ranks. Rated are events of known bytes that take time.
ADDED = (
    "events",
    "events_without_duration",
    "known_events",  # of known bytes
    "known_bytes",
    "rated_events",
    "rated_bytes",
    "rated_ns",
    "rate_sum",  # bytes per second
    "bus_events",
    "bus_rate_sum",
    "messages",  # SendRecv
    "exchanged_bytes",  # of all-to-alls
)


def sums_by_rank(events: pa.Table) -> pa.Table:
    """One row a rank and tag, sorted; `timed` is whether the rank knows its iterations."""
    duration, size = events["duration_ns"].to_numpy(), filled(events["bytes"])
    rates, bus_rates = (rate(count, duration) for count in (size, filled(events["bus_bytes"])))
    op, timed = events["op"].to_numpy(), events["iteration"].is_valid().to_numpy()
    groups = Groups.of(events["rank"].to_numpy() * len(TAGS) + events["tag"].to_numpy())
    known, exchanged = size != NULL, op == OP["AllToAll"]
    of_known, of_rated = groups.only(known), groups.only(~np.isnan(rates))
    of_bus = groups.only(~np.isnan(bus_rates))
    rank, tag = np.divmod(groups.keys, len(TAGS))
    return pa.table(
        {
            "rank": rank,
            "tag": tag.astype(np.int8),
            "timed": groups.only(timed).counts > 0,
            "p95_rate": of_rated.percentiles(rates, 95),
            "events": groups.counts,
            "events_without_duration": groups.only(duration == 0).counts,
            "known_events": of_known.counts,
            "known_bytes": of_known.sums(size),
            "rated_events": of_rated.counts,
            "rated_bytes": of_rated.sums(size),
            "rated_ns": of_rated.sums(duration),
            "rate_sum": of_rated.totals(rates),
            "bus_events": of_bus.counts,
            "bus_rate_sum": of_bus.totals(bus_rates),
            "messages": groups.only(op == OP["SendRecv"]).counts,
            "exchanged_bytes": groups.only(known & exchanged).sums(size),
        }
    )


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
            "rank": view.rank[comm.iteration],
            "iteration": view.number[comm.iteration],
            "tag": comm.tag,
            "op": comm.op,
            "group": nullable(comm.group),
            "seq": nullable(comm.seq),
            "stream": nullable(comm.stream),
            "group_size": nullable(comm.group_size),
            "start_ns": comm.start - view.moved[comm.iteration],
            "duration_ns": comm.stop - comm.start,
            "alone_ns": comm.alone,
            "bytes": nullable(comm.bytes),
            "payload_bytes": nullable(comm.payload_bytes),  # for matching, whatever is counted
            "bus_bytes": nullable(comm.bus_bytes),
            "partner": nullable(comm.partner),
            "sends": comm.sends,
        }
    )


def bandwidth(
    sums: pa.Table, p95: Mapping[int, float], link: float | None
) -> dict[str, Bandwidth]:
    """The bandwidth of each tag that has events, from `traffic.sums_by_rank`.

    `p95` is the 95th percentile of each tag's rates, `link` in bytes per second.
    """
    tags, place = np.unique(sums["tag"].to_numpy(), return_inverse=True)
    added = {name: _added(sums[name].to_numpy(), place, len(tags)) for name in ADDED}
    found = _columns(added, np.array([p95.get(tag, np.nan) for tag in tags.tolist()]), link)
    rows = zip(*(found[name].to_pylist() for name in Bandwidth.__slots__), strict=True)
    return {
        TAGS[tag]: Bandwidth(**dict(zip(Bandwidth.__slots__, row, strict=True)))
        for tag, row in zip(tags.tolist(), rows, strict=True)
    }


def by_rank(sums: pa.Table, link: float | None) -> pa.Table:
    """`bandwidth` of each rank and tag, a row each."""
    added = {name: sums[name].to_numpy() for name in ADDED}
    tag = pa.array(TAGS).take(sums["tag"].combine_chunks())
    found = _columns(added, sums["p95_rate"].to_numpy(), link)
    return pa.table({"rank": sums["rank"], "tag": tag, **found})


def _added(values: NDArray[Any], place: NDArray[np.int64], count: int) -> NDArray[Any]:
    found = np.zeros(count, values.dtype)
    np.add.at(found, place, values)
    return found


def _columns(
    added: Mapping[str, NDArray[Any]], p95: Floats, link: float | None
) -> dict[str, pa.Array]:
    """The columns of `Bandwidth`."""
    rates = {
        "avg_bw": _divided(added["rate_sum"], added["rated_events"]),
        "p95": p95,
        "global": _divided(added["rated_bytes"], added["rated_ns"]) * NS,
        "avg_bus_bw": _divided(added["bus_rate_sum"], added["bus_events"]),
    }
    shares = {name: each / link if link else each * np.nan for name, each in rates.items()}
    known = added["known_events"]
    return {
        "avg_bw": _known(rates["avg_bw"]),
        "avg_util": _known(shares["avg_bw"]),
        "p95_util": _known(shares["p95"]),
        "global_avg_util": _known(shares["global"]),
        "total_bytes": pa.array(added["known_bytes"], mask=known == 0),
        "avg_bus_bw": _known(rates["avg_bus_bw"]),
        "avg_bus_util": _known(shares["avg_bus_bw"]),
        "events": pa.array(added["events"]),
        "events_without_bytes": pa.array(added["events"] - known),
        "events_without_duration": pa.array(added["events_without_duration"]),
    }


def _divided(total: NDArray[Any], count: NDArray[Any]) -> Floats:
    """NaN where nothing is divided by."""
    return np.where(count > 0, total / np.where(count > 0, count, 1), np.nan)


def _known(values: Floats) -> pa.Array:
    """Null for NaN."""
    return pa.array(values, mask=np.isnan(values))


def iteration_columns(view: View) -> dict[str, pa.Array]:
    """One row an iteration: bytes of its events; null where one is unknown."""
    comm = view.comm
    known = comm.bytes != NULL
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
    union = filled(iterations["comm_union_ns"], 0)
    total = filled(iterations["comm_bytes"])
    found = rate(total, union)
    util = found / link if link else np.full(len(found), np.nan)
    return iterations.append_column("iteration_bw", _known(found)).append_column(
        "iteration_util", _known(util)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Of the events of one tag. A collective counts once a rank: this is no traffic on links.

    Bytes are those of the events whose size is known, null where none is.
    """

    comm_bytes: int | None
    comm_events: int
    bytes_per_iteration: float | None
    bytes_per_step_per_gpu: float | None


def volume(sums: pa.Table, iterations: int | None, ranks: int) -> dict[str, Volume]:
    """The volume of each tag that has events, from `traffic.sums_by_rank`.

    It is that of so many iterations of so many ranks, those whose times are known: null where
    none are.
    """
    tags = sums["tag"].to_numpy()
    return {
        TAGS[tag]: _of_one_tag(sums.filter(pa.array(tags == tag)), iterations, ranks)
        for tag in np.unique(tags)
    }


def _of_one_tag(sums: pa.Table, iterations: int | None, ranks: int) -> Volume:
    total = _total(sums)
    inside = sums.filter(sums["timed"])
    # Ranks that know their times and have no event of the tag move nothing of it.
    timed = _total(inside) if inside.num_rows or total is None else 0
    if not iterations:
        timed = None
    return Volume(
        comm_bytes=total,
        comm_events=int(sums["events"].to_numpy().sum()),
        bytes_per_iteration=None if timed is None else timed / (iterations or 1),
        bytes_per_step_per_gpu=None if timed is None else timed / ((iterations or 1) * ranks),
    )


def _total(sums: pa.Table) -> int | None:
    if not sums["known_events"].to_numpy().sum():
        return None
    # Of many ranks it may need more than 64 bits.
    return sum(map(int, sums["known_bytes"].to_pylist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Exposed communication of one parallelism, in ns of the mean step.

    `wait_ns` and `transfer_ns` add up to `exposed_ns`; both are null where too few of the
    collectives are matched across ranks.
    """

    exposed_ns: float
    wait_ns: float | None
    transfer_ns: float | None


def exposures(
    exact: Mapping[str, float | None],
    step_ns: float | None,
    waits: Sequence[Wait],
    volume: Mapping[str, Volume],
) -> dict[str, Exposure]:
    """Return the exposed time of each parallelism that communicates, divided where known."""
    found = {}
    for tag in volume:
        share = exact.get(f"exposed_{tag}")
        if share is None or step_ns is None:
            continue
        exposed = share * step_ns
        own = [each for each in waits if each.tag == tag]
        waiting = _waiting_share(own, volume[tag]) if exposed else 0.0
        found[tag] = Exposure(
            exposed_ns=exposed,
            wait_ns=None if waiting is None else exposed * waiting,
            transfer_ns=None if waiting is None else exposed * (1 - waiting),
        )
    return found


def divided(exposure: Mapping[str, Exposure]) -> tuple[float, float] | None:
    """Return the waiting and the transfer of all parallelisms that are divided, or None."""
    known = [each for each in exposure.values() if each.wait_ns is not None]
    if not known:
        return None
    return sum(each.wait_ns or 0.0 for each in known), sum(
        each.transfer_ns or 0.0 for each in known
    )


def _waiting_share(waits: Sequence[Wait], volume: Volume) -> float | None:
    """Return the waiting share of matched exposed time; None where little is matched."""
    wait = sum(each.exposed_wait_ns for each in waits)
    total = wait + sum(each.exposed_transfer_ns for each in waits)
    matched = sum(each.collectives for each in waits)
    if not total or 2 * matched < volume.comm_events:
        return None
    return wait / total
