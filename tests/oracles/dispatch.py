"""Dispatch by definition, token by token, in plain Python, without fastcomm."""

from collections import Counter

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


def balanced_queues(block, load, slices):
    """The tokens that each GPU k of node s sends to node d, in order: (first GPU, last GPU).

    A GPU with more than `load` gives tokens to those with less. Its entries, cut into slices
    that take turns, are its own tokens by column, and then what it got.
    """
    nodes, width = len(block), len(block[0][0])
    queues = {}
    for s in range(nodes):
        for d in range(nodes):
            own = [list(row) for row in block[s][d]]
            entries = {k: [] for k in range(width)}
            total = [sum(row) for row in own]
            for i in range(width if s != d else 0):
                for k in range(width):
                    for j in range(width):
                        m = min(total[i] - load[s][d], own[i][j], load[s][d] - total[k])
                        if m > 0:
                            own[i][j] -= m
                            total[i] -= m
                            total[k] += m
                            entries[k].append((i, j, m))
            for k in range(width):
                order = [(k + shift) % width for shift in range(width)]
                whole = [(k, j, own[k][j]) for j in order] + entries[k]
                queues[s, d, k] = [
                    (i, j)
                    for t in range(slices)
                    for i, j, m in whole
                    for _ in range(m * (t + 1) // slices - m * t // slices)
                ]
    return queues


def shift_time(moves, width, cost):
    """Seconds of moves (from, to) inside a node, shift by shift."""
    total = 0.0
    for shift in range(1, width):
        most = max(moves.count((j, (j + shift) % width)) for j in range(width))
        total += (cost[0] + cost[1] * most) if most else 0.0
    return total


def pipeline_time(queues, stages, own, inter_s, cost, ahead):
    """Seconds until the first stage begins, and until all has arrived.

    `stages` has (permutation, weight), `own` the tokens inside each node by GPU and GPU. Pair p
    of moves is worked off by a node once stage p - 1 has ended: moves after that stage, and
    moves before the next stages that are not ready, at most `ahead` of them.
    """
    nodes, width, count = len(own), len(own[0]), len(stages)
    queues = {key: list(queue) for key, queue in queues.items()}
    before, after = [], []
    for permutation, weight in stages:
        before.append([[] for _ in range(nodes)])
        after.append([[] for _ in range(nodes)])
        for s, d in enumerate(permutation):
            for k in range(width if s != d else 0):
                sent, queues[s, d, k] = queues[s, d, k][:weight], queues[s, d, k][weight:]
                before[-1][s] += [(i, k) for i, _ in sent if i != k]
                after[-1][d] += [(k, j) for _, j in sent if j != k]
    assert not any(queue for (s, d, _), queue in queues.items() if s != d)
    total = sum(weight for _, weight in stages)
    ready, begun, ended, prepared, done = [0.0] * nodes, [], [0.0], 0, []
    gone, passed = 0.0, 0
    for p in range(-1, count + 1):
        last = min(count, p + 1 + min(p + 2, ahead))
        passed += stages[p][1] if 0 <= p < count else 0
        reached = passed / total
        for n in range(nodes):
            moves = [move for q in range(prepared, last) for move in before[q][n]]
            moves += after[p - 1][n] if p > 0 else []
            for i in range(width):
                for j in range(width):
                    share = int(own[n][i][j] * reached) - int(own[n][i][j] * gone)
                    moves += [(i, j)] * share
            ready[n] = max(ready[n], ended[max(p, 0)]) + shift_time(moves, width, cost)
        done += [max(ready)] * (last - prepared)
        prepared, gone = last, reached
        if p + 1 < count:
            begun.append(max(ended[-1], done[p + 1]))
            ended.append(begun[-1] + inter_s[p + 1])
    return begun[0], max([ended[-1], *ready])
