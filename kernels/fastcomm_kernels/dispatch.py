"""Random routing of the tokens of a mixture-of-experts layer, and the loads that follow.

Routing is a pure function of (key, number of the token): any chunk of tokens can be drawn alone
and gives the same experts. Random numbers are those of splitmix64, one step a draw; each token
starts at a place of its own.

Token i lies on GPU ``src[i]`` and goes to the experts ``expert[i, :]``, which differ. Loads are
counted in one pass, without a branch that depends on the routing: what a token has seen is a
mark of its own number.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel

Words = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_S11 = np.uint64(11)
_LOW = np.uint64(0xFFFFFFFF)
_UNIT = 2.0**-53

Ids = NDArray[Any]  # int16 or int32
Place = NDArray[np.int32]
Counts = NDArray[np.int32]
Matrix = NDArray[np.int64]


@kernel
def mixed(word: np.uint64) -> np.uint64:
    """The output function of splitmix64."""
    word = (word ^ (word >> _S30)) * _FIRST
    word = (word ^ (word >> _S27)) * _SECOND
    return word ^ (word >> _S31)


@kernel
def routed(
    first: int, key: np.uint64, threshold: Words, alias: Ids, uniform: bool, out: Ids
) -> None:
    """Draw the distinct experts of the tokens from `first` on, into `out` [tokens, top-k].

    `threshold` and `alias` are an alias table. What repeats is drawn anew: from all experts
    alike if `uniform`, else from the table.
    """
    experts = np.uint64(len(threshold))
    for i in range(len(out)):
        state = mixed(key + np.uint64(first + i) * _STEP)
        row = out[i]
        repeats = 0
        for k in range(len(row)):
            state += _STEP
            word = mixed(state)
            column = np.int64(((word >> _S32) * experts) >> _S32)
            other = alias[column]
            found = column if (word & _LOW) < threshold[column] else np.int64(other)
            for j in range(k):
                repeats += int(np.int64(row[j]) == found)
            row[k] = found
        if repeats == 0:
            continue
        # Keep the first of each, then draw on.
        kept = 0
        tries = 0
        while kept < len(row):
            found = np.int64(row[min(tries, len(row) - 1)])
            if tries >= len(row):
                state += _STEP
                word = mixed(state)
                column = np.int64(((word >> _S32) * experts) >> _S32)
                stays = uniform or (word & _LOW) < threshold[column]
                found = column if stays else np.int64(alias[column])
            tries += 1
            is_new = True
            for j in range(kept):
                is_new &= np.int64(row[j]) != found
            row[kept] = found
            kept += int(is_new)


@kernel
def raced(
    first: int,
    key: np.uint64,
    law: NDArray[np.int32],
    weight: NDArray[np.float64],
    gate: tuple[int, int],
    out: Ids,
) -> None:
    """Draw experts without replacement, in proportion to ``weight[law[i]]``, into `out`.

    `gate` is (groups, kept): only the experts of the best `kept` groups, those with the best
    single experts, are taken; the groups are of equal size. An expert of weight 0 is never
    taken as long as others are left.
    """
    experts = weight.shape[1]
    size = experts // gate[0]
    score = np.empty(experts)
    best = np.empty(gate[0])
    for i in range(len(out)):
        state = mixed(key + np.uint64(first + i) * _STEP)
        chances = weight[law[i]]
        best[:] = np.inf
        for e in range(experts):
            state += _STEP
            unit = (np.float64(mixed(state) >> _S11) + 0.5) * _UNIT
            score[e] = -np.log(unit) / chances[e] if chances[e] > 0 else np.inf
            best[e // size] = min(best[e // size], score[e])
        for _ in range(gate[0] - gate[1]):
            worst = np.argmax(best)
            best[worst] = -np.inf
            for e in range(worst * size, (worst + 1) * size):
                score[e] = np.inf
        for k in range(out.shape[1]):
            taken = np.argmin(score)
            out[i, k] = taken
            score[taken] = np.inf


@kernel
def replicated(
    first: int,
    key: np.uint64,
    src_node: Ids,
    expert: Ids,
    replicas: tuple[Ids, Ids, Ids],
    rule: int,
    out: Ids,
) -> None:
    """Choose a replica of each expert, into `out`.

    `replicas` are (start, physical, node): those of expert e are ``physical[start[e] :
    start[e + 1]]``, each on a node. `rule` is 0 random, 1 round robin, 2 random among those of
    the source's node, and of all where it has none.
    """
    start, physical, node = replicas
    for i in range(len(expert)):
        state = mixed(key + np.uint64(first + i) * _STEP)
        for k in range(expert.shape[1]):
            e = expert[i, k]
            begin, count = start[e], start[e + 1] - start[e]
            local = 0
            if rule == 2:
                for r in range(begin, begin + count):
                    local += int(node[r] == src_node[i])
            state += _STEP
            among = local if local else count
            pick = np.int64(((mixed(state) >> _S32) * np.uint64(among)) >> _S32)
            if rule == 1:
                pick = (first + i) % count
            if local:
                r = begin
                while node[r] != src_node[i] or pick > 0:
                    pick -= int(node[r] == src_node[i])
                    r += 1
                out[i, k] = physical[r]
            else:
                out[i, k] = physical[begin + pick]


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
