"""Test the text file for Prometheus: its grammar, its names and its numbers."""

import re
from dataclasses import replace

import pytest
from builders.opened import open_run
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.metrics import prometheus
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.prometheus import Gauge
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

# The text format 0.0.4, as far as gauges need it.
_SAMPLE = re.compile(
    r"(?P<name>[a-z0-9_]+)(\{(?P<labels>LABEL(,LABEL)*)\})?".replace(
        "LABEL", r'[a-z]+="([^"\\\n]|\\["\\n])*"'
    )
    + r" (?P<value>-?[0-9.]+(e[+-]?[0-9]+)?)"
)
_UNITS = ("_seconds", "_bytes", "_ratio", "_bytes_per_second", "_ranks", "_steps")


def parsed(text):
    """The samples of a text by name and labels; fails where it is not in the format."""
    samples, typed, names = {}, None, []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            names.append(line.split(" ")[2])
            assert line.endswith(".")
        elif line.startswith("# TYPE "):
            typed = line.split(" ")[2]
            assert typed == names[-1]
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            assert match["name"] == typed
            key = match["name"], match["labels"] or ""
            assert key not in samples
            samples[key] = float(match["value"])
    assert len(names) == len(set(names))
    return samples


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write(Job.of(ranks=4, steps=3, layers=2, straggler=2), folder)
    return folder


def test_the_numbers_are_those_of_the_metrics_in_base_units(run, tmp_path):
    path = tmp_path / "job.prom"
    result = CliRunner().invoke(main, ["metrics", str(run), "--prometheus", str(path)])
    assert result.exit_code == 0, result.output
    samples, metrics = parsed(path.read_text()), compute_metrics(open_run(run))
    assert samples["fastcomm_step_seconds", ""] == metrics.iteration.mean_ns / 1e9
    parts = [
        value for (name, _), value in samples.items() if name == "fastcomm_step_part_ratio"
    ]
    assert sum(parts) == pytest.approx(1)
    exposed = samples["fastcomm_exposed_seconds", 'parallelism="DP"']
    assert exposed == metrics.exposure["DP"].exposed_ns / 1e9
    for row in metrics.by_rank:
        label = f'rank="{row.rank}"'
        assert samples["fastcomm_rank_step_seconds", label] == row.mean_ns / 1e9
    assert samples["fastcomm_finding_seconds", 'kind="straggler",ranks="2"'] > 0
    assert all(name.startswith("fastcomm_") for name, _ in samples)
    assert all(name.endswith(_UNITS) for name, _ in samples)
    assert [one.name for one in tmp_path.iterdir()] == ["job.prom"]  # nothing unfinished


def test_the_step_time_that_99_percent_do_not_exceed_is_no_mean(run, tmp_path):
    metrics = compute_metrics(open_run(run))
    slow = replace(metrics.iteration, p99_ns=3 * metrics.iteration.mean_ns)
    prometheus.write(replace(metrics, iteration=slow), tmp_path / "job.prom")
    samples = parsed((tmp_path / "job.prom").read_text())
    assert samples["fastcomm_step_p99_seconds", ""] == slow.p99_ns / 1e9


def test_what_is_unknown_has_no_sample(run, tmp_path):
    traces = sorted(run.iterdir())
    metrics = compute_metrics(open_run(traces[0]))
    prometheus.write(metrics, tmp_path / "job.prom")
    samples = parsed((tmp_path / "job.prom").read_text())
    assert not [name for name, _ in samples if name == "fastcomm_wait_seconds"]


def test_names_cannot_end_a_label():
    gauge = Gauge(name="fastcomm_x_ratio", text="X.", values=(({"a": 'b"\n\\'}, 1.0),))
    assert [*gauge.lines()][-1] == 'fastcomm_x_ratio{a="b\\"\\n\\\\"} 1.0'
    assert [*Gauge(name="fastcomm_y", text="Y.", values=()).lines()] == []
