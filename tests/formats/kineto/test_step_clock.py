"""Test work inside and outside of steps on the device clock, and its warnings."""

import json

import pyarrow.parquet as pq
import pytest
from builders import kineto_text as k
from builders.fault_tools import agree
from builders.opened import open_run
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.comparison.analysis import compare
from fastcomm.critical_path.search import analyze
from fastcomm.errors import TraceFileError
from fastcomm.formats.config import Config
from fastcomm.formats.store.layout import ABOUT
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions

NEVER_LAUNCHED = k.kernel("warm-up", 2, 3)
# The host is 30 us ahead: of step 1 nothing runs inside its mark, of step 2 one kernel.
AHEAD = [
    *(k.mark("ProfilerStep#1", 0, 20), k.mark("ProfilerStep#2", 20, 20)),
    NEVER_LAUNCHED,
    *(k.launch(1, 11), k.kernel("gemm", 31, 10, correlation=11)),
    *(k.launch(3, 12), k.all_reduce(41, 5, correlation=12)),
    *(k.launch(21, 13), k.kernel("gemm", 50, 10, correlation=13)),
    *(k.launch(23, 14), k.all_reduce(60, 6, correlation=14)),
]
# Of a host whose trace has no launches.
UNLAUNCHED = [event for event in AHEAD if event["cat"] != "cuda_runtime"]


def opened(path, clock="auto", workers=1, **words):
    options = Config(clock=clock, **words)
    return open_run(path, config=options, workers=workers)


def measured(path, clock="auto", workers=1, **words):
    return compute_metrics(opened(path, clock, workers), MetricsOptions(**words))


def run_of(folder, *ranks):
    folder.mkdir(exist_ok=True)
    for rank, events in enumerate(ranks):
        k.write(folder / f"rank{rank}.json", events, rank=rank, world=len(ranks))
    return folder


@pytest.fixture
def ahead(tmp_path):
    return run_of(tmp_path / "ahead", AHEAD)


def said(*words):
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_work_belongs_to_the_step_that_launched_it(ahead):
    found = measured(ahead)
    rows = found.tables["iterations"].to_pylist()
    assert [(row["iteration"], row["start_ns"], row["stop_ns"]) for row in rows] == [
        (1, 5000, 46_000),
        (2, 46_000, 66_000),
    ]
    assert [row["exact_compute_ns"] for row in rows] == [10_000, 10_000]
    assert found.to_dict()["iteration_clock"] == "device"
    assert found.found_by == ("ProfilerStep#N",)


def test_work_outside_all_steps_is_counted_and_warned_of(ahead):
    found = measured(ahead)
    outside = {"device_ns": 3000, "share": 3 / 34, "comm_events": 0}
    assert found.to_dict()["outside"] == outside
    (warning,) = [text for text in found.warnings if "Outside" in text]
    assert "8.8 % of the device time, 0 communication events, in no metric" in warning


def test_by_the_hosts_marks_an_event_over_an_edge_is_outside_with_the_part_beyond(ahead):
    found = measured(ahead, "host")
    # Inside are the work from before, and 9 us of the first kernel.
    outside = {"device_ns": 22_000, "share": 22 / 34, "comm_events": 2}
    assert found.to_dict()["outside"] == outside
    assert found.iteration_clock == "host"
    assert any(
        "by the host's marks, which the device may run behind" in w for w in found.warnings
    )


def test_iterations_excluded_by_the_user_are_not_outside(ahead):
    assert measured(ahead, steps=[2]).outside == measured(ahead).outside


def test_little_work_outside_steps_is_not_warned_of(tmp_path):
    events = [event for event in AHEAD if event is not NEVER_LAUNCHED]
    folder = run_of(tmp_path / "run", events)
    found = measured(folder)
    assert found.outside.share == 0
    assert not any("Outside" in text for text in found.warnings)
    assert "Outside every step: 0.0 % of the device time, 0 commun" in said("metrics", folder)


def test_without_device_work_the_outside_share_is_unknown(tmp_path):
    folder = run_of(tmp_path / "run", [k.mark("ProfilerStep#1", 0, 20)])
    found = measured(folder).to_dict()
    assert found["outside"] == {"device_ns": None, "share": None, "comm_events": None}
    assert found["iteration_clock"] == "host"


def test_one_rank_without_launches_puts_all_ranks_on_the_host_clock(tmp_path):
    found = measured(run_of(tmp_path / "run", AHEAD, UNLAUNCHED))
    assert found.iteration_clock == "host"
    assert found.breakdown == measured(tmp_path / "run", "host").breakdown
    assert any("because rank 1 cannot be on the device's clock" in w for w in found.warnings)
    assert any(w.startswith("rank 1: no launch of device work") for w in found.warnings)


def test_a_rank_without_device_work_does_not_matter_to_the_clock(tmp_path):
    folder = run_of(tmp_path / "run", AHEAD, [k.mark("ProfilerStep#1", 0, 20)])
    assert measured(folder).iteration_clock == "device"


