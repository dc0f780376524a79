"""Test that metrics of synthetic jobs equal their known answers."""

from functools import cache

import pytest
from builders.opened import open_run
from builders.same import same
from builders.synthetic_files import SMALL
from builders.synthetic_truth import truth
from oracles import kineto as oracle_kineto
from oracles import metrics as oracle_metrics

from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import Variant
from fastcomm.synthetic.traces import write
from fastcomm.trace.rank_grid import Parallel

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
    run = open_run(folder, config=Config(clock=clock, **options))
    return compute_metrics(run, MetricsOptions(link_bandwidth=f"{LINK}B/s"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that writes a job of so many ranks, or some of them, once."""

    @cache
    def folder(ranks, *some):
        path = tmp_path_factory.mktemp("job")
        write(Job.of(ranks, **SMALL), path, ranks=some or None)
        return path

    return folder


@pytest.fixture(scope="module")
def today(made):
    """The metrics of two of eight ranks."""
    return measured(made(8, 0, 5))


def comparable(job):
    return {key: value for key, value in truth(job, LINK).items() if key in KEYS}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_a_synthetic_job_has_its_known_metrics(made, ranks):
    found = measured(made(ranks))
    same(found.to_dict(), comparable(Job.of(ranks, **SMALL)))
    assert found.warnings == (() if ranks > 1 else ("no communication on the device",))


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_synthetic_job_on_the_device_clock_agrees_with_the_oracle(made, ranks):
    found = measured(made(ranks), clock="auto")
    traces = [oracle_kineto.read(path) for path in sorted(made(ranks).glob("*.json*"))]
    wanted = oracle_metrics.metrics(
        traces, tag_of=lambda event: TAG_OF[event["description"]], link_bandwidth=LINK
    )
    assert found.iteration_clock == wanted["iteration_clock"] == "device"
    same(found.to_dict(), wanted)


@pytest.mark.parametrize("variant", [Variant.BASE_LAST, Variant.COMPACT, Variant.HOST_METADATA])
def test_metrics_do_not_depend_on_how_a_job_is_written(tmp_path, today, variant):
    write(Job.of(8, **SMALL), tmp_path, ranks=[0, 5], variant=variant, compress=False)
    assert measured(tmp_path).to_dict() == today.to_dict()


def test_tags_come_from_the_grid_where_the_groups_are_not_described(made, tmp_path):
    job, ranks = Job.of(64, **SMALL), (0, 21, 63)
    write(job, tmp_path, ranks=ranks, variant=Variant.UNDESCRIBED)
    sizes = {name: getattr(job, name) for name in ("tp", "pp", "dp", "ep")}
    by_grid = measured(tmp_path, parallel=Parallel(**sizes))
    by_description = measured(made(64, *ranks))
    assert by_grid.volume == by_description.volume
    assert by_grid.breakdown == by_description.breakdown
    sources = set(by_grid.tables["groups"]["tag_source"].to_pylist())
    assert sources <= {"ranks", "heuristic"}


def test_the_rank_with_the_longest_iteration_and_the_widest_window_are_named(made):
    found = measured(made(8))
    wanted = truth(Job.of(8, **SMALL), LINK)
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
