"""Bytes and bandwidth by level of the network: inside nodes (NVLink) and between nodes (NIC).

A node is a host, or what is stated to be one: GPUs that share an NVLink network. `FoundNodes`
says why nodes are unknown, and what contradicts them.

What a rank sends are its bus bytes. Of an event in a group of g ranks, p of them on the rank's
own node, the other nodes get

- 1 / p in a ring or a chain (all-reduce, all-gather, reduce-scatter, broadcast, reduce), which
  visits each node once, and enters and leaves it by each of its GPUs in turn;
- (g - p) / (g - 1) in an all-to-all;
- all or nothing of a message, which counts at its sender.

The rest stays inside the node. Where members or nodes are unknown, nothing is divided.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.rank_arrays import RankArrays
from fastcomm.metrics.spill_files import NS
from fastcomm.metrics.step_counts import StepCounts
from fastcomm.trace.columns import alike, filled, lookup, nullable, sums
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run_traces import ranges
from fastcomm.trace.schema import OP, OPS
from fastcomm_kernels.arrays import NONE, NULL, Floats, Ints

NetworkLevel = Literal["node", "network"]
LEVELS: tuple[NetworkLevel, ...] = ("node", "network")
BOTH = "both"
# Hosts with so many times fewer ranks than the cluster has GPUs a node may be parts of a node.
_FEWER = 4
NO_NODES = (
    "no trace names its host: pass --gpus-per-node, or --cluster, and ranks fill nodes in order"
)
MOST_PAIRS = 64  # of nodes in a result; the table has all
# How operations send.
_RING, _EXCHANGE, _MESSAGE, _UNKNOWN, _NOTHING = range(5)
_KIND_OF_OP = np.full(len(OPS), _RING, np.int8)
_KIND_OF_OP[OP["AllToAll"]] = _EXCHANGE
_KIND_OF_OP[OP["SendRecv"]] = _MESSAGE
_KIND_OF_OP[OP["Barrier"]] = _NOTHING
# A root sends or receives other bytes than the rest.
_KIND_OF_OP[[OP["Gather"], OP["Scatter"], OP["OTHER"]]] = _UNKNOWN
NO_PAIRS = pa.table(
    {
        **dict.fromkeys(("source", "target", "events"), pa.array([], pa.int64())),
        **dict.fromkeys(("bytes_per_step", "bandwidth"), pa.array([], pa.float64())),
    }
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelUse:
    """Use of a level of the network by one parallelism, or by all."""

    level: NetworkLevel
    tag: str | None  # null: all parallelisms
    events: int  # that send over this level
    bytes_per_step_per_gpu: float | None
    bandwidth: float | None  # bytes over the level / durations of these events
    utilization: float | None  # share of the level's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePair:
    """What one node sends to another."""

    source: int
    target: int
    events: int
    bytes_per_step: float | None
    bandwidth: float | None  # of a GPU: bytes / durations of the events


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Traffic inside and between nodes; without nodes, `unknown` says why."""

    unknown: str | None
    nodes: tuple[NodeRanks, ...] = ()  # by number; of the ranks that were read
    nodes_by: Literal["hosts", "gpus_per_node", "cluster"] | None = None
    limits: Mapping[NetworkLevel, float | None]  # bytes/s of a GPU
    levels: tuple[LevelUse, ...] = ()
    undivided_events: int | None = None  # of unknown level
    undivided_bytes_per_step_per_gpu: float | None = None
    events_without_bytes: int | None = None
    pair_count: int = 0
    pairs: tuple[NodePair, ...] = ()  # the first `MOST_PAIRS`, most bytes first

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "unknown": self.unknown,
            "nodes": [{"node": node.node, "ranks": list(node.ranks)} for node in self.nodes],
            "nodes_by": self.nodes_by,
            "limits": {level: self.limits.get(level) for level in LEVELS},
            "levels": [asdict(use) for use in self.levels],
            "undivided_events": self.undivided_events,
            "undivided_bytes_per_step_per_gpu": self.undivided_bytes_per_step_per_gpu,
            "events_without_bytes": self.events_without_bytes,
            "node_pair_count": self.pair_count,
            "node_pairs": [asdict(pair) for pair in self.pairs],
        }


