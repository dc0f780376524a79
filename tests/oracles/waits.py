"""Skew, waits and outliers of several ranks, by definition."""

from oracles.metrics import mean, percentile


def matched_collectives(events):
    """Collective -> its events, of those that several ranks have; times are on one clock."""
    found = {}
    for event in events:
        found.setdefault(event["collective"], []).append(event)
    return [each for each in found.values() if len(each) > 1]


def median_low(values):
    return sorted(values)[(len(values) - 1) // 2]


def skew(events, steps):
    """(op, tag, power of two of the size) -> what its collectives are like."""
    found = {}
    for each in matched_collectives(events):
        size = each[0]["bytes"]
        power = None if size is None else 1 << max(size, 1).bit_length() - 1
        found.setdefault((each[0]["op"], each[0]["tag"], power), []).append(each)
    return {key: skew_of_class(each, steps) for key, each in found.items()}


def skew_of_class(collectives, steps):
    spreads, transfers, waited, whole = [], [], 0, 0
    for members in collectives:
        starts = [event["start"] for event in members]
        spreads.append(max(starts) - min(starts))
        transfers.append(median_low([event["stop"] for event in members]) - max(starts))
        waited += sum(max(starts) - start for start in starts)
        whole += sum(max(starts) - start + transfers[-1] for start in starts)
    return {
        "count": len(collectives),
        **{
            f"{name}_{what}_ns": of(values)
            for name, values in (("skew", spreads), ("transfer", transfers))
            for what, of in (
                ("mean", mean),
                ("p50", lambda values: percentile(values, 50)),
                ("p95", lambda values: percentile(values, 95)),
            )
        },
        "wait_ns": waited / steps,
        "wait_share": waited / whole if whole > 0 else None,
    }


def waits(events, steps):
    """(rank, tag) -> what it waits for, how often it is last, what that costs the others."""
    found = {}
    for members in matched_collectives(events):
        arrivals = sorted(event["start"] for event in members)
        end = median_low([event["stop"] for event in members])
        for event in members:
            row = found.setdefault((event["rank"], event["tag"]), dict.fromkeys(WAIT, 0))
            alone_last = event["start"] == arrivals[-1] > arrivals[-2]
            others = [other["start"] for other in members if other is not event]
            row["collectives"] += 1
            row["wait_ns"] += arrivals[-1] - event["start"]
            row["transfer_ns"] += end - arrivals[-1]
            row["last"] += alone_last
            row["wait_caused_ns"] += arrivals[-1] - arrivals[-2] if alone_last else 0
            row["later_ns"] += event["start"] - median_low(others)
            waited = exposed_until(event, arrivals[-1])
            row["exposed_wait_ns"] += waited
            row["exposed_transfer_ns"] += event["exposed_ns"] - waited
    for row in found.values():
        row["last_share"] = row["last"] / row["collectives"]
        for name in row:
            if name.endswith("_ns"):
                row[name] /= steps
    return found


def exposed_until(event, moment):
    """Exposed time of an event before a moment; even between the first gap and the last."""
    whole, first, last = (event[f"exposed_{name}ns"] for name in ("", "at_start_", "at_end_"))
    before, after = moment - event["start"], event["stop"] - moment
    if before <= first:
        return before
    if after <= last:
        return whole - after
    return first + round(
        (whole - first - last)
        * ((before - first) / (event["stop"] - event["start"] - first - last))
    )


WAIT = (
    *("collectives", "wait_ns", "transfer_ns", "last", "wait_caused_ns", "later_ns"),
    *("exposed_wait_ns", "exposed_transfer_ns"),
)


def alone(event, others, compute):
    """How long before its end nothing but the event runs, one ns at a time."""
    length = 0
    for moment in reversed(range(event[0], event[1])):
        if any(start <= moment < stop for start, stop in [*others, *compute]):
            break
        length += 1
    return length


def exposed(place, events, compute):
    """Exposed time of an event, and of it before the first gap and after the last, by ns.

    A moment counts for the event that ends first; of equal ends, for the earlier in `events`.
    """
    start, stop = events[place]
    counts = []
    for moment in range(start, stop):
        running = [
            (other[1], number)
            for number, other in enumerate(events)
            if other[0] <= moment < other[1]
        ]
        hidden = any(low <= moment < high for low, high in compute)
        counts.append(min(running) == (stop, place) and not hidden)
    return sum(counts), until_gap(counts), until_gap(counts[::-1])


def until_gap(counts):
    return counts.index(False) if False in counts else len(counts)


def outlier(values, index, least, score):
    """Whether one value is above the others by the rule, and the median of those."""
    others = [value for place, value in enumerate(values) if place != index]
    middle = median(others)
    deviation = 1.4826 * median([abs(value - middle) for value in others])
    return values[index] - middle > max(score * deviation, least), middle


def median(values):
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
