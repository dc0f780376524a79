"""Draw random routings of the tokens of a mixture-of-experts layer, and count the loads.

Routing is a pure function of (key, number of the token): any chunk of tokens can be drawn alone
and gives the same experts. Random numbers are those of splitmix64, one step per draw; each
token starts at a place of its own.

Token i is on GPU ``src[i]`` and goes to the different experts ``expert[i, :]``. Loads are
counted in one pass without branches that depend on the routing: marks hold the number of the
last token.
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Ids, Matrix, Numbers

Bits = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_S11 = np.uint64(11)
_LOW = np.uint64(0xFFFFFFFF)
_UNIT = 2.0**-53


@kernel
def mixed(word: np.uint64) -> np.uint64:
    """Mix the bits of a word by the output function of splitmix64."""
    word = (word ^ (word >> _S30)) * _FIRST
    word = (word ^ (word >> _S27)) * _SECOND
    return word ^ (word >> _S31)


@kernel
def routed(
    first: int, key: np.uint64, threshold: Bits, alias: Ids, uniform: bool, out: Ids
) -> None:
    """Draw distinct experts for the tokens from number `first` on, into `out` [token, top-k].

    Parameters
    ----------
    first, key
        Number of the first token, and key of the random numbers.
    threshold, alias
        Alias table of the experts' popularity: of each column, how many of 2**32 draws take the
        column's own expert, and the expert of the other draws.
    uniform
        Whether repeated experts are redrawn uniformly, rather than from the table.
    out
        Experts; written. Never returns if top-k exceeds the number of experts or, without
        `uniform`, of those that the table can draw.

    """
    experts = np.uint64(len(threshold))
    for i in range(len(out)):
        state = mixed(key + np.uint64(first + i) * _STEP)
        row = out[i]
        repeat_count = 0
        for k in range(len(row)):
            state += _STEP
            word = mixed(state)
            column = np.int64(((word >> _S32) * experts) >> _S32)
            other = alias[column]
            drawn = column if (word & _LOW) < threshold[column] else np.int64(other)
            for j in range(k):
                repeat_count += int(np.int64(row[j]) == drawn)
            row[k] = drawn
        if repeat_count == 0:
            continue
        # Keep the first of each expert, then draw more.
        distinct_count = 0
        tries = 0
        while distinct_count < len(row):
            drawn = np.int64(row[min(tries, len(row) - 1)])
            if tries >= len(row):
                state += _STEP
                word = mixed(state)
                column = np.int64(((word >> _S32) * experts) >> _S32)
                stays = uniform or (word & _LOW) < threshold[column]
                drawn = column if stays else np.int64(alias[column])
            tries += 1
            is_new = True
            for j in range(distinct_count):
                is_new &= np.int64(row[j]) != drawn
            row[distinct_count] = drawn
            distinct_count += int(is_new)


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

    Parameters
    ----------
    first, key
        Number of the first token, and key of the random numbers.
    law
        Row of `weight` for each token.
    weight
        Weights of the experts, shape (laws, experts); an expert of weight 0 is drawn last.
    gate
        Number of groups of equal size, and how many of them are used: those with the best
        experts.
    out
        Experts, shape (tokens, top-k); written.

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
            winner = np.argmin(score)
            out[i, k] = winner
            score[winner] = np.inf


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

    Parameters
    ----------
    first, key
        Number of the first token, and key of the random numbers.
    src_node, expert
        Node and experts of each token.
    replicas
        Start, physical expert and node: the replicas of expert e are
        ``physical[start[e]:start[e + 1]]``.
    rule
        0 random; 1 round robin; 2 random among replicas on the source's node, if it has any.
    out
        Physical experts; written.

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
def copies(src: Ids, expert: Ids, out: Numbers) -> None:
    """Count the copies of tokens that each GPU sends to each expert.

    Parameters
    ----------
    src
        GPU of each token, shape (tokens,).
    expert
        Experts of each token, shape (tokens, top-k).
    out
        Counts of shape (GPUs, experts); the numbers are added to it.

    """
    for i in range(len(src)):
        row = out[src[i]]
        for k in range(expert.shape[1]):
            row[expert[i, k]] += 1


@kernel
def distinct_few(src: Ids, expert: Ids, bit: Numbers, out: Numbers) -> None:
    """Count the tokens of each GPU by the exact set of places that they reach.

    For few places this is faster than `distinct`.

    Parameters
    ----------
    src
        GPU of each token, shape (tokens,).
    expert
        Experts of each token, shape (tokens, top-k).
    bit
        Place of each expert (its GPU or node) as a power of two.
    out
        Counts of shape (GPUs, 2**places), by the sum of the bits; the numbers are added to it.

    """
    for i in range(len(src)):
        reached = bit[expert[i, 0]]
        for k in range(1, expert.shape[1]):
            reached |= bit[expert[i, k]]
        out[src[i], reached] += 1


@kernel
def distinct(src: Ids, expert: Ids, place: Numbers, out: Numbers) -> None:
    """Count the tokens of each GPU that reach each place; a token counts once per place.

    Parameters
    ----------
    src
        GPU of each token, shape (tokens,).
    expert
        Experts of each token, shape (tokens, top-k).
    place
        Place of each expert: its GPU or its node.
    out
        Counts of shape (GPUs, places); the numbers are added to it.

    """
    last = np.full(out.shape[1], -1, np.int64)
    for i in range(len(src)):
        row = out[src[i]]
        for k in range(expert.shape[1]):
            target = place[expert[i, k]]
            row[target] += np.int32(last[target] != i)
            last[target] = i


@kernel
def leaving(src: Ids, expert: Ids, home: Numbers, out: Numbers) -> None:
    """Count the tokens of each GPU that have an expert on another GPU.

    Parameters
    ----------
    src
        GPU of each token, shape (tokens,).
    expert
        Experts of each token, shape (tokens, top-k).
    home
        GPU of each expert.
    out
        Counts of shape (GPUs,); the numbers are added to it.

    """
    for i in range(len(src)):
        s = src[i]
        leaves = False
        for k in range(expert.shape[1]):
            leaves |= home[expert[i, k]] != s
        out[s] += np.int32(leaves)


@kernel
def repair(expert: Ids, experts: int, drawn: NDArray[np.int64]) -> int:
    """Replace repeated experts of each token by drawn ones, in place.

    Parameters
    ----------
    expert
        Experts, shape (tokens, top-k); written. The first occurrences move to the front of a
        row.
    experts
        Number of experts; all values are below it.
    drawn
        Experts to use, in this order; one that the token already has is skipped.

    Returns
    -------
    int
        Number of draws used, or -1 if `drawn` is too short; some rows are then unfinished.

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
    home: Numbers,
    quota: NDArray[np.int32],
    scores: tuple[int, int],
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
    scores
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
                        score = scores[0] * int(gpu_mark[n * width + r] == i)
                        score += scores[1] * int(r == rank)
                        if available[r] > 0 and score > best:
                            best = score
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


