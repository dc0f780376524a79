"""Exposed communication of a step: waiting for the last rank, and transfer.

Only collectives that are matched across ranks can be divided. The division of the matched ones
holds for the exposed time of their parallelism, if they are at least half of its events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastcomm.metrics.skew import Wait
from fastcomm.metrics.volume import Volume


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
