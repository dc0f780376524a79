"""Search for a lighter placement with few moves from the placement of today.

`slots` has the expert of each slot, shape (GPUs, slots of a GPU); replicas of an expert share
its load. A move gives a GPU an expert that it did not have: `was` is 1 where it had it, shape
(experts, GPUs). The last expert has no load and stands for an empty slot. Experts stay in their
domain: the first, second ... `width` GPUs. Changes lower the sum over GPUs of a power of their
load: the square weighs all GPUs, a high power the heaviest ones. No change puts a second
replica of an expert on a GPU.
"""

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Floats, Matrix
from fastcomm_kernels.placement import State, counted, exchange, replace, weigh

# Change of the sum of powers, slot as GPU and number, slot that it is swapped with (or -1, -1),
# and the expert that it gets (or -1).
Step = tuple[float, int, int, int, int, int]
Goal = tuple[int, int, float]  # width, most moves, load of the heaviest GPU that suffices

_POWERS = 6  # from the square on, each the square of the one before
_S13, _S7, _S17 = np.uint64(13), np.uint64(7), np.uint64(17)
_SEED = np.uint64(88172645463325252)
_GAIN = 1e-12  # of the power of the heaviest GPU: less is no change


@kernel
def power(weight: float, squarings: int) -> float:
    """Return a load squared so many times."""
    for _ in range(squarings):
        weight *= weight
    return weight


@kernel
def price(state: State, was: Matrix, gpu: int, out: int, into: int) -> int:
    """Return the moves more if an expert of a GPU is replaced by one that it does not have."""
    on = state[2]
    price = 1 - was[into, gpu]
    if on[out, gpu] == 1:
        price -= 1 - was[out, gpu]
    return int(price)


@kernel
def reliefs(load: Floats, state: State, squarings: int) -> Floats:
    """Return the change of the sum of powers on each expert's GPUs if it had a replica more."""
    _, count, on, weight = state
    change = np.zeros(len(load))
    for e in range(len(load)):
        fall = load[e] / max(1, count[e]) - load[e] / (count[e] + 1)
        for h in range(len(weight)):
            if on[e, h] > 0:
                after = power(weight[h] - on[e, h] * fall, squarings)
                change[e] += after - power(weight[h], squarings)
    return change


@kernel
def replacement(
    load: Floats, state: State, to: tuple[int, int], a: int, squarings: int, bar: float
) -> float:
    """Return the change of the sum of powers if a slot, (GPU, slot), gets expert `a`.

    `bar` is the change of its own GPU that suffices; if that is not reached, the result is
    infinite.
    """
    slots, count, on, weight = state
    g, b = to[0], slots[to]
    less, own = load[a] / (count[a] + 1), load[b] / count[b]
    fall = load[a] / max(1, count[a]) - less
    rise = load[b] / (count[b] - 1) - own if count[b] > 1 else 0.0
    after = weight[g] - on[a, g] * fall + (on[b, g] - 1) * rise + less - own
    change = power(after, squarings) - power(weight[g], squarings)
    if change >= bar:
        return np.inf
    for h in range(len(slots)):
        if h != g and (on[a, h] > 0 or on[b, h] > 0):
            after = weight[h] - on[a, h] * fall + on[b, h] * rise
            change += power(after, squarings) - power(weight[h], squarings)
    return change


@kernel
def swap(
    load: Floats, state: State, at: tuple[int, int], to: tuple[int, int], squarings: int
) -> float:
    """Return the change of the sum of powers if two slots, (GPU, slot), swap their experts."""
    slots, count, _, weight = state
    a, b = slots[at], slots[to]
    gain = load[a] / count[a] - load[b] / count[b]
    before = power(weight[at[0]], squarings) + power(weight[to[0]], squarings)
    after = power(weight[at[0]] - gain, squarings) + power(weight[to[0]] + gain, squarings)
    return after - before


@kernel
def best_spread(
    load: Floats,
    state: State,
    was: Matrix,
    limit: tuple[int, int, int],
    relief: Floats,
    heavy: int,
    best: Step,
) -> Step:
    """Return the best slot that gets one more replica of an expert of GPU `heavy`.

    `limit` has the width, the moves that remain and the squarings; `relief` is of `reliefs`.
    The result is `best` if no change is better.
    """
    slots, count, on, _ = state
    width, spare, squarings = limit
    first = heavy - heavy % width
    for x in range(slots.shape[1]):
        a = slots[heavy, x]
        for g in range(first, first + width):
            if on[a, g] > 0:
                continue
            for y in range(slots.shape[1]):
                b = slots[g, y]
                if count[b] == 1 or price(state, was, g, b, a) > spare:
                    continue
                bar = best[0] - relief[a]
                change = replacement(load, state, (g, y), a, squarings, bar)
                if change < best[0]:
                    best = change, g, y, -1, -1, a
    return best


