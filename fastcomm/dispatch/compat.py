"""The original simulator's schedules and workload, reproduced exactly, with its defects."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.traffic import Matrix, Traffic
from fastcomm.errors import FastcommError
from fastcomm_kernels import dispatch

_FORBIDDEN = 1e9


class NoAnswerError(FastcommError):
    """The original simulator ends in an error on this layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """A token and the bandwidths in the original's units."""

    token_kb: float
    inter_kb_per_s: float
    intra_kb_per_s: float

    def inter_s(self, count: float) -> float:
        """Time of so many tokens on a NIC."""
        return (count * self.token_kb) / self.inter_kb_per_s

    def intra_s(self, count: float) -> float:
        """Time of so many tokens inside a node."""
        return (count * self.token_kb) / self.intra_kb_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepEP:
    """The original's DeepEP on one layer: four counts a GPU, in tokens."""

    counts: Matrix  # GPU by (inter_tx, inter_rx, intra_tx, intra_rx)
    inter_s: float
    intra_s: float
    inter_kb: float

    @property
    def total_s(self) -> float:
        """Both kinds of link work at the same time."""
        return max(self.inter_s, self.intra_s)

    @property
    def max_inter(self) -> int:
        """The largest count of a NIC."""
        return int(self.counts[:, :2].max(initial=0))

    @property
    def max_intra(self) -> int:
        """The largest count inside a node."""
        return int(self.counts[:, 2:].max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fast:
    """The original's FAST on one layer, with all that it works out on the way."""

    remote: Matrix
    raw_send: Matrix
    servers: Matrix
    padded: Matrix
    permutations: NDArray[np.int64]  # stage by node: where the node sends
    weights: Matrix
    remaining: Matrix  # padding left when the last stage with traffic is found
    last: int
    last_max: int
    max_balance: int
    balance_s: float
    inter_s: float
    redist_s: float
    inter_kb: float

    @property
    def total_s(self) -> float:
        """The three phases one after the other, added from the left."""
        return (self.balance_s + self.inter_s) + self.redist_s

    @property
    def max_load(self) -> int:
        """The largest row or column sum of the server matrix."""
        return largest_sum(self.servers)


def deepep_counts(traffic: Traffic, forwarded: Matrix) -> Matrix:
    """Sends and receives of each GPU: once to a node's proxy, from there `forwarded` copies."""
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


def deepep(traffic: Traffic, links: Links) -> DeepEP:
    """The original forwards every copy, two to one GPU as well."""
    counts = deepep_counts(traffic, traffic.copies)
    return DeepEP(
        counts=counts,
        inter_s=links.inter_s(int(counts[:, :2].max(initial=0))),
        intra_s=links.intra_s(int(counts[:, 2:].max(initial=0))),
        inter_kb=int(counts[:, 0].sum()) * links.token_kb,
    )


def fast(traffic: Traffic, links: Links) -> Fast:
    """The original's FAST: floors each block, and lets half of the last stage move on."""
    remote, width = np.where(traffic.own_node, 0, traffic.copies), traffic.width
    raw = traffic.copies.sum(axis=1)
    servers = blocks(remote, width) // width
    balance = np.abs(raw.reshape(-1, width) - servers.sum(axis=1)[:, None]).max(initial=0)
    load = largest_sum(servers)
    padded = pad(servers)
    permutations, weights = assigned_stages(padded)
    if not len(weights):
        raise NoAnswerError(
            "fast-compat: no node sends another a whole token a GPU, and on such a layer the "
            "original ends in an IndexError; `fast` has an answer"
        )
    last, last_max, remaining = _last_stage(permutations, weights, padded - servers)
    return Fast(
        remote=remote,
        raw_send=raw,
        servers=servers,
        padded=padded,
        permutations=permutations,
        weights=weights,
        remaining=remaining,
        last=last,
        last_max=last_max,
        max_balance=int(balance),
        balance_s=links.intra_s(int(balance)),
        inter_s=links.inter_s(load),
        redist_s=links.intra_s(last_max / 2),
        inter_kb=int(remote.sum()) * links.token_kb,
    )


def blocks(matrix: Matrix, width: int) -> Matrix:
    """GPU by GPU to node by node: the sum of each block."""
    nodes = len(matrix) // width
    return np.asarray(matrix.reshape(nodes, width, nodes, width).sum(axis=(1, 3)))


def largest_sum(matrix: Matrix) -> int:
    """The largest row or column sum."""
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


def _last_stage(
    permutations: NDArray[np.int64], weights: Matrix, padding: Matrix
) -> tuple[int, int, Matrix]:
    """The last stage that carries more than padding, its largest cell, and the padding left."""
    remaining, rows = padding.copy(), np.arange(len(padding))
    last = 0
    for stage in range(len(weights) - 1, -1, -1):
        if np.any(weights[stage] > remaining[rows, permutations[stage]]):
            last = stage
            break
        remaining[rows, permutations[stage]] -= weights[stage]
    real = weights[last] - remaining[rows, permutations[last]]
    return last, max(0, int(real.max())), remaining


Ids = NDArray[Any]  # int16 or int32


def id_type(recipe: Recipe) -> type[np.int16] | type[np.int32]:
    """The smallest type that holds every expert and GPU."""
    return np.int16 if recipe.experts <= np.iinfo(np.int16).max else np.int32


def layers(recipe: Recipe) -> Iterator[tuple[Ids, Ids]]:
    """Source and experts of the tokens: iteration by iteration, layer by layer."""
    stream = np.random.RandomState(recipe.seed)
    each, rest = divmod(recipe.tokens, recipe.gpus)
    src = np.repeat(np.arange(recipe.gpus), each)
    if rest:
        src = np.concatenate([src, stream.randint(0, recipe.gpus, rest)])
    src = src.astype(id_type(recipe))
    for _ in range(recipe.iter_num * recipe.num_layers):
        raw = stream.zipf(recipe.zipf_alpha, (recipe.tokens, recipe.topk))
        expert = ((raw - 1) % recipe.experts).astype(src.dtype)
        yield src, _repaired(stream, expert, recipe.experts)


def _repaired(stream: np.random.RandomState, expert: Ids, experts: int) -> Ids:
    """The rows with distinct experts; the stream moves on by exactly what that takes."""
    size = 2 * expert.size + 1024
    while True:
        # n scalar draws take from the stream what one draw of n takes.
        state = stream.get_state()
        drawn = stream.randint(0, experts, size)
        stream.set_state(state)
        fixed = expert.copy()
        used = dispatch.repair(fixed, experts, drawn)
        if used >= 0:
            stream.randint(0, experts, used)
            return fixed
        size *= 4
