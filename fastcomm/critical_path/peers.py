"""Durations of work as on its peers: what a rank or a link would take if it were healthy.

Durations are weights of edges of a joined graph, in ns.
"""

from collections.abc import Collection
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.critical_path.path import FoundPath
from fastcomm.errors import ConfigError
from fastcomm.graph.edits import Edit
from fastcomm.graph.graph import EDGE_KIND
from fastcomm.trace.columns import (
    alike,
    block_lengths,
    block_starts,
    filled,
    members,
    text_codes,
)
from fastcomm.units import percent
from fastcomm_kernels.arrays import NONE, Flags, Floats, Ints, Numbers

# Where one rank has most of the work in common, those with about as much are peers, too.
_ALIKE = 0.99
_KINDS = ("operator", "dependency", "launch", "kernel_kernel", "sync", "inferred")


class OwnedEdges:
    """The graph of a step, the events that own its edges, and its transfers."""

    def __init__(self, critical: FoundPath) -> None:
        """Number the events that own an edge."""
        self.critical = critical
        self.rows, self.owner = np.unique(critical.graph.owner, return_inverse=True)

    @cached_property
    def events(self) -> pa.Table:
        """Columns `rules.EVENT` of the events that own an edge; the first row may be null."""
        return self.critical.events.describe(self.rows)

    @cached_property
    def own(self) -> Flags:
        """Which edges are the duration of an event."""
        graph = self.critical.graph
        flags: Flags = (graph.kind == EDGE_KIND["operator"]) & (graph.owner != NONE)
        return flags

    @cached_property
    def arrival(self) -> Numbers:
        """By edge: for a transfer the node of the last arrival, else NONE."""
        graph = self.critical.graph
        at = np.where(self.own & graph.is_join[graph.source], graph.source, NONE)
        return at.astype(np.int32)

    @cached_property
    def rank(self) -> Ints:
        """Rank of each edge's target."""
        ranks = np.array(self.critical.ranks, np.int64)
        return ranks[self.critical.across.rank_of[self.critical.graph.target]]

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """Ranks of each matched collective or message, by the node of the last arrival."""
        graph = self.critical.graph
        joins = np.flatnonzero(graph.kind == EDGE_KIND["join"])
        transfers = np.flatnonzero(self.arrival != NONE)
        ranks = np.array(self.critical.ranks, np.int64)
        rank = np.append(
            ranks[self.critical.across.rank_of[graph.source[joins]]], self.rank[transfers]
        )
        node = np.append(graph.target[joins], self.arrival[transfers])
        members: dict[int, list[int]] = {}
        for at, number in np.unique(np.stack([node, rank], axis=1), axis=0).tolist():
            members.setdefault(at, []).append(number)
        return {at: tuple(numbers) for at, numbers in members.items()}

    @cached_property
    def transfer_keys(self) -> Ints:
        """By edge: transfers with equal numbers have one operation, parallelism and size."""
        rows = pa.array(self.owner)
        names = [text_codes(self.events[name].take(rows)) for name in ("op", "tag")]
        size = filled(self.events["bus_bytes"], NONE)[self.owner]
        count = np.array([len(self.members.get(at, ())) for at in self.arrival.tolist()])
        return alike(*names, size, count)[1]

    @cached_property
    def stage(self) -> dict[int, int]:
        """Pipeline stage of each rank: its place among the ranks that messages of PP join.

        Empty without such messages, or if ranks of the job are missing, whose places they are.
        """
        from scipy.sparse import coo_array  # a slow import, and few runs have messages
        from scipy.sparse.csgraph import connected_components

        ranks = np.array(self.critical.ranks, np.int64)
        is_pp = filled(pc.equal(self.events["tag"], "PP"), 0).astype(np.bool_)[self.owner]
        transfers = np.flatnonzero(is_pp & (self.arrival != NONE))
        if not len(transfers) or len(ranks) < self.critical.across.expected_ranks:
            return {}
        graph = self.critical.graph
        is_join = graph.kind == EDGE_KIND["join"]
        joins = np.flatnonzero(is_join & np.isin(graph.target, self.arrival[transfers]))
        node = np.append(graph.target[joins], self.arrival[transfers])
        target = graph.target[transfers]
        place = self.critical.across.rank_of[np.append(graph.source[joins], target)]
        shape = (len(ranks), len(graph.event))
        takes_part = coo_array((np.ones(len(node), np.int64), (place, node)), shape)
        count, number = connected_components(takes_part @ takes_part.T, directed=False)
        pipelines = (np.sort(ranks[rows]) for rows in members(number, count))
        return {
            rank: place
            for one in pipelines
            for place, rank in enumerate(one.tolist())
            if len(one) > 1
        }

    def between(self, pair: Collection[int]) -> Ints:
        """Return the transfers in which all of some ranks take part, as edges."""
        nodes = [at for at, ranks in self.members.items() if set(pair) <= set(ranks)]
        return np.flatnonzero(np.isin(self.arrival, nodes) & (self.arrival != NONE))