def test_results_do_not_depend_on_workers_and_order(tmp_path):
    for ranks in ([AHEAD, AHEAD, UNLAUNCHED], [AHEAD, AHEAD, AHEAD]):
        folder = run_of(tmp_path / "run", *ranks)
        assert measured(folder, workers=2).to_dict() == measured(folder).to_dict()


def test_the_first_line_names_the_clock(ahead):
    assert "(ProfilerStep#N; device clock)" in said("metrics", ahead).splitlines()[0]
    by_host = said("metrics", ahead, "--step-boundary", "host")
    assert "(ProfilerStep#N; host clock)" in by_host.splitlines()[0]


def test_a_comparison_of_different_clocks_has_a_note(ahead):
    notes = compare(measured(ahead, "host"), measured(ahead)).notes
    assert any(
        "cut by the host clock before and by the device clock after" in note for note in notes
    )


def test_graphs_are_built_of_the_hosts_windows(ahead):
    window = analyze(opened(ahead).read(0, "all")).about.window
    # The mark; on the device the step begins at 50 us.
    assert (window.start, window.stop) == (20_000, 40_000)


# ------------------------------------------------------------------- stores


@pytest.fixture
def store(ahead, tmp_path):
    ingest(plan([ahead], tmp_path / "store", config=Config()))
    return tmp_path / "store"


def numbers(found):
    return {key: value for key, value in found.to_dict().items() if key != "warnings"}


@pytest.mark.parametrize("clock", ["auto", "device", "host"])
def test_a_store_supports_both_clocks(ahead, store, clock):
    found, wanted = measured(store, clock), measured(ahead, clock)
    assert numbers(found) == numbers(wanted)
    assert found.warnings == wanted.warnings


def test_a_store_without_launches_uses_the_host_clock_with_a_warning(tmp_path):
    folder = run_of(tmp_path / "run", UNLAUNCHED)
    ingest(plan([folder], tmp_path / "store", config=Config()))
    found, wanted = measured(tmp_path / "store"), measured(folder)
    assert numbers(found) == numbers(wanted)
    assert found.warnings == wanted.warnings
    with pytest.raises(TraceFileError, match="no recorded launch of device work lies inside"):
        measured(tmp_path / "store", "device")


def test_a_store_ingested_on_the_host_clock_keeps_it_by_default(ahead, tmp_path):
    by_host = Config(clock="host")
    ingest(plan([ahead], tmp_path / "store", config=by_host))
    assert measured(tmp_path / "store").iteration_clock == "host"
    assert numbers(measured(tmp_path / "store", "device")) == numbers(measured(ahead))


def test_a_damaged_clock_in_a_store_is_an_error_with_its_path(store):
    for path in store.glob("rank-*.parquet"):
        with pq.ParquetFile(path) as file:
            table, about = file.read(), json.loads(file.metadata.metadata[ABOUT])
        about["reading"]["iterations"]["clock"] = "sundial"
        pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(about)}), path)
    agree(store)
    with pytest.raises(TraceFileError, match=r"rank-00000.parquet: damaged.*sundial"):
        measured(store)


# -------------------------------------------------------------- a real trace


def test_steps_of_a_gpu_far_behind_its_host_are_complete(kineto):
    found = measured(kineto / "mi300_resnet")
    assert found.iteration_clock == "device"
    assert round(found.iteration.mean_ns / 1e6, 2) == 18.84
    (volume,) = found.volume.values()
    assert volume.comm_events == 12
    assert round(volume.bytes_per_iteration / 1e6, 2) == 23.40
    assert round(found.breakdown.exact["compute"], 3) == 0.340
    # What the warm-up launched ran before the first step.
    assert found.outside.comm_events == 5


def test_the_host_clock_would_lose_half_of_the_work(kineto):
    found = measured(kineto / "mi300_resnet", "host")
    assert int(100 * found.outside.share) == 45
    assert found.outside.comm_events == 8
    (volume,) = found.volume.values()
    assert volume.comm_events == 9
    assert any("45.8 % of the device time, 8 communication" in w for w in found.warnings)
    words = "5 of 9 communication events in steps were launched before the first step"
    assert any(note.startswith(words) for note in found.warnings)


EARLY = [k.mark("ProfilerStep#0", 0, 25), k.all_reduce(5, 3), k.all_reduce(15, 5), *AHEAD[3:]]


def early(found):
    return [note for note in found.warnings if "launched before the first step" in note]


def test_communication_of_a_warm_up_that_counts_as_inside_a_step_is_a_warning(tmp_path):
    run = run_of(tmp_path / "run", EARLY, EARLY)
    ingest(plan([run], tmp_path / "store"))
    for path in (run, tmp_path / "store"):
        (note,) = early(measured(path, "host"))
        assert note.startswith("4 of 4 communication events in steps were launched before")
        assert not early(measured(path))
    events = [event for event in EARLY if event["cat"] != "cuda_runtime"]
    (note,) = early(measured(run_of(tmp_path / "mixed", EARLY, events)))
    assert note.startswith("2 of 4 communication events in steps")
    assert not early(measured(run_of(tmp_path / "plain", AHEAD), "host"))
