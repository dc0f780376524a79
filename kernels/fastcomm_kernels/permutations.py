"""Decompose traffic matrices into weighted permutations; the FAST schedule."""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Flags, Floats, Ints, Matrix, Numbers


@kernel
def augment(row: int, matrix: Matrix, least: int, column_of: Numbers, row_of: Numbers) -> bool:
    """Match one more row with a column, over cells of at least `least`, if that is possible.

    Parameters
    ----------
    row
        Row without a column.
    matrix
        Square matrix of weights.
    least
        Least weight of a usable cell.
    column_of, row_of
        The matching: column of each row, row of each column, -1 for none; written.

    Returns
    -------
    bool
        Whether the row was matched; if not, nothing was written.

    """
    size = len(matrix)
    for c in range(size):
        if row_of[c] < 0 and matrix[row, c] >= least:
            column_of[row] = c
            row_of[c] = row
            return True
    parent = np.full(size, -1, np.int32)
    queue = np.empty(size, np.int32)
    queue[0] = row
    head, tail = 0, 1
    while head < tail:
        r = queue[head]
        head += 1
        for c in range(size):
            if matrix[r, c] < least or parent[c] >= 0:
                continue
            parent[c] = r
            if row_of[c] >= 0:
                queue[tail] = row_of[c]
                tail += 1
                continue
            last = c
            while True:
                r = parent[last]
                before = column_of[r]
                column_of[r] = last
                row_of[last] = r
                if r == row:
                    break
                last = before
            return True
    return False


