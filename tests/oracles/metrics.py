"""METRIC 0-5 by definition, on what `oracles.kineto` reads, in exact fractions until the end.

Steps are cut by the host's marks, or on the device's clock at the first work launched in each.

A moment is classified by what is active in it; every length is a sum over elementary segments,
in which nothing begins or ends. An unknown value is None.
"""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

from oracles.kineto import RUNTIME, comm_events, device_work, is_compute, is_copy, iterations

TAGS = ("DP", "TP", "PP", "EP", "CP", "OTHER")


def metrics(traces, tag_of, link_bandwidth=None, clock="auto"):
    """All metrics of a run; `tag_of` maps a communication event to its tag."""
    clock = step_clock(traces) if clock == "auto" else clock
    by_rank = [steps_of(trace, tag_of, clock) for trace in traces]
    steps = [step for own in by_rank for step in own]
    numbers = {step["number"] for step in steps}
    return {
        "ranks": sorted(trace["rank"] for trace in traces),
        "iterations": len(numbers),
        "iteration_clock": clock,
        "outside": outside(traces, clock),
        "iteration": iteration_times(steps),
        "breakdown": {"spec": spec_breakdown(steps), "exact": exact_breakdown(steps)},
        "windows": windows(steps),
        "bandwidth": {
            tag: bandwidth(events, link_bandwidth) for tag, events in by_tag(steps).items()
        },
        "volume": {tag: volume(events, tag, by_rank) for tag, events in by_tag(steps).items()},
        "overlap": overlap(steps),
    }


# ------------------------------------------------------------ clocks of steps


def device_events(trace):
    """[(start, stop, start of the launch or None)] of all device work."""
    launches = {}
    for event in trace["events"]:
        if event["cat"] in RUNTIME and event["args"].get("correlation", 0) > 0:
            launches.setdefault(event["args"]["correlation"], event["start"])
    return [
        (e["start"], e["stop"], launches.get(e["args"].get("correlation")))
        for e in trace["events"]
        if device_work(e) is not None
    ]


def step_clock(traces):
    """The device's where all ranks with device work can have it, else the host's."""
    # Choice: device work without any length, and without a launch, says nothing about clocks.
    windows_of_ranks = [
        on_device
        for trace, on_device in zip(traces, map(device_windows, traces), strict=True)
        if on_device or any(stop > start for start, stop, _ in device_events(trace))
    ]
    are_on_device = (on_device is not None for on_device in windows_of_ranks)
    return "device" if windows_of_ranks and all(are_on_device) else "host"


def windows_of(trace, clock):
    on_device = device_windows(trace) if clock == "device" else None
    return iterations(trace) if on_device is None else on_device


def device_windows(trace):
    """Steps from where a device begins one to where it begins the next.

    None without launches in them; empty where no step has any time on the device.
    """
    work = device_events(trace)
    launched = [each for each in work if each[2] is not None]
    # Choice: work before all that is known to be launched is of before the recording.
    begin = min((start for start, _, _ in launched), default=None)
    if not launched or 2 * len(launched) < sum(start >= begin for start, _, _ in work):
        return None
    marks = iterations(trace)
    if marks[0]["source"] == "whole":
        edges = {"start": min(w[0] for w in work), "stop": max(w[1] for w in work)}
        return [{**marks[0], **edges}]
    marks = [
        {**mark, "stop": min(mark["stop"], limit), "place": place}
        for place, (mark, limit) in enumerate(
            zip(marks, [*(mark["start"] for mark in marks[1:]), float("inf")], strict=True)
        )
    ]
    return windows_on_device(
        [{**mark, "waiting": waits(trace, mark, marks)} for mark in marks], work
    )


def waits(trace, mark, marks):
    """Whether the host is recorded inside of a mark, and launches nothing.

    Choice: a mark without any event is of a host that does nothing if other marks have calls.
    """
    own = [e for e in trace["events"] if mark["start"] <= e["start"] < mark["stop"]]
    is_silent = not any(e["cat"] in ("cpu_op", "python_function") for e in own)
    is_recorded = any(
        e["cat"] in RUNTIME and other["start"] <= e["start"] < other["stop"]
        for e in trace["events"]
        for other in marks
    )
    calls = [e["name"].lower() for e in own if e["cat"] in RUNTIME]
    ranges = [
        e
        for e in own
        if e["cat"] == "user_annotation"
        and mark["start"] < e["start"]
        and e["stop"] < mark["stop"]
    ]
    launching = ("launch", "memcpy", "memset", "enqueue")
    return bool(calls or ranges or (is_silent and is_recorded)) and not any(
        word in name for name in calls for word in launching
    )


