"""Test metrics of every real trace against the oracle."""

from functools import lru_cache

import pytest
from builders.opened import open_run
from builders.same import same
from oracles import kineto as oracle_kineto
from oracles import metrics as oracle_metrics

from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions

RUNS = {
    "nccl": ["nccl_2rank_rank0.json.gz"],
    "dlrm": ["dlrm_8rank"],
    "sampled": ["sampled_2of128"],
    "mtia": ["mtia"],
    "control": ["trace_diff/control.json.gz"],
    "test": ["trace_diff/test.json.gz"],
}
# All else is of no known parallelism: this run is plain data parallel.
TAG = {"nccl": "DP"}
LINK = 25e9


def traces_of(real, names):
    folders = [real(name) for name in names]
    paths = [
        path
        for each in folders
        for path in (sorted(each.glob("*")) if each.is_dir() else [each])
    ]
    return [path for path in paths if not path.name.startswith("torch_et")]


@lru_cache(maxsize=1)
def read(paths):
    """The traces as the oracle reads them, which takes long; each clock in turn needs them."""
    return [oracle_kineto.read(path) for path in paths]


@pytest.mark.parametrize("clock", ["auto", "host"])
@pytest.mark.parametrize("name", RUNS)
def test_metrics_of_a_real_run_agree_with_the_oracle(real, name, clock):
    paths = traces_of(real, RUNS[name])
    options = Config(clock=clock)
    run = open_run(*paths, config=options)
    found = compute_metrics(run, MetricsOptions(link_bandwidth=f"{LINK}B/s")).to_dict()
    traces = read(tuple(paths))
    tag = TAG.get(name, "OTHER")
    wanted = oracle_metrics.metrics(traces, lambda event: tag, LINK, clock)
    same(found, wanted)
    assert set(found["bandwidth"]) == set(wanted["bandwidth"])
    assert set(found["overlap"]["by_tag"]) == set(wanted["overlap"]["by_tag"])
