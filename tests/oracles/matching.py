"""Which events of several ranks are one, by definition: slow and obvious.

An event is a namespace of `rank`, `group`, `op`, and `true`: which of all that the group did it
is, as who made the events up knows. Sides of messages have `peer` and `is_send`, and no `op`.
"""

from itertools import combinations


def sets(events):
    """The sets of events that are one, of two ranks or more."""
    found = {}
    for event in events:
        found.setdefault((event.group, event.op, event.true), []).append(event)
    return [each for each in found.values() if len({event.rank for event in each}) > 1]


def disagree(events, name):
    """Whether two of the events say another value, as far as they say any."""
    said = [getattr(event, name) for event in events if getattr(event, name) is not None]
    return any(one != other for one, other in combinations(said, 2))


def collectives(events):
    """The sets of events that are one collective, and how many disagree and so are none."""
    found = sets(events)
    agreed = [each for each in found if not any(disagree(each, name) for name in WORDS)]
    return agreed, len(found) - len(agreed)


WORDS = ("size", "root")


def messages(sides):
    """The pairs of sides that are one message."""
    return [
        (sent, received)
        for sent in sides
        for received in sides
        if sent.is_send
        and not received.is_send
        and (sent.rank, sent.peer) == (received.peer, received.rank)
        and (sent.group, sent.true) == (received.group, received.true)
    ]


def in_place(events):
    """The same events, `true` the place among those of the rank, group and operation."""
    count = {}
    for event in sorted(events, key=lambda event: event.stop):
        key = event.rank, event.group, event.op
        event.true = count[key] = count.get(key, -1) + 1
    return events
