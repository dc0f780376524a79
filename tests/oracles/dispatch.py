"""Dispatch by definition, token by token, in plain Python, without fastcomm."""

from collections import Counter
from itertools import product

WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def matrices(src, expert, home, nodes, width):
    """Copies, distinct GPUs and distinct nodes of each source, and who has to send at all."""
    gpus = nodes * width
    copies = [[0] * gpus for _ in range(gpus)]
    unique = [[0] * gpus for _ in range(gpus)]
    by_node = [[0] * nodes for _ in range(gpus)]
    leaving = [0] * gpus
    for s, row in zip(src, expert, strict=True):
        targets = [home[e] for e in row]
        for t in targets:
            copies[s][t] += 1
        for t in set(targets):
            unique[s][t] += 1
        for n in {t // width for t in targets}:
            by_node[s][n] += 1
        leaving[s] += any(t != s for t in targets)
    return copies, unique, by_node, leaving


def deepep(src, expert, home, gpus, width, *, once):
    """Four counts a GPU: to each node once, by the proxy of the source's rank."""
    counts = [[0, 0, 0, 0] for _ in range(gpus)]
    for s, row in zip(src, expert, strict=True):
        targets = [home[e] for e in row]
        if once:
            targets = sorted(set(targets))
        for n in {t // width for t in targets}:
            hub = s
            if n != s // width:
                hub = n * width + s % width
                counts[s][0] += 1
                counts[hub][1] += 1
            for t in targets:
                if t // width == n and t != hub:
                    counts[hub][2] += 1
                    counts[t][3] += 1
    return counts


def mixed(word):
    """splitmix64's output function."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def routed(number, key, threshold, alias, topk, *, uniform):
    """The experts of one token."""
    state = mixed((key + number * STEP) & WORD)
    drawn, kept = 0, []
    while len(kept) < topk:
        state = (state + STEP) & WORD
        word = mixed(state)
        column = ((word >> 32) * len(threshold)) >> 32
        if (drawn < topk or not uniform) and (word & 0xFFFFFFFF) >= threshold[column]:
            column = alias[column]
        drawn += 1
        if column not in kept:
            kept.append(column)
    return kept


def repaired(rows, drawn):
    """Rows without repeats, and how many of `drawn` that took."""
    drawn, used, out = iter(drawn), 0, []
    for row in rows:
        kept = list(dict.fromkeys(row))
        while len(kept) < len(row):
            value = next(drawn)
            used += 1
            if value not in kept:
                kept.append(value)
        out.append(kept)
    return out, used


def delivered(balanced, permutations, weights):
    """What the stages bring: (source node, node, final GPU) -> units; a NIC is used once."""
    nodes, width = len(balanced), len(balanced[0][0])
    left = {
        (s, d, i): [int(unit) for unit in balanced[s][d][i]]
        for s in range(nodes)
        for d in range(nodes)
        for i in range(width)
    }
    arrived = Counter()
    for permutation, weight in zip(permutations, weights, strict=True):
        assert sorted(permutation) == list(range(nodes))
        for s, d in enumerate(permutation):
            for i in range(width) if s != d else ():
                budget = int(weight)
                for j in range(width):
                    part = min(budget, left[s, d, i][j])
                    left[s, d, i][j] -= part
                    budget -= part
                    arrived[s, int(d), j] += part
    assert all(not any(row) for (s, d, _), row in left.items() if s != d)
    return arrived


def packed(load, packs):
    """The heaviest first into the lightest pack with room: the items of each pack."""
    room = len(load) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    found = [[] for _ in range(packs)]
    for item in sorted(range(len(load)), key=lambda item: (-load[item], item)):
        fits = [p for p in range(packs) if len(found[p]) < room]
        lightest = min(fits, key=lambda p: (sum(load[i] for i in found[p]), p))
        found[lightest].append(item)
    return found


def replica_counts(load, total, most=None):
    """One replica each, then one more for the expert of the greatest share, up to `most`."""
    count = [1] * len(load)
    for _ in range(total - len(load)):
        share = [
            a / b if most is None or b < most else -1 for a, b in zip(load, count, strict=True)
        ]
        count[share.index(max(share))] += 1
    return count


def eplb_heaviest(load, replicas, groups, nodes, gpus):
    """The load of the heaviest GPU as EPLB places: groups on nodes, replicas, then GPUs."""
    nodes = 1 if groups % nodes else nodes
    size = len(load) // groups
    by_group = [sum(load[group * size : (group + 1) * size]) for group in range(groups)]
    most = 0
    for node in packed(by_group, nodes) if nodes > 1 else [range(groups)]:
        own = [load[group * size + e] for group in node for e in range(size)]
        counts = replica_counts(own, replicas // nodes)
        shares = [own[e] / counts[e] for e in range(len(own))]
        shares += [own[e] / counts[e] for e in range(len(own)) for _ in range(counts[e] - 1)]
        for gpu in packed(shares, gpus // nodes):
            most = max(most, sum(shares[item] for item in gpu))
    return most


def drift_of(loads, number, kept, anew, gpus, layer_s):
    """What placements made from the step before `number` save: of each later step, anew.

    Returns both imbalances, the seconds saved of a step, and what is lost as loads change.
    """

    def most(load, logical):
        room = len(logical) // gpus
        share = [load[e] / logical.count(e) for e in logical]
        return max(sum(share[gpu * room : (gpu + 1) * room]) for gpu in range(gpus))

    stale = fresh = total = saved = 0
    aging = 0
    later = loads[number:]
    for layer, (old, new) in enumerate(zip(kept, anew, strict=True)):
        uneven = []
        for step in later:
            load = step[layer]
            before, after = most(load, old), most(load, new)
            stale, fresh, total = stale + before, fresh + after, total + sum(load)
            saved += (1 - after / before) * layer_s[layer] / len(later)
            uneven.append(after * gpus / sum(load))
        own = loads[number - 1][layer]
        first, mean = most(own, new) * gpus / sum(own), sum(uneven) / len(uneven)
        aging += layer_s[layer] * max(0, 1 - first / mean)
    return stale * gpus / total, fresh * gpus / total, saved, aging


def moved(before, after):
    """Experts that GPUs get and did not have, whatever number of replicas."""
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def greedily_replaced(load, before, most_moves, score):
    """Again and again the best replacement that lowers the heaviest GPU, or the second one.

    The best has the least `score` of the loads of GPUs, heaviest first. No expert is twice on a
    GPU, or goes.
    """
    slots = [list(own) for own in before]

    def weights():
        every = [expert for own in slots for expert in own]
        return sorted(sum(load[e] / every.count(e) for e in own) for own in slots)[::-1]

    while True:
        best, now = None, weights()
        for gpu, slot, e in product(range(len(slots)), range(len(slots[0])), range(len(load))):
            own, old = slots[gpu], slots[gpu][slot]
            if e in own:
                continue
            own[slot] = e
            if any(old in each for each in slots) and moved(before, slots) <= most_moves:
                after = weights()
                if after[:2] < now[:2] and (best is None or score(after) < best[0]):
                    best = score(after), own, slot, e
            own[slot] = old
        if best is None:
            return slots
        best[1][best[2]] = best[3]


class Pair:
    """What the GPUs of a node send to another node, while it moves between them."""

    def __init__(self, block):
        self.own = [list(row) for row in block]
        self.total = [sum(row) for row in block]
        self.entries = [[] for _ in block]

    def move(self, to, i, j, m):
        """Give `m` tokens of GPU i for GPU j to GPU `to`."""
        if m > 0:
            self.own[i][j] -= m
            self.total[i] -= m
            self.total[to] += m
            self.entries[to].append((i, j, m))

    def gather(self, limit, near):
        """Bring a share of the tokens for GPU j to GPU j, as many of each GPU."""
        places = range(len(self.own))
        for j in (j for j in places if near[j] > 0):
            column = [self.own[i][j] for i in places]
            need = min(int(near[j] * sum(column)), limit) - column[j]
            share = need / max(1, sum(column) - column[j])
            for i in (i for i in places if i != j):
                m = min(column[i], need, int(share * column[i]) + 1)
                self.move(j, i, j, m)
                need -= max(0, m)

    def spill(self, limit):
        """Move what is above the limit to its own place, then to any."""
        places = range(len(self.own))
        own_place = [(i, k, k) for i in places for k in places]
        any_place = [(i, k, j) for i in places for k in places for j in places]
        for i, k, j in own_place + any_place:
            above, room = self.total[i] - limit, limit - self.total[k]
            self.move(k, i, j, min(above, self.own[i][j], room))


def balanced_queues(block, limit, near, slices):
    """The tokens that each GPU k of node s sends to node d, in order: (first GPU, last GPU).

    GPU k gets tokens for GPU k of node d up to the share `near`, as many of each GPU. A GPU
    with more than `limit` gives tokens to those with less, first those for their own place.
    Entries, cut into slices that take turns, are a GPU's own tokens by column, and then what
    it got.
    """
    nodes, width = len(block), len(block[0][0])
    queues = {}
    for s in range(nodes):
        for d in range(nodes):
            pair = Pair(block[s][d])
            if s != d:
                pair.gather(limit[s][d], near[d])
                pair.spill(limit[s][d])
            for k in range(width):
                order = [(k + shift) % width for shift in range(width)]
                whole = [(k, j, pair.own[k][j]) for j in order] + pair.entries[k]
                queues[s, d, k] = [
                    (i, j)
                    for t in range(slices)
                    for i, j, m in whole
                    for _ in range(m * (t + 1) // slices - m * t // slices)
                ]
    return queues


def port_time(moves, width, cost):
    """Seconds in which each GPU has sent and received its moves, {(from, to): units}."""
    times = [0.0]
    for gpu in range(width):
        for end in (0, 1):
            own = [m for pair, m in moves.items() if m and pair[end] == gpu != pair[1 - end]]
            times.append(cost[0] * len(own) + cost[1] * sum(own))
    return max(times)


def make_moves(moves, used, room, cost):
    """Make as many moves as fit into the seconds that ports have; `moves` keeps the rest."""
    for i, j in sorted(moves):
        if moves[i, j] and i != j:
            begin = 0.0 if (i, j) in used else cost[0]
            free = min(room["send", i], room["receive", j])
            units = min(moves[i, j], int(max(0.0, free - begin) / cost[1] * (1 + 1e-12)))
            if units:
                used.add((i, j))
                moves[i, j] -= units
                room["send", i] -= begin + units * cost[1]
                room["receive", j] -= begin + units * cost[1]


def make_all(due, slot, width, cost):
    """Make the moves that are due, in order, as far as a time allows."""
    if port_time(sum(due, Counter()), width, cost) <= slot:
        for moves in due:
            moves.clear()
        return
    room = {(way, k): slot for way in ("send", "receive") for k in range(width)}
    used = set()
    for moves in due:
        make_moves(moves, used, room, cost)


def pipeline_time(queues, stages, own, inter_s, cost, ahead):
    """Seconds until each stage begins, and until all has arrived.

    `stages` has (permutation, weight), `own` the tokens inside each node by GPU and GPU. While
    a stage runs, a node makes the moves before the next one, which begins after them. In the
    time that remains it makes those of later stages, `ahead` of them at most, then those after
    earlier stages and its own.
    """
    nodes, width, count = len(own), len(own[0]), len(stages)
    queues = {key: list(queue) for key, queue in queues.items()}
    before, after = [], []
    for permutation, weight in stages:
        before.append([Counter() for _ in range(nodes)])
        after.append([Counter() for _ in range(nodes)])
        for s, d in enumerate(permutation):
            for k in range(width if s != d else 0):
                sent, queues[s, d, k] = queues[s, d, k][:weight], queues[s, d, k][weight:]
                before[-1][s].update((i, k) for i, _ in sent if i != k)
                after[-1][d].update((k, j) for _, j in sent if j != k)
    assert not any(queue for (s, d, _), queue in queues.items() if s != d)
    cells = [(i, j) for i in range(width) for j in range(width)]
    backlog = [Counter({(i, j): part[i][j] for i, j in cells}) for part in own]
    now, starts = 0.0, []
    for p in range(-1, count):
        slot = inter_s[p] if p >= 0 else 0.0
        if p + 1 < count:
            slot = max([slot, *(port_time(moves, width, cost) for moves in before[p + 1])])
        for n in range(nodes):
            due = [before[q][n] for q in range(p + 1, min(count, p + 1 + ahead))]
            make_all([*due, backlog[n]], slot, width, cost)
            if p >= 0:
                backlog[n].update(after[p][n])
        now += slot
        starts.append(now)
    return starts[:count], now + max(port_time(moves, width, cost) for moves in backlog)
