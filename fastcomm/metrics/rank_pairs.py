"""Bytes that ranks send to ranks in all-to-alls, from recorded splits.

A trace records what each call sends to each member of its group, and receives from it. A pair
of ranks has what its sender recorded; if the sender was not read, what its receiver did. Bytes
of a rank to itself count, too: they stay on its device.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.rank_arrays import RankArrays, Stack
from fastcomm.metrics.step_counts import StepCounts
from fastcomm.trace.columns import alike, filled, nullable, sums
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import OP, SPLITS
from fastcomm_kernels.arrays import NULL, Floats, Ints

MOST_PAIRS = 4096  # in a result; the table has all
NO_EVENTS = "the run has no all-to-all"
NO_SPLITS = (
    "no trace has splits of its all-to-alls: PyTorch records them with record_shapes=True, "
    "and up to 30 ranks of a group"
)
_SCHEMA = pa.schema(
    [
        pa.field("rank", pa.int64()),
        pa.field("tag", pa.int8()),
        pa.field("peer", pa.int64()),  # null: events without splits
        pa.field("events", pa.int64()),
        pa.field("sent_bytes", pa.int64()),
        pa.field("received_bytes", pa.int64()),
    ]
)


def exchanged_by_rank(stack: Stack, arrays: RankArrays) -> pa.Table:
    """Sum up what the all-to-alls of ranks send to each rank, and receive from it.

    Returns
    -------
    pyarrow.Table
        Rows by `rank`, `tag` and `peer`, sorted by them: `events`, `sent_bytes` and
        `received_bytes`. Events without splits have a row without a peer.

    """
    comm = arrays.comm
    own = np.flatnonzero(comm.op == OP["AllToAll"])
    if not len(own):
        return _SCHEMA.empty_table()
    rank, tag = arrays.rank[comm.iteration[own]], comm.tag[own]
    row, peer, moved = _listed(stack, comm.row[own])
    without = np.setdiff1d(np.arange(len(own)), row)
    of = np.concatenate([row, without])
    peers = np.concatenate([peer, np.full(len(without), NULL)])
    none = np.zeros(len(without), np.int64)
    first, place = alike(rank[of], tag[of], peers)
    count = len(first)
    sent, received = (sums(place, np.concatenate([one, none]), count) for one in moved)
    return pa.table(
        [
            rank[of][first],
            tag[of][first],
            nullable(peers[first]),
            np.bincount(place, minlength=count),
            sent,
            received,
        ],
        schema=_SCHEMA,
    )


def _listed(stack: Stack, rows: Ints) -> tuple[Ints, Ints, tuple[Ints, Ints]]:
    """Return index in `rows`, member, and bytes sent and received, of each split.

    Rows are left out where the group's members or one of the lists are unknown.
    """
    lists = [stack.comm[name].combine_chunks().take(pa.array(rows)) for name in SPLITS]
    group = filled(stack.comm["group"])[rows]
    members = stack.groups["ranks"].combine_chunks()
    # A last entry without members, for groups that are unknown.
    lengths = np.append(filled(members.value_lengths(), 0), 0)
    start = np.cumsum(np.append(0, lengths[:-1]))
    group = np.where(group == NULL, len(lengths) - 1, group)
    sizes = [filled(one.value_lengths(), NULL) for one in lists]
    is_known = (sizes[0] == lengths[group]) & (sizes[1] == sizes[0]) & (sizes[0] > 0)
    own = np.flatnonzero(is_known)
    count = lengths[group[own]]
    inside = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    flat = members.flatten().to_numpy().astype(np.int64)
    moved = [filled(one.take(pa.array(own)).flatten(), 0).astype(np.int64) for one in lists]
    peer = flat[np.repeat(start[group[own]], count) + inside]
    return np.repeat(own, count), peer, (moved[0], moved[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPair:
    """What one rank sends to another in all-to-alls."""

    source: int
    target: int
    tag: str
    bytes: int  # of all steps
    bytes_per_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPairs:
    """What ranks send to ranks in all-to-alls; without splits, `unknown` says why."""

    unknown: str | None
    events: int  # all-to-alls, on all ranks
    events_without_splits: int
    fullest_rank: int | None = None  # which receives the most
    fullest_over_mean: float | None = None
    pair_count: int = 0
    pairs: tuple[RankPair, ...] = ()  # the first `MOST_PAIRS`, most bytes first

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {**asdict(self), "pairs": [asdict(pair) for pair in self.pairs]}


def rank_pairs(exchanged: pa.Table, steps: StepCounts | None) -> tuple[RankPairs, pa.Table]:
    """Return the bytes of pairs of ranks, and the table of all pairs.

    Parameters
    ----------
    exchanged
        Table of `exchanged_by_rank`, of all ranks.
    steps
        Numbers of steps; None if unknown.

    """
    peer, events = filled(exchanged["peer"]), exchanged["events"].to_numpy()
    without = int(events[peer == NULL].sum())
    columns = _pairs(exchanged)
    size = columns["bytes"]
    order = np.lexsort((columns["target"], columns["source"], -size))
    table = pa.table(
        {
            "source": columns["source"][order],
            "target": columns["target"][order],
            "tag": pa.array(TAGS).take(pa.array(columns["tag"][order])),
            "bytes": size[order],
            "bytes_per_step": pa.array(
                _per_step(columns, steps)[order], mask=np.full(len(size), steps is None)
            ),
        }
    )
    whole = _events(exchanged, peer, events)
    if not len(size):
        why = NO_SPLITS if whole else NO_EVENTS
        return RankPairs(unknown=why, events=whole, events_without_splits=without), table
    target, place = np.unique(columns["target"], return_inverse=True)
    received = sums(place, size, len(target))
    total = int(received.sum())
    return (
        RankPairs(
            unknown=None,
            events=whole,
            events_without_splits=without,
            fullest_rank=int(target[received.argmax()]),
            fullest_over_mean=int(received.max()) * len(target) / total if total else None,
            pair_count=len(size),
            pairs=tuple(RankPair(**row) for row in table.slice(0, MOST_PAIRS).to_pylist()),
        ),
        table,
    )


def _events(exchanged: pa.Table, peer: Ints, events: Ints) -> int:
    """Return the number of all-to-alls: those of a rank have a split for itself."""
    own = (peer == exchanged["rank"].to_numpy()) | (peer == NULL)
    return int(events[own].sum())


def _pairs(exchanged: pa.Table) -> Mapping[str, Ints]:
    """Return source, target, tag and bytes of each pair: by its sender, else its receiver."""
    peer = filled(exchanged["peer"])
    own = np.flatnonzero(peer != NULL)
    rank, tag, peer = exchanged["rank"].to_numpy()[own], _tags(exchanged)[own], peer[own]
    is_unread = ~np.isin(peer, rank)
    sent, received = (exchanged[name].to_numpy()[own] for name in SPLITS)
    return {
        "source": np.concatenate([rank, peer[is_unread]]),
        "target": np.concatenate([peer, rank[is_unread]]),
        "tag": np.concatenate([tag, tag[is_unread]]),
        "bytes": np.concatenate([sent, received[is_unread]]),
    }


def _per_step(pairs: Mapping[str, Ints], steps: StepCounts | None) -> Floats:
    """Return the bytes of each pair per step of the rank that recorded them."""
    if steps is None:
        return pairs["bytes"].astype(np.float64)
    source, target = pairs["source"], pairs["target"]
    recorder = np.where(np.isin(source, steps.ranks), source, target)
    return steps.per_step(recorder, pairs["bytes"])


def _tags(exchanged: pa.Table) -> NDArray[np.int64]:
    return np.asarray(exchanged["tag"].to_numpy(), np.int64)


def matrix(pairs: pa.Table) -> tuple[NDArray[np.float64], list[int]]:
    """Return bytes per step from rank to rank, and the ranks in order.

    `pairs` is the table of `rank_pairs`; where steps are unknown, bytes are of all.
    """
    source, target = (pairs[name].to_numpy() for name in ("source", "target"))
    ranks = np.unique(np.concatenate([source, target]))
    name = "bytes" if pairs["bytes_per_step"].null_count else "bytes_per_step"
    grid = np.zeros((len(ranks), len(ranks)))
    np.add.at(
        grid,
        (np.searchsorted(ranks, source), np.searchsorted(ranks, target)),
        pairs[name].to_numpy(),
    )
    return grid, ranks.tolist()