def transfers(step: OwnedEdges, weight: Ints, edges: Ints, edit: Edit) -> Ints:
    """Return the times of transfers as in other groups: the median of equal operation and size.

    Parameters
    ----------
    step
        The step.
    weight
        Of all edges, ns.
    edges
        The transfers to heal.
    edit
        For the error.

    Raises
    ------
    ConfigError
        If no other group has such transfers.

    """
    others = np.setdiff1d(np.flatnonzero(step.arrival != NONE), edges)
    key = step.transfer_keys
    healed = _medians(key[others], weight[others], key[edges])
    if np.isnan(healed).all():
        raise ConfigError(
            f"{edit}: no other group has transfers of the same operation and size to compare"
        )
    weights: Ints = np.where(np.isnan(healed), weight[edges], healed).astype(np.int64)
    return weights


class _ComparedWork:
    """The work of a step whose counterparts on other ranks are known by name and order.

    Work corresponds if it has the same name and is the n-th of that name on its rank.
    """

    def __init__(self, step: OwnedEdges) -> None:
        """Number the work: `name` is equal where names are, `key` where also the order is."""
        graph = step.critical.graph
        is_used = np.isin(graph.kind, [EDGE_KIND[kind] for kind in _KINDS])
        self.edges = np.flatnonzero(is_used & (step.arrival == NONE))
        self.rank = step.rank[self.edges]
        names = text_codes(step.events["name"])
        behind = graph.event[graph.target[self.edges]]
        place = np.searchsorted(step.rows, behind).clip(max=len(step.rows) - 1)
        behind_name = np.where(step.rows[place] == behind, names[place], NONE)
        is_end = graph.is_end[graph.target[self.edges]].astype(np.int8)
        own_name = names[step.owner[self.edges]]
        _, self.name = alike(graph.kind[self.edges], own_name, behind_name, is_end)
        _, self.key = alike(self.name, _occurrence(self.name, self.rank))

    def peers(self, number: int, healed: Collection[int]) -> list[int]:
        """Return the ranks that have most of the work of a rank, without those to heal."""
        same = np.isin(self.key, self.key[self.rank == number])
        common = {
            other: int((same & (self.rank == other)).sum())
            for other in np.unique(self.rank).tolist()
            if other not in healed
        }
        most = max(common.values(), default=0)
        peers = [other for other, count in common.items() if most and count == most]
        if len(peers) == 1:
            peers = [other for other, count in common.items() if count >= _ALIKE * most]
        return peers


def of_ranks(
    step: OwnedEdges, weight: Ints, healed: Collection[int], edit: Edit
) -> tuple[Ints, Ints]:
    """Return the edges of ranks that their peers have, and the median of the peers' weights.

    Peers are the other ranks that have most of the work of a rank. Transfers stay.

    Parameters
    ----------
    step
        The step.
    weight
        Of all edges, ns.
    healed
        Numbers of the ranks.
    edit
        For the error.

    Raises
    ------
    ConfigError
        If no other rank has the same work.

    """
    work = _ComparedWork(step)
    changed, weights = [], []
    for number in healed:
        peers = work.peers(number, healed)
        if not peers:
            raise ConfigError(f"{edit}: no other rank has the work of rank {number} to compare")
        own = np.flatnonzero(work.rank == number)
        of_peers = np.flatnonzero(np.isin(work.rank, peers))
        medians = _medians(work.key[of_peers], weight[work.edges[of_peers]], work.key[own])
        is_known = ~np.isnan(medians)
        changed.append(work.edges[own[is_known]])
        weights.append(medians[is_known].astype(np.int64))
    return np.concatenate(changed), np.concatenate(weights)


