"""Test that metrics of synthetic jobs equal their known answers."""

import pytest
from builders.same import same
from builders.synthetic_truth import truth
from oracles import kineto as oracle_kineto
from oracles import metrics as oracle_metrics

from fastcomm.analyses.measure import compute_metrics
from fastcomm.options import MetricsOptions
from fastcomm.readers.config import Config, Parallel
from fastcomm.readers.runs import OpenOptions, open_run
from fastcomm.synthetic import Job, Variant, write
from fastcomm.trace.iterations import IterationRule

LINK = 50e9
TAG_OF = {
    "TENSOR_MODEL_PARALLEL_GROUP": "TP",
    "DATA_PARALLEL_GROUP": "DP",
    "EXPERT_DATA_PARALLEL_GROUP": "DP",
    "PIPELINE_MODEL_PARALLEL_GROUP": "PP",
    "EXPERT_MODEL_PARALLEL_GROUP": "EP",
}
KEYS = (
    "ranks",
    "iterations",
    "iteration",
    "breakdown",
    "windows",
    "bandwidth",
    "volume",
    "overlap",
)


def measured(folder, clock="host", **options):
    """Measure a job; its truth is by the host's marks."""
    rule = IterationRule(clock=clock)
    run = open_run(folder, options=OpenOptions(iterations=rule, **options))
    return compute_metrics(run, MetricsOptions(link_bandwidth=f"{LINK}B/s"))


def comparable(job):
    return {key: value for key, value in truth(job, LINK).items() if key in KEYS}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_a_synthetic_job_has_its_known_metrics(tmp_path, ranks):
    job = Job.of(ranks=ranks)
    write(job, tmp_path)
    found = measured(tmp_path)
    same(found.to_dict(), comparable(job))
    assert found.warnings == (() if ranks > 1 else ("no communication on the device",))


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_synthetic_job_on_the_device_clock_agrees_with_the_oracle(tmp_path, ranks):
    job = Job.of(ranks=ranks)
    write(job, tmp_path)
    found = measured(tmp_path, clock="auto")
    traces = [oracle_kineto.read(path) for path in sorted(tmp_path.glob("*.json*"))]
    wanted = oracle_metrics.metrics(
        traces, tag_of=lambda event: TAG_OF[event["description"]], link_bandwidth=LINK
    )
    assert found.iteration_clock == wanted["iteration_clock"] == "device"
    same(found.to_dict(), wanted)


@pytest.mark.parametrize("variant", [Variant.BASE_LAST, Variant.COMPACT, Variant.HOST_METADATA])
def test_metrics_do_not_depend_on_how_a_job_is_written(tmp_path, variant):
    job = Job.of(ranks=8)
    write(job, tmp_path / "today", ranks=[0, 5])
    write(job, tmp_path / "variant", ranks=[0, 5], variant=variant, compress=False)
    today, other = measured(tmp_path / "today"), measured(tmp_path / "variant")
    assert other.to_dict() == today.to_dict()


def test_tags_come_from_the_grid_where_the_groups_are_not_described(tmp_path):
    job = Job.of(ranks=64)
    ranks = [0, 21, 63]
    write(job, tmp_path / "today", ranks=ranks)
    write(job, tmp_path / "variant", ranks=ranks, variant=Variant.UNDESCRIBED)
    sizes = {name: getattr(job, name) for name in ("tp", "pp", "dp", "ep")}
    by_grid = measured(tmp_path / "variant", config=Config(parallel=Parallel(**sizes)))
    by_description = measured(tmp_path / "today")
    assert by_grid.volume == by_description.volume
    assert by_grid.breakdown == by_description.breakdown
    sources = set(by_grid.tables["groups"]["tag_source"].to_pylist())
    assert sources <= {"ranks", "heuristic"}


def test_the_rank_with_the_longest_iteration_and_the_widest_window_are_named(tmp_path):
    job = Job.of(ranks=8)
    write(job, tmp_path)
    found = measured(tmp_path)
    wanted = truth(job, LINK)
    assert found.longest.rank == wanted["longest_rank"]
    table = found.tables["windows"].to_pylist()
    widest = max(table, key=lambda row: row["window_ns"])
    assert wanted["widest_window"] == {
        "from": widest["from"],
        "to": widest["to"],
        "ns": widest["window_ns"],
        "rank": widest["rank"],
        "iteration": widest["iteration"],
    }