def windows_on_device(marks, work):
    """The steps of disjoint marks, each with its place, from the first to the last with work.

    The boundary before a step is max(begin of its mark, min(its first device work, end of the
    last device work of the step before)). A step that no other follows ends with its mark, or
    with the last device work of the steps so far, if that is later.
    """
    busy, ends = with_work(marks, work)
    # Choice: before the first work, and behind the last, the device may not be recorded.
    places = [place for place, (_, first, _) in enumerate(busy) if first is not None]
    if not places:
        return None
    first_busy, first_work, _ = busy[places[0]]
    end = max(stop for _, stop, launch in work if launch is not None and launch < ends[-1])
    busy = busy[slice(*range_with_waiting(busy, places[0], places[-1], end))]
    first_mark = busy[0][0]
    # Choice: work that no recorded call launched was queued before, if it runs before.
    queued = [
        stop
        for start, stop, launch in work
        if (start < first_work if launch is None else launch < first_mark["start"])
    ]
    found, before = [], max(queued, default=-float("inf"))
    earliest = min(first for _, first, _ in busy if first is not None)
    latest = -float("inf")
    for mark, first, last in busy:
        begin = max(mark["start"], before if first is None else min(first, before))
        # Choice: work of another step before the first with work would be in no step otherwise.
        if mark["start"] <= first_busy["start"]:
            begin = max(mark["start"], min(begin, earliest))
        # Choice: a step does not begin before the one before it.
        begin = max([begin, *(step["start"] for step in found)])
        if found and follows(found[-1], mark):
            found[-1]["stop"] = begin
        elif found:
            found[-1]["stop"] = min(found[-1]["stop"], begin)
        # Choice: also of steps before, whose work would be in no step otherwise.
        latest = latest if last is None else max(latest, last)
        found.append({**mark, "start": begin, "stop": max(mark["stop"], latest)})
        found[-1].update(mark_start=mark["start"], mark_stop=mark["stop"])
        before = before if last is None else last
    return found


def with_work(marks, work):
    """The first start and last end of the work of each mark, and ends of marks with work."""
    busy, ends = [], []
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        # Choice: what is launched between a mark and the next that follows is of the first.
        step = {**mark, "mark_start": mark["start"], "mark_stop": mark["stop"]}
        goes_on = following is not None and follows(step, following)
        end = following["start"] if goes_on else mark["stop"]
        own = [w for w in work if w[2] is not None and mark["start"] <= w[2] < end]
        if own:
            ends.append(end)
        first = min((w[0] for w in own), default=None)
        busy.append((mark, first, max((w[1] for w in own), default=None)))
    return busy, ends


def range_with_waiting(busy, first, last, end):
    """The range of the marks `first` to `last`, and of those around them that launch nothing.

    Choice: behind the last, they wait for more than the device, which works up to `end`.
    """

    def is_step(mark):
        own = mark["stop"] - max(mark["start"], end)
        return 100 * own > mark["stop"] - mark["start"]

    while first and busy[first - 1][0].get("waiting"):
        first -= 1
    while last + 1 < len(busy) and busy[last + 1][0].get("waiting"):
        if not is_step(busy[last + 1][0]):
            break
        last += 1
    return first, last + 1


def follows(step, mark):
    """Whether a mark is of the step after: with the next number, or where the mark ends.

    Choice: a hundredth of the mark's length is no pause.
    """
    gap = mark["start"] - step["mark_stop"]
    length = step["mark_stop"] - step["mark_start"]
    return mark["number"] == step["number"] + 1 or 100 * gap <= length


def outside(traces, clock):
    """Device time and communication that no step has."""
    recorded = missing = events = 0
    for trace in traces:
        steps = [(step["start"], step["stop"]) for step in windows_of(trace, clock)]
        steps = [
            (start, min([stop, *(following for following, _ in steps[number + 1 :][:1])]))
            for number, (start, stop) in enumerate(steps)
        ]
        for start, stop, _ in device_events(trace):
            inside = sum(max(min(stop, b) - max(start, a), 0) for a, b in steps)
            recorded += stop - start
            missing += stop - start - inside
        if any(stop > start for start, stop, _ in device_events(trace)):
            events += sum(
                not any(a <= event["start"] < b for a, b in steps)
                for event in comm_events(trace)
            )
    if not recorded:
        return {"device_ns": None, "share": None, "comm_events": None}
    share = float(Fraction(missing, recorded))
    return {"device_ns": missing, "share": share, "comm_events": events}


