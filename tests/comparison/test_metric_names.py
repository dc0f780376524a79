"""Test the names of metrics that conditions may have before a run is measured."""

import pytest
from builders.opened import open_run

from fastcomm.comparison.metric_names import check_names
from fastcomm.comparison.metrics_documents import metrics_document, scalars
from fastcomm.errors import ConfigError
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write


def test_every_number_of_a_run_has_a_name(tmp_path):
    write(Job.of(ranks=4, steps=3, layers=1), tmp_path)
    options = MetricsOptions(flops=True, tokens_per_step=1000)
    metrics = compute_metrics(open_run(tmp_path), options)
    names = [name for name, _ in scalars(metrics_document(metrics, "run"))]
    assert len(names) > 100
    check_names(names)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("iteration.mean", "iteration.mean_ns"),
        ("breakdown.idle", "breakdown.exact.idle"),
        ("zzz", "JSON of a comparison lists all names"),
    ],
)
def test_another_name_is_an_error_with_similar_ones(name, near):
    with pytest.raises(ConfigError, match=near.replace(".", r"\.")):
        check_names([name])
