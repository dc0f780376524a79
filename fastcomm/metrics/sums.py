"""Sums over the communication events of each rank and tag, from which others are made."""

import numpy as np
import pyarrow as pa

from fastcomm.metrics.groups import Groups
from fastcomm.metrics.rates import column, rate
from fastcomm.metrics.view import UNKNOWN
from fastcomm.trace.schema import OP, TAGS

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


def by_rank(events: pa.Table) -> pa.Table:
    """One row a rank and tag, sorted; `timed` is whether the rank knows its iterations."""
    duration, size = events["duration_ns"].to_numpy(), column(events, "bytes")
    rates, bus_rates = (rate(count, duration) for count in (size, column(events, "bus_bytes")))
    op, timed = events["op"].to_numpy(), events["iteration"].is_valid().to_numpy()
    groups = Groups.of(events["rank"].to_numpy() * len(TAGS) + events["tag"].to_numpy())
    known, exchanged = size != UNKNOWN, op == OP["AllToAll"]
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
