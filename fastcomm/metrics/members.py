"""Members of process groups over all ranks, and their pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.metrics import ungrouped
from fastcomm.metrics.grouping import members
from fastcomm.metrics.view import Stack
from fastcomm.trace.columns import alike, filled, lookup
from fastcomm.trace.schema import TAG_SOURCES, TAGS
from fastcomm_kernels.arrays import Ints

_TAGS, _SOURCES = pa.array(TAGS), pa.array(TAG_SOURCES)


def rows(stack: Stack, labels: Sequence[int | None]) -> pa.Table:
    """One row a process group; `labels` are what `clocks.labels` says of them as described."""
    groups = stack.groups
    used = stack.comm["group"].drop_null().to_numpy()
    return pa.table(
        {
            "rank": stack.rank_of_group,
            "group": pa.array(labels, pa.int64()),
            "name": groups["name"],
            "description": groups["description"],
            "size": groups["size"],
            "tag": _TAGS.take(groups["tag"].combine_chunks()),
            "tag_source": _SOURCES.take(groups["tag_source"].combine_chunks()),
            "candidates": _candidates(groups),
            "events": np.bincount(used, minlength=groups.num_rows),
        }
    )


def tagged(stack: Stack) -> pa.Table:
    """Return a row for each rank, process group and tag of its events.

    Events of one group differ in their tag where it serves several parallelisms. `place` is the
    group's place among those of its rank in `rows`; null for events of no known group.
    """
    comm = stack.comm
    group = filled(comm["group"], -1)
    columns = (stack.rank_of_comm, group, comm["tag"].to_numpy(), comm["tag_source"].to_numpy())
    first, kind = alike(*columns)
    rank, group, tag, source = (column[first] for column in columns)
    place, known = group - _first_of(stack.rank_of_group, rank), group >= 0
    return pa.table(
        {
            "rank": rank,
            "place": pa.array(place, mask=~known),
            "tag": _TAGS.take(pa.array(tag)),
            "tag_source": _SOURCES.take(pa.array(source)),
            "events": np.bincount(kind, minlength=len(first)),
        }
    )


def described(found: pa.Table, groups: pa.Table) -> pa.Table:
    """Return the rows of `tagged` with what `rows` says of each group."""
    place, rank = filled(found["place"], 0), found["rank"].to_numpy()
    first = _first_of(groups["rank"].to_numpy(), rank)
    row = pa.array(
        first + place, mask=found["place"].combine_chunks().is_null().to_numpy(False)
    )
    for name in ("description", "size", "candidates"):
        column = groups[name].combine_chunks().take(row)
        found = found.append_column(
            name, column.fill_null("") if name == "candidates" else column
        )
    return found


def _first_of(ranks: Ints, asked: Ints) -> Ints:
    """Return the first row of each asked rank; 0 for a rank that has none."""
    known, first = np.unique(ranks, return_index=True)
    if not len(known):
        return np.zeros(len(asked), np.int64)
    place = lookup(known, asked)
    return np.where(place >= 0, first[place], 0)


def _candidates(groups: pa.Table) -> pa.Array:
    """Return the tags that fit each group equally well, joined by "/"."""
    words = ["/".join(TAGS[tag] for tag in fits) for fits in groups["candidates"].to_pylist()]
    return pa.array(words, pa.string())


def group_members(stack: Stack, labels: Sequence[int | None]) -> pa.Table:
    """The ranks of each process group that several can be in, as far as they are known.

    Once each, by label: every rank of a group of thousands says who they all are.
    """
    label = pa.array(labels, pa.int64())
    table = pa.table({"group": label, "ranks": stack.groups["ranks"]})
    return once([table.filter(label.is_valid())])


def once(tables: Sequence[pa.Table]) -> pa.Table:
    """The members of all groups of several such tables."""
    table = pa.concat_tables(tables).combine_chunks()
    _, first = np.unique(table["group"].to_numpy(), return_index=True)
    return table.take(pa.array(first))


Label = int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """One process group, as its first rank describes it."""

    label: Label
    description: str | None
    tag: str
    size: int | None
    ranks: tuple[int, ...] | None  # null where no trace names them
    seen: tuple[int, ...]  # ranks that have it


def by_label(groups: pa.Table, who: pa.Table) -> dict[Label, GroupSummary]:
    """The groups that more than one rank can be in; `who` is `group_members`."""
    ranks = dict(zip(who["group"].to_pylist(), who["ranks"].to_pylist(), strict=True))
    table = groups.filter(groups["group"].is_valid())
    labels, order = np.unique(table["group"].to_numpy(), return_inverse=True)
    rows = members(order, len(labels))
    rank, found = table["rank"].to_numpy(), {}
    chosen = table.take(pa.array([own[0] for own in rows], pa.int64()))
    for row, own in zip(chosen.to_pylist(), rows, strict=True):
        found[row["group"]] = GroupSummary(
            label=row["group"],
            description=row["description"],
            tag=row["tag"],
            size=row["size"],
            ranks=tuple(ranks[row["group"]] or ()) or None,
            seen=tuple(np.unique(rank[own]).tolist()),
        )
    return found


def of_all_ranks(ranks: Sequence[int]) -> dict[Label, GroupSummary]:
    """Return the group that stands for all ranks, of collectives matched without a group."""
    group = GroupSummary(
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


def stages(groups: dict[Label, GroupSummary]) -> dict[int, int]:
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
