"""Bytes and bandwidths of communication, by rank and parallelism (METRIC 3 and 4).

Also exposed communication of each parallelism, divided into wait and transfer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.metrics.rank_arrays import RankArrays
from fastcomm.metrics.skew import Wait
from fastcomm.metrics.spill_files import NS, rate
from fastcomm.metrics.step_counts import StepCounts
from fastcomm.trace.columns import Groups, filled, nullable
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Floats

# Columns that are added up over ranks. *Rated* events have known bytes and a duration.
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
    """Sum up communication events by rank and tag.

    Parameters
    ----------
    events
        Table of `rows`.

    Returns
    -------
    pyarrow.Table
        A row per rank and tag, sorted, with the columns of `ADDED`, `p95_rate`, and `timed`:
        whether iterations of the rank are known.

    """
    duration, size = events["duration_ns"].to_numpy(), filled(events["bytes"])
    rates, bus_rates = (rate(count, duration) for count in (size, filled(events["bus_bytes"])))
    op, timed = events["op"].to_numpy(), events["iteration"].is_valid().to_numpy()
    groups = Groups.of(events["rank"].to_numpy() * len(TAGS) + events["tag"].to_numpy())
    is_known, exchanged = size != NULL, op == OP["AllToAll"]
    of_known, of_rated = groups.only(is_known), groups.only(~np.isnan(rates))
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
            "exchanged_bytes": groups.only(is_known & exchanged).sums(size),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bandwidth of the events of one tag, bytes per second; utilization is a share of the link.

    Events of unknown bytes or without duration are in no average. A value is null without such
    events, or if it needs the link's bandwidth and that is unknown.
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


def rows(arrays: RankArrays) -> pa.Table:
    """Return a row per communication event inside an iteration.

    `start_ns` is on the clock of the rank's trace. `exposed_ns` is the exposed time, which
    counts for the event that ends first if several run; `exposed_at_start_ns` is the part
    before the first gap in it, `exposed_at_end_ns` that after the last. `alone_ns` is the time
    before the end in which neither compute nor other communication runs.
    `step` is the iteration's number, where it is the job's.
    Of unknown group, sequence number, stream, size, bytes and partner the value is null.
    """
    comm = arrays.comm
    return pa.table(
        {
            "rank": arrays.rank[comm.iteration],
            "iteration": arrays.number[comm.iteration],
            "step": nullable(
                np.where(
                    arrays.is_numbered[comm.iteration], arrays.number[comm.iteration], NULL
                )
            ),
            "tag": comm.tag,
            "op": comm.op,
            "group": nullable(comm.group),
            "seq": nullable(comm.seq),
            "call_id": nullable(comm.call_id),
            "stream": nullable(comm.stream),
            "group_size": nullable(comm.group_size),
            "start_ns": comm.start - arrays.moved[comm.iteration],
            "duration_ns": comm.stop - comm.start,
            "alone_ns": comm.alone,
            "exposed_ns": comm.exposed[:, 0],
            "exposed_at_start_ns": comm.exposed[:, 1],
            "exposed_at_end_ns": comm.exposed[:, 2],
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
    """Return the bandwidth of each tag that has events.

    Parameters
    ----------
    sums
        Table of `sums_by_rank`.
    p95
        95th percentile of rates by tag, in bytes per second.
    link
        Bandwidth of a link in bytes per second; None if unknown.

    """
    tags, place = np.unique(sums["tag"].to_numpy(), return_inverse=True)
    added = {name: _added(sums[name].to_numpy(), place, len(tags)) for name in ADDED}
    columns = _columns(added, np.array([p95.get(tag, np.nan) for tag in tags.tolist()]), link)
    rows = zip(*(columns[name].to_pylist() for name in Bandwidth.__slots__), strict=True)
    return {
        TAGS[tag]: Bandwidth(**dict(zip(Bandwidth.__slots__, row, strict=True)))
        for tag, row in zip(tags.tolist(), rows, strict=True)
    }


def by_rank(sums: pa.Table, link: float | None) -> pa.Table:
    """Return the columns of `Bandwidth` per rank and tag, from the table of `sums_by_rank`.

    `link` is the link bandwidth in bytes/s; None leaves utilizations null.
    """
    added = {name: sums[name].to_numpy() for name in ADDED}
    tag = pa.array(TAGS).take(sums["tag"].combine_chunks())
    columns = _columns(added, sums["p95_rate"].to_numpy(), link)
    return pa.table({"rank": sums["rank"], "tag": tag, **columns})


def _added(values: NDArray[Any], place: NDArray[np.int64], count: int) -> NDArray[Any]:
    total = np.zeros(count, values.dtype)
    np.add.at(total, place, values)
    return total


def _columns(
    added: Mapping[str, NDArray[Any]], p95: Floats, link: float | None
) -> dict[str, pa.Array]:
    """Return the columns of `Bandwidth`."""
    rates = {
        "avg_bw": _divided(added["rate_sum"], added["rated_events"]),
        "p95": p95,
        "global": _divided(added["rated_bytes"], added["rated_ns"]) * NS,
        "avg_bus_bw": _divided(added["bus_rate_sum"], added["bus_events"]),
    }
    shares = {name: value / link if link else value * np.nan for name, value in rates.items()}
    known_events = added["known_events"]
    return {
        "avg_bw": _nullable(rates["avg_bw"]),
        "avg_util": _nullable(shares["avg_bw"]),
        "p95_util": _nullable(shares["p95"]),
        "global_avg_util": _nullable(shares["global"]),
        "total_bytes": pa.array(added["known_bytes"], mask=known_events == 0),
        "avg_bus_bw": _nullable(rates["avg_bus_bw"]),
        "avg_bus_util": _nullable(shares["avg_bus_bw"]),
        "events": pa.array(added["events"]),
        "events_without_bytes": pa.array(added["events"] - known_events),
        "events_without_duration": pa.array(added["events_without_duration"]),
    }


def _divided(total: NDArray[Any], count: NDArray[Any]) -> Floats:
    """Divide; NaN where the count is 0."""
    return np.where(count > 0, total / np.where(count > 0, count, 1), np.nan)


def _nullable(values: Floats) -> pa.Array:
    """Convert to Arrow, with null for NaN."""
    return pa.array(values, mask=np.isnan(values))


def iteration_columns(arrays: RankArrays) -> dict[str, pa.Array]:
    """Return bytes per iteration, null where an event's bytes are unknown; and such events.

    Collectives of the host, beside those of a device, have columns of their own.
    """
    comm = arrays.comm
    is_known = comm.bytes != NULL
    total = np.zeros(len(arrays.number), np.int64)
    np.add.at(total, comm.iteration[is_known], comm.bytes[is_known])
    unknown = np.zeros(len(arrays.number), np.int64)
    np.add.at(unknown, comm.iteration[~is_known], 1)
    return {
        "comm_bytes": pa.array(total, mask=unknown > 0),
        "events_without_bytes": pa.array(unknown),
        "host_comm_events": pa.array(arrays.on_host.events),
        "host_comm_ns": pa.array(arrays.on_host.union),
        "host_comm_alone_ns": pa.array(arrays.on_host.alone),
    }


def iteration_rates(iterations: pa.Table, link: float | None) -> pa.Table:
    """Append bytes/s of communication, and its share of `link` (bytes/s), per iteration.

    Null where bytes are unknown or no time is spent; the share is null without `link`.
    """
    union = filled(iterations["comm_union_ns"], 0)
    total = filled(iterations["comm_bytes"])
    rates = rate(total, union)
    util = rates / link if link else np.full(len(rates), np.nan)
    return iterations.append_column("iteration_bw", _nullable(rates)).append_column(
        "iteration_util", _nullable(util)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Bytes of the events of one tag, counted at each member of a collective: no link traffic.

    Only events of known size count; null without any.
    """

    comm_bytes: int | None
    comm_events: int
    bytes_per_iteration: float | None
    bytes_per_step_per_gpu: float | None


