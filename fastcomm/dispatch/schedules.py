"""Schedules of an expert all-to-all: time of a layer, busiest link, load of each GPU.

FAST balances tokens inside the nodes. In its stages, each node sends to one other node, GPU i
to GPU i. The tokens that arrive in a stage are redistributed inside their node. As published,
balancing comes first, tokens are redistributed during the next stage, and traffic inside a node
overlaps the first stage. As a pipeline, a node balances for a later stage and redistributes of
an earlier one at the same time, with a share of the traffic inside it. Demands are in tokens.

A schedule is a function of the traffic of a layer and the terms of a simulation. Loads are in
tokens, times in seconds. A load has a row per GPU and the columns NIC send, NIC receive, NVLink
send, NVLink receive.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.traffic import Traffic, largest_sum
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.hardware.clusters import Cost, GpuLinks
from fastcomm_kernels import dispatch
from fastcomm_kernels import permutations as kernels
from fastcomm_kernels.arrays import Matrix, Numbers

DECOMPOSITIONS = ("threshold", "incremental", "assignment")
# Cost of an empty cell, above any number of cells: the assignment avoids such cells.
_FORBIDDEN = 1e9
# Sixteenths to which the threshold falls if the cells above it do not suffice.
_SHRINK = 15
# Of a pipeline: parts into which all stages are cut, share of their time that the parts' starts
# may take, parts of what a GPU sends that are mixed, and stages that balancing is ahead.
_PARTS, _STARTS, _SLICES, _AHEAD = 128, 0.02, 8, 8
_FAST_LINKS = 5  # times the NIC: from there on links inside a node rarely bind
_NEAR = 1.04  # times the bound, up to which no other pipeline is tried
# Between the bound and the best time so far: times to reach with uneven NICs.
_SHARES = 0.5, 0.25, 0.75
_FEW_NODES = 16  # up to which more is tried: the search is short
_FEW_STAGES = 128
Stages = tuple[Numbers, Matrix]  # permutations and weights
LINKS = ("NIC", "NVLink")
DIRECTIONS = ("send", "receive")
# Labels of the columns of a load.
LOAD_NAMES = tuple(f"{link} {way}" for link in LINKS for way in DIRECTIONS)
# Start-up time and reached share of NIC and NVLink, fitted to DeepEP's published low-latency
# tables (EP 16 to 256 with 50 GB/s NICs; EP 8 with 160 GB/s inside a node).
LOW_LATENCY = {
    "dispatch": (34.6e-6, 46.4 / 50, 86 / 160),
    "combine": (5.7e-6, 39.9 / 50, 113 / 160),
}
# Preferences for a NIC of a target, and for the source's own NIC.
_PREFERENCES = (2, 1), (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class FastSchedule:
    """FAST's published schedule of one demand, and the seconds of each part."""

    servers: Matrix  # node by node: load of each NIC
    permutations: Numbers  # stage by node: destination; a node's own number is padding
    weights: Matrix  # tokens of each stage
    balanced: NDArray[np.int64]  # [node, node, GPU, GPU] after balancing
    moved: NDArray[np.int64]  # [node * node, GPU, GPU] moved by balancing
    balance_s: float
    own_s: float  # traffic inside nodes
    inter_s: NDArray[np.float64]  # of each stage
    redist_s: NDArray[np.float64]  # redistribution of each stage

    @property
    def total_s(self) -> float:
        """Balancing, then the stages, each overlapped with the previous redistribution."""
        if not len(self.weights):
            return self.balance_s + self.own_s
        return float(self.balance_s + self._slots_s.sum() + self.redist_s[-1])

    @property
    def start_s(self) -> NDArray[np.float64]:
        """Seconds until each stage begins."""
        slots = self._slots_s
        return np.asarray(self.balance_s + np.cumsum(slots) - slots)

    @property
    def _slots_s(self) -> NDArray[np.float64]:
        """Seconds from the start of each stage until the next one may begin."""
        overlapped = np.concatenate([[self.own_s], self.redist_s])[: len(self.inter_s)]
        return np.asarray(np.maximum(self.inter_s, overlapped))


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPipeline:
    """FAST's stages as a pipeline: balancing and redistribution overlap other stages."""

    servers: Matrix  # node by node: load of each NIC
    permutations: Numbers  # stage by stage: destination; a node's own number is padding
    weights: Matrix  # tokens of each stage
    queues: tuple[Numbers, Matrix]  # what GPUs send after balancing, as `kernels.rails` has it
    slices: int  # into which each entry of a queue is cut: the first of all go first
    own: NDArray[np.int64]  # [node, GPU, GPU] inside nodes
    start_s: NDArray[np.float64]  # until each stage begins
    inter_s: NDArray[np.float64]  # of each stage
    total_s: float

    @property
    def balance_s(self) -> float:
        """Seconds of balancing before the first stage."""
        return float(self.start_s[0]) if len(self.start_s) else 0.0

    @property
    def balanced(self) -> NDArray[np.int64]:
        """Tokens [node, node, GPU, GPU] after balancing."""
        nodes, width = self.own.shape[:2]
        block = self._sums(1)
        block[np.arange(nodes), np.arange(nodes)] = self.own
        return block.reshape(nodes, nodes, width, width)

    @property
    def moved(self) -> NDArray[np.int64]:
        """Tokens [node * node, GPU, GPU] that balancing moves."""
        nodes, width = self.own.shape[:2]
        moved = self._sums(0).swapaxes(2, 3).reshape(nodes * nodes, width, width)
        moved[:, np.arange(width), np.arange(width)] = 0
        return moved

    def _sums(self, column: int) -> NDArray[np.int64]:
        """Return the units [node, node, sending GPU, GPU] by a column of the entries."""
        nodes, width = self.own.shape[:2]
        start, entries = self.queues
        sums = np.zeros((nodes * nodes * width, width), np.int64)
        queue = np.repeat(np.arange(len(sums)), np.diff(start))
        np.add.at(sums, (queue, entries[:, column]), entries[:, 2])
        return sums.reshape(nodes, nodes, width, width)


