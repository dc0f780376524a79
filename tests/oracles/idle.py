"""Why a device is idle, by definition, instant by instant, on what `oracles.kineto` reads.

Between two neighboring edges of events nothing begins or ends, so that one instant speaks for
all of them. The answer is the cause, and the name that is its evidence or None.
"""

import re
from collections import Counter
from itertools import pairwise

from oracles.kineto import RUNTIME, comm_events, device_work, iterations

APART = 100_000  # ns: calls of a thread at most this far apart launch without a pause
SHORT = 20_000  # ns: shorter operators and functions are no cause
LATE = 100_000  # ns: what starts later after its launch was queued

RANGES = ("user_annotation", "python_function")


def causes(trace, windows):
    """By (index of a window, cause): the idle ns, and Counters of the names behind them."""
    events = sorted(trace["events"], key=lambda event: event["start"])
    work = [e for e in events if device_work(e) is not None and e["stop"] > e["start"]]
    edges = {t for e in events for t in (e["start"], e["stop"])}
    edges |= {t for window in windows for t in window}
    edges = sorted(edges)
    ns, names = Counter(), {}
    for low, high in pairwise(edges):
        place = next((k for k, (a, b) in enumerate(windows) if a <= low < b), None)
        if place is None or any(e["start"] <= low < e["stop"] for e in work):
            continue
        cause, name = cause_at(low, trace, events, work, edges)
        ns[place, cause] += high - low
        if name is not None:
            names.setdefault((place, cause), Counter())[name] += high - low
    return ns, names


def cause_at(t, trace, events, work, edges):
    """Cause and evidence at an idle instant."""
    nodes = [e for e in events if e["cat"] == "graph_host_node"]
    if found := outer(nodes, t):
        return "graph_callback", found["name"]
    busy = [*work, *(e for e in nodes if e["stop"] > e["start"])]
    a = max((e["stop"] for e in busy if e["stop"] <= t), default=edges[0] - 1)
    later = [e for e in work if e["start"] > t]
    b = min((e["start"] for e in busy if e["start"] > t), default=None) if later else None
    if b is not None:
        ends = min(later, key=lambda e: e["start"])
        launch, name = launch_of(ends, events), ends["name"]
    else:
        last = max((e["stop"] for e in work), default=None)
        ends = next((e for e in work if e["stop"] == last), None)
        launch, name = ends and launch_of(ends, events), None
    if launch is None:
        return "unknown", None if b is None else name
    thread = [e for e in events if lane(e) == lane(launch) and on_host(e)]
    before = b is None or t < launch["start"]
    queued = max(a, launch["stop"])
    if b is not None and (launch["stop"] <= a or (t >= queued and b - queued > LATE)):
        waits = communicates(ends, trace) and b - queued > LATE
        return (late(trace) if waits else "kernel_gaps"), name
    cause, evidence = by_thread(t, thread, events, trace, name) if before else (None, None)
    if not before or cause == "launch_bound":
        drained = outer([e for e in thread if is_sync(e)], a)
        if drained is not None:
            return "synchronization", operator(drained, thread)
        return "launch_bound", name
    return cause, evidence


def late(trace):
    """Cause of late communication: the bubble of a pipeline where a group is one."""
    groups = [e["args"].get("Process Group Description") for e in trace["events"]]
    return "pipeline_bubble" if "mesh_pp" in groups else "late_communication"


def communicates(event, trace):
    keys = ("start", "stop", "name")
    return any(all(event[key] == e[key] for key in keys) for e in comm_events(trace))


def launch_of(event, events):
    number = event["args"].get("correlation", 0)
    calls = (e for e in events if e["cat"] in RUNTIME and number > 0)
    return next((e for e in calls if e["args"].get("correlation") == number), None)


def lane(event):
    return event["pid"], event["tid"]


def on_host(event):
    return event["cat"] in RUNTIME or event["cat"] in ("cpu_op", *RANGES)


def is_long(event):
    return event["stop"] - event["start"] >= SHORT


def is_sync(event):
    return event["cat"] in RUNTIME and bool(re.search("Synchronize|Memcpy$", event["name"]))


def by_thread(t, thread, events, trace, launched):  # noqa: PLR0911 - a rule a line
    """Cause and evidence by what the launching thread does at an instant."""
    ranges = [e for e in thread if e["cat"] in RANGES]
    long = [e for e in thread if e["cat"] not in ("cpu_op", "python_function") or is_long(e)]
    may_load = [e for e in long if e["cat"] in (*RANGES, "cpu_op")]
    if found := outer([e for e in long if e in ranges and "gc.collect" in e["name"]], t):
        return "python", inner_function(t, long, found)["name"]
    if found := outer([e for e in may_load if "DataLoader" in e["name"]], t):
        return "data_loading", found["name"]
    if found := outer([e for e in thread if is_sync(e)], t):
        return "synchronization", operator(found, thread)
    calls = [e for e in thread if e["cat"] in RUNTIME and not is_sync(e)]
    calls = [e for e in calls if launches(e, events) and e["stop"] > e["start"]]
    if launching(
        t, [e for e in thread if e in calls or (is_sync(e) and e["stop"] > e["start"])]
    ):
        return "launch_bound", launched
    if found := outer([e for e in may_load if re.search(r"\bbarrier\b", e["name"])], t):
        return late(trace), found["name"]
    other = [e for e in thread if e["cat"] in RUNTIME and e not in calls and not is_sync(e)]
    marks = [e for e in ranges if e["cat"] == "user_annotation" and not is_mark(e, trace)]
    ops = [e for e in long if e["cat"] == "cpu_op"]
    if found := outer([e for e in thread if e in other or e in marks or e in ops], t):
        return "host_work", found["name"]
    if found := outer([e for e in long if e["cat"] == "python_function"], t):
        return "python", inner_function(t, long, found)["name"]
    return "unknown", None


def outer(events, t):
    """The event around an instant that starts first, and of several the longest."""
    around = [e for e in events if e["start"] <= t < e["stop"]]
    return min(around, key=lambda e: (e["start"], -e["stop"]), default=None)


def inner_function(t, thread, other):
    """The Python function around an instant that starts last."""
    around = [
        e for e in thread if e["cat"] == "python_function" and e["start"] <= t < e["stop"]
    ]
    return max(around, key=lambda e: (e["start"], -e["stop"]), default=other)


def operator(call, thread):
    """The outermost operator around a call, else the call."""
    ops = [e for e in thread if e["cat"] == "cpu_op" and is_long(e)]
    found = outer(ops, call["start"])
    return (found if found and found["stop"] >= call["stop"] else call)["name"]


def launches(call, events):
    number = call["args"].get("correlation")
    linked = [e for e in events if device_work(e) is not None and number is not None]
    is_first = any(launch_of(e, events) is call for e in linked)
    return is_first or "Launch" in call["name"]


def launching(t, calls):
    """Whether a thread launches at an instant, or pauses shortly between two calls."""
    if any(e["start"] <= t < e["stop"] for e in calls):
        return True
    last = max((e["stop"] for e in calls if e["stop"] <= t), default=None)
    following = min((e["start"] for e in calls if e["start"] > t), default=None)
    return None not in (last, following) and following - last <= APART


def is_mark(event, trace):
    encloses = any(
        event["start"] <= step["start"] and step["stop"] <= event["stop"]
        for step in iterations(trace)
    )
    return encloses or event["name"].startswith("ProfilerStep#")