def volume(sums: pa.Table, steps: StepCounts | None) -> dict[str, Volume]:
    """Return the volume of each tag that has events.

    Parameters
    ----------
    sums
        Table of `sums_by_rank`.
    steps
        Numbers of steps; None if unknown.

    """
    tags = sums["tag"].to_numpy()
    return {
        TAGS[tag]: _of_one_tag(sums.filter(pa.array(tags == tag)), steps)
        for tag in np.unique(tags)
    }


def _of_one_tag(sums: pa.Table, steps: StepCounts | None) -> Volume:
    """Return the volume of a tag; `steps` is None if their number is unknown."""
    total = _total(sums)
    inside = sums.filter(sums["timed"])
    # Ranks with known times and without events of the tag move 0 bytes.
    timed = _total(inside) if inside.num_rows or total is None else 0
    if steps is None or not steps.steps:
        timed = None
    per_step, per_gpu = None, None
    if timed is not None and steps is not None:
        per_step = timed / steps.steps
        per_gpu = timed / (steps.steps * len(steps.ranks))
        if not steps.is_even:
            own = inside["rank"].to_numpy(), inside["known_bytes"].to_numpy()
            per_step = float(steps.per_step(*own).sum())
            per_gpu = per_step / len(steps.ranks)
    return Volume(
        comm_bytes=total,
        comm_events=int(sums["events"].to_numpy().sum()),
        bytes_per_iteration=per_step,
        bytes_per_step_per_gpu=per_gpu,
    )