# ------------------------------------------------- one (iteration, rank)


def steps_of(trace, tag_of, clock="host"):
    """Every iteration of a rank: length, its own events, its segments."""
    communication = [{**e, "tag": (tag_of(e) or "OTHER").upper()} for e in comm_events(trace)]
    labeled = [(e["start"], e["stop"], e["tag"]) for e in communication]
    for event in trace["events"]:
        if is_compute(event):
            labeled.append((event["start"], event["stop"], "compute"))
        elif is_copy(event):
            labeled.append((event["start"], event["stop"], "copy"))
    rest = communication
    steps = []
    for mark in windows_of(trace, clock):
        # Choice: where iterations overlap, the first one that holds an event's start has it.
        own = [e for e in rest if mark["start"] <= e["start"] < mark["stop"]]
        rest = [e for e in rest if not mark["start"] <= e["start"] < mark["stop"]]
        steps.append(
            {
                "number": mark["number"],
                "is_recorded": any(device_work(event) for event in trace["events"]),
                "length": mark["stop"] - mark["start"],
                "events": sorted(own, key=lambda e: e["start"]),
                "segments": segments(labeled, mark["start"], mark["stop"]),
            }
        )
    return steps


def segments(labeled, start, stop):
    """[(length, labels active in it)] of the elementary segments of [start, stop)."""
    changes = {start: [], stop: []}
    for begin, end, label in labeled:
        clipped = max(begin, start), min(end, stop)
        if clipped[0] < clipped[1]:
            changes.setdefault(clipped[0], []).append((label, +1))
            changes.setdefault(clipped[1], []).append((label, -1))
    found = []
    active = Counter()
    moments = sorted(changes)
    for moment, after in pairwise(moments):
        for label, step in changes[moment]:
            active[label] += step
        found.append((after - moment, frozenset(label for label in active if active[label])))
    return found


def length(step, condition):
    """How long `condition(active labels)` holds."""
    return sum(span for span, active in step["segments"] if condition(active))


def tags_in(active):
    return active - {"compute", "copy"}


# --------------------------------------------------------------- metric 0, 1


def iteration_times(steps):
    lengths = [step["length"] for step in steps]
    return {"mean_ns": mean(lengths), "p99_ns": percentile(lengths, 99)}


def spec_breakdown(steps):
    """The specification's formulas; idle is negative where communication overlaps itself."""
    steps = recorded(steps)
    totals = dict.fromkeys(("compute", "idle", *(f"comm_{tag}" for tag in TAGS)), 0)
    for step in steps:
        compute = step["length"] - length(step, tags_in)
        everything = sum(duration(e) for e in step["events"])
        totals["compute"] += compute
        totals["idle"] += step["length"] - compute - everything
        for event in step["events"]:
            totals[f"comm_{event['tag']}"] += duration(event)
    return shares(totals, steps)


def exact_breakdown(steps):
    """A partition of the iteration."""
    steps = recorded(steps)
    names = ("compute", "idle", "memcpy", *(f"exposed_{tag}" for tag in TAGS), "exposed_mixed")
    totals = dict.fromkeys(names, 0)
    for step in steps:
        for span, active in step["segments"]:
            totals[category(active)] += span
    assert sum(totals.values()) == sum(step["length"] for step in steps)
    return shares(totals, steps)


def recorded(steps):
    """The steps of ranks of which some device work is recorded; of others nothing is known."""
    return [step for step in steps if step["is_recorded"]]


def category(active):
    if "compute" in active:
        return "compute"
    tags = tags_in(active)
    if len(tags) > 1:
        return "exposed_mixed"
    if tags:
        return f"exposed_{next(iter(tags))}"
    return "memcpy" if "copy" in active else "idle"


def shares(totals, steps):
    whole = sum(step["length"] for step in steps)
    return {name: float(Fraction(t, whole)) if whole else None for name, t in totals.items()}


# ------------------------------------------------------------------ metric 2


