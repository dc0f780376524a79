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
def best_swap(load: Floats, state: State, heavy: int, most: float) -> Change:
    """Return the swap with a slot of GPU `heavy` whose GPUs are lightest, below `most`.

    Without one, the result has -1 as slot.
    """
    slots, count, on, weight = state
    best, at, to, place = most, -1, -1, -1
    for x in range(slots.shape[1]):
        a = slots[heavy, x]
        own = load[a] / count[a]
        for g in range(len(slots)):
            if g == heavy or on[a, g] > 0:
                continue
            for y in range(slots.shape[1]):
                b = slots[g, y]
                gain = own - load[b] / count[b]
                heavier = max(weight[heavy] - gain, weight[g] + gain)
                if heavier < best and on[b, heavy] == 0:
                    best, at, to, place = heavier, x, g, y
    return best, at, to, place


@kernel
def best_replica(load: Floats, state: State, heavy: int, most: float) -> Change:
    """Return the slot that is best given to one more replica of an expert of GPU `heavy`.

    It is taken from an expert with other replicas, which get heavier. All GPUs that change are
    below `most`. Without such a slot, the result has -1 as slot of the expert.
    """
    slots, count, on, weight = state
    gpus = len(slots)
    best, at, to, place = most, -1, -1, -1
    for x in range(slots.shape[1]):
        a = slots[heavy, x]
        less = load[a] / (count[a] + 1)
        fall = load[a] / count[a] - less
        for g in range(gpus):
            if on[a, g] > 0:
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
def descend(load: Floats, state: State, target: float, work: int, has_spare: bool) -> int:
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

    """
    slots, count, _, weight = state
    pairs = slots.shape[1] * len(slots) * slots.shape[1]
    while work > 0:
        heavy = int(np.argmax(weight))
        most = weight[heavy]
        if most <= target:
            break
        swap = best_swap(load, state, heavy, most * _GAIN)
        work -= pairs
        more = swap
        if has_spare:
            more = best_replica(load, state, heavy, swap[0])
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
def lightened(load: Floats, slots: Matrix, target: float, work: int) -> Matrix:
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
        work = descend(load, state, target, work, has_spare)
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
