"""What a layer moves, what no schedule can beat, and FAST's schedule as published.

A layer has copies, distinct destinations and nodes, whatever the number of its tokens. A bound
is a time of one layer; a schedule is held to those of its class. FAST spreads an even load on
every NIC of a node, then sends in stages without incast: one node to one node, GPU i to GPU i;
what a stage brought moves on inside its node while the next one runs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import ConfigError
from fastcomm.hardware import Cost, GpuLinks
from fastcomm_kernels import dispatch
from fastcomm_kernels import permutations as kernels

Ids = NDArray[Any]  # int16 or int32
Place = NDArray[np.int32]
Matrix = NDArray[np.int64]

# Up to so many nodes a histogram over sets of nodes is smaller than what it saves.
_FEW = 8

Rows = NDArray[np.int32]
DECOMPOSITIONS = ("threshold", "incremental", "assignment")
# Above any number of cells: the assignment takes such a cell only where it has to.
_FORBIDDEN = 1e9
# Of 16: how far the threshold falls where the cells above it do not suffice.
_SHRINK = 15


@dataclass(frozen=True)
class LayerTokens:
    """Tokens of one layer, and the GPUs of its experts."""

    src: Ids
    expert: Ids
    home: Place  # the GPU of each expert
    nodes: int
    width: int  # GPUs of a node

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.nodes * self.width


@dataclass(frozen=True)
class Traffic:
    """Matrices of one layer, in tokens; own node and own GPU are in all three."""

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
        """By GPU: its tokens that any other GPU needs."""
        found = np.zeros(len(self.copies), np.int32)
        dispatch.leaving(self.layer.src, self.layer.expert, self.layer.home, found)
        return found

    @cached_property
    def own_node(self) -> NDArray[np.bool_]:
        """Whether each pair of GPUs lies in one node."""
        node = np.arange(len(self.copies)) // self.width
        return np.asarray(node[:, None] == node)

    @cached_property
    def remote_node_unique(self) -> Matrix:
        """GPU by node, the own node left out."""
        remote = self.node_unique.copy()
        gpu = np.arange(len(remote))
        remote[gpu, gpu // self.width] = 0
        return remote

    def demand(self, kind: str) -> Matrix:
        """Return the tokens from GPU to GPU, "copies" or "unique"; none to itself."""
        demand = (self.copies if kind == "copies" else self.unique).copy()
        np.fill_diagonal(demand, 0)
        return demand

    def remote(self, kind: str) -> Matrix:
        """Return the tokens from GPU to GPU between nodes, "copies" or "unique"."""
        return np.where(self.own_node, 0, self.demand(kind))


def _by_expert(layer: LayerTokens) -> NDArray[np.int32]:
    found = np.zeros((layer.gpus, len(layer.home)), np.int32)
    dispatch.copies(layer.src, layer.expert, found)
    return found


def _by_gpu(by_expert: NDArray[np.int32], layer: LayerTokens) -> Matrix:
    """Add up the experts of each GPU."""
    order = np.argsort(layer.home, kind="stable")
    first = np.flatnonzero(np.diff(layer.home[order], prepend=-1))
    found = np.zeros((layer.gpus, layer.gpus), np.int64)
    found[:, layer.home[order[first]]] = np.add.reduceat(by_expert[:, order], first, axis=1)
    return found


def _by_node(layer: LayerTokens) -> Matrix:
    node = (layer.home // layer.width).astype(np.int32)
    if layer.nodes > _FEW or not layer.expert.shape[1]:
        found = np.zeros((layer.gpus, layer.nodes), np.int32)
        dispatch.distinct(layer.src, layer.expert, node, found)
        return found.astype(np.int64)
    sets = np.zeros((layer.gpus, 1 << layer.nodes), np.int32)
    dispatch.distinct_few(layer.src, layer.expert, (1 << node).astype(np.int32), sets)
    members = np.arange(1 << layer.nodes)[:, None] >> np.arange(layer.nodes) & 1
    return np.asarray(sets.astype(np.int64) @ members)


def sum_by_node(matrix: Matrix, width: int) -> Matrix:
    """Sum a GPU-by-GPU matrix to node by node."""
    nodes = len(matrix) // width
    return np.asarray(matrix.reshape(nodes, width, nodes, width).sum(axis=(1, 3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of one layer, in seconds."""

    relayed_s: float  # no dedupe, any NIC of a node may carry: FAST
    fixed_s: float  # each GPU sends and receives its own: direct, SpreadOut
    multicast_s: float  # once a node, any NIC of it
    proxy_s: float  # once a node, by the NICs of the source's rank: DeepEP
    gpu_s: float  # what a GPU itself needs or has, over all its links
    node_s: float  # what is handed on inside a node, where it arrives once
    joint_s: float  # what the GPUs of a node need, over all their links

    @property
    def optimal_s(self) -> float:
        """Seconds that no schedule of any class beats."""
        return max(self.multicast_s, self.gpu_s, self.joint_s)

    def of(self, kind: str) -> float:
        """Return the bound of a class: relayed, fixed, multicast or proxy."""
        inside = self.node_s if kind in {"multicast", "proxy"} else self.joint_s
        return max(float(getattr(self, f"{kind}_s")), self.gpu_s, inside)


