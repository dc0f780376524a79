"""Test sums per step where ranks recorded different steps: they are those of one long job."""

import pytest
from builders import kineto_text as k
from builders.opened import open_run

from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions

STEP, LATE = 10_000, 300
GROUP = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}
SAID = {
    "Process_Group_Name": "0",
    "Process_Group_Description": "default_pg",
    "Process_Group_Ranks": "[0, 1]",
    "Group_size": 2,
}


def rank_events(rank, steps, every=1, renumbered=0):
    """Three all-reduces of 4000 bytes in each `every`th step, at which rank 1 is late."""
    events = []
    for number in steps:
        at = STEP * number
        events.append(k.mark(f"ProfilerStep#{number - renumbered}", at, STEP))
        events += [k.launch(at + 5, 100 * number), k.kernel("gemm", at + 10, 900)]
        events[-1]["args"]["correlation"] = 100 * number
        for place in range(3 if number % every == 0 else 0):
            call, start = 100 * number + place + 1, at + 1000 * (place + 1)
            late = LATE * rank
            events += [
                k.launch(at + 20 + place, call),
                k.all_reduce(
                    start + late, 700 - late, Seq=3 * number + place, correlation=call, **SAID
                ),
            ]
    return events


def measured(tmp_path, steps, **words):
    tmp_path.mkdir(exist_ok=True)
    for rank, own in enumerate(steps):
        options = {key: value[rank] for key, value in words.items()}
        events = rank_events(rank, own, **options)
        k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2, groups=[GROUP])
    return compute_metrics(open_run(tmp_path), MetricsOptions())


def per_step(metrics):
    return {
        "volume": metrics.volume["DP"].bytes_per_step_per_gpu,
        "waits": [
            (row.rank, row.wait_ns, row.transfer_ns, row.wait_caused_ns)
            for row in metrics.across.waits
        ],
        "skew": [(row.op, row.wait_ns) for row in metrics.across.skew],
        "network": metrics.network.levels[0].bytes_per_step_per_gpu
        if metrics.network.levels
        else None,
        "waiting": metrics.across.mean_waits(),
    }


EVEN = [range(8), range(8)]


def test_every_step_has_its_sums(tmp_path):
    sums = per_step(measured(tmp_path, EVEN))
    assert sums["volume"] == 12_000
    assert sums["waits"] == [(0, 900_000, 1_200_000, 0), (1, 0, 1_200_000, 900_000)]
    assert sums["skew"] == [("AllReduce", 900_000)]


@pytest.mark.parametrize(
    "steps",
    [
        [range(8), range(4, 12)],
        [range(8), range(6, 14)],
        [range(8), range(2, 5)],
        [range(6, 14), range(8)],
        [range(8), range(4, 5)],
    ],
)
def test_sums_per_step_do_not_depend_on_which_steps_are_recorded(tmp_path, steps):
    metrics = measured(tmp_path / "uneven", steps)
    assert per_step(metrics) == per_step(measured(tmp_path / "even", EVEN))
    (warning,) = [text for text in metrics.warnings if "own steps" in text]
    union = len({*steps[0], *steps[1]})
    said = f"{len(steps[1])} of {union} steps: times and bytes of a rank are means over its own"
    assert said in warning


def test_sums_per_step_do_not_depend_on_numbers_of_marks(tmp_path):
    """The sequence numbers tell that the steps of both ranks are the same."""
    metrics = measured(tmp_path / "uneven", EVEN, renumbered=[0, -20])
    assert metrics.iterations == 16
    assert per_step(metrics) == per_step(measured(tmp_path / "even", EVEN))


def test_steps_without_communication_count(tmp_path):
    """All-reduces in each second step, as with accumulated gradients."""
    metrics = measured(tmp_path / "uneven", [range(8), range(4, 12)], every=[2, 2])
    assert per_step(metrics) == per_step(measured(tmp_path / "even", EVEN, every=[2, 2]))
    assert per_step(metrics)["volume"] == 6000


@pytest.mark.parametrize("steps", [[range(8), range(4, 12)], [range(4), range(8, 12)]])
def test_the_number_of_events_without_a_match_is_told(tmp_path, steps):
    matching = measured(tmp_path / "uneven", steps).across.matching
    count = matching.events - matching.matched
    assert count == 3 * sum(len({*own} - ({*steps[0]} & {*steps[1]})) for own in steps)
    said = f"{count} events of {matching.events} not matched across ranks: other ranks did not"
    assert said in matching.note


def test_nothing_is_told_where_all_is_matched(tmp_path):
    assert measured(tmp_path / "even", EVEN).across.matching.note is None
