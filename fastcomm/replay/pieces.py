"""Operators that a profiler writes in pieces, or over each other."""

from collections.abc import Iterable
from dataclasses import replace

from fastcomm.replay.uniform import Event


def merged(events_: Iterable[Event]) -> list[Event]:
    """Consecutive events of one name as one, from the first start to the last end."""
    found: list[Event] = []
    for each in events_:
        last = found[-1] if found else None
        if last is not None and last.name == each.name and last.step == each.step:
            stop = max(last.start + last.dur, each.start + each.dur)
            found[-1] = replace(last, dur=stop - last.start)
        else:
            found.append(each)
    return found


def one_after_the_other(events_: Iterable[Event]) -> list[Event]:
    """Updates in the order of their ends, none beginning before the one before it has ended."""
    found = list(events_)
    updates = [i for i, each in enumerate(found) if each.name.startswith("UPDATE_")]
    updates.sort(key=lambda i: found[i].start + found[i].dur)
    free = None
    for i in updates:
        stop = found[i].start + found[i].dur
        start = found[i].start if free is None else max(found[i].start, free)
        found[i] = replace(found[i], start=start, dur=stop - start)
        free = stop
    return sorted(found, key=lambda each: each.start)
