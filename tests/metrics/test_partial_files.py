"""Test partial results in files: the metrics from them are those from traces."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest
from builders.opened import open_run
from builders.places import TESTS

from fastcomm.errors import TraceFileError
from fastcomm.metrics import partial_files
from fastcomm.metrics.computation import compute_metrics, of_partials
from fastcomm.metrics.options import MetricsOptions
from fastcomm.metrics.partial_files import RankPartials
from fastcomm.result import json_text
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.trace.run_traces import SkippedRank


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write(Job.of(ranks=4, steps=3, layers=2), folder)
    return open_run(folder)


def stored(run, folder, ranks=None, byte_kind="payload"):
    """The partial results of ranks, written and read."""
    parts = []
    for source in run.sources:
        if ranks is None or source.rank in ranks:
            path = folder / f"rank{source.rank}.arrow"
            partial_files.write(RankPartials.of(source.read("metrics"), byte_kind), path)
            parts.append(partial_files.read(path))
    return parts


@pytest.mark.parametrize(
    "options",
    [
        MetricsOptions(),
        MetricsOptions(link_bandwidth="400Gbit/s"),
        MetricsOptions(bytes="bus"),
    ],
)
def test_metrics_of_partial_results_are_those_of_traces(run, tmp_path, options):
    parts = stored(run, tmp_path, byte_kind=options.bytes)
    expected = json_text(compute_metrics(run, options))
    assert json_text(of_partials(parts[::-1], options)) == expected


def test_a_job_without_a_device_has_partial_results_too(tmp_path):
    run = open_run(TESTS / "jobs" / "recorded" / "ddp-straggler" / "faulty")
    assert json_text(of_partials(stored(run, tmp_path))) == json_text(compute_metrics(run))


def test_ranks_without_launches_put_all_ranks_on_the_clock_of_the_host(tmp_path):
    paths = write(Job.of(ranks=2, steps=3, layers=2), tmp_path / "run", compress=False)
    trace = json.loads(paths[1].read_text())
    events = [event for event in trace["traceEvents"] if event.get("cat") != "cuda_runtime"]
    paths[1].write_text(json.dumps({**trace, "traceEvents": events}))
    run = open_run(tmp_path / "run")
    expected = compute_metrics(run)
    assert expected.iteration_clock == "host"
    assert "rank 1 cannot be on the device's clock" in " ".join(expected.warnings)
    assert json_text(of_partials(stored(run, tmp_path))) == json_text(expected)


def test_missing_and_skipped_ranks_are_named(run, tmp_path):
    parts = stored(run, tmp_path, ranks=(0, 1))
    assert of_partials(parts).warnings[0] == "2 of 4 ranks have no trace here: 2-3"
    failed = SkippedRank(rank=2, path="window", error="window: disk full")
    metrics = of_partials(parts, skipped=[failed])
    assert (metrics.skipped, metrics.expected_ranks) == ((failed,), 4)
    assert metrics.warnings[0] == "1 of 4 ranks has no trace here: 3"


def test_a_file_is_some_kilobytes(run, tmp_path):
    stored(run, tmp_path)
    for source in run.sources:
        assert (tmp_path / f"rank{source.rank}.arrow").stat().st_size < source.size / 3


@pytest.mark.parametrize("place", [0, 100, 2000, -200, -1])
def test_a_damaged_file_is_refused_in_one_line(run, tmp_path, place):
    stored(run, tmp_path, ranks=(0,))
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:place])
    with pytest.raises(TraceFileError, match="damaged, or no partial result") as caught:
        partial_files.read(path)
    assert "\n" not in str(caught.value)


def changed(parts, tmp_path, **tables):
    """The error of a file in which tables of the partial result were replaced."""
    path = tmp_path / "changed.arrow"
    partial_files.write(replace(parts, device=replace(parts.device, **tables)), path)
    with pytest.raises(TraceFileError) as caught:
        partial_files.read(path)
    return str(caught.value)


def test_columns_and_indices_of_another_file_are_refused(run, tmp_path):
    (parts,) = stored(run, tmp_path, ranks=(0,))
    events = parts.device.events
    place = events.schema.get_field_index("op")
    wrong = events.set_column(
        place, "op", pa.array([99] * events.num_rows, events.schema.field("op").type)
    )
    assert "unknown op" in changed(parts, tmp_path, events=wrong)
    assert "other columns" in changed(parts, tmp_path, events=events.drop_columns(["op"]))


def test_a_file_of_another_version_says_so(run, tmp_path, monkeypatch):
    layout = partial_files._LAYOUT
    monkeypatch.setattr(partial_files, "_LAYOUT", layout + 1)
    stored(run, tmp_path, ranks=(0,))
    monkeypatch.undo()
    with pytest.raises(TraceFileError, match=f"layout {layout + 1}, this one reads {layout}"):
        partial_files.read(tmp_path / "rank0.arrow")
