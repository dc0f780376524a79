"""Links by the bandwidth that their collectives reach once the last rank is there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.classes import classes, members, sums
from fastcomm.metrics.meetings import Events, Meetings
from fastcomm.metrics.members import Group, Label
from fastcomm.metrics.outliers import above_peers
from fastcomm.metrics.skew import size_class
from fastcomm.metrics.view import UNKNOWN
from fastcomm.trace.schema import OPS, TAGS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NS = 1e9  # of a second
# A link is slow that reaches less of its peers' bandwidth and stands apart from them, if its
# transfers take longer by more of a step.
SLOW = 0.8
LEAST_EXCESS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One group in the collectives of one class, beside the other groups of that class."""

    group: str | None  # description
    ranks: tuple[int, ...]
    tag: str
    op: str
    size_from: int  # a power of two, in bytes
    count: int
    bus_bw: float | None  # sum of bus bytes / sum of transfers, bytes per second
    peers_bus_bw: float | None  # median of the other groups; null where there is none
    ratio: float | None  # bus_bw / peers_bus_bw
    excess_ns: float | None  # what its transfers take longer than at the peers' rate, a step
    is_slow: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What everything is a share of."""

    count: int
    ns: float | None  # mean


@dataclass(frozen=True, slots=True)
class Found:
    """A link with the collectives that it is measured by."""

    link: Link
    meetings: Ints
    excess: Floats  # of each: what its transfer takes longer than at peers' rate


@dataclass(frozen=True, slots=True)
class _Classes:
    """Collectives by class and group; columns of `keys` and `parts` go together."""

    keys: Ints  # rows: tag, op, power of two of the size, ranks of the group, label
    parts: list[Ints]  # the collectives of each
    bus: Ints  # bytes of each collective: of the member that moves the most
    per_byte: Floats  # ns, of each class and group; NaN where it cannot be told

    @classmethod
    def of(cls, events: Events, meetings: Meetings) -> Self:
        """The collectives of known sizes."""
        one = meetings.row[meetings.first]
        bus = meetings.largest(events.bus_bytes)
        power = size_class(meetings.largest(events.bytes))
        rated = np.flatnonzero((bus > 0) & (power >= 0))
        tag, op, size, label = (
            np.asarray(column[one][rated], np.int64)
            for column in (events.tag, events.op, events.group_size, events.group)
        )
        keys, place = classes(tag, op, power[rated], size, label)
        count = keys.shape[1]
        moved, took = (sums(place, each[rated], count) for each in (bus, meetings.transfer))
        return cls(
            keys=keys,
            parts=[rated[rows] for rows in members(place, count)],
            bus=bus,
            per_byte=np.where(took > 0, took / np.maximum(moved, 1), np.nan),
        )

    def peers(self) -> list[Ints]:
        """Columns of the same class, which differ in the group alone; they lie together."""
        _, kind = classes(*self.keys[:-1])
        edges = np.flatnonzero(np.diff(kind)) + 1
        return np.split(np.arange(len(kind)), edges) if len(kind) else []


def links(
    events: Events, meetings: Meetings, groups: Mapping[Label, Group], step: Step
) -> tuple[Found, ...]:
    """A row a group and class of collectives, by tag, operation, size and ranks."""
    by_class, found = _Classes.of(events, meetings), []
    for columns in by_class.peers():
        rates = by_class.per_byte[columns]
        apart = {index for index, _, _ in above_peers(rates, 0.0)}
        for index, column in enumerate(columns.tolist()):
            own = by_class.parts[column]
            peers = _median_of_others(rates, index)
            excess = meetings.transfer[own] - by_class.bus[own] * peers
            about = groups.get(int(by_class.keys[-1, column]))
            link = Link(
                group=about.description if about else None,
                ranks=_members(events, meetings, own, about),
                **_names(by_class.keys[:, column]),
                count=len(own),
                **_rates(float(rates[index]), peers),
                excess_ns=None if np.isnan(peers) else float(excess.sum()) / step.count,
                is_slow=index in apart and _is_slow(rates[index], peers, excess, step),
            )
            found.append(Found(link=link, meetings=own, excess=excess))
    return tuple(sorted(found, key=_order))


def _is_slow(rate: float, peers: float, excess: Floats, step: Step) -> bool:
    longer = float(excess.sum()) / step.count
    return bool(peers / rate < SLOW) and longer > LEAST_EXCESS * (step.ns or 0.0)


def _order(found: Found) -> tuple[int, str, int, tuple[int, ...]]:
    link = found.link
    return TAGS.index(link.tag), link.op, link.size_from, link.ranks


def _names(key: Ints) -> dict[str, Any]:
    tag, op, power = key[:3].tolist()
    return {"tag": TAGS[tag], "op": OPS[op], "size_from": 1 << power}


def _rates(own: float, peers: float) -> dict[str, Any]:
    """Of ns a byte; null where one is not known."""
    return {
        "bus_bw": None if np.isnan(own) else NS / own,
        "peers_bus_bw": None if np.isnan(peers) else NS / peers,
        "ratio": None if np.isnan(peers) or np.isnan(own) else peers / own,
    }


def _median_of_others(values: Floats, index: int) -> float:
    others = np.delete(values, index)
    others = others[~np.isnan(others)]
    return float(np.median(others)) if len(others) else np.nan


def _members(
    events: Events, meetings: Meetings, own: Ints, about: Group | None
) -> tuple[int, ...]:
    if about and about.ranks:
        return about.ranks
    rows = meetings.row[meetings.edges[own[0]] : meetings.edges[own[0] + 1]]
    return tuple(sorted(events.rank[rows].tolist()))


def alone_excess(
    events: Events, meetings: Meetings, own: Ints, excess: Floats
) -> dict[int, float]:
    """By rank: what transfers took longer by while nothing else went on."""
    rows = np.concatenate(
        [np.arange(meetings.edges[each], meetings.edges[each + 1]) for each in own]
    )
    longer = np.repeat(excess, meetings.size[own])
    alone = events.alone[meetings.row[rows]]
    cost = np.clip(np.where(alone == UNKNOWN, longer, np.minimum(longer, alone)), 0, None)
    ranks, place = np.unique(events.rank[meetings.row[rows]], return_inverse=True)
    sums = np.bincount(place, cost, len(ranks))
    return dict(zip(ranks.tolist(), sums.tolist(), strict=True))
