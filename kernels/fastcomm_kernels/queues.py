"""Queue the operations of devices that do one at a time, and choose the device that goes on.

No time is negative, so that the bits of a time order like the float: times are compared as
integers. All columns are accessed by addresses, since counting references would cost more than
the heaps: callers of `queues_of` keep the arrays alive. The functions write into the columns.
"""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import Address, address, get, put
from fastcomm_kernels.arrays import Floats, Ints

Heaps = tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints]

# The bits of infinity, and a number below the bits of any time.
NEVER = 0x7FF << 52
BEFORE = -1


class Queues(NamedTuple):
    """The waiting nodes of each device in two heaps, and the device that goes on first."""

    room: Address  # by device: where its part of both heaps begins
    future: Address  # heaps of nodes that will be ready, the earliest first
    futures: Address  # by device: nodes in `future`
    choice: Address  # heaps of nodes that are ready, the most urgent first
    choices: Address  # by device: nodes in `choice`
    priority: Address  # by node: the least goes first
    ready: Address  # by node: when it is ready
    arrival: Address  # by node: number of its arrival, which breaks ties
    soon: Address  # by device: when it may go on
    first: (
        Address  # tree of devices: entry 1 goes on first; 2k and 2k + 1 are the children of k
    )
    leaf: int  # entry of device 0 in the tree


@kernel
def _early(queues: Queues, a: int, b: int) -> bool:
    """Return whether node `a` is ready before node `b`; the earlier arrival wins ties."""
    key_a, key_b = get(queues.ready, a), get(queues.ready, b)
    if key_a == key_b:
        key_a, key_b = get(queues.arrival, a), get(queues.arrival, b)
    return bool(key_a < key_b)


@kernel
def _urgent(queues: Queues, a: int, b: int) -> bool:
    """Return whether ready node `a` goes before ready node `b`."""
    key_a, key_b = get(queues.priority, a), get(queues.priority, b)
    if key_a == key_b:
        return _early(queues, a, b)
    return bool(key_a < key_b)


