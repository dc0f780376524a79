"""Test steps on the device clock against the definition, on jobs of any kind."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.metrics import windows_on_device

from fastcomm.errors import ConfigError
from fastcomm.trace.iterations import DeviceWork, Iterations, Launching, on_device_clock
from fastcomm_kernels.arrays import NULL

TIMES = st.integers(0, 30)
GAPS = st.sampled_from([0, 0, 0, 1, 40])


@st.composite
def jobs(draw, ahead=TIMES, gaps=GAPS):
    """Marks with pauses, and work of two streams, launched before, inside and between marks.

    A stream does what is launched in order; `ahead` is how long work waits at least.
    """
    marks, at = [], draw(TIMES)
    number = draw(st.integers(0, 5))
    for place in range(draw(st.integers(1, 20))):
        length = draw(st.integers(1, 40))
        mark = {"number": number, "start": at, "stop": at + length, "place": place}
        marks.append({**mark, "waiting": draw(st.booleans())})
        at += length + draw(gaps)
        number += draw(st.sampled_from([1, 1, 1, 9]))
    launches = draw(st.lists(st.tuples(st.integers(0, at), st.booleans()), max_size=40))
    edges = [*(mark["start"] for mark in marks[1:]), at]
    for mark, edge in zip(marks, edges, strict=True):
        mark["waiting"] &= not any(mark["start"] <= launch < edge for launch, _ in launches)
    free, work = [0, 0], []
    for launch, stream in sorted(launches):
        start = max(launch + draw(ahead), free[stream])
        free[stream] = start + draw(st.integers(1, 20))
        work.append((start, free[stream], launch if draw(st.integers(0, 9)) else None))
    return marks, work


def found_by_kernel(marks, work):
    columns = (np.array([mark[name] for mark in marks]) for name in ("number", "start", "stop"))
    number, start, stop = columns
    begin, end, launch = (
        np.array(column, np.int64)
        for column in zip(
            *(
                (start, stop, NULL if launch is None else launch)
                for start, stop, launch in work
            ),
            strict=True,
        )
    )
    found = on_device_clock(
        Iterations(number=number, start=start, stop=stop, found_by="names"),
        DeviceWork(start=begin, stop=end, launch=launch),
        launching=Launching(
            np.zeros(len(marks), np.bool_),
            np.array([mark.get("waiting", False) for mark in marks]),
        ),
    )
    rows = zip(found.number.tolist(), found.start.tolist(), found.stop.tolist(), strict=True)
    return list(rows), found.warnings


def of(marks, work):
    return [
        (step["number"], step["start"], step["stop"]) for step in windows_on_device(marks, work)
    ]


def has_work(marks, work):
    return [
        mark
        for mark in marks
        if any(at is not None and mark["start"] <= at < mark["stop"] for *_, at in work)
    ]


@given(st.one_of(jobs(), jobs(ahead=st.integers(0, 200))))
def test_steps_are_those_of_the_definition(job):
    marks, work = job
    if windows_on_device(marks, work) is not None:
        assert found_by_kernel(marks, work)[0] == of(marks, work)
    elif work:
        with pytest.raises(ConfigError):
            found_by_kernel(marks, work)


@given(jobs(gaps=st.just(0)))
def test_steps_that_follow_each_other_cover_the_recording_exactly_once(job):
    marks, work = job
    busy = has_work(marks, work)
    if len(busy) == len(marks):
        rows, _ = found_by_kernel(marks, work)
        assert [number for number, *_ in rows] == [mark["number"] for mark in marks]
        assert all(one[2] == two[1] for one, two in pairwise(rows))
        assert marks[0]["start"] <= rows[0][1]
        launched = [stop for _, stop, at in work if at is not None and at < marks[-1]["stop"]]
        assert rows[-1][2] >= marks[-1]["stop"]
        assert rows[-1][2] in (marks[-1]["stop"], *launched)


EMPTY = "iterations have no time of their own on the device, which runs behind its host"
EMPTY_MEANS = (
    "Means count them; which of their neighbors has their time depends on which work runs first"
)
BEHIND_EARLIER = (
    [
        {"number": 0, "start": 15, "stop": 49, "place": 0},
        {"number": 1, "start": 50, "stop": 89, "place": 1},
    ],
    [(20, 209, 3), (209, 226, 20), (102, 114, 59)],
)


BEHIND_A_PAUSE = (
    [
        {"number": 0, "start": 1, "stop": 2, "place": 0, "waiting": True},
        {"number": 9, "start": 3, "stop": 4, "place": 1},
        {"number": 10, "start": 4, "stop": 5, "place": 2},
    ],
    [(4, 5, None), (5, 6, 3), (4, 5, 4)],
)


def test_the_first_step_begins_no_later_than_work_of_another():
    """Its own work waits for what was launched before the recording, on another stream."""
    rows, notes = found_by_kernel(*BEHIND_EARLIER)
    assert rows == [(0, 102, 102), (1, 102, 226)] == of(*BEHIND_EARLIER)
    assert notes == (f"1 of 2 {EMPTY}: 0. {EMPTY_MEANS}",)


@pytest.mark.parametrize("every", [1, 2, 4, 5, 7])
def test_steps_without_time_of_their_own_count_in_means(every):
    """The host is three steps ahead, and copies on another stream in some of the steps."""
    marks = [
        {"number": n, "start": 100 * n, "stop": 100 * n + 100, "place": n} for n in range(20)
    ]
    work = [(100 * n - 1, 100 * n + 99, 100 * n - 295) for n in range(23)]
    work += [(100 * n + 2, 100 * n + 3, 100 * n + 1) for n in range(0, 20, every)]
    rows, notes = found_by_kernel(marks, work)
    assert rows == of(marks, work)
    assert [number for number, *_ in rows] == list(range(20))
    assert sum(stop - start for _, start, stop in rows) == 2299 - 2
    empty = [number for number, start, stop in rows if start == stop]
    assert bool(empty) == (every > 1)
    listed = ", ".join(map(str, empty))
    assert notes == ((f"{len(empty)} of 20 {EMPTY}: {listed}. {EMPTY_MEANS}",) if empty else ())


@settings(max_examples=500)
@example(BEHIND_EARLIER)
@example(BEHIND_A_PAUSE)
@given(jobs(ahead=st.integers(0, 200)))
def test_no_work_that_a_step_launched_is_lost(job):
    """In the step that launched it, or in that in which it runs, also behind the last mark."""
    marks, work = job
    if windows_on_device(marks, work) is None:
        return
    rows, _ = found_by_kernel(marks, work)
    busy = has_work(marks, work)
    for start, stop, launch in work:
        if launch is not None and any(mark["start"] <= launch < mark["stop"] for mark in busy):
            inside = (max(min(stop, end) - max(start, begin), 0) for _, begin, end in rows)
            assert sum(inside) == stop - start


def test_the_last_step_lasts_to_the_end_of_all_work():
    """The step before queued more than the last one waits for."""
    marks = [
        {"number": 5, "start": 0, "stop": 10, "place": 0},
        {"number": 6, "start": 10, "stop": 13, "place": 1},
    ]
    work = [(2, 12, 1), (12, 22, 1), (11, 12, 10)]
    rows, _ = found_by_kernel(marks, work)
    assert rows == [(5, 0, 11), (6, 11, 22)] == of(marks, work)


@pytest.mark.parametrize("steps", range(1, 21))
@pytest.mark.parametrize("behind", [0, 4, 25])
def test_any_number_of_recorded_steps_has_the_same_mean(steps, behind):
    """A step of 10: 6 of loading, then a kernel of 4, for which the host waits or does not."""
    marks = [
        {"number": n, "start": 10 * n, "stop": 10 * n + 10, "place": n} for n in range(steps)
    ]
    work = [(10 * n + 6 + behind, 10 * n + 10 + behind, 10 * n + 6) for n in range(-3, steps)]
    rows, notes = found_by_kernel(marks, work)
    assert {stop - start for _, start, stop in rows} == {10}
    assert notes == ()


def test_a_pause_between_steps_is_in_no_step_and_reported():
    marks = [
        {"number": number, "start": at, "stop": at + 10, "place": place}
        for place, (number, at) in enumerate([(5, 0), (6, 10), (15, 1000), (16, 1010)])
    ]
    work = [(mark["start"] + 1, mark["start"] + 9, mark["start"]) for mark in marks]
    rows, notes = found_by_kernel(marks, work)
    assert rows == [(5, 0, 10), (6, 10, 20), (15, 1000, 1010), (16, 1010, 1020)]
    assert notes == (
        "the recorded steps do not follow each other: 980 ns between 6 and 15 are in no step",
    )


def test_what_is_launched_between_marks_that_follow_is_of_the_first():
    """As by an optimizer behind the mark; what is launched in a pause is of no step."""
    marks = [
        {"number": number, "start": at, "stop": at + 6, "place": place}
        for place, (number, at) in enumerate([(5, 0), (6, 10), (15, 100), (16, 110)])
    ]
    work = [(at + 1, at + 5, at) for at in (0, 10, 100, 110)]
    work += [(at + 8, at + 12, at + 7) for at in (0, 10, 100, 110)]
    rows, _ = found_by_kernel(marks, work)
    assert rows == [(5, 0, 11), (6, 11, 16), (15, 100, 111), (16, 111, 116)]


def test_a_pause_of_no_time_is_none():
    """The work of the step before fills it."""
    marks = [
        {"number": number, "start": at, "stop": at + 10, "place": place}
        for place, (number, at) in enumerate([(27, 0), (34, 20)])
    ]
    rows, notes = found_by_kernel(marks, [(1, 40, 1), (40, 50, 21)])
    assert rows == [(27, 0, 40), (34, 40, 50)]
    assert notes == ()


@pytest.mark.parametrize("gaps", [[0, 3000, 0, 0], [1, 3000, 0, 2]])
def test_a_long_time_between_marks_that_follow_each_other_is_reported(gaps):
    """As of an evaluation, which counts in the step before."""
    marks, at = [], 0
    for place, gap in enumerate([*gaps, 0]):
        marks.append({"number": place, "start": at, "stop": at + 10, "place": place})
        at += 10 + gap
    work = [(mark["start"] + 1, mark["start"] + 9, mark["start"]) for mark in marks]
    rows, notes = found_by_kernel(marks, work)
    assert rows[1] == (1, marks[1]["start"], marks[2]["start"])
    assert notes == (
        "3.00 us between the marks of 1 and 2 count in 1, as where a job evaluates or saves; "
        "--steps selects others",
    )


@pytest.mark.parametrize("gaps", [[3000, 3000, 3000], [11, 9, 10], [9, 0, 0]])
def test_usual_times_between_marks_are_not_reported(gaps):
    marks, at = [], 0
    for place, gap in enumerate([*gaps, 0]):
        marks.append({"number": place, "start": at, "stop": at + 10, "place": place})
        at += 10 + gap
    work = [(mark["start"] + 1, mark["start"] + 9, mark["start"]) for mark in marks]
    assert found_by_kernel(marks, work)[1] == ()