def _total(sums: pa.Table) -> int | None:
    """Return the bytes of events of known size; None if no size is known."""
    if not sums["known_events"].to_numpy().sum():
        return None
    # The sum over many ranks may need more than 64 bits.
    return sum(map(int, sums["known_bytes"].to_pylist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommunication:
    """Collectives of the host (gloo, MPI, UCC) in a run with a device; times in the mean step.

    They are in no other metric: where the device does nothing meanwhile, it is idle.
    """

    events: int  # in steps, over all ranks
    ns_per_step: float | None  # in which at least one runs
    alone_ns_per_step: float | None  # of it, without any work of the device


def host_communication(iterations: pa.Table) -> HostCommunication | None:
    """Return the collectives of the host, from the table of iterations; None without any."""
    events = pc.sum(iterations["host_comm_events"]).as_py()
    if not events:
        return None
    return HostCommunication(
        events=events,
        ns_per_step=pc.mean(iterations["host_comm_ns"]).as_py(),
        alone_ns_per_step=pc.mean(iterations["host_comm_alone_ns"]).as_py(),
    )


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
    """Return the exposed time of each parallelism, divided into wait and transfer if known.

    Parameters
    ----------
    exact
        The exact partition: shares of the step.
    step_ns
        Mean step time; None if unknown.
    waits
        Waits by rank and parallelism.
    volume
        Communication by parallelism; the result has its keys.

    """
    by_tag = {}
    for tag in volume:
        share = exact.get(f"exposed_{tag}")
        if share is None or step_ns is None:
            continue
        exposed = share * step_ns
        own = [wait for wait in waits if wait.tag == tag]
        waiting = _waiting_share(own, volume[tag]) if exposed else 0.0
        by_tag[tag] = Exposure(
            exposed_ns=exposed,
            wait_ns=None if waiting is None else exposed * waiting,
            transfer_ns=None if waiting is None else exposed * (1 - waiting),
        )
    return by_tag


def divided(exposure: Mapping[str, Exposure]) -> tuple[float, float] | None:
    """Return wait and transfer in ns, summed over parallelisms; None if none is divided."""
    parts = [part for part in exposure.values() if part.wait_ns is not None]
    if not parts:
        return None
    return sum(part.wait_ns or 0.0 for part in parts), sum(
        part.transfer_ns or 0.0 for part in parts
    )


def _waiting_share(waits: Sequence[Wait], volume: Volume) -> float | None:
    """Return the share of wait in the exposed time of matched collectives of a parallelism.

    `waits` and `volume` are of one tag. None if there is no exposed time, or if fewer than half
    of the events of `volume` are matched.
    """
    wait = sum(row.exposed_wait_ns for row in waits)
    total = wait + sum(row.exposed_transfer_ns for row in waits)
    matched = sum(row.collectives for row in waits)
    if not total or 2 * matched < volume.comm_events:
        return None
    return wait / total