def sent_by_rank(arrays: RankArrays) -> pa.Table:
    """Sum up what ranks send, by parallelism, kind of operation, group and receiver.

    Messages that a rank receives, barriers and groups of one rank send nothing.

    Returns
    -------
    pyarrow.Table
        Columns `rank`, `tag`, `kind`, `group` and `partner` (null if unknown), sorted by them;
        `events`, and of these `unsized` of unknown bytes; `bytes`, and of events with a
        duration `rated_bytes` and `rated_ns`.

    """
    comm = arrays.comm
    kind = _KIND_OF_OP[comm.op]
    partner = np.where(kind == _MESSAGE, comm.partner, NULL)
    received = (partner != NULL) & ~comm.sends
    own = np.flatnonzero(~received & (kind != _NOTHING) & (comm.group_size != 1))
    rank = arrays.rank[comm.iteration[own]]
    first, place = alike(rank, comm.tag[own], kind[own], comm.group[own], partner[own])
    moved, took, count = comm.bus_bytes[own], comm.stop[own] - comm.start[own], len(first)
    size = np.where(moved == NULL, 0, moved)
    is_rated = (moved != NULL) & (took > 0)
    return pa.table(
        {
            "rank": rank[first],
            "tag": comm.tag[own][first],
            "kind": kind[own][first],
            "group": nullable(comm.group[own][first]),
            "partner": nullable(partner[own][first]),
            "events": np.bincount(place, minlength=count),
            "unsized": np.bincount(place[moved == NULL], minlength=count),
            "bytes": sums(place, size, count),
            "rated_bytes": sums(place, np.where(is_rated, size, 0), count),
            "rated_ns": sums(place, np.where(is_rated, took, 0), count),
        }
    )


@dataclass(frozen=True, slots=True)
class _Sent:
    """Rows of `sent_by_rank` with their places among nodes."""

    table: Mapping[str, Ints]
    group: Ints  # index in `GroupNodes`, NONE if unknown
    site: Ints  # of the sender in its group, NONE if unknown
    node: Ints  # of the sender
    target: Ints  # node of the receiver of a message, else NONE
    share: Floats  # that leaves the node; NaN if unknown

    @classmethod
    def of(cls, sent: pa.Table, nodes: ClusterNodes, groups: GroupNodes) -> Self:
        """Divide what ranks send between the levels."""
        table = {name: filled(sent[name]) for name in sent.column_names}
        kind, node = table["kind"], nodes.of(table["rank"])
        target = nodes.of(table["partner"])
        group = lookup(groups.label, table["group"])
        group = np.where((group >= 0) & groups.is_known[group], group, NONE)
        site = groups.sites(group, node)
        own, size = groups.ranks[site], groups.size[group]
        is_across = groups.sites_each[group] > 1
        by_place = np.where(own == size, 0.0, np.where(own == 1, 1.0, np.nan))
        in_group = np.select(
            [kind == _RING, kind == _EXCHANGE, kind == _MESSAGE],
            [
                np.where(is_across, 1 / np.maximum(own, 1), 0.0),
                (size - own) / np.maximum(size - 1, 1),
                by_place,
            ],
            np.nan,
        )
        in_group[site < 0] = np.nan
        is_direct = (kind == _MESSAGE) & (target >= 0) & (node >= 0)
        share = np.where(is_direct, target != node, in_group)
        return cls(
            table=table,
            group=group,
            site=site,
            node=node,
            target=np.where(is_direct, target, NONE),
            share=np.zeros(len(node)) if nodes.is_single else share,
        )


class _Steps(NamedTuple):
    """What bytes per step refer to."""

    counts: StepCounts | None
    untimed: Ints  # ranks of unknown times
    ranks: int  # number of ranks with steps


def network(
    sent: pa.Table,
    members: pa.Table,
    nodes: FoundNodes,
    facts: NodeFacts,
    *,
    counts: StepCounts | None,
    untimed: Sequence[int] = (),
) -> tuple[Network, pa.Table]:
    """Divide the traffic of a run between the levels of its network.

    Parameters
    ----------
    sent
        Rows of `sent_by_rank` of all ranks.
    members
        Ranks of each process group, `Partial.members`.
    nodes
        Nodes of the ranks.
    facts
        Bandwidths of a GPU on each level.
    counts
        Numbers of steps; None if unknown.
    untimed
        Ranks whose times are unknown.

    Returns
    -------
    tuple of Network and pyarrow.Table
        The result, and all pairs of nodes: the fields of `NodePair`.

    """
    if nodes.nodes is None:
        return Network(unknown=nodes.unknown, limits=facts.limits), NO_PAIRS
    groups = GroupNodes.of(members, nodes.nodes)
    rows = _Sent.of(sent, nodes.nodes, groups)
    steps = _Steps(
        counts, np.array(untimed, np.int64), 0 if counts is None else len(counts.ranks)
    )
    is_undivided = np.isnan(rows.share)
    timed, pairs = _timed(rows, steps), _pairs(rows, groups, steps)
    result = Network(
        unknown=None,
        nodes=nodes.nodes.members(),
        nodes_by=nodes.nodes.by,
        limits=facts.limits,
        levels=tuple(_uses(rows, steps, facts.limits)),
        undivided_events=int(rows.table["events"][is_undivided].sum()),
        undivided_bytes_per_step_per_gpu=None
        if timed is None
        else float(timed[is_undivided].sum() / steps.ranks),
        events_without_bytes=int(rows.table["unsized"].sum()),
        pair_count=pairs.num_rows,
        pairs=tuple(NodePair(**pair) for pair in pairs.slice(0, MOST_PAIRS).to_pylist()),
    )
    return result, pairs


