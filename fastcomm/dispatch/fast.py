"""FAST as published: an even load on every NIC of a node, and stages without incast.

Balance inside the nodes, then stages in step, one node to one node, GPU i to GPU i; what a
stage brought moves on inside its node while the next one runs. Own-node traffic runs beside
the first stage.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.traffic import Matrix
from fastcomm.errors import ConfigError
from fastcomm.hardware.cluster import Cost
from fastcomm_kernels import permutations as kernels

Rows = NDArray[np.int32]
DECOMPOSITIONS = ("threshold", "incremental", "assignment")
# Above any number of cells: the assignment takes such a cell only where it has to.
_FORBIDDEN = 1e9
# Of 16: how far the threshold falls where the cells above it do not suffice.
_SHRINK = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
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
) -> Schedule:
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
        Schedule(
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
