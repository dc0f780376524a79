"""Statistics and replays by definition: slow and obvious, without fastcomm."""

import statistics


def described(pairs):
    """Per key: sum, least, most, upper median, population variance, in the order of keys."""
    found = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {
        key: (
            sum(values),
            min(values),
            max(values),
            sorted(values)[len(values) // 2],
            float(statistics.pvariance(values)),
        )
        for key, values in found.items()
    }


def simulated(size, edges, groups, common, time, delay=None):
    """Start and end of every operation by instance: time[op][rank][step].

    Nothing is ordered: every number is computed anew until none changes.
    """
    ranks, steps = len(time[0]), len(time[0][0])
    cells = [(op, d, s) for op in range(size) for d in range(ranks) for s in range(steps)]
    start, end = dict.fromkeys(cells, 0.0), dict.fromkeys(cells, 0.0)
    group_of = {op: g for g, members in enumerate(groups) for op in members}
    for _ in range(2 * size + 2):
        for op, d, s in cells:
            waits = [end[a, d, s] for a, b in edges if b == op]
            start[op, d, s] = max(waits, default=0.0) + (delay[op][d][s] if delay else 0.0)
        for op, d, s in cells:
            if op not in group_of:
                end[op, d, s] = start[op, d, s] + time[op][d][s]
                continue
            g = group_of[op]
            others = range(ranks) if common[g] else [d]
            last = max(start[m, o, s] for m in groups[g] for o in others)
            end[op, d, s] = last + time[op][d][s]
    return start, end


def played(size, edges, work, kinds, ready, by_time):  # noqa: C901, PLR0912, PLR0915
    """Start, end and order of nodes on devices, one after the other, searching all each time.

    `edges` are (from, to, lag, waits for the start alone) sorted by from; `work` rows are
    (device, priority, duration, busy, group, releases); a kind is 0, 1 (unlimited) or 2
    (exclusive).
    """
    ready, free, held = list(ready), [0.0] * len(kinds), [None] * len(kinds)
    waits = [sum(b == i for _, b, _, _ in edges) for i in range(size)]
    queue, shut, order = [], [[] for _ in kinds], []
    start, end, arrival, arrived = {}, {}, {}, 0

    def arrive(node):
        nonlocal arrived
        arrival[node] = arrived
        arrived += 1
        queue.append(node)

    for i in range(size):
        if not waits[i]:
            arrive(i)
    while queue:
        if by_time:
            open_ = [
                n
                for n in queue
                if kinds[work[n][0]] != 2 or held[work[n][0]] in (None, work[n][4])
            ]
            could = {
                n: ready[n] if kinds[work[n][0]] == 1 else max(ready[n], free[work[n][0]])
                for n in open_
            }
            now, device = min((could[n], work[n][0]) for n in open_)
            own = [n for n in open_ if work[n][0] == device and ready[n] <= now]
        else:
            _, device = min((free[work[n][0]], work[n][0]) for n in queue)
            own = [n for n in queue if work[n][0] == device]
        node = min(own, key=lambda n: (work[n][1], ready[n], arrival[n]))
        queue.remove(node)
        _, _, duration, busy, group, releases = work[node]
        if kinds[device] == 2 and held[device] not in (None, group):
            shut[device].append(node)
            continue
        start[node] = ready[node]
        if kinds[device] != 1:
            start[node] = max(ready[node], free[device])
        end[node] = start[node] + duration
        if kinds[device] != 1 or not by_time:
            free[device] = end[node] + busy
        order.append(node)
        for a, b, lag, at_start in edges:
            if a == node:
                ready[b] = max(ready[b], (start if at_start else end)[a] + lag)
                waits[b] -= 1
                if not waits[b]:
                    arrive(b)
        if kinds[device] == 2:
            held[device] = None if releases else group
            if releases and shut[device]:
                arrive(shut[device].pop(0))
    return start, end, order
