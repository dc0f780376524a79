"""The communication of one rank, as what other ranks are compared with. Times are aligned."""

from collections.abc import Iterator
from dataclasses import dataclass

from fastcomm.trace.schema import OPS, TAGS
from fastcomm.trace.trace import Trace
from fastcomm_kernels.graph import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What is said of the group that communicates."""

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
    tag: str
    root: int | None  # global rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One operation of one group, on all ranks that were read."""

    members: tuple[Part, ...]
    # By member: the members, itself among them, before whose starts it cannot end.
    waits_for: tuple[tuple[int, ...], ...]
    is_whole: bool  # no participant is missing


_COLUMNS = ("event", "op", "start", "stop", "group", "tag", "root")


def parts(rank: int, trace: Trace, rows: Column, ahead: int) -> Iterator[Part]:
    """These rows of the rank's `comm`, all of known groups.

    `ahead` is by how many ns the rank's clock is ahead.
    """
    groups = [_about(row) for row in trace.groups.to_pylist()]
    table = trace.comm.select(_COLUMNS).take(rows)
    columns = [table[name].to_pylist() for name in _COLUMNS]
    for row, op, start, stop, group, tag, root in zip(*columns, strict=True):
        yield Part(
            rank=rank,
            row=row,
            op=OPS[op],
            start=start - ahead,
            stop=stop - ahead,
            group=groups[group],
            tag=TAGS[tag],
            root=root,
        )


def _about(row: dict[str, object]) -> About:
    ranks = row["ranks"]
    members = tuple(ranks) if isinstance(ranks, list) else ()
    size = row["size"]
    return About(
        label=str(row["description"] or row["name"] or members),
        size=size if isinstance(size, int) else None,
    )
