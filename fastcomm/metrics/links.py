"""Links by the bandwidth that their collectives reach once the last rank is there."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One group in the collectives of one class, beside the other groups of that class."""

    group: str | None  # description
    ranks: tuple[int, ...] | None
    tag: str
    op: str
    size_from: int  # a power of two, in bytes
    count: int
    bus_bw: float  # sum of bus bytes / sum of transfers, bytes per second
    peers_bus_bw: float | None  # median of the other groups; null where there is none
    ratio: float | None  # bus_bw / peers_bus_bw
    excess_ns: float | None  # what its transfers take longer than at the peers' rate, a step
    is_slow: bool
