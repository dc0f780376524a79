"""Traffic of a layer, and lower bounds of its time.

Traffic counts copies, distinct target GPUs and distinct target nodes. All that a schedule needs
has a size independent of the number of tokens. A bound is a time of one layer in seconds, for
one class of schedules.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.hardware.clusters import GpuLinks
from fastcomm.trace.columns import block_starts
from fastcomm_kernels import dispatch
from fastcomm_kernels.arrays import Ids, Matrix, Numbers

# Up to this many nodes a histogram over sets of nodes is faster than counting tokens.
_FEW = 8


@dataclass(frozen=True)
class LayerTokens:
    """Tokens of one layer, and the GPUs of its experts."""

    src: Ids  # source GPU of each token
    expert: Ids  # (tokens, top-k): experts of each token
    home: Numbers  # GPU of each expert
    nodes: int
    width: int  # GPUs of a node

    def __post_init__(self) -> None:
        """Make the tokens read-only, as files are: kernels are compiled for one kind."""
        for name in ("src", "expert"):
            column = getattr(self, name).view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.nodes * self.width


@dataclass(frozen=True)
class Traffic:
    """Matrices of one layer in tokens, with the traffic to the own GPU and node."""

    copies: Matrix  # GPU by GPU: (token, expert) pairs
    unique: Matrix  # GPU by GPU: distinct (token, GPU) pairs
    node_unique: Matrix  # GPU by node: distinct (token, node) pairs
    expert_load: Matrix  # expert: copies
    width: int
    layer: LayerTokens

    @classmethod
    def of(cls, layer: LayerTokens) -> Self:
        """Count the tokens of a layer."""
        by_expert = _by_expert(layer)
        unique = np.zeros((layer.gpus, layer.gpus), np.int32)
        dispatch.distinct(layer.src, layer.expert, layer.home, unique)
        return cls(
            copies=_by_gpu(by_expert, layer),
            unique=unique.astype(np.int64),
            node_unique=_by_node(layer),
            expert_load=by_expert.sum(axis=0, dtype=np.int64),
            width=layer.width,
            layer=layer,
        )

    @property
    def nodes(self) -> int:
        """Nodes of the cluster."""
        return int(self.node_unique.shape[1])

    @cached_property
    def leaving(self) -> NDArray[np.int32]:
        """Number of tokens of each GPU that any other GPU needs, shape (GPUs,)."""
        counts = np.zeros(len(self.copies), np.int32)
        dispatch.leaving(self.layer.src, self.layer.expert, self.layer.home, counts)
        return counts

    @cached_property
    def own_node(self) -> NDArray[np.bool_]:
        """Whether two GPUs are in the same node, shape (GPUs, GPUs)."""
        node = np.arange(len(self.copies)) // self.width
        return np.asarray(node[:, None] == node)

    @cached_property
    def remote_node_unique(self) -> Matrix:
        """`node_unique` without each GPU's own node."""
        remote = self.node_unique.copy()
        gpu = np.arange(len(remote))
        remote[gpu, gpu // self.width] = 0
        return remote

    def demand(self, kind: str) -> Matrix:
        """Return tokens from GPU to other GPUs; `kind` is "copies" or "unique"."""
        demand = (self.copies if kind == "copies" else self.unique).copy()
        np.fill_diagonal(demand, 0)
        return demand

    def remote(self, kind: str) -> Matrix:
        """Return tokens from GPU to GPUs of other nodes; `kind` is "copies" or "unique"."""
        return np.where(self.own_node, 0, self.demand(kind))


def _by_expert(layer: LayerTokens) -> NDArray[np.int32]:
    """Count copies, GPU by expert."""
    counts = np.zeros((layer.gpus, len(layer.home)), np.int32)
    dispatch.copies(layer.src, layer.expert, counts)
    return counts


def _by_gpu(by_expert: NDArray[np.int32], layer: LayerTokens) -> Matrix:
    """Sum the experts of each GPU."""
    order = np.argsort(layer.home, kind="stable")
    first = block_starts(layer.home[order])
    sums = np.zeros((layer.gpus, layer.gpus), np.int64)
    sums[:, layer.home[order[first]]] = np.add.reduceat(by_expert[:, order], first, axis=1)
    return sums


def _by_node(layer: LayerTokens) -> Matrix:
    """Count distinct (token, node) pairs, GPU by node."""
    node = (layer.home // layer.width).astype(np.int32)
    if layer.nodes > _FEW or not layer.expert.shape[1]:
        counts = np.zeros((layer.gpus, layer.nodes), np.int32)
        dispatch.distinct(layer.src, layer.expert, node, counts)
        return counts.astype(np.int64)
    sets = np.zeros((layer.gpus, 1 << layer.nodes), np.int32)
    dispatch.distinct_few(layer.src, layer.expert, (1 << node).astype(np.int32), sets)
    members = np.arange(1 << layer.nodes)[:, None] >> np.arange(layer.nodes) & 1
    return np.asarray(sets.astype(np.int64) @ members)


def sum_by_node(matrix: Matrix, width: int) -> Matrix:
    """Sum a GPU-by-GPU matrix to a node-by-node matrix."""
    nodes = len(matrix) // width
    return np.asarray(matrix.reshape(nodes, width, nodes, width).sum(axis=(1, 3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of the dispatch of one layer, in seconds."""

    relayed_s: float  # every copy is sent, through any NIC of a node: FAST
    fixed_s: float  # each GPU sends and receives its own tokens: direct, SpreadOut
    multicast_s: float  # a token is sent once per node, through any of its NICs
    proxy_s: float  # a token is sent once per node, through NICs of the source's rank: DeepEP
    gpu_s: float  # tokens that a GPU needs or has, through all of its links
    node_s: float  # tokens forwarded inside a node, to which they are sent once
    joint_s: float  # tokens that the GPUs of a node need, through all of their links

    @property
    def optimal_s(self) -> float:
        """Lower bound for all classes of schedules."""
        return max(self.multicast_s, self.gpu_s, self.joint_s)

    def of(self, kind: str) -> float:
        """Return the bound in s of a class: "relayed", "fixed", "multicast" or "proxy"."""
        inside = self.node_s if kind in {"multicast", "proxy"} else self.joint_s
        return max(float(getattr(self, f"{kind}_s")), self.gpu_s, inside)


def bounds(traffic: Traffic, links: GpuLinks, size: int, demand: str = "copies") -> Bounds:
    """Return the lower bounds of a layer.

    Parameters
    ----------
    traffic
        Traffic of the layer.
    links
        Links of each GPU.
    size
        Bytes of a token.
    demand
        "copies" or "unique": tokens that schedules without multicast send.

    """
    width, remote = traffic.width, traffic.remote(demand)
    nic, port = size / links.inter, size / links.intra
    # A single node does not use its NICs.
    both = size / (links.inter + links.intra) if traffic.nodes > 1 else port
    pairs = traffic.remote_node_unique.reshape(traffic.nodes, width, -1).sum(axis=1)
    arriving = pairs.sum(axis=0)
    needed = traffic.demand("unique")
    needed_by_node = needed.sum(axis=0).reshape(-1, width).sum(axis=1)
    return Bounds(
        relayed_s=largest_sum(sum_by_node(remote, width)) * nic / width,
        fixed_s=largest_sum(remote) * nic,
        multicast_s=largest_sum(pairs) * nic / width,
        proxy_s=busiest_proxy(traffic) * nic,
        gpu_s=max(float(needed.sum(axis=0).max()), float(traffic.leaving.max())) * both,
        node_s=max(0.0, float((needed_by_node - arriving).max())) * port / width,
        joint_s=float(needed_by_node.max()) * both / width,
    )


def largest_sum(matrix: Matrix) -> int:
    """Return the largest row or column sum."""
    return int(max(matrix.sum(axis=0).max(initial=0), matrix.sum(axis=1).max(initial=0)))


def busiest_proxy(traffic: Traffic) -> float:
    """Return the most tokens that a NIC sends or receives if proxies of equal rank forward."""
    remote = traffic.remote_node_unique
    by_rank = remote.reshape(traffic.nodes, traffic.width, -1).sum(axis=0)
    return float(max(by_rank.max(), remote.sum(axis=1).max()))