@kernel
def packed(load: NDArray[np.float64], order: Matrix, packs: int) -> Matrix:
    """Return the pack of each item: heaviest first, into the lightest pack with room.

    Parameters
    ----------
    load
        Load of each item.
    order
        Items, heaviest first.
    packs
        Number of packs, of equal numbers of items.

    """
    pack = np.empty(len(load), np.int64)
    weight = np.zeros(packs)
    count = np.zeros(packs, np.int64)
    for item in order:
        lightest = -1
        for one in range(packs):
            if count[one] * packs < len(load) and (
                lightest < 0 or weight[one] < weight[lightest]
            ):
                lightest = one
        pack[item] = lightest
        weight[lightest] += load[item]
        count[lightest] += 1
    return pack


@kernel
def swapped(
    load: NDArray[np.float64], pack: Matrix, packs: int, target: float, most_swaps: int
) -> Matrix:
    """Return packs after swaps of two items that make the heaviest pack lighter.

    Each swap makes the heavier of its two packs as light as any swap with the heaviest can.

    Parameters
    ----------
    load
        Load of each item.
    pack
        Pack of each item.
    packs
        Number of packs.
    target
        Load of the heaviest pack that suffices.
    most_swaps
        Bound of the number of swaps.

    """
    pack = pack.copy()
    weight = np.zeros(packs)
    for item in range(len(load)):
        weight[pack[item]] += load[item]
    for _ in range(most_swaps):
        heaviest = np.argmax(weight)
        most = weight[heaviest]
        if most <= target:
            break
        best, gives, takes = most * (1 - 1e-12), -1, -1
        for one in range(len(load)):
            if pack[one] != heaviest:
                continue
            for other in range(len(load)):
                gain = load[one] - load[other]
                if gain <= 0 or pack[other] == heaviest:
                    continue
                heavier = max(most - gain, weight[pack[other]] + gain)
                if heavier < best:
                    best, gives, takes = heavier, one, other
        if gives < 0:
            break
        gain = load[gives] - load[takes]
        weight[heaviest] -= gain
        weight[pack[takes]] += gain
        pack[gives], pack[takes] = pack[takes], pack[gives]
    return pack
