"""The definition of a surface, slow: linear interpolation one axis after the other.

Above the last knot of an axis the time grows by a power of the size.
"""

import math


def seconds(axes, logs, sizes, growth):
    """The time at one point; `logs` is a nested list, an axis a level."""
    time = math.exp(_log(axes, logs, sizes))
    for knots, size, power in zip(axes, sizes, growth, strict=True):
        if size > knots[-1]:
            time *= (size / knots[-1]) ** power
    return time


def _log(axes, logs, sizes):
    if not axes:
        return logs
    knots, size = axes[0], min(max(sizes[0], axes[0][0]), axes[0][-1])
    inner = [_log(axes[1:], each, sizes[1:]) for each in logs]
    below = max(i for i in range(len(knots) - 1) if knots[i] <= size or i == 0)
    low, high = math.log(knots[below]), math.log(knots[below + 1])
    share = (math.log(size) - low) / (high - low)
    return inner[below] + share * (inner[below + 1] - inner[below])
