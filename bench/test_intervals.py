import numba
import numpy as np
import pytest

from fastcomm_kernels import intervals
from fastcomm_kernels.intervals import alone

N = 2_000_000
MANY = 8_000_000  # no cache holds them: where the sum reads memory
CLASSES = 7


def busy_and_idle(n, seed, stretch=1):
    """A merged set: kernels and gaps of random length, up to 40 us each, times `stretch`."""
    random = np.random.default_rng(seed)
    times = 1_753_000_000_000_000_000 + np.cumsum(random.integers(1, stretch * 40_000, 2 * n))
    return times[::2].copy(), times[1::2].copy()


@numba.njit
def merged(one, other):
    """Merge two sorted arrays by the plain loop, as a compiler makes it."""
    out = np.empty(len(one) + len(other), np.int64)
    i = j = 0
    for place in range(len(out)):
        if j == len(other) or (i < len(one) and one[i] <= other[j]):
            out[place] = one[i]
            i += 1
        else:
            out[place] = other[j]
            j += 1
    return out


def merge(arrays):
    """Merge sorted arrays in pairs, pairs of these, and so on."""
    while len(arrays) > 1:
        last = arrays[len(arrays) & ~1 :]
        arrays = [merged(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=False)]
        arrays += last
    return arrays[0]


def cut(sets, n):
    """The span of all sets, in n segments without a gap."""
    first = min(start[0] for start, _ in sets)
    last = max(stop[-1] for _, stop in sets)
    cuts = first + np.arange(n + 1) * (last - first) // n
    return cuts[:-1], cuts[1:]


def half_overlapping(n):
    """Sorted by start, about half of them begin before an earlier one stops."""
    random = np.random.default_rng(0)
    start = np.sort(random.integers(0, 15 * n, n))
    return start, start + random.integers(1, 30, n)


@pytest.fixture(scope="module")
def overlapping():
    return half_overlapping(N)


