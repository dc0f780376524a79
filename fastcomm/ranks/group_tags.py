"""One parallelism for the operations of each process group, from the tags on all its ranks.

A rank is tagged from its own trace alone, and members of one group may do different things: one
computes nothing, another lost its all-to-alls. Evidence decides in the order of `TAG_SOURCES`:
what the user states before descriptions, ranks and guesses. Of different descriptions, which
one name of frameworks can stand for, the exchange of experts counts: a rank without it recorded
none. Of different guesses, that of most ranks counts. Statements of the user, or of the layout,
that contradict each other stay as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.ranks.clocks import labels
from fastcomm.trace.columns import alike, filled
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.schema import TAG_SOURCES
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NONE, NULL, Ints

_SOURCE = {name: number for number, name in enumerate(TAG_SOURCES)}
# Tags of operations on ranks: a row per rank, group, operation and tag.
TAGGED_OPS = pa.schema(
    [
        pa.field("rank", pa.int64()),
        pa.field("group", pa.int64()),  # `clocks.labels` by description
        pa.field("op", pa.int64()),  # index of OPS; NONE: the group as a whole
        pa.field("tag", pa.int64()),
        pa.field("source", pa.int64()),  # index of TAG_SOURCES
        pa.field("events", pa.int64()),  # number
    ]
)


@dataclass(frozen=True, slots=True)
class _Vote:
    """What the ranks with one tag have: the best source, their number, and that of events."""

    tag: int
    source: int
    ranks: int
    events: int


GroupTags = Mapping[tuple[int, int], tuple[int, int]]  # (group, op): (tag, source)


def tagged_ops(trace: Trace) -> pa.Table:
    """Return the tags of the operations of a rank's groups, `TAGGED_OPS`."""
    label = filled(pa.array(labels(trace.groups, by_description=True), pa.int64()))
    place = filled(trace.comm["group"])
    columns = (trace.comm[name].to_numpy() for name in ("op", "tag", "tag_source"))
    kinds = [np.append(label, NULL)[np.where(place == NULL, len(label), place)], *columns]
    first, kind = alike(*kinds)
    of_groups = (trace.groups[name].to_numpy() for name in ("tag", "tag_source"))
    pairs = zip(
        (*(column[first] for column in kinds), np.bincount(kind, minlength=len(first))),
        (
            label,
            np.full(len(label), NONE),
            *of_groups,
            np.bincount(place[place != NULL], minlength=len(label)),
        ),
        strict=True,
    )
    group, *rest = (np.concatenate(pair) for pair in pairs)
    return table_of_tags(np.full(len(group), trace.meta.rank), group, *rest)


def table_of_tags(
    rank: Ints, group: Ints, op: Ints, tag: Ints, source: Ints, events: Ints
) -> pa.Table:
    """Return a table of `TAGGED_OPS`, without rows of unknown groups or without events."""
    used = (group != NULL) & (events > 0)
    columns = (rank, group, op, tag, source, events)
    return pa.table([column[used].astype(np.int64) for column in columns], schema=TAGGED_OPS)


def agreed(rows: pa.Table) -> GroupTags:
    """Return one tag and source for each group and operation on which ranks differ.

    `rows` are `TAGGED_OPS` of all ranks. Operations with several tags on one rank are of
    several purposes, and are left out.
    """
    kinds = rows.group_by(["group", "op"]).aggregate([("tag", "min"), ("tag", "max")])
    divided = kinds.filter(pc.not_equal(kinds["tag_min"], kinds["tag_max"]))
    if not divided.num_rows:
        return {}
    own = rows.join(divided.select(["group", "op"]), ["group", "op"], join_type="left semi")
    by_key: dict[tuple[int, int], list[dict[str, int]]] = {}
    for row in own.to_pylist():
        by_key.setdefault((row["group"], row["op"]), []).append(row)
    decided = {key: _decided(of_key) for key, of_key in by_key.items()}
    return {key: tag for key, tag in decided.items() if tag is not None}


def _decided(rows: Sequence[Mapping[str, int]]) -> tuple[int, int] | None:
    """Return the tag and source that all ranks get; None if nothing decides."""
    if len({row["rank"] for row in rows}) < len(rows):
        return None
    votes = [_vote(tag, rows) for tag in sorted({row["tag"] for row in rows})]
    best = min(vote.source for vote in votes)
    strongest = [vote for vote in votes if vote.source == best]
    if len(strongest) == 1:
        return strongest[0].tag, best
    if best == _SOURCE["description"]:
        tags = {vote.tag for vote in strongest}
        return (TAG["EP"], best) if TAG["EP"] in tags else None
    if best != _SOURCE["heuristic"]:
        return None
    return max(strongest, key=lambda vote: (vote.ranks, vote.events, -vote.tag)).tag, best


def _vote(tag: int, rows: Iterable[Mapping[str, int]]) -> _Vote:
    """Sum up the ranks with a tag."""
    own = [row for row in rows if row["tag"] == tag]
    source = min(row["source"] for row in own)
    # The group of all ranks is OTHER by its description where nothing tells more.
    is_open = tag == TAG["OTHER"] and source != _SOURCE["explicit"]
    return _Vote(
        tag=tag,
        source=_SOURCE["none"] if is_open else source,
        ranks=len(own),
        events=sum(row["events"] for row in own),
    )


def with_tags(trace: Trace, tags: GroupTags) -> Trace:
    """Return a rank's trace with the tags on which the ranks of its groups agreed."""
    label = list(labels(trace.groups, by_description=True))
    if not tags or not {group for group, _ in tags}.intersection(label):
        return trace
    comm, place = trace.comm, filled(trace.comm["group"])
    tag, source = (comm[name].to_numpy().copy() for name in ("tag", "tag_source"))
    op = comm["op"].to_numpy()
    whole = [trace.groups[name].to_numpy().copy() for name in ("tag", "tag_source")]
    for (group, of_op), (new_tag, new_source) in tags.items():
        places = [at for at, own in enumerate(label) if own == group]
        rows = np.isin(place, places)
        if of_op == NONE:
            whole[0][places], whole[1][places] = new_tag, new_source
            # Of an operation that no rank knows.
            rows &= (tag == TAG["OTHER"]) & (source != _SOURCE["explicit"])
        else:
            rows &= op == of_op
        tag[rows], source[rows] = new_tag, new_source
    return replace(
        trace,
        comm=_replaced(comm, tag, source),
        groups=_replaced(trace.groups, *whole),
    )


def _replaced(table: pa.Table, tag: Ints, source: Ints) -> pa.Table:
    """Return a table of communication or groups with other tags."""
    for name, column in (("tag", tag), ("tag_source", source)):
        at = table.column_names.index(name)
        table = table.set_column(at, table.schema.field(name), pa.array(column))
    return table
