"""What waits for devices that do one thing at a time, and which device may go on first.

No time is negative: the bits of such floats are integers of the same order, and all that waits
is compared by those. Everything lies behind addresses, or counting references would cost more
than the heaps do; whoever asks for `queues_of` keeps the arrays. The functions write into it.
"""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, address, get, put
from fastcomm_kernels.arrays import Floats, Ints

Heaps = tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints]

# The bits of infinity, and less than those of any time.
NEVER = 0x7FF << 52
BEFORE = -1


class Queues(NamedTuple):
    """What waits for the devices: two heaps each, and who goes first in them."""

    room: Address  # where a device's nodes are in both heaps
    future: Address  # nodes that will be ready, the earliest first
    futures: Address
    choice: Address  # nodes that are ready, the most urgent first
    choices: Address
    priority: Address
    ready: Address
    arrival: Address
    soon: Address  # when a device may go on
    first: Address  # a tree of devices: 1 is who may go on first, 2k and 2k + 1 are below k
    leaf: int  # where the devices themselves are in it


@kernel
def _early(queues: Queues, a: int, b: int) -> bool:
    """Whether node `a` is ready before `b`."""
    ours, theirs = get(queues.ready, a), get(queues.ready, b)
    if ours == theirs:
        ours, theirs = get(queues.arrival, a), get(queues.arrival, b)
    return bool(ours < theirs)


@kernel
def _urgent(queues: Queues, a: int, b: int) -> bool:
    """Whether node `a` goes before `b` where both are ready."""
    ours, theirs = get(queues.priority, a), get(queues.priority, b)
    if ours == theirs:
        return _early(queues, a, b)
    return bool(ours < theirs)


@kernel
def _push_future(queues: Queues, d: int, node: int) -> None:
    """Let a device have a node that will be ready."""
    heap, base, at = queues.future, get(queues.room, d), get(queues.futures, d)
    put(queues.futures, d, at + 1)
    while at > 0:
        above = get(heap, base + (at - 1) // 2)
        if not _early(queues, node, above):
            break
        put(heap, base + at, above)
        at = (at - 1) // 2
    put(heap, base + at, node)


@kernel
def push_choice(queues: Queues, d: int, node: int) -> None:
    """Let a device have a node that is ready."""
    heap, base, at = queues.choice, get(queues.room, d), get(queues.choices, d)
    put(queues.choices, d, at + 1)
    while at > 0:
        above = get(heap, base + (at - 1) // 2)
        if not _urgent(queues, node, above):
            break
        put(heap, base + at, above)
        at = (at - 1) // 2
    put(heap, base + at, node)


@kernel
def _pop_future(queues: Queues, d: int) -> int:
    """Take the node of a device that is ready first."""
    heap, base, size = queues.future, get(queues.room, d), get(queues.futures, d) - 1
    put(queues.futures, d, size)
    least, last = get(heap, base), get(heap, base + size)
    at, below = 0, 1
    while below < size:
        node = get(heap, base + below)
        if below + 1 < size and _early(queues, get(heap, base + below + 1), node):
            below += 1
            node = get(heap, base + below)
        if not _early(queues, node, last):
            break
        put(heap, base + at, node)
        at, below = below, 2 * below + 1
    put(heap, base + at, last)
    return least


@kernel
def pop_choice(queues: Queues, d: int) -> int:
    """Take the most urgent node of a device."""
    heap, base, size = queues.choice, get(queues.room, d), get(queues.choices, d) - 1
    put(queues.choices, d, size)
    least, last = get(heap, base), get(heap, base + size)
    at, below = 0, 1
    while below < size:
        node = get(heap, base + below)
        if below + 1 < size and _urgent(queues, get(heap, base + below + 1), node):
            below += 1
            node = get(heap, base + below)
        if not _urgent(queues, node, last):
            break
        put(heap, base + at, node)
        at, below = below, 2 * below + 1
    put(heap, base + at, last)
    return least


@kernel
def promise(queues: Queues, d: int, when: int) -> None:
    """Note when a device may go on, and who is first now; of equals the least device is."""
    if get(queues.soon, d) == when:
        return
    put(queues.soon, d, when)
    at = (queues.leaf + d) // 2
    while at > 0:
        left, right = get(queues.first, 2 * at), get(queues.first, 2 * at + 1)
        # Without a branch: who wins is the toss of a coin.
        winner = left + (right - left) * (get(queues.soon, right) < get(queues.soon, left))
        if winner == get(queues.first, at) and winner != d:
            break
        put(queues.first, at, winner)
        at //= 2


@kernel
def arrive(queues: Queues, d: int, node: int, free: int) -> None:
    """Let a node wait for its device, which is free from `free` on."""
    # Whatever the device does next, it does not do before it is free.
    if get(queues.ready, node) <= free:
        push_choice(queues, d, node)
    else:
        _push_future(queues, d, node)


@kernel
def soon_of(queues: Queues, d: int, free: int, limit: int) -> int:
    """Return when a device can go on; what is not ready yet does not start before `limit`."""
    if get(queues.choices, d) > 0:
        return free
    if get(queues.futures, d) == 0:
        return NEVER
    return max(get(queues.ready, get(queues.future, get(queues.room, d))), limit)


@kernel
def chosen(queues: Queues, d: int, now: int) -> int:
    """Take what a device starts now."""
    base = get(queues.room, d)
    while get(queues.futures, d) > 0 and get(queues.ready, get(queues.future, base)) <= now:
        node = _pop_future(queues, d)
        none_else = get(queues.futures, d) == 0 or (
            get(queues.ready, get(queues.future, base)) > now
        )
        if none_else and get(queues.choices, d) == 0:
            return node
        push_choice(queues, d, node)
    return pop_choice(queues, d)


@kernel
def _rooms(device: Ints, devices: int) -> Ints:
    """Return where each device's part of a common array of nodes begins."""
    first = np.zeros(devices + 1, np.int64)
    for i in range(len(device)):
        first[device[i] + 1] += 1
    for d in range(devices):
        first[d + 1] += first[d]
    return first


@kernel
def _tree(devices: int) -> Ints:
    """Return a tree in which every device is below who comes first of its part."""
    size = 1
    while size < devices:
        size *= 2
    first = np.zeros(2 * size, np.int64)
    for at in range(2 * size - 1, 0, -1):
        first[at] = at - size if at >= size else first[2 * at]
    return first


@kernel
def heaps_for(device: Ints, devices: int) -> Heaps:
    """Return room for all that may wait."""
    n, room, first = len(device), _rooms(device, devices), _tree(devices)
    future, choice, arrival = (
        np.empty(n, np.int64),
        np.empty(n, np.int64),
        np.empty(n, np.int64),
    )
    futures, choices = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    soon = np.full(len(first) // 2, NEVER, np.int64)
    return room, future, futures, choice, choices, arrival, soon, first


@kernel
def queues_of(heaps: Heaps, priority: Ints, ready: Floats) -> Queues:
    """Return addresses, for whoever keeps the arrays."""
    room, future, futures, choice, choices, arrival, soon, first = heaps
    return Queues(
        address(room),
        address(future),
        address(futures),
        address(choice),
        address(choices),
        address(priority),
        address(ready.view(np.int64)),
        address(arrival),
        address(soon),
        address(first),
        len(first) // 2,
    )
