"""Who is in which group, over all ranks, and in which stage of the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.metrics import ungrouped
from fastcomm.metrics.classes import members

Label = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One process group, as its first rank describes it."""

    label: Label
    description: str | None
    tag: str
    size: int | None
    ranks: tuple[int, ...] | None  # null where no trace names them
    seen: tuple[int, ...]  # ranks that have it


def by_label(groups: pa.Table, who: pa.Table) -> dict[Label, Group]:
    """The groups that more than one rank can be in; `who` is `membership.members`."""
    ranks = dict(zip(who["group"].to_pylist(), who["ranks"].to_pylist(), strict=True))
    table = groups.filter(groups["group"].is_valid())
    labels, order = np.unique(table["group"].to_numpy(), return_inverse=True)
    rows = members(order, len(labels))
    rank, found = table["rank"].to_numpy(), {}
    chosen = table.take(pa.array([own[0] for own in rows], pa.int64()))
    for row, own in zip(chosen.to_pylist(), rows, strict=True):
        found[row["group"]] = Group(
            label=row["group"],
            description=row["description"],
            tag=row["tag"],
            size=row["size"],
            ranks=tuple(ranks[row["group"]] or ()) or None,
            seen=tuple(np.unique(rank[own]).tolist()),
        )
    return found


def of_all_ranks(ranks: Sequence[int]) -> dict[Label, Group]:
    """Return the group that stands for all ranks, of collectives matched without a group."""
    group = Group(
        label=ungrouped.GROUP,
        description=None,
        tag="OTHER",
        size=len(ranks),
        ranks=tuple(ranks),
        seen=tuple(ranks),
    )
    return {group.label: group}


def of_rank(groups: pa.Table, rank: int) -> set[Label]:
    """The labels of a rank's groups that more than one rank can be in."""
    own = groups.filter(pa.array(groups["rank"].to_numpy() == rank))
    return set(own["group"].drop_null().to_pylist())


def stages(groups: dict[Label, Group]) -> dict[int, int]:
    """The pipeline stage of each rank that is in a group of tag PP: its place there.

    Of groups of several sizes the largest count: a pipeline has groups of its two ends, too.
    """
    pipelines = [each for each in groups.values() if each.tag == "PP" and each.ranks]
    longest = max((len(each.ranks or ()) for each in pipelines), default=0)
    return {
        rank: place
        for each in pipelines
        if each.ranks and len(each.ranks) == longest
        for place, rank in enumerate(each.ranks)
    }