def windows(steps):
    """Signed time from the end of a phase to the start of the next, within an iteration."""
    found = {}
    for step in steps:
        phases = phases_of(step["events"])
        for one, two in pairwise(phases):
            found.setdefault((one["tag"], two["tag"]), []).append(two["start"] - one["stop"])
    return [
        {
            "from": pair[0],
            "to": pair[1],
            "count": len(spans),
            "mean_ns": mean(spans),
            "p50_ns": percentile(spans, 50),
            "p95_ns": percentile(spans, 95),
        }
        for pair, spans in sorted(found.items())
    ]


def phases_of(events):
    """Runs of one tag in order of start; a phase ends with its latest end."""
    phases = []
    for event in events:
        if phases and phases[-1]["tag"] == event["tag"]:
            phases[-1]["stop"] = max(phases[-1]["stop"], event["stop"])
        else:
            phases.append({key: event[key] for key in ("tag", "start", "stop")})
    return phases


# --------------------------------------------------------------- metric 3, 4


def by_tag(steps):
    """Tag -> the events that start in an iteration; only tags that have some."""
    found = {}
    for step in steps:
        for event in step["events"]:
            found.setdefault(event["tag"], []).append(event)
    return dict(sorted(found.items()))


def bandwidth(events, link):
    timed = [e for e in events if duration(e) > 0 and e["payload_bytes"] is not None]
    speeds = [Fraction(e["payload_bytes"] * 10**9, duration(e)) for e in timed]
    buses = [
        Fraction(e["bus_bytes"] * 10**9, duration(e))
        for e in events
        if duration(e) > 0 and e["bus_bytes"] is not None
    ]
    pooled = None
    if timed:
        moved = sum(e["payload_bytes"] for e in timed)
        pooled = Fraction(moved * 10**9, sum(duration(e) for e in timed))
    return {
        "avg_bw": mean(speeds),
        "avg_util": per(mean(speeds), link),
        "p95_util": per(percentile(speeds, 95), link),
        "global_avg_util": per(pooled, link),
        # Choice: an event of no duration has moved its bytes, though it has no bandwidth.
        "total_bytes": total_bytes(events),
        "avg_bus_bw": mean(buses),
        "events_without_bytes": sum(e["payload_bytes"] is None for e in events),
    }


def per(speed, link):
    return None if speed is None or link is None else float(Fraction(speed) / Fraction(link))


def total_bytes(events):
    """Sum of the known; None where nothing is known."""
    known = [e["payload_bytes"] for e in events if e["payload_bytes"] is not None]
    return sum(known) if known else None


def volume(events, tag, by_rank):
    """Bytes of a tag; per step they are those of each rank in each of its own steps."""
    total = total_bytes(events)
    # Choice: of a rank without steps nothing is known.
    with_steps = [steps for steps in by_rank if steps]
    per_step = [
        Fraction(total_bytes(by_tag(steps).get(tag, [])) or 0, len(steps))
        for steps in with_steps
    ]
    unknown = total is None
    return {
        "comm_bytes": total,
        "comm_events": len(events),
        "bytes_per_iteration": None if unknown else float(sum(per_step)),
        "bytes_per_step_per_gpu": None if unknown else float(sum(per_step) / len(with_steps)),
    }


def duration(event):
    return event["stop"] - event["start"]


# ------------------------------------------------------------------ metric 5


def overlap(steps):
    """Mean over the (iteration, rank) that communicate; the same for each tag alone."""
    tags = sorted({tag for step in steps for _, a in step["segments"] for tag in tags_in(a)})
    return {
        "average_overlap_ratio": mean(overlap_ratios(steps, tags_in)),
        "by_tag": {tag: mean(overlap_ratios(steps, {tag}.intersection)) for tag in tags},
    }


def overlap_ratios(steps, communicates):
    ratios = []
    for step in steps:
        union = length(step, communicates)
        both = length(step, lambda active: communicates(active) and "compute" in active)
        if union:
            ratios.append(Fraction(both, union))
    return ratios


# ---------------------------------------------------------------- statistics


def mean(values):
    return float(Fraction(sum(values)) / len(values)) if values else None


def percentile(values, q):
    """NumPy's linear rule: on the line between the two neighbors of (n - 1) * q / 100."""
    if not values:
        return None
    ordered = sorted(values)
    place = Fraction((len(ordered) - 1) * q, 100)
    below = place.numerator // place.denominator
    above = min(below + 1, len(ordered) - 1)
    gap = ordered[above] - ordered[below]
    return float(ordered[below] + gap * (place - below))