@kernel
def stages(matrix: Matrix, first: int, shrink: int) -> tuple[Numbers, Matrix]:
    """Decompose a matrix into weighted permutations, as in the FAST schedule.

    Only cells of at least a threshold are used; it shrinks when they do not suffice. The stages
    of a matrix with unequal sums do not add up to it.

    Parameters
    ----------
    matrix
        Square matrix of int64 that are not negative, with equal sums of all rows and columns.
    first
        First threshold; 1 gives the plain incremental decomposition.
    shrink
        The threshold shrinks to ``shrink / 16`` of itself, at least 1.

    Returns
    -------
    tuple of ndarray of int32 and of int64
        Column of each row, shape (stages, rows); weight of each stage.

    """
    size = len(matrix)
    remaining = matrix.copy()
    permutations = np.empty((size * size + 1, size), np.int32)
    weights = np.empty(size * size + 1, np.int64)
    column_of = np.full(size, -1, np.int32)
    row_of = np.full(size, -1, np.int32)
    least = first
    total = 0
    for c in range(size):
        total += remaining[0, c]
    n = 0
    while total > 0:
        for row in range(size):
            while column_of[row] < 0 and not augment(row, remaining, least, column_of, row_of):
                if least <= 1:
                    return permutations[:n], weights[:n]
                least = max(1, least * shrink // 16)
        weight = total
        for row in range(size):
            weight = min(weight, remaining[row, column_of[row]])
        for row in range(size):
            c = column_of[row]
            permutations[n, row] = c
            remaining[row, c] -= weight
            if remaining[row, c] < least:
                column_of[row] = -1
                row_of[c] = -1
        weights[n] = weight
        n += 1
        total -= weight
    return permutations[:n], weights[:n]


Blocks = NDArray[np.int64]
SendCost = tuple[float, float]


@kernel
def spread_time(moved: Matrix, cost: SendCost) -> float:
    """Return the time in s to move a square matrix shift by shift, without the diagonal.

    `cost` is the seconds per shift that is not empty, and per unit of its largest cell.
    """
    size = len(moved)
    total = 0.0
    for shift in range(1, size):
        most = np.int64(0)
        for j in range(size):
            k = j + shift
            most = max(most, moved[j, k - size if k >= size else k])
        if most > 0:
            total += cost[0] + cost[1] * most
    return total


@kernel
def port_time(moved: Matrix, cost: SendCost) -> float:
    """Return the time in s to move a square matrix at once, without the diagonal.

    A switch connects all ports; the one with the most to send or to receive sets the time.
    `cost` is the seconds per message of a port, and per unit.
    """
    size = len(moved)
    longest = 0.0
    for i in range(size):
        sent, received = np.int64(0), np.int64(0)
        sends, receives = 0, 0
        for j in range(size):
            if j != i:
                sent += moved[i, j]
                received += moved[j, i]
                sends += int(moved[i, j] > 0)
                receives += int(moved[j, i] > 0)
        longest = max(longest, cost[0] * sends + cost[1] * sent)
        longest = max(longest, cost[0] * receives + cost[1] * received)
    return longest


@kernel
def balance(block: Blocks, cost: SendCost) -> tuple[Matrix, Blocks, float]:
    """Even out the rows of each block, in place, where that saves time.

    Parameters
    ----------
    block
        Traffic [source node, node, GPU, GPU]; written.
    cost
        Time per shift inside a node, and per unit.

    Returns
    -------
    ndarray
        Load of a NIC by pair of nodes.
    ndarray
        What moves inside the source node, [pair of nodes, GPU, GPU].
    float
        Time of these moves in the slowest node.

    """
    nodes, width = block.shape[0], block.shape[2]
    load = np.zeros((nodes, nodes), np.int64)
    moved = np.zeros((nodes * nodes, width, width), np.int64)
    row = np.empty(width, np.int64)
    slowest = 0.0
    for s in range(nodes):
        node_time = 0.0
        for d in range(nodes):
            if s == d:
                continue
            b = block[s, d]
            total, most = np.int64(0), np.int64(0)
            for i in range(width):
                row[i] = 0
                for j in range(width):
                    row[i] += b[i, j]
                total += row[i]
                most = max(most, row[i])
            load[s, d] = most
            if cost[0] > 0:
                used, longest = 0, np.int64(0)
                for shift in range(width):
                    largest = np.int64(0)
                    for j in range(width):
                        largest = max(largest, b[j, (j + shift) % width])
                    used += int(largest > 0)
                    longest += largest
                if cost[1] * (most + longest) < 2 * cost[0] * (1 + used):
                    continue
            target = (total + width - 1) // width
            load[s, d] = target
            pair = moved[s * nodes + d]
            level(b, row, target, pair)
            node_time += spread_time(pair, cost)
        slowest = max(slowest, node_time)
    return load, moved, slowest


@kernel
def level(b: Matrix, row: Matrix, target: int, moved: Matrix) -> None:
    """Move the surplus of rows above `target` to the rows below it, column by column.

    Parameters
    ----------
    b
        Square matrix of bytes; written.
    row
        Sums of its rows; written.
    target
        Sum that rows shall not exceed.
    moved
        Matrix to which the amount moved from row to row is added.

    """
    for i in range(len(row)):
        for k in range(len(row)):
            if row[i] <= target:
                break
            if row[k] >= target:
                continue
            for j in range(len(row)):
                m = min(row[i] - target, b[i, j], target - row[k])
                b[i, j] -= m
                b[k, j] += m
                row[i] -= m
                row[k] += m
                moved[i, k] += m


@kernel
def redistribution(
    block: Blocks, permutations: Numbers, weights: Matrix, cost: SendCost
) -> Floats:
    """Return the time in which each stage's traffic is spread inside its target nodes.

    A stage takes the columns of each row in order, up to its weight.

    Parameters
    ----------
    block
        Traffic [source node, node, GPU, GPU].
    permutations, weights
        Stages of nodes (`stages`).
    cost
        Time per shift inside a node, and per unit.

    """
    nodes, width = block.shape[0], block.shape[2]
    remaining = block.copy()
    column = np.zeros((nodes, nodes, width), np.int64)
    most = np.zeros(width, np.int64)
    out = np.zeros(len(weights))
    for p in range(len(weights)):
        for s in range(nodes):
            d = permutations[p, s]
            if d == s:
                continue
            for shift in range(width):
                most[shift] = 0
            for i in range(width):
                budget = weights[p]
                j = column[s, d, i]
                while j < width and budget > 0:
                    part = min(budget, remaining[s, d, i, j])
                    remaining[s, d, i, j] -= part
                    budget -= part
                    shift = j - i if j >= i else j - i + width
                    most[shift] = max(most[shift], part)
                    j += int(remaining[s, d, i, j] == 0)
                column[s, d, i] = j
            stage_time = 0.0
            for shift in range(1, width):
                if most[shift] > 0:
                    stage_time += cost[0] + cost[1] * most[shift]
            out[p] = max(out[p], stage_time)
    return out


@kernel
def rails(block: Blocks, limit: Matrix, near: Floats) -> tuple[Numbers, Matrix, Matrix]:
    """Return what the GPUs of a node send to another node once they are balanced.

    A GPU sends to the one of its place in the other node. So that others have less to pass on,
    some of the traffic to a GPU goes by its own place first; what is above the limit moves to
    the places of its targets, as far as they have room, and then to any place.

    Parameters
    ----------
    block
        Traffic [source node, node, GPU, GPU] before balancing.
    limit
        Most units that a GPU sends, by pair of nodes; at least the mean.
    near
        Share of the traffic to a GPU, [node, GPU], that comes by its own place, if possible.

    Returns
    -------
    ndarray of int32
        First entry of each [pair of nodes, sending GPU], flat, and their number.
    ndarray
        Entries: GPU that had the traffic, GPU that gets it, units; the GPU's own come first.
    ndarray
        Most units that a GPU sends, by pair of nodes.

    """
    nodes, width = block.shape[0], block.shape[2]
    start = np.zeros(nodes * nodes * width + 1, np.int32)
    most = 4 * width * width + 2 * width
    entries = np.empty((nodes * (nodes - 1) * most, 3), np.int64)
    moves = np.empty((most, 4), np.int64)  # to, donor, target, units
    row = np.empty(width, np.int64)
    load = np.zeros((nodes, nodes), np.int64)
    n = 0
    for pair in range(nodes * nodes):
        s, d = pair // nodes, pair % nodes
        own = block[s, d].copy()
        count = 0
        if s != d:
            for i in range(width):
                row[i] = own[i].sum()
            count = gather(own, row, limit[s, d], near[d], moves)
            count = spill(own, row, limit[s, d], moves, count)
            load[s, d] = row.max()
        for k in range(width):
            start[pair * width + k] = n
            # Rows begin with different columns, so that their sends fit into one shift.
            for shift in range(width if s != d else 0):
                j = (k + shift) % width
                if own[k, j] > 0:
                    entries[n] = k, j, own[k, j]
                    n += 1
            for move in range(count):
                if moves[move, 0] == k:
                    entries[n] = moves[move, 1], moves[move, 2], moves[move, 3]
                    n += 1
    start[-1] = n
    return start, entries[:n], load


@kernel
def gather(own: Matrix, row: Matrix, limit: int, near: Floats, moves: Matrix) -> int:
    """Move traffic to the places of its targets, alike from all rows; return the moves.

    Parameters
    ----------
    own
        Traffic of the rows by target; written.
    row
        Sums of the rows, with what moves to them; written.
    limit
        Most units of a target at its own place.
    near
        Share of the traffic to a target that is to be at its place.
    moves
        Row to, row from, target and units of each move; written.

    """
    width, count = len(row), 0
    for j in range(width):
        if near[j] <= 0:
            continue
        total = own[:, j].sum()
        need = min(np.int64(near[j] * total), limit) - own[j, j]
        share = need / max(1, total - own[j, j])
        for i in range(width):
            m = min(own[i, j], need, np.int64(share * own[i, j]) + 1)
            if i != j and m > 0:
                own[i, j] -= m
                row[i] -= m
                row[j] += m
                need -= m
                moves[count] = j, i, j, m
                count += 1
    return count


@kernel
def spill(own: Matrix, row: Matrix, limit: int, moves: Matrix, count: int) -> int:
    """Move what rows have above `limit` to rows below it, targets of that row first.

    Parameters are those of `gather`; `count` is the number of moves so far, and the result that
    of all.
    """
    width = len(row)
    for is_any in range(2):
        for i in range(width):
            for k in range(width):
                if row[i] <= limit:
                    break
                if row[k] >= limit:
                    continue
                for j in range(0 if is_any else k, width if is_any else k + 1):
                    m = min(row[i] - limit, own[i, j], limit - row[k])
                    if m > 0:
                        own[i, j] -= m
                        row[i] -= m
                        row[k] += m
                        moves[count] = k, i, j, m
                        count += 1
    return count


@kernel
def send(
    queues: tuple[Numbers, Matrix],
    place: tuple[Numbers, Numbers, Ints],
    first: int,
    amount: tuple[int, int],
    before: Matrix,
    after: Matrix,
) -> None:
    """Take units from the queues of a node's GPUs; add what moves before and after their send.

    Parameters
    ----------
    queues
        What GPUs send: entries as `rails` returns them.
    place
        Of each queue its next entry, the slice of its entries, and what is gone of this slice;
        written.
    first
        Queue of the node's first GPU.
    amount
        Units that each GPU sends, or less if its queue ends; slices of an entry.
    before
        What moves to the GPUs in their node, [GPU, GPU]; written.
    after
        What moves on in the other node, [GPU, GPU]; written.

    """
    start, entries = queues
    entry, turn, gone = place
    slices = amount[1]
    for gpu in range(len(before)):
        queue = first + gpu
        begin, end = start[queue], start[queue + 1]
        e, t, units = entry[queue], turn[queue], amount[0]
        out = gone[queue]
        while units > 0 and t < slices and begin < end:
            donor, target, whole = entries[e, 0], entries[e, 1], entries[e, 2]
            # Divisions take most of the time where entries are not cut.
            part = (whole * (t + 1) // slices if t + 1 < slices else whole) - out
            part -= whole * t // slices if t > 0 else 0
            if part > units:
                part = units
                out += part
            else:
                out = 0
                e += 1
                if e == end:
                    e = begin
                    t += 1
            units -= part
            if donor != gpu:
                before[donor, gpu] += part
            if target != gpu:
                after[gpu, target] += part
        entry[queue], turn[queue], gone[queue] = e, t, out


@kernel
def take(moves: Matrix, used: Flags, room: Floats, cost: SendCost) -> bool:
    """Make the moves for which ports have time, in order; return whether some remain.

    Parameters
    ----------
    moves
        Units from GPU to GPU; written.
    used
        Pairs of GPUs that have a message already; written.
    room
        Seconds that remain, to send and to receive [2, GPU]; written.
    cost
        Seconds per message of a port, and per unit.

    """
    size = len(moves)
    remain = False
    for i in range(size):
        for j in range(size):
            units = moves[i, j]
            if units == 0 or i == j:
                continue
            begin = 0.0 if used[i, j] else cost[0]
            free = min(room[0, i], room[1, j])
            if begin + units * cost[1] > free:
                remain = True
                units = np.int64(max(free - begin, 0.0) / cost[1])
                if units == 0:
                    continue
            used[i, j] = True
            room[0, i] -= begin + units * cost[1]
            room[1, j] -= begin + units * cost[1]
            moves[i, j] -= units
    return remain


@kernel
def pipelined(
    queues: tuple[Numbers, Matrix],
    stage: tuple[Numbers, Matrix],
    mixing: tuple[int, int],
    inter_s: Floats,
    own: Blocks,
    cost: SendCost,
) -> tuple[Floats, float]:
    """Return the time of stages whose moves inside nodes overlap other stages.

    Before a stage, what its GPUs send moves to them; after it, what they got moves on. A stage
    begins once all nodes have made its moves. While it runs, ports make the moves of the next
    stage, and in the time that remains those of later stages, then those after earlier ones
    and the traffic inside the node. Ports of a node work at the same time (`port_time`).

    Parameters
    ----------
    queues
        What GPUs send: entries as `rails` returns them.
    stage
        Permutations and weights (`stages`).
    mixing
        Parts into which entries of a queue are cut and mixed, so that stages are alike; by how
        many stages moves before a stage are ahead of it, at most.
    inter_s
        Time of each stage between nodes.
    own
        Traffic inside each node, [node, GPU, GPU].
    cost
        Seconds per message of a port inside a node, and per unit.

    Returns
    -------
    ndarray
        Seconds until each stage begins.
    float
        Seconds until everything has arrived.

    """
    permutations, weights = stage
    count, nodes = permutations.shape
    width = own.shape[1]
    slices, ahead = mixing
    ring = ahead + 1
    queue_count = nodes * nodes * width
    place = (
        queues[0][:-1].copy(),
        np.zeros(queue_count, np.int32),
        np.zeros(queue_count, np.int64),
    )
    before = np.zeros((ring, nodes, width, width), np.int64)
    after = np.zeros((ring, nodes, width, width), np.int64)
    waits = np.zeros((ring, nodes), np.bool_)  # for moves before a stage
    backlog = own.copy()
    used, room = np.zeros((width, width), np.bool_), np.zeros((2, width))
    begins = np.zeros(count)
    now = 0.0
    sent = 0
    for p in range(-1, count):
        while sent < min(count, p + 1 + ahead):
            at = sent % ring
            before[at] = 0
            after[at] = 0
            for s in range(nodes):
                d = permutations[sent, s]
                waits[at, s] = d != s
                if d != s:
                    queue = (s * nodes + d) * width
                    amount = weights[sent], slices
                    send(queues, place, queue, amount, before[at, s], after[at, d])
            sent += 1
        slot = inter_s[p] if p >= 0 else 0.0
        if p + 1 < count:
            for n in range(nodes):
                if waits[(p + 1) % ring, n]:
                    slot = max(slot, port_time(before[(p + 1) % ring, n], cost))
        # Sums of what is due may exceed the time by its rounding.
        slack = slot * (1 + 1e-12)
        for n in range(nodes):
            every = backlog[n].copy()
            for q in range(p + 1, sent):
                if waits[q % ring, n]:
                    every += before[q % ring, n]
            if port_time(every, cost) <= slot:
                waits[:, n] = False
                backlog[n] = 0
            else:
                room[:] = slack
                used[:] = False
                for q in range(p + 1, sent):
                    if waits[q % ring, n]:
                        waits[q % ring, n] = take(before[q % ring, n], used, room, cost)
                take(backlog[n], used, room, cost)
            if p >= 0:
                backlog[n] += after[p % ring, n]
        now += slot
        if p + 1 < count:
            begins[p + 1] = now
    last = 0.0
    for n in range(nodes):
        last = max(last, port_time(backlog[n], cost))
    return begins, now + last
