"""Test that planted faults of synthetic jobs are found with their cost, and no others."""

import json
from dataclasses import replace

import pytest
from builders.examples import fewer
from builders.job_traces import measured_job
from builders.opened import open_run
from builders.shared_data import needs, path_of
from builders.synthetic_truth import planted
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.cli.main import main
from fastcomm.errors import ConfigError
from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic import pipeline
from fastcomm.synthetic.job import FAULTS, IDLE_FAULTS, Job
from fastcomm.synthetic.play import steps
from fastcomm.synthetic.traces import write

STRAGGLER = path_of("replay/straggler")
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
        assert found[0].value("stage") in (wanted["stage"], None)


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        (64, None),
        (128, "slow_link"),  # where size shows most
        *(pytest.param(512, fault, marks=pytest.mark.soak) for fault in [None, *FAULTS]),
    ],
)
def test_the_first_finding_of_many_ranks_is_the_planted_cause(ranks, fault):
    changes = {"fault": fault} if fault else {"straggler": None}
    job = Job.of(ranks, steps=1, layers=2, **changes)
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
@fewer(4)
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
    job = Job.of(skew_ns=0, steps=2)
    longer = sum(pipeline.slack(job, direction) for direction in ("forward", "backward"))
    assert planted(job) == {
        "kind": "straggler",
        "ranks": [5],
        "stage": 1,
        "cost_ns": job.micro_batches * longer,
    }
    # Without the fault its peers would be as late at times.
    assert 0.95 < planted(Job.of(steps=2))["cost_ns"] / planted(job)["cost_ns"] < 1
    assert planted(Job.of(straggler=None)) is None


@needs("replay")
def test_the_last_stage_of_a_real_job_is_imbalanced():
    found = compute_metrics(open_run(STRAGGLER))
    first = found.findings[0]
    assert (first.kind, first.ranks, first.value("stage")) == ("imbalanced_stage", (6, 7), 3)
    # The study's own replay saves this by an ideal last stage.
    study = json.loads((STRAGGLER / "ms-ST.json").read_text())
    saved = (study["tori"] - study["trem"]) * 1e9
    assert first.cost_ns == pytest.approx(saved, rel=0.35)
    assert found.health is None


def by_host(path):
    """The metrics of steps by the host's marks, which are those of the made-up job."""
    return compute_metrics(open_run(path, config=Config(clock="host")))


@pytest.mark.parametrize("fault", IDLE_FAULTS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_planted_cause_of_idle_time_is_named_with_its_cost(fault, ranks, tmp_path):
    layers = 4 if ranks == 1 else 2
    job = Job.of(ranks, tp=1, pp=min(ranks, 2), fault=fault, steps=2, layers=layers)
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
    assert finding.value("idle_cause") == wanted["idle_cause"]
    assert wanted["idle_cause"] == {"garbage_collection": "python"}.get(fault, fault)
    assert list(finding.ranks) == wanted["ranks"]
    assert finding.value("idle_cause_ns") >= 0.9 * wanted["cost_ns"]
    assert "idle" not in [each.kind for each in found["clean"].findings]


def test_a_stage_that_ends_early_is_idle_for_the_others(tmp_path):
    job = Job.of(8, straggler=None, steps=2, layers=2)
    write(job, tmp_path)
    found = by_host(tmp_path)
    rows = found.tables["iterations"].to_pylist()
    assert len(rows) == job.ranks * job.steps
    stops = {
        (step.number, rank): max(work.stop for work in step.works)
        for rank in range(job.ranks)
        for step in steps(job, rank)
    }
    for row in rows:
        own = stops[row["iteration"], row["rank"]]
        last = max(stops[row["iteration"], rank] for rank in range(job.ranks))
        # The call that waits for the own work returns 4 us after it, as that of the last rank.
        assert row["idle_pipeline_bubble_ns"] == pytest.approx(last - own, abs=5_000)
    assert found.idle["pipeline_bubble"] > 0.5 * sum(found.idle.values())
    assert found.idle["unknown"] < 0.01 * sum(found.idle.values())
