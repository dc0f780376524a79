"""Loads of a mixture-of-experts layer, counted over its tokens in one pass.

Token i lies on GPU ``src[i]`` and goes to the experts ``expert[i, :]``, which differ. The loops
have no branch that depends on the routing: what a token has seen is a mark of its own number.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel

Ids = NDArray[Any]  # int16 or int32
Place = NDArray[np.int32]
Counts = NDArray[np.int32]
Matrix = NDArray[np.int64]


@kernel
def copies(src: Ids, expert: Ids, out: Counts) -> None:
    """Add to `out` [GPU, expert] how many tokens of a GPU go to an expert."""
    for i in range(len(src)):
        row = out[src[i]]
        for k in range(expert.shape[1]):
            row[expert[i, k]] += 1


@kernel
def distinct_few(src: Ids, expert: Ids, bit: Counts, out: Counts) -> None:
    """Add to `out` [GPU, set of places] how many tokens reach exactly that set.

    `bit` is the place of each expert as a power of two. For few places this beats `distinct`.
    """
    for i in range(len(src)):
        seen = bit[expert[i, 0]]
        for k in range(1, expert.shape[1]):
            seen |= bit[expert[i, k]]
        out[src[i], seen] += 1


@kernel
def distinct(src: Ids, expert: Ids, place: Place, out: Counts) -> None:
    """Add to `out` [GPU, place] how many tokens of a GPU reach a place, each counted once.

    `place` holds the place of each expert: its GPU, or its node.
    """
    last = np.full(out.shape[1], -1, np.int64)
    for i in range(len(src)):
        row = out[src[i]]
        for k in range(expert.shape[1]):
            at = place[expert[i, k]]
            row[at] += np.int32(last[at] != i)
            last[at] = i


@kernel
def leaving(src: Ids, expert: Ids, home: Place, out: Counts) -> None:
    """Add to `out` [GPU] how many of its tokens have an expert on another GPU."""
    for i in range(len(src)):
        s = src[i]
        away = False
        for k in range(expert.shape[1]):
            away |= home[expert[i, k]] != s
        out[s] += np.int32(away)


@kernel
def repair(expert: Ids, experts: int, drawn: NDArray[np.int64]) -> int:
    """Replace repeated experts in each row by those `drawn`; return how many that took.

    -1 if `drawn` is too short; the rows are then half done. Writes into `expert`.
    """
    used = 0
    last = np.full(experts, -1, np.int64)
    for i in range(len(expert)):
        row = expert[i]
        kept = 0
        for k in range(len(row)):
            value = row[k]
            if last[value] != i:
                last[value] = i
                row[kept] = value
                kept += 1
        while kept < len(row):
            if used == len(drawn):
                return -1
            found = drawn[used]
            used += 1
            if last[found] != i:
                last[found] = i
                row[kept] = found
                kept += 1
    return used


@kernel
def balanced_loads(
    src: Ids,
    expert: Ids,
    home: Place,
    quota: NDArray[np.int32],
    likes: tuple[int, int],
    out: Matrix,
) -> None:
    """Add to `out` [GPU, 4] inter and intra sends and receives when NICs share the load.

    Each token goes once to a node, by the NICs of one rank on both sides: one that is a target
    and the source's own if there is, else by `likes`, how much to like a (target, own rank), as
    long as `quota` [source node, node, rank] lasts. Writes into `quota` and `out`.
    """
    width = quota.shape[2]
    node_mark = np.full(quota.shape[0], -1, np.int64)
    gpu_mark = np.full(len(out), -1, np.int64)
    for i in range(len(src)):
        s = np.int64(src[i])
        for k in range(expert.shape[1]):
            gpu_mark[home[expert[i, k]]] = i
        for k in range(expert.shape[1]):
            n = home[expert[i, k]] // width
            if node_mark[n] == i:
                continue
            node_mark[n] = i
            hub = s
            if n != s // width:
                left = quota[s // width, n]
                rank = s % width
                if left[rank] == 0 or gpu_mark[n * width + rank] != i:
                    best, to = -1, rank
                    for r in range(width):
                        fit = likes[0] * int(gpu_mark[n * width + r] == i)
                        fit += likes[1] * int(r == rank)
                        if left[r] > 0 and fit > best:
                            best = fit
                            to = r
                    rank = to
                left[rank] -= 1
                sender = s - s % width + rank
                hub = n * width + rank
                out[sender, 0] += 1
                out[hub, 1] += 1
                out[s, 2] += np.int64(sender != s)
                out[sender, 3] += np.int64(sender != s)
            for t in range(n * width, (n + 1) * width):
                needed = np.int64(gpu_mark[t] == i and t != hub)
                out[hub, 2] += needed
                out[t, 3] += needed
