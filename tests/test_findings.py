"""Test that planted faults of synthetic jobs are found with their cost, and no others."""

import json
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import SHARED
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from job_traces import measured_job

from fastcomm.analyses.measure import compute_metrics
from fastcomm.cli import main
from fastcomm.errors import ConfigError
from fastcomm.metrics.outliers import HeatArrays
from fastcomm.metrics.suspects import Measurements, own_work
from fastcomm.readers.runs import OpenOptions, open_run
from fastcomm.synthetic import Job, pipeline, planted, write
from fastcomm.synthetic.job import FAULTS, IDLE_FAULTS
from fastcomm.synthetic.play import steps
from fastcomm.trace.iterations import IterationRule

pytestmark = pytest.mark.compiled

STRAGGLER = SHARED / "data" / "replay" / "straggler"
# Of the true cost. Gradients of a late host that are on their way cover its idle time. A slow
# link delays buckets of groups without peers, too.
TOLERANCE = {"slow_link": 0.2, "jittery_host": 0.15}
# Other stages of a deep pipeline hide the end of the last bucket, and some of the rest.
DEEP_TOLERANCE = {"slow_link": 0.4}
LAYOUTS = {
    "tp2-pp2-dp2-ep2": {"ranks": 8},
    "tp1-pp1-dp8-ep4": {"ranks": 8, "tp": 1, "pp": 1, "dp": 8, "ep": 4},
    "tp2-pp1-dp4-ep1": {"ranks": 8, "tp": 2, "pp": 1, "dp": 4, "ep": 1},
    "tp4-pp2-dp1-ep1": {"ranks": 8, "tp": 4, "pp": 2, "dp": 1, "ep": 1},
    "tp1-pp4-dp4-ep2": {"ranks": 16, "tp": 1, "pp": 4, "dp": 4, "ep": 2},
    "tp1-pp1-dp3-ep1": {"ranks": 3},
}
IMPOSSIBLE = {
    ("tp1-pp1-dp8-ep4", "imbalanced_stage"),
    ("tp2-pp1-dp4-ep1", "imbalanced_stage"),
    ("tp2-pp1-dp4-ep1", "hot_expert"),
    ("tp4-pp2-dp1-ep1", "hot_expert"),
    ("tp4-pp2-dp1-ep1", "slow_link"),
    ("tp1-pp1-dp3-ep1", "hot_expert"),
    ("tp1-pp1-dp3-ep1", "imbalanced_stage"),
    ("tp1-pp1-dp3-ep1", "slow_link"),  # one group: its link has no peers
}
CASES = [(a, f) for a in LAYOUTS for f in FAULTS if (a, f) not in IMPOSSIBLE]


def tolerance(job):
    """The largest relative error of the cost of a job's fault."""
    deep = DEEP_TOLERANCE if job.pp > 2 else {}
    return (TOLERANCE | deep).get(job.fault, 0.1)


@pytest.mark.parametrize(("layout", "fault"), CASES)
def test_a_planted_fault_is_found_with_its_cost_and_nothing_else(layout, fault):
    job = Job.of(**LAYOUTS[layout], fault=fault, steps=1)
    found = measured_job(job).findings
    wanted = planted(job)
    assert [each.kind for each in found if not each.is_symptom] == [wanted["kind"]]
    assert found[0].kind == wanted["kind"]
    assert found[0].cost_ns == pytest.approx(wanted["cost_ns"], rel=tolerance(job))
    if fault == "slow_link":
        assert set(wanted["ranks"]) <= set(found[0].ranks)
    else:
        assert list(found[0].ranks) == wanted["ranks"]
        assert found[0].evidence.stage in (wanted["stage"], None)


@pytest.mark.parametrize("fault", [*FAULTS, None])
def test_the_first_finding_of_512_ranks_is_the_planted_cause(fault):
    changes = {"fault": fault} if fault else {"straggler": None}
    job = Job.of(512, steps=1, layers=2, **changes)
    found, wanted = measured_job(job, with_tables=False), planted(job)
    assert found.headline.startswith("Compute is the largest part of the step: ")
    if wanted is None:
        # Stages wait in receives, and nothing else stands apart.
        assert [each.kind for each in found.findings] == ["exposed_communication"]
        healthy = "No rank, stage or link stands apart; compute limits"
        assert found.health.startswith(healthy)
        return
    first, *others = found.findings
    assert [each.kind for each in others] == ["exposed_communication"]
    assert (first.kind, list(first.ranks)) == (wanted["kind"], wanted["ranks"])
    assert first.cost_ns == pytest.approx(wanted["cost_ns"], rel=tolerance(job))
    assert first.share == pytest.approx(first.cost_ns / found.iteration.mean_ns)
    assert found.health is None


