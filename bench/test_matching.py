"""What several ranks did together, matched where numbers tell nothing and events are lost."""

import numpy as np

from fastcomm.ranks.matching import CollectiveCalls, Messages, match, match_messages
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NULL

RANKS, MEMBERS, CALLS, LOST = 64, 8, 10_000, 200


def kept(count, numbers):
    """The rows that are left when some are lost."""
    return np.delete(np.arange(count), numbers.choice(count, LOST, replace=False))


def nearest_by_hand(group):
    """Look in NumPy for the nearest end of the first rank; return how many ranks have them."""
    first, others = group[0], group[1:]
    fitting = 1
    for ends in others:
        own = ends - (ends[0] - first[0])
        after = np.searchsorted(first, own).clip(1, len(first) - 1)
        is_before = own - first[after - 1] < first[after] - own
        apart = np.abs(own - first[after - is_before])
        fitting += np.median(apart) < 100_000
    return fitting


def test_matched_in_order(bar):
    numbers = np.random.default_rng(0)
    rank, call = np.repeat(np.arange(RANKS), CALLS), np.tile(np.arange(CALLS), RANKS)
    at = np.cumsum(numbers.integers(200_000, 3_000_000, CALLS))
    stop = at[call] + numbers.integers(0, 20_000, len(call)) + 1_000_000_000 * rank
    rows = kept(len(rank), numbers)
    unknown = np.full(len(rows), NULL)
    calls = CollectiveCalls(
        rank=rank[rows],
        group=rank[rows] // MEMBERS,
        op=call[rows] % 3,
        seq=unknown,
        size=unknown,
        stop=stop[rows],
        step=unknown,
        root=unknown,
    )
    found = match(calls)
    assert (found.dropped, found.count) == (0, RANKS // MEMBERS * CALLS)
    ends = np.split(calls.stop, np.flatnonzero(np.diff(calls.rank)) + 1)
    groups = [ends[first : first + MEMBERS] for first in range(0, RANKS, MEMBERS)]
    assert all(nearest_by_hand(group) == MEMBERS for group in groups)
    bar(
        "matched_in_order",
        lambda: match(calls),
        lambda: [*map(nearest_by_hand, groups)],
        count=len(rows),
    )


def test_matched_messages(bar):
    numbers = np.random.default_rng(0)
    sender, call = np.repeat(np.arange(RANKS), CALLS), np.tile(np.arange(CALLS), RANKS)
    receiver = (sender + 1) % RANKS
    at = np.cumsum(numbers.integers(3_000_000, 9_000_000, CALLS))[call]
    rows = kept(2 * len(call), numbers)
    unknown = np.full(len(rows), NULL)
    messages = Messages(
        rank=np.append(sender, receiver)[rows],
        peer=np.append(receiver, sender)[rows],
        is_send=np.repeat([True, False], len(call))[rows],
        group=np.zeros(len(rows), np.int64),
        seq=unknown,
        size=unknown,
        stop=(np.tile(at, 2) + numbers.integers(0, 20_000, 2 * len(call)))[rows],
        step=unknown,
    )
    whole = np.bincount(rows % len(call)) == 2
    assert match_messages(messages).count == whole.sum()
    keys = (messages.stop, messages.peer, messages.rank)
    bar(
        "matched_messages",
        lambda: match_messages(messages),
        lambda: np.lexsort(keys),
        count=len(rows),
    )


def test_owners(bar):
    """Divide idle times of a device by what a thread of the host does in them."""
    numbers = np.random.default_rng(0)
    count = 200_000
    start = np.cumsum(numbers.integers(10_000, 40_000, count))
    stop = start + numbers.integers(1_000, 9_000, count)
    layers = []
    for _ in range(7):
        begin = np.cumsum(numbers.integers(50_000, 250_000, count // 5))
        layers.append((begin, begin + numbers.integers(1_000, 40_000, len(begin))))
    layer_start, layer_stop = (np.concatenate(column) for column in zip(*layers, strict=True))
    edges = np.arange(8) * (count // 5)
    interval, end, owner = matching.owners(start, stop, layer_start, layer_stop, edges)
    assert len(interval) >= count
    assert (end <= stop[interval]).all()
    assert ((owner == -1) | (layer_stop[owner] >= end)).all()
    everything = np.concatenate([start, stop, layer_start, layer_stop])
    bar(
        "owners",
        lambda: matching.owners(start, stop, layer_start, layer_stop, edges),
        lambda: np.sort(everything, kind="stable"),
        count=len(everything),
    )
