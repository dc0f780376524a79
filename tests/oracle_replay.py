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