clean = st.builds(
    lambda tp, pp, ep, edp, changes: Job.of(
        tp * pp * ep * edp, tp=tp, pp=pp, dp=ep * edp, ep=ep, straggler=None, **changes
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(1, 2),
    st.fixed_dictionaries(
        {"steps": st.just(1), "micro_batches": st.sampled_from([2, 4])},
        optional={
            "layers": st.integers(2, 3),
            "hidden": st.integers(512, 3000),
            "layer_ns": st.integers(900_000, 3_000_000),
            "seed": st.integers(0, 2**40),
        },
    ),
)


@given(clean)
@settings(max_examples=8)
def test_no_cause_is_found_in_a_clean_run(job):
    assert [each for each in measured_job(job).findings if not each.is_symptom] == []


@pytest.mark.parametrize("fault", ["slow_gpu", "slow_link"])
def test_a_larger_fault_costs_more_and_a_small_one_is_not_found(fault):
    costs = []
    for slowdown in (0, 40, 80):
        found = measured_job(Job.of(fault=fault, slowdown=slowdown, steps=1)).findings
        costs.append(sum(each.cost_ns for each in found))
    assert costs[0] == 0 < costs[1] < costs[2]


def test_the_demo_plants_a_fault_and_the_report_begins_with_it(tmp_path):
    words = ["demo", str(tmp_path), "--num-ranks", "2"]
    shown = CliRunner().invoke(main, words, catch_exceptions=False).stdout.splitlines()
    assert shown[1].startswith("  Compute is the largest part of the step: ")
    assert shown[2].startswith("  Rank 1 is a straggler: same work as its peers, ")
    assert any("wait caused/step" in line for line in shown)
    options = ["--clock-alignment", "none", "--json"]
    raw = CliRunner().invoke(main, ["metrics", str(tmp_path), *options])
    said = json.loads(raw.stdout)
    assert said["clocks"]["times"] == "raw"
    assert [each["offset_ns"] for each in said["clocks"]["offsets"]] == [0, 0]
    assert [each["kind"] for each in said["findings"]] == ["straggler"]
    clean = CliRunner().invoke(main, [*words, "--fault", "none"], catch_exceptions=False)
    assert clean.stdout.splitlines()[2].startswith(
        "  The run is healthy: no rank, stage or link"
    )


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("ranks", [3, 7, 9])
def test_the_cost_of_a_late_data_parallel_host_is_right_within_15_percent(ranks, steps):
    job = Job.of(ranks, fault="jittery_host", steps=steps)
    (found,) = measured_job(job).findings
    assert found.kind == "jittery_host"
    assert found.cost_ns == pytest.approx(planted(job)["cost_ns"], rel=0.15)


@pytest.mark.parametrize(
    ("ranks", "fault", "why"),
    [
        (1, "slow-link", "no other rank to compare with; pass --num-ranks 4"),
        (1, "slow-gpu", "no other rank to compare with; pass --num-ranks 2"),
        (2, "hot-expert", "it has no expert parallelism; pass --num-ranks 4"),
        (3, "slow-link", "it has no expert parallelism; pass --num-ranks 4"),
        (12, "slow-link", "it has no expert parallelism; pass --num-ranks 16"),
        (4, "imbalanced-stage", "its pipeline has one stage; pass --num-ranks 8"),
    ],
)
def test_the_demo_refuses_a_fault_that_its_layout_cannot_show(tmp_path, ranks, fault, why):
    words = ["demo", str(tmp_path / "out"), "--num-ranks", str(ranks), "--fault", fault]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert f"--fault {fault}: a job of {ranks} rank" in done.stderr
    assert why in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_demo_of_one_rank_has_no_fault(tmp_path):
    done = CliRunner().invoke(main, ["demo", str(tmp_path), "--num-ranks", "1"])
    assert done.exit_code == 0
    assert "wrote 1 trace to " in done.stderr


def test_a_fault_that_a_job_cannot_have_is_refused():
    with pytest.raises(ConfigError, match="fault imbalanced_stage needs pp of 2 or more"):
        Job.of(2, fault="imbalanced_stage")
    with pytest.raises(ConfigError, match="fault hot_expert needs 2 layers or more, not 1"):
        Job.of(fault="hot_expert", layers=1)
    with pytest.raises(
        ConfigError, match="invalid fault 'rust': expected one of slow_gpu, slow_link"
    ):
        Job.of(fault="rust")


def test_a_slow_gpu_costs_what_its_attentions_take_longer():
    job = Job.of(skew_ns=0)
    longer = sum(pipeline.slack(job, direction) for direction in ("forward", "backward"))
    assert planted(job) == {
        "kind": "straggler",
        "ranks": [5],
        "stage": 1,
        "cost_ns": job.micro_batches * longer,
    }
    # Without the fault its peers would be as late at times.
    assert 0.95 < planted(Job.of())["cost_ns"] / planted(job)["cost_ns"] < 1
    assert planted(Job.of(straggler=None)) is None


RANKS, MS = 8, 10**6


def known_of(excess, stage=None, received=None, idle=None, steps=2, caused=None, together=None):
    """Eight ranks whose compute is some ms above 50, in two steps of 100 ms."""
    compute = np.full((RANKS, steps), 50 * MS)
    for rank, more in excess.items():
        compute[rank] += (np.array(more) * MS).astype(np.int64)
    idles = compute // 10
    for rank, more in (idle or {}).items():
        idles[rank] = (5 + more) * MS
    values = {
        "compute_ns": compute,
        "idle_ns": idles,
        "time_ns": 0 * compute + 100 * MS,
    }
    excess = excess | (idle or {})
    late = max(np.max(more) for more in excess.values()) * MS
    return Measurements(
        grid=HeatArrays(np.arange(RANKS), np.arange(steps), values),
        stage=stage or {},
        received=received or {},
        waits={rank: 0.0 if rank in excess else late for rank in range(RANKS)},
        caused=caused or {},
        common_wait_caused=lambda ranks: {
            rank: (together or {}).get(rank, 0.0) for rank in ranks
        },
        longer=lambda _: None,
    )


def told(findings):
    return [(each.ranks, each.cost_ns / MS) for each in findings]


def test_the_cost_of_a_straggler_is_limited_by_waits_for_it_alone():
    (found,) = own_work(known_of({3: 4}, caused={3: 1.5 * MS, 5: 1 * MS}))
    assert told([found]) == [((3,), pytest.approx(1.5))]
    assert "+4.00 ms compute per step; others delay the same steps, its share is 1.50" in (
        found.text
    )
    for caused in (9, 0.5):  # of delays that are handed on, and of those by messages
        (found,) = own_work(known_of({3: 4}, caused={3: caused * MS}))
        assert told([found]) == [((3,), 4)]


def test_ranks_with_equal_delays_are_one_finding_that_costs_the_delay_once():
    (found,) = own_work(known_of({3: 4, 5: 4}))
    assert told([found]) == [((3, 5), 4)]
    text = (
        "Ranks 3, 5 are stragglers: same work as their peers, +4.00 ms compute per step (4.0 %"
    )
    assert found.text.startswith(text)
    (found,) = (
        each for each in own_work(known_of({3: 40, 5: 40})) if each.kind == "jittery_host"
    )
    assert found.text.startswith(
        "The hosts of ranks 3, 5 launch late: the device is idle longer"
    )


def test_costs_of_ranks_that_delay_the_same_steps_add_up_to_the_delay():
    worst, second = own_work(known_of({3: 4, 5: 3}))
    assert told([worst, second]) == [((3,), 2.5), ((5,), 1.5)]
    assert "+4.00 ms compute per step; others delay the same steps, its share is 2.50 ms" in (
        worst.text
    )


def test_ranks_that_delay_different_steps_share_nothing():
    found = own_work(known_of({3: (8, 0), 5: (0, 6)}))
    assert told(found) == [((3,), 4), ((5,), 3)]


def fixed(late):
    """What each of some ranks adds to the steps: the mean over all orders of fixing them.

    `late` is a row a rank with how late it comes to each collective; those who are there
    wait for the last.
    """
    shares, orders = np.zeros(len(late)), list(permutations(range(len(late))))
    for order in orders:
        left = np.array(late, float)
        for rank in order:
            before = left.max(axis=0).sum()
            left[rank] = 0
            shares[rank] += before - left.max(axis=0).sum()
    return shares / len(orders)


def alone(late):
    """How long others wait for each of some ranks alone."""
    beyond = [row - np.delete(late, rank, axis=0).max(axis=0) for rank, row in enumerate(late)]
    return np.maximum(beyond, 0).sum(axis=1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3))