@kernel
def best_relief(
    load: Floats,
    state: State,
    was: Matrix,
    limit: tuple[int, int, int],
    relief: Floats,
    heavy: int,
    best: Step,
) -> Step:
    """Return the best other expert of a slot of GPU `heavy`; see `best_spread`."""
    slots, count, on, _ = state
    width, spare, squarings = limit
    first = heavy - heavy % width
    for e in range(len(load)):
        if on[e, heavy] > 0 or on[e, first : first + width].sum() == 0:
            continue
        for y in range(slots.shape[1]):
            b = slots[heavy, y]
            if count[b] == 1 or price(state, was, heavy, b, e) > spare:
                continue
            bar = best[0] - relief[e]
            change = replacement(load, state, (heavy, y), e, squarings, bar)
            if change < best[0]:
                best = change, heavy, y, -1, -1, e
    return best


@kernel
def best_trade(
    load: Floats, state: State, was: Matrix, limit: tuple[int, int, int], heavy: int, best: Step
) -> Step:
    """Return the best swap with a slot of GPU `heavy`; see `best_spread`."""
    slots, _, on, _ = state
    width, spare, squarings = limit
    first = heavy - heavy % width
    for x in range(slots.shape[1]):
        a = slots[heavy, x]
        for g in range(first, first + width):
            if g == heavy or on[a, g] > 0:
                continue
            for y in range(slots.shape[1]):
                b = slots[g, y]
                if on[b, heavy] > 0:
                    continue
                cost = price(state, was, g, b, a) + price(state, was, heavy, a, b)
                change = swap(load, state, (heavy, x), (g, y), squarings)
                if cost <= spare and change < best[0]:
                    best = change, g, y, heavy, x, -1
    return best


@kernel
def change(load: Floats, state: State, was: Matrix, step: Step) -> int:
    """Make a change, and return its moves."""
    slots, count, _, weight = state
    g, y, h, x, a = step[1:]
    moves = 0
    if h < 0:
        moves = price(state, was, g, slots[g, y], a)
        replace(state, (g, y), a)
    else:
        moves = price(state, was, g, slots[g, y], slots[h, x])
        moves += price(state, was, h, slots[h, x], slots[g, y])
        exchange(state, (g, y), (h, x))
    weigh(load, slots, count, weight)
    return moves


@kernel
def best_fill(load: Floats, state: State, width: int, squarings: int, may_stack: bool) -> Step:
    """Return the replica in an empty slot for which the sum of powers is least.

    Without one, the result has -1 as GPU. `may_stack` tells whether an expert may have a second
    replica on a GPU.
    """
    slots, _, on, _ = state
    empty = len(load) - 1
    best = np.inf, -1, -1, -1, -1, -1
    for g in range(len(slots)):
        first = g - g % width
        y = int(np.argmax(slots[g]))
        for e in range(empty if slots[g, y] == empty else 0):
            is_near = on[e, first : first + width].sum() > 0
            if is_near and (may_stack or on[e, g] == 0):
                rise = replacement(load, state, (g, y), e, squarings, np.inf)
                if rise < best[0]:
                    best = rise, g, y, -1, -1, e
    return best


@kernel
def fill(load: Floats, state: State, was: Matrix, width: int, squarings: int) -> None:
    """Give each empty slot a replica of an expert that its GPU does not have, if possible."""
    count = state[1]
    while count[-1] > 0:
        step = best_fill(load, state, width, squarings, False)
        if step[1] < 0:
            step = best_fill(load, state, width, squarings, True)
        change(load, state, was, step)


@kernel
def next_step(load: Floats, state: State, was: Matrix, limit: tuple[int, int, int]) -> Step:
    """Return the best change of the heaviest GPU, else of the second one; see `best_spread`.

    Without one, the result has -1 as GPU.
    """
    weight = state[3]
    heavy = int(np.argmax(weight))
    most = weight[heavy]
    relief = reliefs(load, state, limit[2])
    step = -_GAIN * power(most, limit[2]), -1, -1, -1, -1, -1
    for _ in range(2):
        step = best_spread(load, state, was, limit, relief, heavy, step)
        step = best_relief(load, state, was, limit, relief, heavy, step)
        step = best_trade(load, state, was, limit, heavy, step)
        if step[1] >= 0 or len(weight) == 1:
            break
        weight[heavy] = -1.0
        second = int(np.argmax(weight))
        weight[heavy] = most
        heavy = second
    return step