def schedule(
    demand: Matrix, width: int, inter: Cost, intra: Cost, decomposition: str = "threshold"
) -> FastSchedule | FastPipeline:
    """Schedule a GPU-by-GPU demand in tokens; its diagonal does not move.

    As a pipeline, long stages are cut into shorter ones; as published, stages run in the order
    of their decomposition or sorted by size. The fastest of these counts.

    Parameters
    ----------
    demand
        Tokens from each GPU to each GPU.
    width
        GPUs of a node.
    inter, intra
        Costs of tokens between nodes and inside a node.
    decomposition
        How the demand between nodes is split into stages, one of `DECOMPOSITIONS`.

    """
    block = blocked(demand, width)
    parts, in_order = _balanced(block, intra, decomposition)
    if not len(in_order[1]):  # nothing leaves a node
        return _published(parts, in_order, (inter, intra))
    search = _PipelineSearch(block, parts["servers"], in_order, (inter, intra), decomposition)
    candidates: list[FastSchedule | FastPipeline] = [search.best()]
    if len(in_order[1]) <= _FEW_STAGES:
        candidates.append(_published(parts, in_order, (inter, intra)))
    return min(candidates, key=lambda candidate: candidate.total_s)


def published_schedule(
    demand: Matrix, width: int, inter: Cost, intra: Cost, decomposition: str = "threshold"
) -> FastSchedule:
    """Schedule a demand as FAST is published: its stages wait for all balancing.

    Stages run in the order of their decomposition or sorted by size, whichever is faster.
    It has the parameters of `schedule`.
    """
    parts, in_order = _balanced(blocked(demand, width), intra, decomposition)
    return _published(parts, in_order, (inter, intra))


def _published(
    parts: dict[str, Any], in_order: Stages, costs: tuple[Cost, Cost]
) -> FastSchedule:
    """Return the published schedule of a balanced demand, and of its stages in their order.

    `costs` are the costs of a token between nodes and inside a node.
    """
    inter, intra = costs
    block = parts["balanced"]
    own_s = max(kernels.spread_time(block[n, n], intra.pair) for n in range(len(block)))
    # Sorted by size, a stage can overlap the previous redistribution, which is similar.
    schedules = [
        FastSchedule(
            **parts,
            own_s=own_s,
            permutations=permutations,
            weights=weights,
            inter_s=np.asarray(inter.start_s + weights * inter.unit_s, np.float64),
            redist_s=kernels.redistribution(block, permutations, weights, intra.pair),
        )
        for permutations, weights in (in_order, by_size(in_order))
    ]
    return min(schedules, key=lambda candidate: candidate.total_s)


def by_size(stage: Stages) -> Stages:
    """Return stages sorted by size, the longest first."""
    permutations, weights = stage
    order = np.argsort(-weights, kind="stable")
    return permutations[order], weights[order]


