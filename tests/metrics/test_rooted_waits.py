"""Test waits in operations with a root, in messages, and on busy streams."""

import pytest
from builders.across_events import (
    ONE,
    STEPS,
    TWO,
    ask,
    table,
)


def of_group(op, arrivals, ends, **more):
    """An event of each rank of the second group, from its arrival to its end."""
    seen = {
        "group": TWO,
        "seq": 0,
        "tag": "DP",
        "op": op,
        "alone_ns": 0,
        "exposed_ns": 0,
        "group_size": 3,
    }
    return [
        {
            **seen,
            "rank": r,
            "start_ns": a,
            "duration_ns": b - a,
            "bytes": 8,
            "bus_bytes": 8,
            **more,
        }
        for r, (a, b) in enumerate(zip(arrivals, ends, strict=True))
    ]


@pytest.mark.parametrize(
    ("op", "arrivals", "waits", "caused"),
    [
        # Of a broadcast by rank 1 the others wait for it, and for nobody else.
        ("Broadcast", (20, 50, 70), (30, 0, 0), (0, 0, 0)),
        ("Scatter", (20, 70, 50), (50, 0, 20), (0, 20, 0)),
        # Of a reduction to rank 1 that waits for the last of the others, and nobody else waits.
        ("Reduce", (20, 50, 70), (0, 20, 0), (0, 0, 20)),
        ("Gather", (20, 70, 50), (0, 0, 0), (0, 0, 0)),
    ],
)
def test_who_waits_in_a_rooted_operation_depends_on_its_direction(op, arrivals, waits, caused):
    events = of_group(op, arrivals, (85, 100, 95), partner=1)
    found, _ = ask([0, 1, 2], table(events), "none")
    by_rank = {each.rank: each for each in found.waits}
    assert tuple(by_rank[rank].wait_ns * STEPS for rank in range(3)) == waits
    assert tuple(by_rank[rank].wait_caused_ns * STEPS for rank in range(3)) == caused
    (skew,) = found.skew
    # Some are done before others have come: it ends with the last end.
    assert (skew.skew_mean_ns, skew.transfer_mean_ns) == (50, 30)
    assert (found.matching.events, found.matching.matched, found.matching.collectives) == (
        3,
        3,
        1,
    )


def test_waits_of_rooted_operations_without_a_known_root_are_unknown():
    for partner in (None, 4):  # not said; not read
        events = of_group("Broadcast", (20, 50, 70), (85, 100, 95), partner=partner)
        found, _ = ask([0, 1, 2], table(events), "none")
        assert (found.waits, found.matching.matched) == ((), 0)


def message(sender, receiver, moment, number, size=8):
    """Both sides: the sender comes at a moment, the receiver 30 ns later; it ends 50 later."""
    seen = {
        "group": TWO,
        "tag": "PP",
        "op": "SendRecv",
        "alone_ns": 0,
        "exposed_ns": 0,
        "group_size": 3,
    }
    seen |= {"bytes": size, "bus_bytes": size, "seq": number}
    return [
        {**seen, "rank": sender, "start_ns": moment, "duration_ns": 60, "partner": receiver}
        | {"sends": True},
        {**seen, "rank": receiver, "start_ns": moment + 30, "duration_ns": 50}
        | {"partner": sender},
    ]


def test_a_message_counts_as_a_collective_of_two_ranks_and_as_a_link():
    sides = [
        *message(0, 1, 1_000_000, 0),
        *message(1, 0, 2_000_000, 1),
        *message(1, 2, 3_000_000, 2),
        *message(0, 1, 4_000_000, 3)[:1],  # the receiver's trace ends before it
        {**message(0, 1, 5_000_000, 4)[0], "partner": None},  # whom it sends to is not said
    ]
    sides.sort(key=lambda each: (each["rank"], each["start_ns"]))
    found, _ = ask([0, 1, 2], table(sides), "none")
    matching = found.matching
    assert (matching.events, matching.matched, matching.messages) == (7, 6, 3)
    assert (matching.collectives, matching.without_partner) == (0, 1)
    waits = {each.rank: (each.collectives, each.wait_ns * STEPS) for each in found.waits}
    assert waits == {0: (2, 30), 1: (3, 60), 2: (1, 0)}
    (skew,) = found.skew
    assert (skew.count, skew.skew_mean_ns, skew.transfer_mean_ns) == (3, 30, 50)
    assert [(each.ranks, each.count) for each in found.links] == [((0, 1), 2), ((1, 2), 1)]


@pytest.mark.parametrize(
    ("stream", "start", "caused"),
    [(7, 180, 0), (7, 190, 10), (7, 270, 90), (8, 180, 80), (None, 180, 80)],
)
def test_a_rank_causes_no_wait_for_the_time_in_which_its_stream_is_busy(stream, start, caused):
    """Rank 1 leaves the first collective 80 ns later than rank 0."""
    rows = [
        (0, 0, 0, 100, 7),
        (1, 0, 0, 180, 7),
        (0, 1, 100, 300, 7),
        (1, 1, start, 300, stream),
    ]
    one = {"group": ONE, "group_size": 2, "tag": "DP", "op": "AllReduce", "bytes": 8}
    names = ("rank", "seq", "start_ns", "stop_ns", "stream")
    events = [one | dict(zip(names, row, strict=True)) for row in rows]
    events = [each | {"duration_ns": each["stop_ns"] - each["start_ns"]} for each in events]
    result, _ = ask([0, 1], table(events), "none")
    waits = {row.rank: row.wait_caused_ns * STEPS for row in result.waits}
    assert waits == {0: 0, 1: min(caused, start - 100)}


@pytest.mark.parametrize(
    ("ahead", "skew"), [(0, 20), (7_000_000_000, None), (-7_000_000_000, None)]
)
def test_waits_of_broadcasts_are_unknown_where_clocks_are(ahead, skew):
    """Nothing but the broadcasts of rank 0 tells how far the clock of rank 1 is ahead."""
    rows = [
        event
        for number in range(5)
        for event in of_group(
            "Broadcast",
            (100 * number, 100 * number + 20 + ahead),
            (100 * number + 50, 100 * number + 50 + ahead),
            partner=0,
            seq=number,
            group_size=2,
        )
    ]
    found, _ = ask([0, 1], table(rows), "auto")
    assert found.matching.collectives == 5
    assert [row.skew_mean_ns for row in found.skew] == ([skew] if skew else [])
    assert bool(found.unaligned) == bool(ahead)
    raw, _ = ask([0, 1], table(rows), "none")
    assert [row.skew_mean_ns for row in raw.skew] == [abs(20 + ahead)]
