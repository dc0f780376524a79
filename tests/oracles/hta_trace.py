"""How HolisticTraceAnalysis reads a trace for its critical path, by its definition.

Times are microseconds. A document is as `json.load` gives it.
"""

import math
import re
from collections import defaultdict
from types import SimpleNamespace

SYNCS = ("Event Sync", "Context Sync")


def number(value):
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1


def read(document):
    """Rows of the trace, rounded, linked and trimmed (section 1)."""
    events = document["traceEvents"]
    rounds = any(not isinstance(event.get("ts"), int) for event in events)
    rows = []
    for id_, event in enumerate(events):
        if event.get("dur") is None or event.get("cat") in (None, "Trace"):
            continue
        args = event.get("args") or {}
        ts, dur = event["ts"], event["dur"]
        if rounds:
            end = math.floor(float(ts) + float(dur))
            ts = math.ceil(ts)
            dur = end - ts
        row = SimpleNamespace(id=id_, ts=ts, dur=dur, name=event["name"], cat=event["cat"])
        row.pid, row.tid = event["pid"], event["tid"]
        row.stream = number(args.get("stream", -1))
        row.correlation = number(args.get("correlation", -1))
        row.wait_stream = number(args.get("wait_on_stream", -1))
        row.wait_record = number(args.get("wait_on_cuda_event_record_corr_id", -1))
        row.linking = (row.stream >= 0 and row.correlation >= 0) or row.name in SYNCS
        rows.append(row)
    link(rows)
    least = min(row.ts for row in rows)
    for row in rows:
        row.stale_end = row.ts + row.dur
        row.ts -= least
    return trimmed(rows)


def link(rows):
    """Find the partner of every row."""
    linking = defaultdict(list)
    for row in rows:
        row.ic = min(row.correlation, 0)
        if row.linking:
            linking[row.correlation].append(row)
    for row in rows:
        if not row.linking and row.correlation != -1:
            for other in linking[row.correlation]:
                row.ic, other.ic = other.id, row.id


def trimmed(rows):
    """The rows without the last profiled step."""
    steps = {row.name for row in rows if re.match(r"ProfilerStep#(\d+)", row.name)}
    if len(steps) < 2:
        return rows
    last = max(row.ts for row in rows if not row.linking and row.name in steps)
    others = [row for row in rows if not row.linking and row.ts < last]
    kept = {row.correlation for row in others}
    return [row for row in rows if row.linking and row.correlation in kept] + others


def window(rows, annotation, instance):
    """The clipped rows, ascending (section 2)."""
    if annotation == "":
        low, high = min(row.ts for row in rows), max(row.stale_end for row in rows)
    else:
        first, last = instance if isinstance(instance, tuple) else (instance, instance)
        marks = [row for row in rows if annotation in row.name][first : last + 1]
        low, high = min(row.ts for row in marks), max(row.ts + row.dur for row in marks)
    host = [r for r in rows if r.stream == -1 and low <= r.ts <= high and r.dur > 0]
    reached = {row.ic for row in host}
    device = [row for row in rows if row.stream != -1 and row.id in reached]
    waits = [row for row in rows if row.name == "Stream Wait Event"]
    return sorted({r.id: r for r in host + device + waits}.values(), key=lambda r: r.id)