def test_the_share_of_two_ranks_counts_the_collectives_that_they_are_late_at(pairs):
    late = np.array(pairs).T
    assume(late.sum(axis=1).min() > 0)
    cost = late.sum(axis=1)
    assume(cost.min() < 0.9 * cost.max())  # else they tie
    excess = dict(zip((3, 5), cost.tolist(), strict=True))
    together = dict(zip((3, 5), alone(late) * MS, strict=True))
    found = own_work(known_of(excess, together=together))
    wanted = zip(((3,), (5,)), fixed(late), strict=True)
    assert sorted(told(found)) == [(ranks, pytest.approx(part)) for ranks, part in wanted]


def test_equally_late_ranks_at_different_collectives_cost_the_sum():
    (found,) = own_work(known_of({3: 4, 5: 4}, together={3: 4 * MS, 5: 4 * MS}))
    assert told([found]) == [((3, 5), 8)]
    assert "+4.00 ms compute per step each, in turns: together 8.00 ms (8.0 % of" in found.text
    (found,) = own_work(known_of({3: 4, 5: 4}, together={3: 1 * MS, 5: 1 * MS}))
    assert told([found]) == [((3, 5), 5)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=3))
def test_no_rank_of_several_has_a_larger_share_than_its_fix_gains(rows):
    late = np.array(rows).T
    cost = late.sum(axis=1)
    assume(cost.min() > 0)
    steps = len(rows)  # each of one collective: nothing is known but the sums
    known = known_of(
        {2 * place: tuple(row) for place, row in enumerate(late)},
        steps=steps,
        together=dict(zip(range(0, 8, 2), alone(late) / steps * MS, strict=True)),
    )
    by_ranks = {each.ranks: each.cost_ns / MS * steps for each in own_work(known)}
    for ranks, part in by_ranks.items():
        if len(ranks) == 1 and len(by_ranks) == 4:
            assert part == pytest.approx(fixed(late)[ranks[0] // 2])


def test_a_straggler_and_a_late_host_share_the_delay_of_the_same_steps():
    found = own_work(known_of({2: 5}, idle={5: 4}))
    assert {each.kind: told([each])[0] for each in found} == {
        "straggler": ((2,), 3),
        "jittery_host": ((5,), 2),
    }
    assert all("others delay the same steps" in each.text for each in found)


def test_a_stage_and_a_late_host_of_another_stage_share_the_delay_of_the_same_steps():
    stage = {rank: rank // 4 for rank in range(RANKS)}
    found = own_work(known_of(dict.fromkeys(range(4, 8), 5), stage=stage, idle={1: 4}))
    assert {each.kind: told([each])[0] for each in found} == {
        "imbalanced_stage": ((4, 5, 6, 7), 3),
        "jittery_host": ((1,), 2),
    }


def test_delays_of_one_rank_add_up_and_are_not_shared():
    found = own_work(known_of({2: 5}, idle={2: 4}))
    assert {each.kind: told([each])[0] for each in found} == {
        "straggler": ((2,), 5),
        "jittery_host": ((2,), 4),
    }


def test_stragglers_that_take_turns_cost_the_sum_of_their_delays():
    turns = np.kron(np.eye(4), [[5]])
    excess = {2 * number: tuple(row) for number, row in enumerate(turns)}
    (found,) = own_work(known_of(excess, steps=4))
    assert told([found]) == [((0, 2, 4, 6), 5)]
    assert found.confidence == "high"  # each step is 5 ms late


def test_a_straggler_does_not_tie_with_a_hot_expert():
    received = dict.fromkeys(range(RANKS), 100.0) | {5: 150.0}
    found = own_work(known_of({3: 4, 5: 4}, received=received))
    assert sorted((each.kind, *told([each])[0]) for each in found) == [
        ("hot_expert", (5,), 2),
        ("straggler", (3,), 2),
    ]


@pytest.mark.parametrize(
    ("stages", "ranks", "cost"),
    [
        ([0, 10, 20, 34], (6, 7), 14),  # a ramp: without the last stage the third one limits
        ([0, 0, 20, 20], (4, 5, 6, 7), 20),
        ([20, 0, 0, 21], (0, 1, 6, 7), 20),
        ([0, 20, 20, 20], None, None),  # one stage has less to do than the others
        ([0, 1, 1, 2], None, None),
    ],
)
def test_the_stages_above_the_widest_gap_are_one_finding(stages, ranks, cost):
    excess = {rank: stages[rank // 2] for rank in range(RANKS)}
    found = own_work(known_of(excess, stage={rank: rank // 2 for rank in excess}))
    assert told(found) == ([(ranks, cost)] if ranks else [])


@pytest.mark.skipif(not STRAGGLER.is_dir(), reason=f"no real job at {STRAGGLER}")
def test_the_last_stage_of_a_real_job_is_imbalanced():
    found = compute_metrics(open_run(STRAGGLER))
    first = found.findings[0]
    assert (first.kind, first.ranks, first.evidence.stage) == ("imbalanced_stage", (6, 7), 3)
    # The study's own replay saves this by an ideal last stage.
    study = json.loads((STRAGGLER / "ms-ST.json").read_text())
    saved = (study["tori"] - study["trem"]) * 1e9
    assert first.cost_ns == pytest.approx(saved, rel=0.35)
    assert found.health is None


def by_host(path):
    """The metrics of steps by the host's marks, which are those of the made-up job."""
    rule = IterationRule(clock="host")
    return compute_metrics(open_run(path, options=OpenOptions(iterations=rule)))


@pytest.mark.parametrize("fault", IDLE_FAULTS)
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_planted_cause_of_idle_time_is_named_with_its_cost(fault, ranks, tmp_path):
    job = Job.of(ranks, fault=fault, steps=2)
    names = {"faulty": job, "clean": replace(job, slowdown=0)}
    found = {}
    for name, made in names.items():
        write(made, tmp_path / name)
        found[name] = by_host(tmp_path / name)
    wanted = planted(job)
    longer = {
        cause: share * found["faulty"].iteration.mean_ns
        - found["clean"].idle[cause] * found["clean"].iteration.mean_ns
        for cause, share in found["faulty"].idle.items()
    }
    assert sum(longer.values()) == pytest.approx(wanted["cost_ns"], rel=1e-6)
    assert longer[wanted["idle_cause"]] == pytest.approx(wanted["cost_ns"], rel=0.1)
    (finding,) = (each for each in found["faulty"].findings if each.kind == wanted["kind"])
    assert finding.evidence.idle_cause == wanted["idle_cause"]
    assert wanted["idle_cause"] == {"garbage_collection": "python"}.get(fault, fault)
    assert list(finding.ranks) == wanted["ranks"]
    assert finding.evidence.idle_cause_ns >= 0.9 * wanted["cost_ns"]
    assert "idle" not in [each.kind for each in found["clean"].findings]


def test_a_stage_that_ends_early_is_idle_for_the_others(tmp_path):
    job = Job.of(8, straggler=None, steps=2)
    write(job, tmp_path)
    found = by_host(tmp_path)
    rows = found.tables["iterations"].to_pylist()
    assert len(rows) == job.ranks * job.steps
    for row in rows:
        (step,) = (s for s in steps(job, row["rank"]) if s.number == row["iteration"])
        own = max(work.stop for work in step.works)
        last = max(
            max(work.stop for work in other.works)
            for rank in range(job.ranks)
            for other in steps(job, rank)
            if other.number == step.number
        )
        # The call that waits for the own work returns 4 us after it, as that of the last rank.
        assert row["idle_pipeline_bubble_ns"] == pytest.approx(last - own, abs=5_000)
    assert found.idle["pipeline_bubble"] > 0.5 * sum(found.idle.values())
    assert found.idle["unknown"] < 0.01 * sum(found.idle.values())
