"""Definitions of statistics and replays, slow and obvious; imports nothing of fastcomm."""

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
