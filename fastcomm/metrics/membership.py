"""The process groups of ranks in words, and how often each communicates."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fastcomm.metrics.stack import Stack
from fastcomm.trace.schema import TAG_SOURCES, TAGS

_TAGS, _SOURCES = pa.array(TAGS), pa.array(TAG_SOURCES)


def rows(stack: Stack, labels: Sequence[int | None]) -> pa.Table:
    """One row a process group; `labels` are what `clocks.labels` says of them as described."""
    groups = stack.groups
    candidates = [
        "/".join(TAGS[tag] for tag in fits) for fits in groups["candidates"].to_pylist()
    ]
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
            "candidates": pa.array(candidates, pa.string()),
            "events": np.bincount(used, minlength=groups.num_rows),
        }
    )


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