@kernel
def _push_future(queues: Queues, d: int, node: int) -> None:
    """Add a node that will be ready to the heap of a device."""
    heap, base, entry = queues.future, get(queues.room, d), get(queues.futures, d)
    put(queues.futures, d, entry + 1)
    while entry > 0:
        above = get(heap, base + (entry - 1) // 2)
        if not _early(queues, node, above):
            break
        put(heap, base + entry, above)
        entry = (entry - 1) // 2
    put(heap, base + entry, node)


@kernel
def push_choice(queues: Queues, d: int, node: int) -> None:
    """Add node `node`, which is ready, to the heap `choice` of device `d`."""
    heap, base, entry = queues.choice, get(queues.room, d), get(queues.choices, d)
    put(queues.choices, d, entry + 1)
    while entry > 0:
        above = get(heap, base + (entry - 1) // 2)
        if not _urgent(queues, node, above):
            break
        put(heap, base + entry, above)
        entry = (entry - 1) // 2
    put(heap, base + entry, node)


@kernel
def _pop_future(queues: Queues, d: int) -> int:
    """Remove and return the node of a device that is ready first."""
    heap, base, size = queues.future, get(queues.room, d), get(queues.futures, d) - 1
    put(queues.futures, d, size)
    least, last = get(heap, base), get(heap, base + size)
    entry, below = 0, 1
    while below < size:
        node = get(heap, base + below)
        if below + 1 < size and _early(queues, get(heap, base + below + 1), node):
            below += 1
            node = get(heap, base + below)
        if not _early(queues, node, last):
            break
        put(heap, base + entry, node)
        entry, below = below, 2 * below + 1
    put(heap, base + entry, last)
    return least


@kernel
def pop_choice(queues: Queues, d: int) -> int:
    """Remove and return the most urgent node of device `d` that is ready; there is one."""
    heap, base, size = queues.choice, get(queues.room, d), get(queues.choices, d) - 1
    put(queues.choices, d, size)
    least, last = get(heap, base), get(heap, base + size)
    entry, below = 0, 1
    while below < size:
        node = get(heap, base + below)
        if below + 1 < size and _urgent(queues, get(heap, base + below + 1), node):
            below += 1
            node = get(heap, base + below)
        if not _urgent(queues, node, last):
            break
        put(heap, base + entry, node)
        entry, below = below, 2 * below + 1
    put(heap, base + entry, last)
    return least


@kernel
def promise(queues: Queues, d: int, when: int) -> None:
    """Set when device `d` may go on, and update the tree; the lowest device wins ties.

    `when` is the bits of a float time.
    """
    if get(queues.soon, d) == when:
        return
    put(queues.soon, d, when)
    entry = (queues.leaf + d) // 2
    while entry > 0:
        first_child, second_child = (
            get(queues.first, 2 * entry),
            get(queues.first, 2 * entry + 1),
        )
        # Without a branch, which would be unpredictable.
        winner = first_child + (second_child - first_child) * (
            get(queues.soon, second_child) < get(queues.soon, first_child)
        )
        if winner == get(queues.first, entry) and winner != d:
            break
        put(queues.first, entry, winner)
        entry //= 2


@kernel
def arrive(queues: Queues, d: int, node: int, free: int) -> None:
    """Queue a node: in the heap `choice` if it is ready when the device is free, else `future`.

    Parameters
    ----------
    queues, d
        Queues, and the number of the device.
    node
        The node; its time is in `queues.ready`.
    free
        Time from which the device is free, as the bits of a float.

    """
    # A node that is ready before the device is free counts as ready now.
    if get(queues.ready, node) <= free:
        push_choice(queues, d, node)
    else:
        _push_future(queues, d, node)


@kernel
def soon_of(queues: Queues, d: int, free: int, limit: int) -> int:
    """Return when a device can go on, as the bits of a float time; NEVER without a node.

    Parameters
    ----------
    queues, d
        Queues, and the number of the device.
    free
        Time from which the device is free.
    limit
        Earliest start of a node that is not ready yet.

    """
    if get(queues.choices, d) > 0:
        return free
    if get(queues.futures, d) == 0:
        return NEVER
    return max(get(queues.ready, get(queues.future, get(queues.room, d))), limit)


@kernel
def chosen(queues: Queues, d: int, now: int) -> int:
    """Remove and return the node that device `d` starts at `now` (bits of a float time).

    First moves the nodes that are ready by now from `future` to `choice`. The device has a node
    that is ready.
    """
    base = get(queues.room, d)
    while get(queues.futures, d) > 0 and get(queues.ready, get(queues.future, base)) <= now:
        node = _pop_future(queues, d)
        is_last = get(queues.futures, d) == 0 or (
            get(queues.ready, get(queues.future, base)) > now
        )
        if is_last and get(queues.choices, d) == 0:
            return node
        push_choice(queues, d, node)
    return pop_choice(queues, d)


@kernel
def _rooms(device: Ints, devices: int) -> Ints:
    """Return where the part of each device in a common array of nodes begins."""
    first = np.zeros(devices + 1, np.int64)
    for i in range(len(device)):
        first[device[i] + 1] += 1
    for d in range(devices):
        first[d + 1] += first[d]
    return first


@kernel
def _tree(devices: int) -> Ints:
    """Return the tree of devices with equal times: the first device of each part wins."""
    size = 1
    while size < devices:
        size *= 2
    first = np.zeros(2 * size, np.int64)
    for entry in range(2 * size - 1, 0, -1):
        first[entry] = entry - size if entry >= size else first[2 * entry]
    return first


@kernel
def heaps_for(device: Ints, devices: int) -> Heaps:
    """Allocate empty heaps; `device` is the device of each node, `devices` their number."""
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
    """Return the addresses of the columns; the caller keeps the arrays alive.

    Parameters
    ----------
    heaps
        Of `heaps_for`.
    priority
        By node; the least goes first.
    ready
        By node: the time when it is ready, in any unit; not negative.

    """
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
