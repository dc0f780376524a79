"""The process groups of ranks in words, how often each communicates, and for what."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.stack import Stack
from fastcomm.trace.alike import alike
from fastcomm.trace.schema import TAG_SOURCES, TAGS

Ints = NDArray[np.int64]

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
    group = comm["group"].fill_null(-1).to_numpy().astype(np.int64)
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
    place, rank = found["place"].fill_null(0).to_numpy(), found["rank"].to_numpy()
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
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[at] == asked, first[at], 0)


def _candidates(groups: pa.Table) -> pa.Array:
    """Return the tags that fit each group equally well, joined by "/"."""
    words = ["/".join(TAGS[tag] for tag in fits) for fits in groups["candidates"].to_pylist()]
    return pa.array(words, pa.string())


def members(stack: Stack, labels: Sequence[int | None]) -> pa.Table:
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
