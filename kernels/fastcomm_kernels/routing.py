"""Random routing of tokens, a pure function of (key, number of the token).

Any chunk of tokens can be drawn alone and gives the same experts. Random numbers are those of
splitmix64, one step a draw; each token starts at a place of its own.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel

Ids = NDArray[Any]  # int16 or int32
Words = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_S11 = np.uint64(11)
_LOW = np.uint64(0xFFFFFFFF)
_UNIT = 2.0**-53


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