def _balanced(
    block: NDArray[np.int64], intra: Cost, decomposition: str
) -> tuple[dict[str, Any], Stages]:
    """Return the balanced demand between nodes and what moves for it, and its stages."""
    balanced = block.copy()
    servers, moved, balance_s = kernels.balance(balanced, intra.pair)
    parts = {"servers": servers, "moved": moved, "balanced": balanced}
    return parts | {"balance_s": balance_s}, stages(servers, decomposition)


class _PipelineSearch:
    """Search of the fastest pipeline for a demand.

    Where links inside nodes bind, NICs of hot GPUs send and receive more than others, as far as
    the time allows that is to be reached. Stages are sorted by size, or parts of all of them
    take turns, so that what moves inside nodes is even over time.
    """

    def __init__(
        self,
        block: NDArray[np.int64],
        servers: Matrix,
        even: Stages,
        costs: tuple[Cost, Cost],
        decomposition: str,
    ) -> None:
        """Prepare a demand; `servers` has the balanced load of a NIC by pair of nodes.

        `even` are the stages of that load.
        """
        self.block, self.servers, self.decomposition = block, servers, decomposition
        self.even = even
        self.inter, self.intra = costs
        nodes, self.width = len(block), block.shape[2]
        self.own = np.stack([block[n, n] for n in range(nodes)])
        self.pairs = block.sum(axis=(2, 3)) * ~np.eye(nodes, dtype=bool)
        self.received = block.sum(axis=(0, 2))  # by node and GPU
        sent = block.sum(axis=(1, 3))
        self.busiest_nic = largest_sum(self.pairs) / self.width
        per_s = 1 / self.inter.unit_s + 1 / self.intra.unit_s
        all_links = [part.sum(axis=1).max() / self.width for part in (self.received, sent)]
        all_links += [part.max() for part in (self.received, sent)]
        self.least_s = float(max(self.busiest_nic * self.inter.unit_s, max(all_links) / per_s))

    def best(self) -> FastPipeline:
        """Return the fastest pipeline of all that are tried, until one is near the bound."""
        are_links_slow = self.intra.unit_s * _FAST_LINKS > self.inter.unit_s
        best = self._fastest(self.least_s, in_turn=are_links_slow)
        if not are_links_slow and best.total_s > _NEAR * self.least_s:
            best = self._faster(best, self.least_s)
        # Of many nodes, other times to reach take long and rarely help: demands are alike.
        for share in _SHARES if len(self.own) <= _FEW_NODES else ():
            if best.total_s <= _NEAR * self.least_s:
                break
            best = self._faster(best, self.least_s + share * (best.total_s - self.least_s))
        return best

    def _faster(self, best: FastPipeline, target_s: float) -> FastPipeline:
        """Return `best`, or a pipeline of stages in turn if that is faster."""
        other = self._fastest(target_s, in_turn=True)
        return min(best, other, key=lambda one: one.total_s)

    def _fastest(self, target_s: float, *, in_turn: bool) -> FastPipeline:
        """Return the fastest pipeline whose NICs are to take `target_s` at most.

        `in_turn` is whether parts of all stages take turns.
        """
        queues, servers = self._queues(target_s)
        is_even = np.array_equal(servers, self.servers)
        stage = by_size(self.even if is_even else stages(servers, self.decomposition))
        tokens, nodes = float(stage[1].sum()), len(self.own)
        # Of many nodes, stages are short as they are, and mixing would take long.
        mixing = max(1, min(_SLICES, _SLICES * _FEW_NODES**2 // nodes**2)), _AHEAD
        timed = []
        for count in _cuts(nodes, tokens, self.inter):
            permutations, weights = cut = _cut(stage, count, in_turn=in_turn)
            inter_s = np.asarray(self.inter.start_s + weights * self.inter.unit_s, np.float64)
            start_s, total_s = kernels.pipelined(
                queues, cut, mixing, inter_s, self.own, self.intra.pair
            )
            timed.append(
                FastPipeline(
                    servers=servers,
                    permutations=permutations,
                    weights=weights,
                    queues=queues,
                    slices=mixing[0],
                    own=self.own,
                    start_s=start_s,
                    inter_s=inter_s,
                    total_s=total_s,
                )
            )
        return min(timed, key=lambda one: one.total_s)

    def _queues(self, target_s: float) -> tuple[tuple[Numbers, Matrix], Matrix]:
        """Return what GPUs send, and the load of a NIC by pair of nodes.

        A NIC takes `target_s` at most, or what it takes if all are alike. A GPU that receives
        more than its links inside the node pass on in that time gets the rest by its own NIC.
        """
        uneven = max(1.0, target_s / (self.busiest_nic * self.inter.unit_s))
        limit = np.ceil(self.pairs * (uneven / self.width)).astype(np.int64)
        remote = self.received - self.own.sum(axis=1)
        excess = self.received - target_s / self.intra.unit_s
        near = np.clip(excess / np.maximum(remote, 1), 0.0, 1.0)
        start, entries, servers = kernels.rails(
            self.block, np.maximum(limit, self.servers), near
        )
        return (start, entries), servers


def _cuts(nodes: int, tokens: float, inter: Cost) -> set[int]:
    """Return the numbers of equal parts of all stages to try; 1 leaves stages as they are."""
    count = _PARTS if nodes <= _FEW_NODES else _PARTS // 2
    if inter.start_s:
        affordable = tokens * inter.unit_s * _STARTS / float(inter.start_s)
        count = max(1, int(min(count, affordable)))
    return {1, count} if nodes <= _FEW_NODES else {count}


def _cut(stage: Stages, count: int, *, in_turn: bool = False) -> Stages:
    """Return stages of at most a `count`-th of all tokens, cut from longer ones.

    `in_turn` is whether parts of different stages take turns, as evenly as possible.
    """
    permutations, weights = stage
    longest = max(1, -(-int(weights.sum()) // count))
    parts = -(-weights // longest)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    whole, parts_of = np.repeat(weights, parts), np.repeat(parts, parts)
    cut = whole * (number + 1) // parts_of - whole * number // parts_of
    spread = np.repeat(permutations, parts, axis=0)
    if not in_turn:
        return spread, cut
    order = np.argsort((number + 0.5) / parts_of, kind="stable")
    return spread[order], cut[order]


def blocked(demand: Matrix, width: int) -> NDArray[np.int64]:
    """Copy a GPU-by-GPU demand as [from node, to node, from GPU, to GPU], diagonal 0.

    `width` is the number of GPUs of a node.
    """
    nodes = len(demand) // width
    copy = np.array(demand, np.int64)
    np.fill_diagonal(copy, 0)
    return np.ascontiguousarray(copy.reshape(nodes, width, nodes, width).transpose(0, 2, 1, 3))


def stages(servers: Matrix, decomposition: str = "threshold") -> tuple[Numbers, Matrix]:
    """Split a node-by-node matrix into weighted permutations.

    Returns
    -------
    permutations : ndarray
        (stages, nodes): destination of each node.
    weights : ndarray
        Tokens of each stage.

    Raises
    ------
    ConfigError
        If the decomposition is unknown.

    """
    padded = pad(servers)
    if decomposition == "assignment":
        permutations, weights = assigned_stages(padded)
        return permutations.astype(np.int32), weights
    if decomposition not in DECOMPOSITIONS:
        raise ConfigError(
            f"invalid decomposition {decomposition!r}: expected {', '.join(DECOMPOSITIONS)}"
        )
    first = int(padded.max(initial=0)) if decomposition == "threshold" else 1
    return split(padded, first)


def split(padded: Matrix, first: int) -> tuple[Numbers, Matrix]:
    """Split a matrix of equal row and column sums; ValueError if they differ."""
    load = largest_sum(padded)
    if (padded.sum(axis=0) != load).any() or (padded.sum(axis=1) != load).any():
        raise ValueError("the row and column sums differ: pad the matrix first")
    return kernels.stages(padded, first, _SHRINK)


def spreadout_s(demand: Matrix, width: int, inter: Cost, intra: Cost) -> float:
    """Return the seconds of SpreadOut: in shift k, GPU j sends to GPU j + k.

    Parameters
    ----------
    demand
        Tokens from each GPU to each GPU.
    width
        GPUs of a node.
    inter, intra
        Costs of tokens between nodes and inside a node.

    """
    gpus = len(demand)
    units = np.array(demand, np.float64)
    node = np.arange(gpus) // width
    own = node[:, None] == node
    start = np.where(own, intra.start_s, inter.start_s)
    cost = np.where(units > 0, start + units * np.where(own, intra.unit_s, inter.unit_s), 0.0)
    np.fill_diagonal(cost, 0.0)
    shifted = (np.arange(gpus)[:, None] + np.arange(gpus)) % gpus
    return float(np.take_along_axis(cost, shifted, axis=1).max(axis=0, initial=0).sum())


def pad(matrix: Matrix) -> Matrix:
    """Return the matrix with values added so that all row and column sums are equal."""
    load = largest_sum(matrix)
    # Lists of Python's integers: few nodes, and an access to an array takes longer.
    rows, columns = ((load - matrix.sum(axis=axis)).tolist() for axis in (1, 0))
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
    """Split a matrix into weighted permutations by repeated assignment (SciPy).

    Parameters
    ----------
    padded
        Square matrix with equal sums of rows and columns; the diagonal counts.

    Returns
    -------
    tuple of ndarray of int64
        Column of each row, shape (stages, rows); weight of each stage.

    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    remaining = padded.copy()
    rows = np.arange(len(remaining))
    permutations, weights = [], []
    while remaining.max(initial=0) > 0:
        _, destination = linear_sum_assignment(np.where(remaining > 0, 0.0, _FORBIDDEN))
        weight = remaining[rows, destination].min()
        if weight == 0:
            break
        remaining[rows, destination] -= weight
        permutations.append(destination)
        weights.append(weight)
    shape = (len(weights), len(remaining))
    return np.array(permutations, np.int64).reshape(shape), np.array(weights, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Links, sizes and rules of a simulation."""

    token_bytes: int  # of a dispatched token
    combine_bytes: int  # of a combined token
    links: GpuLinks = field(default_factory=GpuLinks)
    demand: str = "copies"  # "copies": a token per expert, "unique": a token per GPU
    decomposition: str = "threshold"  # of FAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The busiest link of a layer."""

    gpu: int
    link: str
    direction: str
    tokens: int

    def __str__(self) -> str:
        return f"GPU {self.gpu} {self.link} {self.direction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSends:
    """What nodes send to each other in the stages of a schedule, an element per send.

    GPU i of a node sends to GPU i of the other one.
    """

    stage: NDArray[np.int64]
    node: NDArray[np.int64]
    destination: NDArray[np.int64]
    tokens: NDArray[np.int64]  # of the fullest GPU of the node
    start_s: NDArray[np.float64]
    stop_s: NDArray[np.float64]  # of the stage

    @classmethod
    def of(cls, plan: FastSchedule | FastPipeline) -> Self:
        """Return the sends of a schedule, without stages that a pair does not need."""
        count, nodes = plan.permutations.shape
        stage, node = (axis.ravel() for axis in np.indices((count, nodes)))
        destination = plan.permutations.ravel().astype(np.int64)
        # What a pair may send before a stage, and then.
        order = np.lexsort((stage, destination, node))
        pair, weights = (node * nodes + destination)[order], plan.weights[stage[order]]
        total = np.cumsum(weights) - weights
        first = np.flatnonzero(np.diff(pair, prepend=-1))
        sizes = np.diff(first, append=len(pair))
        before = total - np.repeat(total[first], sizes)
        tokens = np.empty(len(order), np.int64)
        tokens[order] = np.clip(plan.servers.ravel()[pair] - before, 0, weights)
        some = np.flatnonzero((tokens > 0) & (node != destination))
        stage = stage[some]
        return cls(
            stage=stage,
            node=node[some],
            destination=destination[some],
            tokens=tokens[some],
            start_s=plan.start_s[stage],
            stop_s=plan.start_s[stage] + plan.inter_s[stage],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times and loads of one layer under one schedule."""

    seconds: float  # of dispatch
    phases: dict[str, float]  # seconds of dispatch by phase
    inter_tokens: int  # tokens sent between nodes
    loads: Matrix
    bottleneck: Bottleneck
    combine_s: float | None = None
    sends: NodeSends | None = None  # of dispatch, for schedules with stages


class NoAnswerError(FastcommError):
    """A schedule cannot handle a layer."""


Schedule = Callable[[Traffic, Terms], Timing]


def _weights(
    links: GpuLinks, size: int = 1, nic: float = 1.0, port: float = 1.0
) -> NDArray[np.float64]:
    """Return the seconds per token on each of the four links of a GPU.

    The values are for NIC out, NIC in, NVLink out and NVLink in. A token has `size` bytes;
    `nic` and `port` are the shares of the bandwidths of NIC and NVLink that are reached.
    """
    return np.repeat([size / (links.inter * nic), size / (links.intra * port)], 2)


def busiest(loads: Matrix, seconds: NDArray[np.float64]) -> Bottleneck:
    """Return the link with the most seconds, and its load in tokens.

    `loads` and `seconds` have a row per GPU and a column per link and direction.
    """
    gpu, column = np.unravel_index(int(np.argmax(seconds)), seconds.shape)
    return Bottleneck(
        gpu=int(gpu),
        link=LINKS[int(column) // 2],
        direction=DIRECTIONS[int(column) % 2],
        tokens=int(loads[gpu, column]),
    )


def _pipelined(loads: Matrix, terms: Terms) -> Timing:
    """Time loads on both kinds of links at once; the busiest link determines the time."""
    seconds = loads * _weights(terms.links, terms.token_bytes)
    times = _by_kind(seconds, terms.links)
    return Timing(
        seconds=max(times),
        phases={"inter": times[0], "intra": times[1]},
        inter_tokens=int(loads[:, 0].sum()),
        loads=loads,
        bottleneck=busiest(loads, seconds),
        combine_s=max(_by_kind(seconds, terms.links, terms.combine_bytes / terms.token_bytes)),
    )


def _by_kind(
    seconds: NDArray[np.float64], links: GpuLinks, factor: float = 1.0
) -> tuple[float, float]:
    """Return the time of the busiest NIC and NVLink, with the start-up times of used links.

    `factor` scales the `seconds` of each link, as if tokens had other sizes.
    """
    nic, port = float(seconds[:, :2].max()), float(seconds[:, 2:].max())
    return (
        nic * factor + links.inter_start_s if nic else 0.0,
        port * factor + links.intra_start_s if port else 0.0,
    )


def deepep_counts(traffic: Traffic, forwarded: Matrix) -> Matrix:
    """Return the load of DeepEP, in which a proxy in each node forwards tokens.

    The proxy is the GPU with the rank of the source. `forwarded` has the tokens that proxies
    send, source GPU by target GPU.
    """
    width, nodes = traffic.width, traffic.nodes
    gpus = nodes * width
    remote = traffic.remote_node_unique
    rank = np.arange(gpus) % width
    by_rank = forwarded.reshape(nodes, width, gpus).sum(axis=0)
    by_rank[rank, np.arange(gpus)] = 0
    counts = np.zeros((gpus, 4), np.int64)
    counts[:, 0] = remote.sum(axis=1)
    counts[:, 1] = remote.reshape(nodes, width, nodes).sum(axis=0).T.ravel()
    counts[:, 2] = by_rank.reshape(width, nodes, width).sum(axis=2).T.ravel()
    counts[:, 3] = by_rank.sum(axis=0)
    return counts


def deepep(traffic: Traffic, terms: Terms) -> Timing:
    """Time a layer with DeepEP's schedule.

    A token is sent once to each node that has one of its experts, to the GPU with the source's
    place in its node, and from there to the GPUs of its experts.

    Parameters
    ----------
    traffic
        Tokens of a layer from each GPU to each GPU and node.
    terms
        Bandwidths of links, and bytes of a token.

    Returns
    -------
    Timing
        Seconds, bytes and loads. Both kinds of links work at once; the busiest link determines
        the time.

    """
    loads = deepep_counts(traffic, traffic.unique)
    return _pipelined(loads, terms)


def hierarchical(traffic: Traffic, terms: Terms) -> Timing:
    """Time a two-level all-to-all: to the source's rank in the target's node, then on.

    Parameters
    ----------
    traffic
        Tokens of one layer, from GPUs to experts.
    terms
        Which tokens count, bytes of a token, and speeds of the links.

    Returns
    -------
    Timing
        Times in seconds of both levels at once: the busiest link determines them. Loads are
        tokens, a row per GPU.

    """
    nodes, width = traffic.nodes, traffic.width
    block = traffic.demand(terms.demand).reshape(nodes, width, nodes, width)
    node, rank = np.arange(nodes), np.arange(width)
    local = block[node, :, node, :]
    block[node, :, node, :] = 0
    across = block.sum(axis=3)  # source node, rank, target node
    onward = block.sum(axis=0)  # rank, target node, target rank
    onward[rank, :, rank] = 0
    sends, receives = across.sum(axis=2), across.sum(axis=0).T
    inner_sends = local.sum(axis=2) + onward.sum(axis=2).T
    inner_receives = local.sum(axis=1) + onward.sum(axis=0)
    return _pipelined(_loads(sends, receives, inner_sends, inner_receives), terms)


def _loads(*columns: Matrix) -> Matrix:
    """Return the loads of sums by GPU, of any shape in the order of GPUs."""
    return np.stack([column.ravel() for column in columns], axis=1)


def _multicast_balanced(traffic: Traffic, terms: Terms) -> Timing:
    """Time one token to each node, spread evenly over all NICs of both nodes.

    A token enters a node through a GPU that needs it, or leaves through its own GPU: whichever
    preference is faster.
    """
    timings = (
        _pipelined(_balanced_loads(traffic, preference), terms) for preference in _PREFERENCES
    )
    return min(timings, key=lambda timing: timing.seconds)


def _balanced_loads(traffic: Traffic, preference: tuple[int, int]) -> Matrix:
    """Return the loads of balanced multicast in tokens, shape (GPUs, 4).

    The columns are sends and receives between nodes, and sends and receives inside nodes.
    Unless the source's own NIC suits, the free NIC with the highest score carries a token:
    `preference` has the scores of the local rank of a target GPU, and of the source's own.
    """
    loads = np.zeros((traffic.nodes * traffic.width, 4), np.int64)
    layer, quota = traffic.layer, _quota(traffic)
    dispatch.balanced_loads(layer.src, layer.expert, layer.home, quota, preference, loads)
    return loads


def _quota(traffic: Traffic) -> NDArray[np.int32]:
    """Return tokens by NIC, [node, node, rank]; remainders rotate, so that totals are even."""
    width = traffic.width
    pairs = traffic.remote_node_unique.reshape(traffic.nodes, width, -1).sum(axis=1)
    base, remainder = np.divmod(pairs, width)
    first = np.cumsum(remainder, axis=1) - remainder
    turn = (np.arange(width) - first[:, :, None]) % width
    return np.asarray(base[:, :, None] + (turn < remainder[:, :, None]), np.int32)


def end_loads(remote: Matrix, local: Matrix) -> Matrix:
    """Return the loads of traffic that no GPU forwards, one row per GPU.

    `remote` and `local` have the tokens from GPU to GPU, of other nodes and of the node.
    """
    return _loads(*(matrix.sum(axis=axis) for matrix in (remote, local) for axis in (1, 0)))


def direct(traffic: Traffic, terms: Terms) -> Timing:
    """Time direct messages between all GPUs, all at the same time."""
    demand, remote = traffic.demand(terms.demand), traffic.remote(terms.demand)
    ends = end_loads(remote, demand - remote)
    messages = end_loads(np.sign(remote), np.sign(demand - remote))
    seconds, dispatch_s = _direct_s(ends, messages, terms, terms.token_bytes)
    mirror = [1, 0, 3, 2]
    _, combine_s = _direct_s(ends[:, mirror], messages[:, mirror], terms, terms.combine_bytes)
    return Timing(
        seconds=max(dispatch_s),
        phases={"inter": dispatch_s[0], "intra": dispatch_s[1]},
        inter_tokens=int(remote.sum()),
        loads=ends,
        bottleneck=busiest(ends, seconds),
        combine_s=max(combine_s),
    )


def _direct_s(
    ends: Matrix, messages: Matrix, terms: Terms, size: int
) -> tuple[NDArray[np.float64], list[float]]:
    """Return the seconds of each link, with incast, and the largest of NIC and of NVLink.

    `ends` are the tokens and `messages` the messages of each link; tokens have `size`
    bytes.
    """
    links = terms.links
    seconds = ends * _weights(links, size)
    seconds[:, 1] *= 1 + links.incast * np.maximum(messages[:, 1] - 1, 0)
    seconds += messages * np.repeat([links.inter_start_s, links.intra_start_s], 2)
    return seconds, [float(seconds[:, :2].max()), float(seconds[:, 2:].max())]


def spreadout(traffic: Traffic, terms: Terms) -> Timing:
    """Time SpreadOut: in shift k, GPU j sends to GPU j + k; shifts run one after the other."""
    demand, remote = traffic.demand(terms.demand), traffic.remote(terms.demand)
    ends = end_loads(remote, demand - remote)
    dispatch_s, combine_s = (
        spreadout_s(tokens, traffic.width, *terms.links.costs(size))
        for tokens, size in ((demand, terms.token_bytes), (demand.T, terms.combine_bytes))
    )
    return Timing(
        seconds=dispatch_s,
        phases={"shifts": dispatch_s},
        inter_tokens=int(remote.sum()),
        loads=ends,
        bottleneck=busiest(ends, ends * _weights(terms.links)),
        combine_s=combine_s,
    )


def _low_latency(traffic: Traffic, terms: Terms) -> Timing:
    """Time DeepEP's low-latency kernels: one message for each expert of a token."""
    demand = traffic.demand("copies")
    remote = traffic.remote("copies")
    loads = end_loads(remote, demand - remote)
    links = terms.links
    most = [int(loads[:, :2].max()), int(loads[:, 2:].max())]
    times = {}
    for operation, size in (("dispatch", terms.token_bytes), ("combine", terms.combine_bytes)):
        start, nic, port = LOW_LATENCY[operation]
        across = most[0] * size / (links.inter * nic) + (start if most[0] else 0.0)
        times[operation] = across, most[1] * size / (links.intra * port)
    _, nic, port = LOW_LATENCY["dispatch"]
    return Timing(
        seconds=max(times["dispatch"]),
        phases=dict(zip(("inter", "intra"), times["dispatch"], strict=True)),
        inter_tokens=int(remote.sum()),
        loads=loads,
        bottleneck=busiest(loads, loads * _weights(links, terms.token_bytes, nic, port)),
        combine_s=max(times["combine"]),
    )


def _fast_exact(traffic: Traffic, terms: Terms) -> Timing:
    """Time FAST's stages, as a pipeline where that is faster, or direct messages.

    Where links inside a node are not much faster than NICs, balancing can cost more than it
    saves: then tokens go directly.
    """
    staged, sent = _fast(traffic, terms, schedule), direct(traffic, terms)
    times = [one.combine_s for one in (staged, sent) if one.combine_s is not None]
    combine_s = min(times)
    if staged.seconds <= sent.seconds:
        return replace(staged, combine_s=combine_s)
    inter_s = sent.phases["inter"]
    phases = {"balance": 0.0, "inter": inter_s, "exposed_intra": sent.seconds - inter_s}
    return replace(sent, phases=phases, combine_s=combine_s)


def _fast_published(traffic: Traffic, terms: Terms) -> Timing:
    """Time FAST as published."""
    return _fast(traffic, terms, published_schedule)


def _fast(
    traffic: Traffic, terms: Terms, scheduled: Callable[..., FastSchedule | FastPipeline]
) -> Timing:
    """Time dispatch and combine as `scheduled` schedules their demands."""
    demand = traffic.demand(terms.demand)
    both = (demand, terms.token_bytes), (np.ascontiguousarray(demand.T), terms.combine_bytes)
    dispatched, combined = (
        scheduled(tokens, traffic.width, *terms.links.costs(size), terms.decomposition)
        for tokens, size in both
    )
    balance_s, inter_s = dispatched.balance_s, float(dispatched.inter_s.sum())
    exposed_s = max(0.0, dispatched.total_s - balance_s - inter_s)
    loads = _fast_loads(dispatched)
    return Timing(
        seconds=dispatched.total_s,
        phases={"balance": balance_s, "inter": inter_s, "exposed_intra": exposed_s},
        inter_tokens=int(traffic.remote(terms.demand).sum()),
        loads=loads,
        bottleneck=busiest(loads, loads * _weights(terms.links)),
        combine_s=combined.total_s,
        sends=NodeSends.of(dispatched),
    )


def _fast_loads(plan: FastSchedule | FastPipeline) -> Matrix:
    """Return the load of each GPU: stages, balancing, redistribution and own node."""
    block = plan.balanced
    nodes, width = block.shape[0], block.shape[2]
    node = np.arange(nodes)
    moved = plan.moved.reshape(nodes, nodes, width, width).sum(axis=1)
    arriving = block.sum(axis=0)
    arriving[:, np.arange(width), np.arange(width)] = 0
    inside = moved + arriving
    sends = block.sum(axis=3)
    sends[node, node] = 0
    return _loads(sends.sum(axis=1), sends.sum(axis=0), inside.sum(axis=2), inside.sum(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A schedule, and the class of lower bounds that applies to it."""

    run: Schedule
    bound: str  # "proxy", "fixed", "relayed" or "multicast"; see `traffic.Bounds`
    copies_only: bool = False  # a token is sent once for each of its experts


STRATEGIES = {
    "deepep": Strategy(run=deepep, bound="proxy"),
    "deepep-ll": Strategy(run=_low_latency, bound="fixed", copies_only=True),
    "fast": Strategy(run=_fast_exact, bound="relayed"),
    "fast-published": Strategy(run=_fast_published, bound="relayed"),
    "direct": Strategy(run=direct, bound="fixed"),
    "spreadout": Strategy(run=spreadout, bound="fixed"),
    "hierarchical": Strategy(run=hierarchical, bound="proxy"),
    "multicast-balanced": Strategy(run=_multicast_balanced, bound="multicast"),
}
