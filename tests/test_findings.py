"""Faults of made-up jobs are found and named with their cost; where none is, none is found."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from job_traces import measured_job

from fastcomm.cli import main
from fastcomm.errors import ConfigError
from fastcomm.synthetic import Job, layers, planted
from fastcomm.synthetic.job import FAULTS

pytestmark = pytest.mark.compiled

# Of the true cost. Other stages may hide the end of the last bucket; the first stage and the
# last have more to do than those between.
TOLERANCE = {"slow_link": 0.15, "imbalanced_stage": 0.25}
LAYOUTS = {
    "tp2-pp2-dp2-ep2": {"ranks": 8},
    "tp1-pp1-dp8-ep4": {"ranks": 8, "tp": 1, "pp": 1, "dp": 8, "ep": 4},
    "tp2-pp1-dp4-ep1": {"ranks": 8, "tp": 2, "pp": 1, "dp": 4, "ep": 1},
    "tp4-pp2-dp1-ep1": {"ranks": 8, "tp": 4, "pp": 2, "dp": 1, "ep": 1},
    "tp1-pp4-dp4-ep2": {"ranks": 16, "tp": 1, "pp": 4, "dp": 4, "ep": 2},
}
IMPOSSIBLE = {
    ("tp1-pp1-dp8-ep4", "imbalanced_stage"),
    ("tp2-pp1-dp4-ep1", "imbalanced_stage"),
    ("tp2-pp1-dp4-ep1", "hot_expert"),
    ("tp4-pp2-dp1-ep1", "hot_expert"),
    ("tp4-pp2-dp1-ep1", "slow_link"),
}
CASES = [(a, f) for a in LAYOUTS for f in FAULTS if (a, f) not in IMPOSSIBLE]


@pytest.mark.parametrize(("layout", "fault"), CASES)
def test_a_planted_fault_is_found_with_its_cost_and_nothing_else(layout, fault):
    job = Job.of(**LAYOUTS[layout], fault=fault, steps=1)
    found = measured_job(job).findings
    wanted = planted(job)
    assert [each.kind for each in found if not each.is_symptom] == [wanted["kind"]]
    assert found[0].kind == wanted["kind"]
    assert found[0].cost_ns == pytest.approx(wanted["cost_ns"], rel=TOLERANCE.get(fault, 0.1))
    if fault == "slow_link":
        assert set(wanted["ranks"]) <= set(found[0].ranks)
    else:
        assert list(found[0].ranks) == wanted["ranks"]
        assert found[0].evidence.stage in (wanted["stage"], None)


@pytest.mark.parametrize("fault", [*FAULTS, None])
def test_the_first_finding_of_512_ranks_is_the_planted_cause_and_there_is_none_without(fault):
    changes = {"fault": fault} if fault else {"straggler": None}
    job = Job.of(512, steps=1, layers=2, **changes)
    found, wanted = measured_job(job, with_tables=False), planted(job)
    assert found.headline.startswith("Compute is the largest part of the step: ")
    if wanted is None:
        assert found.findings == ()
        healthy = "The run is healthy: no rank, stage or link stands apart; compute limits"
        assert found.health.startswith(healthy)
        return
    (first,) = found.findings
    assert (first.kind, list(first.ranks)) == (wanted["kind"], wanted["ranks"])
    assert first.cost_ns == pytest.approx(wanted["cost_ns"], rel=TOLERANCE.get(fault, 0.1))
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
def test_a_slower_fault_costs_more_and_a_small_one_is_none(fault):
    costs = []
    for slowdown in (0, 40, 80):
        found = measured_job(Job.of(fault=fault, slowdown=slowdown, steps=1)).findings
        costs.append(sum(each.cost_ns for each in found))
    assert costs[0] == 0 < costs[1] < costs[2]


def test_the_demo_plants_a_fault_and_the_report_begins_with_it(tmp_path):
    words = ["demo", str(tmp_path), "--ranks", "2"]
    shown = CliRunner().invoke(main, words, catch_exceptions=False).stdout.splitlines()
    assert shown[1].startswith("  Compute is the largest part of the step: ")
    assert shown[2].startswith("  Rank 1 is a straggler: same work as its peers, ")
    assert any("wait caused a step" in line for line in shown)
    raw = CliRunner().invoke(main, ["metrics", str(tmp_path), "--clocks", "raw", "--json"])
    said = json.loads(raw.stdout)
    assert said["clocks"]["times"] == "raw"
    assert [each["offset_ns"] for each in said["clocks"]["offsets"]] == [0, 0]
    assert [each["kind"] for each in said["findings"]] == ["straggler"]
    clean = CliRunner().invoke(main, [*words, "--fault", "none"], catch_exceptions=False)
    assert clean.stdout.splitlines()[2].startswith(
        "  The run is healthy: no rank, stage or link"
    )


def test_a_fault_that_a_job_cannot_have_is_refused():
    with pytest.raises(ConfigError, match="fault imbalanced_stage: wanted pp 2 or more"):
        Job.of(2, fault="imbalanced_stage")
    with pytest.raises(ConfigError, match="fault hot_expert: wanted 2 layers or more, found 1"):
        Job.of(fault="hot_expert", layers=1)
    with pytest.raises(ConfigError, match="fault 'rust': wanted one of slow_gpu, slow_link"):
        Job.of(fault="rust")


def test_a_slow_gpu_costs_what_its_attentions_take_longer():
    job = Job.of()
    longer = sum(layers.slack(job, direction) for direction in ("forward", "backward"))
    assert planted(job) == {
        "kind": "straggler",
        "ranks": [5],
        "stage": 1,
        "cost_ns": job.micro_batches * longer,
    }
    assert planted(Job.of(straggler=None)) is None
