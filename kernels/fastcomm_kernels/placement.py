"""Search for a placement of replicas of experts whose heaviest GPU is lighter.

`slots` has the expert of each slot, shape (GPUs, slots of a GPU); replicas of an expert share
its load. No move puts a second replica of an expert on a GPU. Work is counted in pairs of slots
that are compared, so that results do not depend on the machine.
"""

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Floats, Matrix

State = tuple[Matrix, Matrix, Matrix, Floats]  # slots, replicas, replicas on GPUs, GPU loads
Change = tuple[float, int, int, int]  # heaviest GPU after it, slot, other GPU and its slot

_GAIN = 1 - 1e-9  # of a load that counts as lighter
_S13, _S7, _S17 = np.uint64(13), np.uint64(7), np.uint64(17)
_SEED = np.uint64(88172645463325252)


@kernel
def counted(slots: Matrix, experts: int) -> tuple[Matrix, Matrix]:
    """Return the replicas of each expert, and of each expert on each GPU."""
    gpus, room = slots.shape
    count = np.zeros(experts, np.int64)
    on = np.zeros((experts, gpus), np.int64)
    for g in range(gpus):
        for x in range(room):
            count[slots[g, x]] += 1
            on[slots[g, x], g] += 1
    return count, on


@kernel
def weigh(load: Floats, slots: Matrix, count: Matrix, weight: Floats) -> None:
    """Write the load of each GPU into `weight`; `count` has the replicas of experts."""
    for g in range(len(slots)):
        weight[g] = 0.0
        for x in range(slots.shape[1]):
            weight[g] += load[slots[g, x]] / count[slots[g, x]]


@kernel
def best_swap(load: Floats, state: State, heavy: int, most: float, alike: float) -> Change:
    """Return the swap with a slot of GPU `heavy` whose GPUs are lightest, below `most`.

    Slots of less load than `alike` are: the first one of a GPU is compared. Without a swap, the
    result has -1 as slot.
    """
    slots, count, on, weight = state
    best, at, to, place = most, -1, -1, -1
    for x in range(slots.shape[1]):
        a = slots[heavy, x]
        own = load[a] / count[a]
        for g in range(len(slots)):
            if own < alike or g == heavy or on[a, g] > 0:
                continue
            is_light = False
            for y in range(slots.shape[1]):
                b = slots[g, y]
                if is_light and load[b] < alike * count[b]:
                    continue
                is_light = is_light or load[b] < alike * count[b]
                gain = own - load[b] / count[b]
                heavier = max(weight[heavy] - gain, weight[g] + gain)
                if heavier < best and on[b, heavy] == 0:
                    best, at, to, place = heavier, x, g, y
    return best, at, to, place


@kernel
def best_replica(load: Floats, state: State, heavy: int, most: float, alike: float) -> Change:
    """Return the slot that is best given to one more replica of an expert of GPU `heavy`.

    It is taken from an expert with other replicas, which get heavier. All GPUs that change are
    below `most`. Experts whose replicas have less load than `alike` get none. Without such a
    slot, the result has -1 as slot of the expert.
    """
    slots, count, on, weight = state
    gpus = len(slots)
    best, at, to, place = most, -1, -1, -1
    for x in range(slots.shape[1]):
        a = slots[heavy, x]
        less = load[a] / (count[a] + 1)
        fall = load[a] / count[a] - less
        for g in range(gpus):
            if load[a] < alike * count[a] or on[a, g] > 0:
                continue
            for y in range(slots.shape[1]):
                b = slots[g, y]
                if count[b] == 1:
                    continue
                own = load[b] / count[b]
                rise = load[b] / (count[b] - 1) - own
                worst = weight[g] - own + less + (on[b, g] - 1) * rise
                if worst >= best:
                    continue
                for h in range(gpus):
                    if h != g and (on[b, h] > 0 or h == heavy):
                        worst = max(worst, weight[h] + on[b, h] * rise - on[a, h] * fall)
                if worst < best:
                    best, at, to, place = worst, x, g, y
    return best, at, to, place


