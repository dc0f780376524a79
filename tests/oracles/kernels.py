"""What `fastcomm kernels` says of events, by the definitions: slow, and without fastcomm.

An event is a dictionary: rank, kind, name, thread, start, stop, and for calls and device work
the correlation.
"""

from math import ceil, floor
from statistics import median

WORK = ("kernel", "memcpy", "memset")


def percentile(values, share):
    """The percentile as NumPy interpolates it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[floor(place)], ordered[ceil(place)]
    return low + (high - low) * (place - floor(place))


def rounded(duration):
    """The middle of the durations with equal first 11 bits."""
    width = 1 << max(duration.bit_length() - 11, 0)
    return duration // width * width + width // 2


def in_steps(events, steps):
    """The work that starts in one of the steps, which are (rank, start, stop)."""
    return [
        event
        for event in events
        if event["kind"] in WORK
        and any(
            rank == event["rank"] and start <= event["start"] < stop
            for rank, start, stop in steps
        )
    ]


def innermost(event, events, kind):
    """The name of the innermost range of a kind around the launch of an event; else None."""
    calls = [
        call
        for call in events
        if call["kind"] == "runtime"
        and call["rank"] == event["rank"]
        and call["correlation"] == event["correlation"]
    ]
    if not calls:
        return None
    call = min(calls, key=lambda call: call["start"])
    around = [
        one
        for one in events
        if one["kind"] == kind
        and one["rank"] == event["rank"]
        and one["thread"] == call["thread"]
        and one["start"] <= call["start"]
        and call["stop"] <= one["stop"]
    ]
    return max(around, key=lambda one: one["start"])["name"] if around else None


def running(work, category):
    """By category, the nanoseconds in which any of its events runs, of all ranks."""
    moments = {}
    for event in work:
        own = moments.setdefault(category(event), set())
        own |= {(event["rank"], ns) for ns in range(event["start"], event["stop"])}
    return {name: len(own) for name, own in moments.items()}


def summed(work, label, steps):
    """A dictionary by label of what the work of all ranks adds up to."""
    groups = {}
    for event in work:
        groups.setdefault(label(event), []).append(event)
    step_ns = sum(stop - start for _, start, stop in steps)
    rows = {}
    for name, own in groups.items():
        times = [event["stop"] - event["start"] for event in own]
        rows[name] = {
            "count": len(times),
            "total_ns": sum(times),
            "mean_ns": sum(times) / len(times),
            "median_ns": percentile(times, 0.5),
            "p95_ns": percentile(times, 0.95),
            "min_ns": min(times),
            "max_ns": max(times),
            "share": sum(times) / step_ns,
            "ranks": len({event["rank"] for event in own}),
            "slowdown": slowdown(own),
        }
    return rows


def slowdown(work):
    """The total of the slowest rank, by the median of the others with as many events.

    Of several numbers of events, the one with the largest difference counts; None without one.
    """
    ranks = {}
    for event in work:
        ranks.setdefault(event["rank"], []).append(event["stop"] - event["start"])
    best = None
    for count in {len(times) for times in ranks.values()}:
        totals = sorted(sum(times) for times in ranks.values() if len(times) == count)
        if len(totals) > 1 and (peers := median(totals[:-1])) > 0:
            candidate = totals[-1] - peers, totals[-1] / peers
            # Of equal differences, the one that is met first counts.
            best = candidate if best is None or candidate[0] > best[0] else best
    return best and best[1]
