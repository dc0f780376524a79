"""Bytes moved by each parallelism (METRIC 4), and its exposed wait and transfer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.metrics.skew import Wait
from fastcomm.trace.schema import TAGS


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
    """The volume of each tag that has events, from `bandwidth.sums_by_rank`.

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