@pytest.fixture(scope="module")
def two_sets():
    return busy_and_idle(N // 2, 1), busy_and_idle(N // 2, 2)


@pytest.fixture(scope="module")
def seven_sets():
    """Half of all intervals compute, six classes of communication share the rest."""
    return [
        busy_and_idle(N // 2, 0),
        *(busy_and_idle(N // 12, seed, 6) for seed in range(1, 7)),
    ]


def test_union_length(bar):
    start, stop = half_overlapping(MANY)
    bar(
        "union_length",
        lambda: intervals.union_length(start, stop),
        lambda: (start.sum(), stop.sum()),
        count=MANY,
    )


def numpy_merge(start, stop):
    furthest = np.maximum.accumulate(stop)
    opens = np.concatenate([[True], start[1:] > furthest[:-1]])
    return start[opens], furthest[np.concatenate([opens[1:], [True]])]


def test_merge(bar, overlapping):
    for ours, theirs in zip(
        intervals.merge(*overlapping), numpy_merge(*overlapping), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    bar(
        "merge",
        lambda: intervals.merge(*overlapping),
        lambda: numpy_merge(*overlapping),
        count=N,
    )


def numpy_overlap(a, b):
    """Sort all boundaries, and add the steps in which both sets are active."""
    times = np.concatenate([*a, *b])
    change = np.repeat(np.uint8([1, 2]), [2 * len(a[0]), 2 * len(b[0])])
    order = np.argsort(times, kind="stable")
    active = np.bitwise_xor.accumulate(change[order])[:-1]
    return np.diff(times[order])[active == 3].sum()


def test_overlap_length(bar, two_sets):
    a, b = two_sets
    assert intervals.overlap_length(*a, *b) == numpy_overlap(a, b)
    bar(
        "overlap_length",
        lambda: intervals.overlap_length(*a, *b),
        lambda: numpy_overlap(a, b),
        count=N,
    )


def numpy_coverage_of_steps(time, mask, seg_start, seg_stop):
    """Insert the segments' boundaries into the steps, and add by segment and mask."""
    cuts = np.append(seg_start, seg_stop[-1])
    places = np.searchsorted(time, cuts)
    times = np.insert(time, places, cuts)
    active = np.insert(mask, places, np.append(np.uint8(0), mask)[places])[:-1]
    row = np.searchsorted(seg_start, times[:-1], side="right") - 1
    inside = (row >= 0) & (times[:-1] < seg_stop[-1])
    cell = (row * intervals.MASKS + active)[inside]
    length = np.bincount(cell, np.diff(times)[inside], len(seg_start) * intervals.MASKS)
    return length.reshape(len(seg_start), intervals.MASKS)


def test_coverage(bar, two_sets):
    time, mask = intervals.join(
        *intervals.steps(*two_sets[0], 1, 0, 0), *intervals.steps(*two_sets[1], 2, 0, 0)
    )
    columns = time, mask, *cut(two_sets, 100)
    np.testing.assert_array_equal(
        intervals.coverage(*columns), numpy_coverage_of_steps(*columns)
    )
    cell, length = mask[:-1].astype(np.int64), np.diff(time).astype(np.float64)
    bar(
        "coverage",
        lambda: intervals.coverage(*columns),
        lambda: np.bincount(cell, length, intervals.MASKS),
        count=N,
    )


def numpy_coverage(sets, seg_start, seg_stop):
    """Sort all boundaries, and give each of the steps between to its segment and its mask."""
    times = np.concatenate(
        [*(column for pair in sets for column in pair), seg_start, seg_stop[-1:]]
    )
    bits = [np.full(2 * len(start), 1 << c, np.uint8) for c, (start, _) in enumerate(sets)]
    change = np.concatenate([*bits, np.zeros(len(seg_start) + 1, np.uint8)])
    order = np.argsort(times, kind="stable")
    times, mask = times[order], np.bitwise_xor.accumulate(change[order])[:-1]
    row = np.searchsorted(seg_start, times[:-1], side="right") - 1
    cell = row * intervals.MASKS + mask
    # bincount adds in float64, which is exact to 2**53 ns only.
    length = np.bincount(cell, np.diff(times), len(seg_start) * intervals.MASKS)
    return length.reshape(len(seg_start), intervals.MASKS)


@pytest.mark.parametrize(
    ("name", "fixture"), [("coverage_of_2", "two_sets"), ("coverage_of_7", "seven_sets")]
)
def test_coverage_by_class(bar, name, fixture, request):
    sets = request.getfixturevalue(fixture)
    few = [(start[: len(start) // 10], stop[: len(stop) // 10]) for start, stop in sets]
    segments, first_segments = cut(sets, 100), cut(few, 10)
    np.testing.assert_array_equal(
        intervals.coverage_by_class(few, *first_segments), numpy_coverage(few, *first_segments)
    )
    boundaries = [column for pair in sets for column in pair]
    merge(boundaries)  # compiles
    bar(
        name,
        lambda: intervals.coverage_by_class(sets, *segments),
        lambda: merge(boundaries),
        count=N,
    )


def numpy_alone(start, stop, other_start, other_stop):
    """Sort all boundaries, and look for the last moment before each end with anything else."""
    moments = np.concatenate([start, stop, other_start, other_stop])
    sizes = [len(start), len(stop), len(other_start), len(other_stop)]
    order = np.argsort(moments, kind="stable")
    active = np.cumsum(np.repeat([1, -1, 1 << 32, -(1 << 32)], sizes)[order])
    moments = moments[order]
    busy = (active[:-1] != 1) & (moments[1:] > moments[:-1])
    until = np.append(moments[:1], np.where(busy, moments[1:], moments[0]))
    place = np.searchsorted(moments, stop)
    return stop - np.maximum(start, np.maximum.accumulate(until)[place])


def test_alone(bar):
    sets = (*half_overlapping(N // 4), *busy_and_idle(N // 4, 1, 1))
    sets = (sets[0] + sets[2][0], sets[1] + sets[2][0], *sets[2:])
    np.testing.assert_array_equal(alone(*sets), numpy_alone(*sets))
    boundaries = [np.sort(column) for column in sets]
    bar("alone", lambda: alone(*sets), lambda: merge(boundaries), count=N // 2)
