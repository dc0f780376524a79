"""The communication of one rank, as what other ranks are compared with. Times are aligned."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastcomm.trace.schema import OPS, TAGS
from fastcomm.trace.trace import Trace
from fastcomm_kernels.graph import Flags

# What is the same for a group on all of its members: its ranks, or else its names.
GroupKey = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is said of the group that communicates."""

    key: GroupKey
    label: str
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part in an operation of a group; start and stop on the first rank's clock."""

    rank: int
    row: int  # of the rank's events
    op: str
    start: int
    stop: int
    group: About
    seq: int | None
    tag: str
    payload: int | None
    root: int | None  # global ranks, as the peers
    sends_to: tuple[int, ...] | None  # None: unknown
    receives_from: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One operation of one group, on all ranks that were read."""

    members: tuple[Part, ...]
    # By member: the members, itself among them, before whose starts it cannot end.
    waits_for: tuple[tuple[int, ...], ...]
    is_whole: bool  # no participant is missing


_COLUMNS = (
    *("event", "op", "start", "stop", "group", "seq", "tag", "payload_bytes"),
    *("root", "sends_to", "receives_from"),
)


def parts(rank: int, trace: Trace, inside: Flags, ahead: int) -> Iterator[Part]:
    """The communication of a known group; `inside` says which rows of `comm` count.

    `ahead` is by how many ns the rank's clock is ahead.
    """
    groups = [_about(row) for row in trace.groups.to_pylist()]
    table = trace.comm.select(_COLUMNS).take(np.flatnonzero(inside))
    columns = [table[name].to_pylist() for name in _COLUMNS]
    for row, op, start, stop, group, *said in zip(*columns, strict=True):
        if group is not None:
            seq, tag, payload, root, sends_to, receives_from = said
            yield Part(
                rank=rank,
                row=row,
                op=OPS[op],
                start=start - ahead,
                stop=stop - ahead,
                group=groups[group],
                seq=seq,
                tag=TAGS[tag],
                payload=payload,
                root=root,
                sends_to=None if sends_to is None else tuple(sends_to),
                receives_from=None if receives_from is None else tuple(receives_from),
            )


def _about(row: dict[str, object]) -> About:
    ranks = row["ranks"]
    members = tuple(ranks) if isinstance(ranks, list) else ()
    size = row["size"]
    return About(
        key=members or (row["name"], row["description"]),
        label=str(row["description"] or row["name"] or members),
        size=size if isinstance(size, int) else None,
    )