def bounds(traffic: Traffic, links: GpuLinks, size: int, demand: str = "copies") -> Bounds:
    """Return the bounds of a layer with tokens of `size` bytes."""
    width, remote = traffic.width, traffic.remote(demand)
    nic, port = size / links.inter, size / links.intra
    # The NICs of a single node carry nothing.
    both = size / (links.inter + links.intra) if traffic.nodes > 1 else port
    pairs = traffic.remote_node_unique.reshape(traffic.nodes, width, -1).sum(axis=1)
    arriving = pairs.sum(axis=0)
    needed = traffic.demand("unique")
    needed_by_node = needed.sum(axis=0).reshape(-1, width).sum(axis=1)
    return Bounds(
        relayed_s=_most(sum_by_node(remote, width)) * nic / width,
        fixed_s=_most(remote) * nic,
        multicast_s=_most(pairs) * nic / width,
        proxy_s=_proxy(traffic) * nic,
        gpu_s=float(max(needed.sum(axis=0).max(), traffic.leaving.max())) * both,
        node_s=max(0.0, float((needed_by_node - arriving).max())) * port / width,
        joint_s=float(needed_by_node.max()) * both / width,
    )


def _most(matrix: Matrix) -> float:
    return float(max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max()))


def _proxy(traffic: Traffic) -> float:
    remote = traffic.remote_node_unique
    by_rank = remote.reshape(traffic.nodes, traffic.width, -1).sum(axis=0)
    return float(max(by_rank.max(), remote.sum(axis=1).max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class FastSchedule:
    """FAST's schedule of one demand, and the seconds of each part."""

    servers: Matrix  # node by node: load of each NIC
    permutations: Rows  # stage by node: where the node sends; itself is padding
    weights: Matrix
    balanced: NDArray[np.int64]  # [node, node, GPU, GPU] after the balance
    moved: NDArray[np.int64]  # [node * node, GPU, GPU] by the balance
    balance_s: float
    own_s: float
    inter_s: NDArray[np.float64]  # a stage
    redist_s: NDArray[np.float64]  # a stage

    @property
    def total_s(self) -> float:
        """Balance, then the stages, each beside the redistribution of the one before."""
        if not len(self.weights):
            return self.balance_s + self.own_s
        hidden = np.concatenate([[self.own_s], self.redist_s[:-1]])
        return float(
            self.balance_s + np.maximum(self.inter_s, hidden).sum() + self.redist_s[-1]
        )


def schedule(
    demand: Matrix, width: int, inter: Cost, intra: Cost, decomposition: str = "threshold"
) -> FastSchedule:
    """Schedule a GPU-by-GPU demand; its diagonal does not move."""
    block = blocked(demand, width)
    servers, moved, balance_s = kernels.balance(block, intra.pair)
    permutations, weights = stages(servers, decomposition)
    given = _timed(block, permutations, weights, intra)
    # A stage hides the redistribution of the one before if that is not much larger.
    order = np.argsort(-weights, kind="stable")
    ordered = _timed(block, permutations[order], weights[order], intra)
    own_s = max(kernels.spread_time(block[n, n], intra.pair) for n in range(len(block)))
    found = [
        FastSchedule(
            servers=servers,
            permutations=rows,
            weights=units,
            balanced=block,
            moved=moved,
            balance_s=balance_s,
            own_s=own_s,
            inter_s=np.asarray(inter.start_s + units * inter.unit_s, np.float64),
            redist_s=times,
        )
        for rows, units, times in (
            (permutations, weights, given),
            (permutations[order], weights[order], ordered),
        )
    ]
    return min(found, key=lambda each: each.total_s)


def blocked(demand: Matrix, width: int) -> NDArray[np.int64]:
    """[node, node, GPU, GPU]: a fresh copy, nothing on the diagonal."""
    nodes = len(demand) // width
    kept = np.array(demand, np.int64)
    np.fill_diagonal(kept, 0)
    return np.ascontiguousarray(kept.reshape(nodes, width, nodes, width).transpose(0, 2, 1, 3))


def stages(servers: Matrix, decomposition: str = "threshold") -> tuple[Rows, Matrix]:
    """Pad a server matrix and split it into weighted permutations."""
    padded = pad(servers)
    if decomposition == "assignment":
        permutations, weights = assigned_stages(padded)
        return permutations.astype(np.int32), weights
    if decomposition not in DECOMPOSITIONS:
        raise ConfigError(
            f"decomposition: found {decomposition!r}, wanted one of {', '.join(DECOMPOSITIONS)}"
        )
    first = int(padded.max(initial=0)) if decomposition == "threshold" else 1
    return split(padded, first)


def split(padded: Matrix, first: int) -> tuple[Rows, Matrix]:
    """Split a matrix of equal row and column sums."""
    load = largest_sum(padded)
    if (padded.sum(axis=0) != load).any() or (padded.sum(axis=1) != load).any():
        raise ValueError("the row and column sums differ: pad the matrix first")
    return kernels.stages(padded, first, _SHRINK)


def _timed(
    block: NDArray[np.int64], permutations: Rows, weights: Matrix, intra: Cost
) -> NDArray[np.float64]:
    return kernels.redistribution(block, permutations, weights, intra.pair)


def spreadout_s(demand: Matrix, width: int, inter: Cost, intra: Cost) -> float:
    """Shift by shift: GPU j sends to GPU j + k, and the slowest pair sets the time."""
    gpus = len(demand)
    units = np.array(demand, np.float64)
    node = np.arange(gpus) // width
    own = node[:, None] == node
    start = np.where(own, intra.start_s, inter.start_s)
    cost = np.where(units > 0, start + units * np.where(own, intra.unit_s, inter.unit_s), 0.0)
    np.fill_diagonal(cost, 0.0)
    shifted = (np.arange(gpus)[:, None] + np.arange(gpus)) % gpus
    return float(np.take_along_axis(cost, shifted, axis=1).max(axis=0, initial=0).sum())


def largest_sum(matrix: Matrix) -> int:
    """Return the largest row or column sum."""
    return int(max(matrix.sum(axis=0).max(initial=0), matrix.sum(axis=1).max(initial=0)))


def pad(matrix: Matrix) -> Matrix:
    """Bring every row and column to the largest sum, from the upper left corner on."""
    load = largest_sum(matrix)
    rows, columns = load - matrix.sum(axis=1), load - matrix.sum(axis=0)
    padded = matrix.copy()
    r = c = 0
    while r < len(rows) and c < len(rows):
        added = min(rows[r], columns[c])
        padded[r, c] += added
        rows[r] -= added
        columns[c] -= added
        r, c = r + (rows[r] == 0), c + (columns[c] == 0)
    return padded


def assigned_stages(padded: Matrix) -> tuple[NDArray[np.int64], Matrix]:
    """Weighted permutations that add up to the matrix, as SciPy's assignment finds them."""
    from scipy.optimize import linear_sum_assignment  # takes a while to load

    rest = padded.copy()
    rows = np.arange(len(rest))
    permutations, weights = [], []
    while rest.max(initial=0) > 0:
        _, to = linear_sum_assignment(np.where(rest > 0, 0.0, _FORBIDDEN))
        weight = rest[rows, to].min()
        if weight == 0:
            break
        rest[rows, to] -= weight
        permutations.append(to)
        weights.append(weight)
    shape = (len(weights), len(rest))
    return np.array(permutations, np.int64).reshape(shape), np.array(weights, np.int64)
