"""The nodes of ranks, and of the members of process groups.

A node is a host, or what is stated to be one: GPUs that share an NVLink network. `FoundNodes`
says why nodes are unknown, and what contradicts them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.trace.columns import alike, filled, lookup
from fastcomm.trace.run import ranges
from fastcomm_kernels.arrays import NONE, Ints

NetworkLevel = Literal["node", "network"]
LEVELS: tuple[NetworkLevel, ...] = ("node", "network")
BOTH = "both"
# Hosts with so many times fewer ranks than the cluster has GPUs a node may be parts of a node.
_FEWER = 4

NO_NODES = (
    "no trace names its host: pass --gpus-per-node, or --cluster, and ranks fill nodes in order"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is stated about nodes; None is unknown. Bandwidths are of a GPU, bytes per second.

    `gpus_per_node` goes before the traces' names of hosts, that of the cluster behind them.
    """

    gpus_per_node: int | None = None
    cluster_gpus: int | None = None  # of a node of the cluster
    limits: Mapping[NetworkLevel, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """A node, and those of its ranks that were read."""

    node: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNodes:
    """The node of each rank: by a table, or `per_node` ranks on each, in order."""

    by: Literal["hosts", "gpus_per_node", "cluster"]
    ranks: Ints  # that were read, sorted
    table: Ints  # node of each of them
    per_node: int | None
    is_single: bool  # whether the whole job is on one node

    def of(self, ranks: Ints) -> Ints:
        """Return the node of each rank; NONE if unknown."""
        if self.per_node is not None:
            return np.where(ranks < 0, NONE, ranks // self.per_node)
        place = lookup(self.ranks, ranks)
        return np.where(place >= 0, self.table[place], NONE)

    def members(self) -> tuple[NodeRanks, ...]:
        """Return the nodes of the ranks that were read."""
        return tuple(
            NodeRanks(node=node, ranks=tuple(self.ranks[self.table == node].tolist()))
            for node in np.unique(self.table).tolist()
        )


class FoundNodes(NamedTuple):
    """Nodes, or why they are unknown; and what contradicts them."""

    nodes: ClusterNodes | None
    unknown: str | None = None
    warnings: tuple[str, ...] = ()


def find_nodes(
    hosts: Mapping[int, str | None], facts: NodeFacts, world_size: int | None
) -> FoundNodes:
    """Find the node of each rank.

    Parameters
    ----------
    hosts
        What tells the host of each rank that was read; None if its trace names none.
    facts
        What is stated about nodes.
    world_size
        Number of ranks of the job; None if unknown.

    """
    ranks = np.array(sorted(hosts), np.int64)
    numbers: dict[str | None, int] = {}
    table = np.array([numbers.setdefault(hosts[rank], len(numbers)) for rank in ranks.tolist()])
    is_named = None not in numbers
    most = int(np.bincount(table).max()) if len(table) else 0
    if facts.gpus_per_node is not None:
        warnings = _contradictions(ranks, table, facts.gpus_per_node) if is_named else ()
        return FoundNodes(
            _filled(ranks, facts.gpus_per_node, "gpus_per_node", world_size), warnings=warnings
        )
    gpus = facts.cluster_gpus
    if is_named and len(ranks) and (gpus is None or most <= gpus):
        is_single = len(numbers) == 1 and world_size == len(ranks)
        nodes = ClusterNodes(
            by="hosts", ranks=ranks, table=table, per_node=None, is_single=is_single
        )
        return FoundNodes(nodes, warnings=_finer(len(numbers), most, gpus))
    if gpus is not None:
        warnings = (_too_many(most, gpus),) if is_named else ()
        return FoundNodes(_filled(ranks, gpus, "cluster", world_size), warnings=warnings)
    named = [rank for rank, host in hosts.items() if host is not None]
    if not named:
        return FoundNodes(None, NO_NODES)
    without = sorted(set(hosts).difference(named))
    return FoundNodes(
        None, f"rank {ranges(without)} names no host: pass --cluster or --gpus-per-node"
    )


def _filled(
    ranks: Ints,
    per_node: int,
    by: Literal["gpus_per_node", "cluster"],
    world_size: int | None,
) -> ClusterNodes:
    """Return nodes that ranks fill in order."""
    is_single = world_size is not None and world_size <= per_node
    return ClusterNodes(
        by=by, ranks=ranks, table=ranks // per_node, per_node=per_node, is_single=is_single
    )


def _contradictions(ranks: Ints, hosts: Ints, per_node: int) -> tuple[str, ...]:
    """Return a warning if ranks of one host are on several nodes of `per_node` GPUs."""
    pairs = np.unique(np.stack([hosts, ranks // per_node]), axis=1)
    if pairs.shape[1] == len(np.unique(hosts)):
        return ()
    return (
        f"the traces name one host for ranks of several nodes of {per_node} GPUs; "
        "--gpus-per-node is used for traffic by node",
    )


def _too_many(most: int, gpus: int) -> str:
    """Return the warning on hosts with more ranks than a node of the cluster has GPUs."""
    return (
        f"the traces name one host for {most} ranks, but a node of the cluster has {gpus} "
        "GPUs: ranks fill nodes in order"
    )


def _finer(hosts: int, most: int, gpus: int | None) -> tuple[str, ...]:
    """Return a warning if a node of the cluster may have several of the hosts."""
    if hosts == 1 or gpus is None or most * _FEWER >= gpus:
        return ()
    return (
        f"hosts have at most {most} ranks, nodes of the cluster {gpus} GPUs: each host is "
        f"taken as a node. If its hosts share one NVLink network, pass --gpus-per-node {gpus}",
    )


@dataclass(frozen=True, slots=True)
class GroupNodes:
    """Nodes of process groups. A *site* is a node of a group; sites are sorted by group, node.

    The last group and the last site stand for unknown ones, so that NONE is a valid index.
    """

    label: Ints
    size: Ints  # number of ranks
    is_known: NDArray[np.bool_]  # whether the nodes of all members are known
    first: Ints  # first site of each group, then the number of sites
    node: Ints  # of each site
    ranks: Ints  # number of ranks of each site
    code: Ints  # of each site, ascending
    nodes: int  # above every node number

    @classmethod
    def of(cls, members: pa.Table, nodes: ClusterNodes) -> Self:
        """Find the nodes of the groups in `Partial.members`."""
        lists = members["ranks"].combine_chunks()
        size = filled(lists.value_lengths(), 0)
        group = np.repeat(np.arange(len(size)), size)
        node = nodes.of(lists.flatten().to_numpy().astype(np.int64))
        site, place = alike(group, node)
        is_known = size > 0
        is_known[group[node < 0]] = False
        count = int(node.max(initial=0)) + 1
        return cls(
            label=members["group"].to_numpy(),
            size=np.append(size, 1),
            is_known=np.append(is_known, False),
            first=np.searchsorted(group[site], np.arange(len(size) + 2)),
            node=np.append(node[site], NONE),
            ranks=np.append(np.bincount(place, minlength=len(site)), 1),
            code=group[site] * (count + 1) + node[site],
            nodes=count,
        )

    def sites(self, group: Ints, node: Ints) -> Ints:
        """Return the site of each pair of a group's index and a node; NONE if there is none."""
        code = group * (self.nodes + 1) + node
        is_valid = (group >= 0) & (node >= 0) & (node < self.nodes)
        return np.where(is_valid, lookup(self.code, code), NONE)

    @property
    def sites_each(self) -> Ints:
        """Number of nodes of each group."""
        return np.diff(self.first)

    def levels(self) -> list[str | None]:
        """Return the level of each group: "node", "network" (one rank a node) or "both"."""
        names = np.where(
            self.sites_each == 1,
            "node",
            np.where(self.sites_each == self.size, "network", BOTH),
        )
        return [
            str(name) if is_known else None
            for name, is_known in zip(names, self.is_known, strict=True)
        ]


def group_levels(groups: pa.Table, members: pa.Table, nodes: ClusterNodes | None) -> pa.Array:
    """Return the level of each row of `Partial.groups`: null if unknown."""
    if nodes is None:
        return pa.nulls(groups.num_rows, pa.string())
    sites = GroupNodes.of(members, nodes)
    levels = np.array(sites.levels(), object)
    of_row = levels[lookup(sites.label, filled(groups["group"]))]
    of_row[filled(groups["size"]) == 1] = "node"
    return pa.array(of_row, pa.string())


def joined_levels(levels: Sequence[str | None]) -> str | None:
    """Return the level of several groups together; None if that of one is unknown."""
    distinct = set(levels)
    if None in distinct or not distinct:
        return None
    return distinct.pop() if len(distinct) == 1 else BOTH
