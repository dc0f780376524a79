"""Count the loads of a mixture-of-experts layer over its tokens, in one pass.

Token i is on GPU ``src[i]`` and goes to the different experts ``expert[i, :]``. Loops avoid
branches that depend on the routing: marks hold the number of the last token.
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
    """Add to `out` [GPU, expert] the number of tokens of the GPU that go to the expert."""
    for i in range(len(src)):
        row = out[src[i]]
        for k in range(expert.shape[1]):
            row[expert[i, k]] += 1


@kernel
def distinct_few(src: Ids, expert: Ids, bit: Counts, out: Counts) -> None:
    """Add to `out` [GPU, set of places] the number of tokens that reach exactly this set.

    `bit` is the place of each expert as a power of two. For few places this is faster than
    `distinct`.
    """
    for i in range(len(src)):
        reached = bit[expert[i, 0]]
        for k in range(1, expert.shape[1]):
            reached |= bit[expert[i, k]]
        out[src[i], reached] += 1


@kernel
def distinct(src: Ids, expert: Ids, place: Place, out: Counts) -> None:
    """Add to `out` [GPU, place] the number of tokens of the GPU that reach the place.

    `place` is the place of each expert: its GPU or its node. A token counts once per place.
    """
    last = np.full(out.shape[1], -1, np.int64)
    for i in range(len(src)):
        row = out[src[i]]
        for k in range(expert.shape[1]):
            target = place[expert[i, k]]
            row[target] += np.int32(last[target] != i)
            last[target] = i


@kernel
def leaving(src: Ids, expert: Ids, home: Place, out: Counts) -> None:
    """Add to `out` [GPU] the number of its tokens with an expert on another GPU.

    `home` is the GPU of each expert.
    """
    for i in range(len(src)):
        s = src[i]
        leaves = False
        for k in range(expert.shape[1]):
            leaves |= home[expert[i, k]] != s
        out[s] += np.int32(leaves)


@kernel
def repair(expert: Ids, experts: int, drawn: NDArray[np.int64]) -> int:
    """Replace repeated experts in each row of `expert` by drawn ones, in place.

    Return the number of draws used, or -1 if `drawn` is too short; some rows are then
    unfinished.
    """
    used = 0
    last = np.full(experts, -1, np.int64)
    for i in range(len(expert)):
        row = expert[i]
        size = 0
        for k in range(len(row)):
            value = row[k]
            if last[value] != i:
                last[value] = i
                row[size] = value
                size += 1
        while size < len(row):
            if used == len(drawn):
                return -1
            replacement = drawn[used]
            used += 1
            if last[replacement] != i:
                last[replacement] = i
                row[size] = replacement
                size += 1
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
    """Add the loads of NICs that share traffic to `out` [GPU, 4].

    The columns of `out` are sends and receives between nodes, and sends and receives inside
    nodes. Each token goes once to a node, by the NICs of one local rank on both sides. If the
    source's own rank has a target GPU and quota, it is used; else the rank with quota that has
    the highest score.

    Parameters
    ----------
    src, expert, home
        Source and experts of each token, and the GPU of each expert.
    quota
        Tokens [source node, node, local rank] that may still use a rank; written.
    likes
        Scores of a rank with a target GPU, and of the source's own rank.
    out
        Loads; written.

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
                available = quota[s // width, n]
                rank = s % width
                if available[rank] == 0 or gpu_mark[n * width + rank] != i:
                    best, to = -1, rank
                    for r in range(width):
                        fit = likes[0] * int(gpu_mark[n * width + r] == i)
                        fit += likes[1] * int(r == rank)
                        if available[r] > 0 and fit > best:
                            best = fit
                            to = r
                    rank = to
                available[rank] -= 1
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
