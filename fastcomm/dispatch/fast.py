"""The schedule of FAST as published.

FAST first balances tokens inside the nodes. Then follow stages, in which each node sends to one
other node, GPU i to GPU i. The tokens that arrive in a stage are redistributed inside their
node during the next stage. Traffic inside a node overlaps the first stage. Demands are in
tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.traffic import largest_sum
from fastcomm.errors import ConfigError
from fastcomm.hardware import Cost
from fastcomm_kernels import permutations as kernels
from fastcomm_kernels.arrays import Matrix, Numbers

DECOMPOSITIONS = ("threshold", "incremental", "assignment")
# Cost of an empty cell, above any number of cells: the assignment avoids such cells.
_FORBIDDEN = 1e9
# Sixteenths to which the threshold falls if the cells above it do not suffice.
_SHRINK = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class FastSchedule:
    """FAST's schedule of one demand, and the seconds of each part."""

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
        overlapped = np.concatenate([[self.own_s], self.redist_s[:-1]])
        return float(
            self.balance_s + np.maximum(self.inter_s, overlapped).sum() + self.redist_s[-1]
        )


def schedule(
    demand: Matrix, width: int, inter: Cost, intra: Cost, decomposition: str = "threshold"
) -> FastSchedule:
    """Schedule a GPU-by-GPU demand in tokens; its diagonal does not move.

    Stages run in the order of their decomposition, or sorted by size, whichever is faster.

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
    servers, moved, balance_s = kernels.balance(block, intra.pair)
    permutations, weights = stages(servers, decomposition)
    redist = _redistribution(block, permutations, weights, intra)
    # Sorted by size, a stage can overlap the previous redistribution, which is similar.
    order = np.argsort(-weights, kind="stable")
    sorted_redist = _redistribution(block, permutations[order], weights[order], intra)
    own_s = max(kernels.spread_time(block[n, n], intra.pair) for n in range(len(block)))
    schedules = [
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
            (permutations, weights, redist),
            (permutations[order], weights[order], sorted_redist),
        )
    ]
    return min(schedules, key=lambda candidate: candidate.total_s)


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


def _redistribution(
    block: NDArray[np.int64], permutations: Numbers, weights: Matrix, intra: Cost
) -> NDArray[np.float64]:
    return kernels.redistribution(block, permutations, weights, intra.pair)


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
