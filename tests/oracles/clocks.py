"""Clock offsets by definition: slow and obvious, without fastcomm."""

from statistics import median_low


def pair_offsets(rows):
    """(low, high) -> (offset, spread, matches), from rows (rank, key, stop)."""
    collectives = {}
    for rank, key, stop in rows:
        collectives.setdefault(key, {})[rank] = stop
    ahead = {}
    for stops in collectives.values():
        low = min(stops)
        for rank in stops:
            if rank != low:
                ahead.setdefault((low, rank), []).append(stops[rank] - stops[low])
    return {
        pair: (
            median_low(found),
            median_low([abs(each - median_low(found)) for each in found]),
            len(found),
        )
        for pair, found in ahead.items()
    }


def least_spread(rows):
    """rank -> (reference, smallest sum of spreads on a way to it), by trying over and over."""
    pairs = pair_offsets(rows)
    edges = [*((a, b, s) for (a, b), (_, s, _) in pairs.items())]
    edges += [(b, a, s) for a, b, s in edges]
    found = {}
    for reference in sorted({a for a, _, _ in edges}):
        if reference in found:
            continue
        reached = {reference: 0}
        for _ in edges:
            for a, b, spread in edges:
                if a in reached and reached[a] + spread < reached.get(b, 1 << 62):
                    reached[b] = reached[a] + spread
        found |= {rank: (reference, spread) for rank, spread in reached.items()}
    return found