def _timed(rows: _Sent, steps: _Steps) -> Floats | None:
    """Return the bytes of each row per step, 0 for ranks without times; None if unknown."""
    counts, rank = steps.counts, rows.table["rank"]
    if counts is None or not counts.steps or not steps.ranks:
        return None
    is_timed = ~np.isin(rank, steps.untimed)
    return counts.per_step(rank, np.where(is_timed, rows.table["bytes"], 0))


def _uses(
    rows: _Sent, steps: _Steps, limits: Mapping[NetworkLevel, float | None]
) -> Iterator[LevelUse]:
    """Yield the use of each level by all, and by each parallelism that uses it."""
    timed, tag = _timed(rows, steps), rows.table["tag"]
    for level in LEVELS:
        share = np.nan_to_num(rows.share if level == "network" else 1 - rows.share)
        for name in (None, *TAGS):
            own = (share > 0) & (True if name is None else tag == TAGS.index(name))
            if name is not None and not own.any():
                continue
            took = int(rows.table["rated_ns"][own].sum())
            rate = (rows.table["rated_bytes"] * share)[own].sum() / took * NS if took else None
            limit = limits.get(level)
            yield LevelUse(
                level=level,
                tag=name,
                events=int(rows.table["events"][own].sum()),
                bytes_per_step_per_gpu=None
                if timed is None
                else float((timed * share)[own].sum() / steps.ranks),
                bandwidth=None if rate is None else float(rate),
                utilization=None if rate is None or not limit else float(rate) / limit,
            )


def _pairs(rows: _Sent, groups: GroupNodes, steps: _Steps) -> pa.Table:
    """Return a row per field of `NodePair`, for each pair of nodes; the most bytes first."""
    sends = zip(*_sends(rows, groups), strict=True)
    row, target, part = (np.concatenate(parts) for parts in sends)
    first, place = alike(rows.node[row], target)
    count, timed = len(first), _timed(rows, steps)
    moved = np.zeros(len(row)) if timed is None else timed[row] * part
    of_pair = np.bincount(place, moved, minlength=count)
    rated = np.bincount(place, rows.table["rated_bytes"][row] * part, minlength=count)
    took = sums(place, rows.table["rated_ns"][row], count)
    pairs = pa.table(
        {
            "source": rows.node[row][first],
            "target": target[first],
            "events": sums(place, rows.table["events"][row], count),
            "bytes_per_step": pa.array(of_pair, mask=np.full(count, timed is None)),
            "bandwidth": pa.array(rated / np.maximum(took, 1) * NS, mask=took == 0),
        }
    )
    return pairs.take(pa.array(np.argsort(-of_pair, kind="stable")))


def _sends(rows: _Sent, groups: GroupNodes) -> Iterator[tuple[Ints, Ints, Floats]]:
    """Yield rows that leave their node, the node that receives, and the share of the bytes.

    A ring goes from each node of a group to its next one, by number.
    """
    is_across = np.nan_to_num(rows.share) > 0
    direct = np.flatnonzero(is_across & (rows.target >= 0))
    yield direct, rows.target[direct], rows.share[direct]
    kind = rows.table["kind"]
    ring = np.flatnonzero(is_across & (kind == _RING))
    after = rows.site[ring] + 1
    group = rows.group[ring]
    after = np.where(after == groups.first[group + 1], groups.first[group], after)
    yield ring, groups.node[after], rows.share[ring]
    exchange = np.flatnonzero(is_across & (kind == _EXCHANGE))
    count = groups.sites_each[rows.group[exchange]]
    row = np.repeat(exchange, count)
    begin = np.cumsum(count) - count
    site = np.arange(len(row)) + np.repeat(groups.first[rows.group[exchange]] - begin, count)
    is_other = site != rows.site[row]
    row, site = row[is_other], site[is_other]
    yield row, groups.node[site], groups.ranks[site] / (groups.size[rows.group[row]] - 1)