@kernel
def exchange(state: State, at: tuple[int, int], to: tuple[int, int]) -> None:
    """Swap the experts of two slots, (GPU, slot); loads of GPUs are not updated."""
    slots, _, on, _ = state
    a, b = slots[at], slots[to]
    slots[at], slots[to] = b, a
    on[a, at[0]] -= 1
    on[a, to[0]] += 1
    on[b, at[0]] += 1
    on[b, to[0]] -= 1


@kernel
def replace(state: State, to: tuple[int, int], a: int) -> None:
    """Give a slot, (GPU, slot), to a replica of expert `a`; loads are not updated."""
    slots, count, on, _ = state
    b = slots[to]
    slots[to] = a
    on[a, to[0]] += 1
    on[b, to[0]] -= 1
    count[a] += 1
    count[b] -= 1


@kernel
def compared(load: Floats, slots: Matrix, count: Matrix, alike: float) -> int:
    """Return the pairs of slots that are compared with those of a GPU, about."""
    gpus, room = slots.shape
    heavy = 0
    for g in range(gpus):
        for x in range(room):
            heavy += load[slots[g, x]] >= alike * count[slots[g, x]]
    own = -(-heavy // gpus)
    return int(own * gpus * min(room, own + 1) + 2 * (slots.size - heavy))


@kernel
def descend(
    load: Floats, state: State, target: float, work: int, has_spare: bool, alike: float
) -> int:
    """Change slots while that makes the heaviest GPU lighter; return the work that remains.

    Parameters
    ----------
    load
        Load of each expert.
    state
        The placement; written.
    target
        Load of the heaviest GPU that suffices.
    work
        Most pairs of slots to compare.
    has_spare
        Whether some experts have several replicas.
    alike
        Load below which the slots of a GPU are not told apart.

    """
    slots, count, _, weight = state
    pairs = compared(load, slots, count, alike)
    while work > 0:
        heavy = int(np.argmax(weight))
        most = weight[heavy]
        if most <= target:
            break
        swap = best_swap(load, state, heavy, most * _GAIN, alike)
        work -= pairs
        more = swap
        if has_spare:
            more = best_replica(load, state, heavy, swap[0], alike)
            work -= 2 * pairs
        if more[0] < swap[0]:
            replace(state, (more[2], more[3]), slots[heavy, more[1]])
        elif swap[1] >= 0:
            exchange(state, (heavy, swap[1]), (swap[2], swap[3]))
        else:
            break
        weigh(load, slots, count, weight)
    return work


@kernel
def kick(state: State, heavy: int, changes: int, word: np.uint64, has_spare: bool) -> np.uint64:
    """Make random changes, the first on GPU `heavy`; return the next random word."""
    slots, count, on, _ = state
    gpus, room = slots.shape
    for change in range(changes):
        word ^= word << _S13
        word ^= word >> _S7
        word ^= word << _S17
        bits = np.int64(word >> np.uint64(2))
        g = heavy if change == 0 else bits % gpus
        bits //= gpus
        x, bits = bits % room, bits // room
        h, bits = bits % gpus, bits // gpus
        y, bits = bits % room, bits // room
        a, b = slots[g, x], slots[h, y]
        if on[a, h] > 0:
            continue
        if has_spare and bits % 2 == 0:
            if count[b] > 1:
                replace(state, (h, y), a)
        elif on[b, g] == 0:
            exchange(state, (g, x), (h, y))
    return word


@kernel
def lightened(load: Floats, slots: Matrix, target: float, work: int, alike: float) -> Matrix:
    """Return slots whose heaviest GPU is lighter, or as heavy.

    Slots change as long as that makes the heaviest GPU lighter; then the best ones so far get a
    few random changes, and so on. The result is the same on every machine.

    Parameters
    ----------
    load
        Load of each expert.
    slots
        Expert of each slot, shape (GPUs, slots of a GPU); every expert has one.
    target
        Load of the heaviest GPU that suffices.
    work
        Most pairs of slots to compare, about.
    alike
        Load below which the slots of a GPU are not told apart.

    """
    best, now = slots.copy(), slots.copy()
    count, on = counted(now, len(load))
    has_spare = bool(now.size > len(load))
    weight = np.zeros(len(now))
    weigh(load, now, count, weight)
    least = weight.max()
    state = now, count, on, weight
    word, turn = _SEED, 0
    while work > 0:
        work = descend(load, state, target, work, has_spare, alike)
        if weight.max() < least:
            least = weight.max()
            best[:] = now
        if least <= target:
            break
        now[:] = best
        count[:], on[:] = counted(now, len(load))
        weigh(load, now, count, weight)
        word = kick(state, int(np.argmax(weight)), 2 + turn % 3, word, has_spare)
        weigh(load, now, count, weight)
        turn += 1
        work -= now.size
    return best


@kernel
def counts_below(
    load: Floats, share: float, total: int, most: int, rule: int, count: Matrix
) -> bool:
    """Write the fewest replicas with at most a share of load each; then give away the others.

    By `rule` they go to the experts of least load (0), to the largest replicas (1), or to the
    largest ones below a third of the share (2). Return whether there are enough of them, and
    none of the `most` of an expert too many.
    """
    spare = total
    for e in range(len(load)):
        count[e] = min(most, max(1, int(np.ceil(load[e] / share - 1e-9))))
        spare -= count[e]
    while spare > 0:
        chosen, best = -1, -np.inf
        for e in range(len(load)):
            worth = -load[e] if rule == 0 else load[e] / count[e]
            is_open = count[e] < most and (rule < 2 or load[e] < share / 3)
            if is_open and worth > best:
                chosen, best = e, worth
        if chosen < 0:
            break
        more = min(spare, most - count[chosen]) if rule == 0 else 1
        count[chosen] += more
        spare -= more
    return bool(spare == 0)


@kernel
def packed_apart(load: Floats, count: Matrix, slots: Matrix, bar: float) -> float:
    """Write replicas into slots, largest first into the lightest GPU without the expert.

    Return the load of the heaviest GPU; it is infinite if that is not below `bar`, or if no GPU
    remains for a replica.
    """
    gpus, room = slots.shape
    weight = np.zeros(gpus)
    used, last = np.zeros(gpus, np.int64), np.full(gpus, -1, np.int64)
    for e in np.argsort(-load / count):
        for _ in range(count[e]):
            to = -1
            for g in range(gpus):
                if used[g] < room and last[g] != e and (to < 0 or weight[g] < weight[to]):
                    to = g
            if to < 0 or weight[to] + load[e] / count[e] >= bar:
                return np.inf
            slots[to, used[to]], last[to] = e, e
            used[to] += 1
            weight[to] += load[e] / count[e]
    return float(weight.max())


@kernel
def divided(
    load: Floats, slots: Matrix, shares: tuple[float, float], trials: int
) -> tuple[Floats, Matrix]:
    """Return the best packings of experts that are divided into shares of many sizes.

    Parameters
    ----------
    load
        Load of each expert.
    slots
        Expert of each slot, shape (GPUs, slots of a GPU); only its shape is used.
    shares
        Smallest and greatest share.
    trials
        Number of shares.

    Returns
    -------
    heaviest : ndarray
        Load of the heaviest GPU, by what is done with spare replicas; infinite without one.
    packings : ndarray
        Expert of each slot, shape (3, GPUs, slots of a GPU).

    """
    gpus = len(slots)
    heaviest, now = np.full(3, np.inf), slots.copy()
    packings = np.zeros((3, *slots.shape), np.int64)
    count = np.ones(len(load), np.int64)
    for trial in range(trials):
        share = shares[0] * (shares[1] / shares[0]) ** (trial / max(1, trials - 1))
        for rule in range(3):
            if counts_below(load, share, slots.size, gpus, rule, count):
                weight = packed_apart(load, count, now, heaviest[rule])
                if weight < heaviest[rule]:
                    heaviest[rule], packings[rule] = weight, now
    return heaviest, packings


@kernel
def draw_counts(
    load: Floats,
    shares: tuple[float, float],
    total: int,
    most: int,
    word: np.uint64,
    count: Matrix,
) -> np.uint64:
    """Write replicas of experts with at most a random share of load; return the next word.

    What remains goes to the largest replicas below a random part of the share, as if loads were
    up to a half more. Experts have `most` replicas at most; there are too few in all if a share
    is too small.
    """
    share, part = shares[0], 1.0
    for draw in range(2):
        word = shuffled(word)
        number = np.int64(word >> np.uint64(11)) / 2.0**53
        if draw == 0:
            share *= (shares[1] / shares[0]) ** number
        else:
            part = 0.2 + number
    spare = total
    for e in range(len(load)):
        count[e] = min(most, max(1, int(np.ceil(load[e] / share - 1e-9))))
        spare -= count[e]
    while spare > 0:
        chosen, best = -1, -1.0
        for e in range(len(load)):
            word = shuffled(word)
            own = load[e] / count[e]
            worth = own * (1.0 + np.int64(word >> np.uint64(11)) / 2.0**54)
            if own <= part * share and count[e] < most and worth > best:
                chosen, best = e, worth
        if chosen < 0:
            break
        count[chosen] += 1
        spare -= 1
    return word


@kernel
def shuffled(word: np.uint64) -> np.uint64:
    """Return the next random word."""
    word ^= word << _S13
    word ^= word >> _S7
    return word ^ (word << _S17)


@kernel
def restarted(
    load: Floats, slots: Matrix, shares: tuple[float, float], target: float, work: int
) -> Matrix:
    """Return slots whose heaviest GPU is lighter, or as heavy, after searches from many starts.

    A start has replicas of at most a random share of load, between the two `shares`. Other
    parameters are those of `lightened`.
    """
    best, now = slots.copy(), slots.copy()
    gpus, experts = len(slots), len(load)
    has_spare = bool(slots.size > experts)
    weight = np.zeros(gpus)
    count, _ = counted(best, experts)
    weigh(load, best, count, weight)
    least = weight.max()
    word, turn = _SEED, 0
    while work > 0 and least > target:
        word = draw_counts(load, shares, slots.size, gpus, word, count)
        work -= slots.size * 4
        if count.sum() != slots.size or packed_apart(load, count, now, np.inf) == np.inf:
            continue
        count, on = counted(now, experts)
        weigh(load, now, count, weight)
        state = now, count, on, weight
        if turn % 2 == 1:
            word = kick(state, int(np.argmax(weight)), 2 + turn % 3, word, has_spare)
            weigh(load, now, count, weight)
        turn += 1
        work = descend(load, state, target, work, has_spare, 0.0)
        if weight.max() < least:
            least = weight.max()
            best[:] = now
    return best


@kernel
def settled(load: Floats, slots: Matrix, was: Matrix, width: int, most: float) -> Matrix:
    """Return slots after swaps that bring experts back to GPUs that had them.

    Parameters
    ----------
    load
        Load of each expert.
    slots
        Expert of each slot, shape (GPUs, slots of a GPU).
    was
        Replicas of each expert on each GPU before, shape (experts, GPUs).
    width
        GPUs among which experts may swap: the first ones, the next ones, and so on.
    most
        Load that no GPU exceeds after a swap.

    """
    now = slots.copy()
    gpus, room = now.shape
    count, on = counted(now, len(load))
    weight = np.zeros(gpus)
    weigh(load, now, count, weight)
    state = now, count, on, weight
    for h in range(gpus):
        for y in range(room):
            # The expert of slot y has moved to GPU h: does another slot of its GPU suit?
            first = h - h % width
            for g in range(first, first + width):
                for x in range(room):
                    a, b = now[g, x], now[h, y]
                    if g == h or on[b, h] <= was[b, h] or on[a, g] <= was[a, g]:
                        continue
                    if on[a, h] > 0 or on[b, g] > 0 or was[a, h] + was[b, g] == 0:
                        continue
                    gain = load[a] / count[a] - load[b] / count[b]
                    if max(weight[g] - gain, weight[h] + gain) <= most:
                        exchange(state, (g, x), (h, y))
                        weight[g] -= gain
                        weight[h] += gain
    return now