@kernel
def retract(state: State, was: Matrix, start: int) -> int:
    """Undo the move of the first replica from a slot on; return the moves that it frees."""
    slots, count, on, _ = state
    room, experts = slots.shape[1], len(on) - 1
    for turn in range(slots.size):
        g, y = divmod((start + turn) % slots.size, room)
        b = slots[g, y]
        if count[b] == 1 or was[b, g] > 0 or on[b, g] > 1:
            continue
        for other in range(experts):
            e = (start + other) % experts
            if was[e, g] > 0 and on[e, g] == 0:
                replace(state, (g, y), e)
                return 1
    return 0


@kernel
def kick(
    load: Floats, state: State, was: Matrix, goal: Goal, changes: int, word: np.uint64
) -> tuple[int, np.uint64]:
    """Undo some moves at random, then give a random slot an expert of the heaviest GPU.

    Return the moves that remain, and the next random word.
    """
    slots, count, on, weight = state
    room, moves = slots.shape[1], goal[1]
    for undone in range(changes + 1):
        word ^= word << _S13
        word ^= word >> _S7
        word ^= word << _S17
        bits = np.int64(word >> np.uint64(2))
        if undone < changes:
            moves += retract(state, was, int(bits))
            continue
        weigh(load, slots, count, weight)
        heavy = int(np.argmax(weight))
        a, bits = slots[heavy, bits % room], bits // room
        g = heavy - heavy % goal[0] + bits % goal[0]
        y = bits // goal[0] % room
        b = slots[g, y]
        if on[a, g] == 0 and count[b] > 1 and price(state, was, g, b, a) <= moves:
            moves -= price(state, was, g, b, a)
            replace(state, (g, y), a)
    weigh(load, slots, count, weight)
    return moves, word


@kernel
def descend(
    load: Floats, state: State, was: Matrix, goal: Goal, squarings: int
) -> tuple[int, int]:
    """Lower the sum of powers while moves remain; return those, and the steps."""
    moves, steps, weight = goal[1], 0, state[3]
    while weight.max() > goal[2]:
        steps += 1
        step = next_step(load, state, was, (goal[0], moves, squarings))
        if step[1] < 0:
            break
        moves -= change(load, state, was, step)
    return moves, steps


@kernel
def changed(load: Floats, slots: Matrix, goal: Goal, work: int) -> Matrix:
    """Return slots after changes that make the heaviest GPU lighter.

    Each power is tried from the start. Then some moves of the best slots are undone, at random,
    and spent anew. The result is the same on every machine.

    Parameters
    ----------
    load
        Load of each expert, 0 of the last one; the sum of their powers has to be a number.
    slots
        Expert of each slot, shape (GPUs, slots of a GPU).
    goal
        Width of a domain of GPUs, most moves besides those into empty slots, and the load of
        the heaviest GPU that suffices.
    work
        Most pairs of slots to compare after each power was tried, about.

    """
    best, now = slots.copy(), slots.copy()
    count, on = counted(now, len(load))
    was, weight = np.minimum(on, 1), np.zeros(len(now))
    was[-1] = 1  # an empty slot is no move
    state = now, count, on, weight
    pairs = 3 * goal[0] * now.shape[1] ** 2
    least, spare, turn, word = np.inf, goal[1], 0, _SEED
    while (turn < _POWERS or work > 0) and least > goal[2]:
        is_first = turn < _POWERS
        now[:], moves = (slots, goal[1]) if is_first else (best, spare)
        count[:], on[:] = counted(now, len(load))
        weigh(load, now, count, weight)
        squarings = 1 + turn % _POWERS
        if is_first:
            fill(load, state, was, goal[0], squarings)
        else:
            limit = goal[0], moves, goal[2]
            moves, word = kick(load, state, was, limit, 1 + turn % 4, word)
        limit = goal[0], moves, goal[2]
        moves, steps = descend(load, state, was, limit, squarings)
        if weight.max() < least:
            best[:], least, spare = now, weight.max(), moves
        work -= 0 if is_first else steps * pairs
        turn += 1
    return best