def of_stages(
    step: OwnedEdges, weight: Ints, healed: Collection[int], edit: Edit
) -> tuple[Ints, Ints]:
    """Return the edges of whole stages that other stages have, and the weights of these.

    A weight is the median of all ranks of the other stages. What a stage does more often than
    most of them takes no time; what no other stage does, such as the head, stays.

    Parameters
    ----------
    step
        The step.
    weight
        Of all edges, ns.
    healed
        Numbers of the ranks of the stages.
    edit
        For the error.

    Raises
    ------
    ConfigError
        If no other stage is there, or less than half of the time of a stage is in work that
        others have.

    """
    work = _ComparedWork(step)
    own = np.flatnonzero(np.isin(work.rank, [*healed]))
    others = np.setdiff1d(np.arange(len(work.edges)), own)
    if not len(others):
        raise ConfigError(f"{edit}: there is no other stage to compare")
    key, name = work.key[others], work.name[others]
    medians = _medians(key, weight[work.edges[others]], work.key[own])
    in_order = np.sort(key)
    low, high = (np.searchsorted(in_order, work.key[own], side) for side in ("left", "right"))
    ranks_with = high - low
    is_rare = 2 * ranks_with < len(np.unique(work.rank[others]))
    is_shared = np.isin(work.name[own], name)
    edges = work.edges[own]
    took = weight[edges] * (
        step.own[edges] & step.critical.on_device[step.critical.graph.target[edges]]
    )
    if 2 * took[is_shared].sum() < took.sum():
        share = 1 - took[is_shared].sum() / took.sum()
        raise ConfigError(
            f"{edit}: other stages have other work: {percent(share)} of the device time of "
            "this one is in kernels that no other stage has"
        )
    weights = np.where(is_rare, 0.0, medians)[is_shared]
    return edges[is_shared], weights.astype(np.int64)


def _occurrence(key: Ints, rank: Ints) -> Ints:
    """Return how many earlier rows have the same key and rank; rows are in order of time."""
    order = np.lexsort((key, rank))
    begin = block_starts(key[order], rank[order])
    length = block_lengths(begin, len(key))
    count = np.empty(len(key), np.int64)
    count[order] = np.arange(len(key)) - np.repeat(begin, length)
    return count


def _medians(key: Ints, values: Ints, selected: Ints) -> Floats:
    """Return the median of the values of each selected key; NaN for a key without values."""
    order = np.lexsort((values, key))
    sorted_key, sorted_values = key[order], values[order]
    first = np.searchsorted(sorted_key, selected, "left")
    last = np.searchsorted(sorted_key, selected, "right")
    medians = np.full(len(selected), np.nan)
    has = last > first
    low, high = (first + last - 1) // 2, (first + last) // 2
    medians[has] = (sorted_values[low[has]] + sorted_values[high[has]]) / 2
    return medians


_SLOW_LINK = 1.2  # times the usual transfer, from which on a group is a suspect


def slow_links(step: OwnedEdges, weight: Ints) -> list[tuple[int, int]]:
    """Return two ranks of each group whose transfers take longer than in other groups.

    A group is listed if the median of its transfers, relative to the median of all transfers of
    equal operation, parallelism and size, is 1.2 or more; the slowest comes first.
    """
    edges = np.flatnonzero((step.arrival != NONE) & (weight > 0))
    key = step.transfer_keys[edges]
    usual = np.maximum(_medians(key, weight[edges], key), 1)
    ratios: dict[tuple[int, ...], list[float]] = {}
    for at, ratio in zip(
        step.arrival[edges].tolist(), (weight[edges] / usual).tolist(), strict=True
    ):
        ratios.setdefault(step.members[at], []).append(ratio)
    slow = {ranks: float(np.median(values)) for ranks, values in ratios.items()}
    groups = sorted(slow, key=lambda ranks: (-slow[ranks], ranks))
    return [(ranks[0], ranks[-1]) for ranks in groups if slow[ranks] >= _SLOW_LINK]
