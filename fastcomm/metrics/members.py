"""Who is in which group, over all ranks, and in which stage of the pipeline."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

Label = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One process group, as its first rank describes it."""

    label: Label
    description: str | None
    tag: str
    size: int | None
    ranks: tuple[int, ...] | None  # null where no trace names them


def by_label(groups: pa.Table) -> dict[Label, Group]:
    """The groups that more than one rank can be in."""
    table = groups.filter(groups["group"].is_valid())
    labels = table["group"].to_numpy()
    _, first = np.unique(labels, return_index=True)
    found = {}
    for row in table.take(pa.array(first)).to_pylist():
        found[row["group"]] = Group(
            label=row["group"],
            description=row["description"],
            tag=row["tag"],
            size=row["size"],
            ranks=tuple(row["ranks"]) if row["ranks"] else None,
        )
    return found


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
