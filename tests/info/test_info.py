"""Test `fastcomm info`."""

import json

import pytest
from builders import kineto_text as k
from builders.commands import quoted
from builders.fault_tools import agree
from builders.opened import open_run
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.errors import FastcommError
from fastcomm.formats.config import Config
from fastcomm.info.info import info
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic.job import TableJob, write_table

NANOSECONDS = 1000

STEP = [
    k.mark("ProfilerStep#3", 0, 100),
    k.kernel("gemm", 5, 30),
    k.all_reduce(20, 40, Process_Group_Ranks="[0, 1]", Process_Group_Description="mesh_tp"),
    k.all_reduce(70, 10, Process_Group_Ranks="[0, 1]", Process_Group_Description="mesh_tp"),
]


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        k.write(folder / f"rank{rank}.json", STEP, rank=rank, world=2)
    return folder


@pytest.fixture
def store(traces, tmp_path):
    ingest(plan([traces], tmp_path / "store"))
    return tmp_path / "store"


def invoke(*words, code=0):
    result = CliRunner().invoke(main, ["info", *map(str, words)])
    assert result.exit_code == code, result.output + result.stderr
    return result.stdout


def told(*words, code=0):
    return json.loads(invoke(*words, "--json", code=code))


def test_traces_are_described_by_their_first_rank(traces):
    lines = invoke(traces).splitlines()
    size = sum(path.stat().st_size for path in traces.iterdir())
    assert lines[0].split(maxsplit=1) == ["format", f"kineto: 2 files, {size / 1000:.2f} kB"]
    assert lines[1].split(maxsplit=1) == ["ranks", "0-1 (2 of 2)"]
    assert lines[2].split(maxsplit=1) == ["read", "rank 0, 4 events; --all reads all"]
    assert lines[3].split(maxsplit=1) == ["time", "1970-01-01 00:00:00 UTC, 100 us"]
    assert lines[4].split(maxsplit=1) == [
        "steps",
        "3 by ProfilerStep#N, 100 us mean (host clock)",
    ]
    assert lines[7].split() == ["mesh_tp", "1", "2", "TP", "description", "1", "2"]
    store = f"{traces.name}-store"
    path = quoted(traces)
    commands = [f"    fastcomm metrics {path}", f"    fastcomm ingest {path} -o {store}"]
    assert lines[-3:] == ["next:", *commands]


def test_all_ranks_are_read_with_all(traces):
    assert [each["rank"] for each in told(traces)["details"]] == [0]
    for workers in (1, 2):
        found = told(traces, "--all", "--workers", workers)
        assert [each["rank"] for each in found["details"]] == [0, 1]
        assert found["groups"][0]["ranks"] == 2
        assert found["groups"][0]["groups"] == 1


def test_info_of_a_store_reads_no_events(traces, store):
    for path in store.glob("rank-*"):
        path.write_bytes(b"")
    agree(store)
    found, all_ranks = told(store), told(traces, "--all")
    assert found["stored"] is True
    assert [each["rank"] for each in found["details"]] == [0, 1]
    for key in (
        "ranks",
        "missing",
        "world_size",
        "formats",
        "groups",
        "iterations",
        "missing_data",
    ):
        assert found[key] == all_ranks[key], key
    lines = invoke(store).splitlines()
    assert lines[0].startswith("format      stored kineto: 2 files, ")
    assert lines[5].split(maxsplit=1)[1].startswith("agree within 0 ns (2 collectives, spread")
    assert lines[-2:] == ["next:", f"    fastcomm metrics {quoted(store)}"]


def test_options_apply_to_a_store(store):
    found = told(store, "--iteration-regex", "Prof.*", "--all")
    assert {each["found_by"] for each in found["details"]} == {"regex Prof.*"}


def test_ranks_that_are_not_selected_are_not_missing(tmp_path, store):
    run = tmp_path / "run"
    run.mkdir()
    for rank in range(3):
        k.write(run / f"rank{rank}.json", STEP, rank=rank, world=4)
    assert told(run)["missing"] == told(run, "--ranks", "1,2")["missing"] == [3]
    assert told(store, "--ranks", "1")["missing"] == []
    assert "ranks       2 of 4 ranks: 1-2; missing: 3\n" in invoke(run, "--ranks", "1,2")


def test_info_of_a_store_can_be_limited_to_ranks(store):
    found = told(store, "--ranks", "1")
    assert [each["rank"] for each in found["details"]] == found["ranks"] == [1]
    assert {row["rank"] for row in found["iterations"]} == {1}


def test_ranks_without_a_common_collective_have_unknown_clocks(tmp_path):
    k.write(tmp_path / "rank0.json", STEP)
    ingest(plan([tmp_path / "rank0.json"], tmp_path / "store"))
    assert "clocks      unknown: no collective joins two of the ranks" in invoke(
        tmp_path / "store"
    )


def test_clock_differences_are_printed_with_their_evidence(tmp_path):
    (tmp_path / "traces").mkdir()
    for rank, ahead in enumerate((0, 7_000_000)):
        events = [{**event, "ts": event["ts"] + ahead} for event in (*STEP, *STEP[2:])]
        k.write(tmp_path / "traces" / f"rank{rank}.json", events, rank=rank, world=2)
    ingest(plan([tmp_path / "traces"], tmp_path / "store"))
    assert (
        "1 rank needs correction (ranks.parquet); the most, rank 1 by -7.00 s to agree with "
        "rank 0 (4 collectives, spread 0 ns)" in " ".join(invoke(tmp_path / "store").split())
    )


@pytest.mark.parametrize(
    ("events", "envelope", "missing"),
    [
        (STEP, {"world": 3}, "ranks 1-2: no trace; put the missing traces beside the others"),
        (
            STEP[:2],
            {},
            "no communication on the device: the job has none, or it runs on the host",
        ),
        (
            [STEP[0], k.kernel("ncclDevKernel_AllReduce", 5, 9)],
            {},
            "1 of 1 communication events have no size: the warnings say why",
        ),
        (
            [STEP[0], k.all_reduce(5, 9)],
            {},
            "1 of 1 communication events have no parallelism: say how ranks are laid out",
        ),
        (STEP[1:], {}, "no iteration marks: if other annotations mark steps"),
        (STEP, {"baseTimeNanoseconds": None}, "no absolute time"),
    ],
)
def test_missing_data_is_listed_with_the_remedy(tmp_path, events, envelope, missing):
    k.write(tmp_path / "rank0.json", events, **envelope)
    assert any(each.startswith(missing) for each in told(tmp_path)["missing_data"])
    assert f"missing: {missing}" in " ".join(invoke(tmp_path).split())


def test_options_that_have_no_effect_are_not_recommended(tmp_path):
    k.write(tmp_path / "rank0.json", [*STEP[:2], k.kernel("ncclDevKernel_SendRecv", 5, 9)])
    (said,) = [each for each in told(tmp_path)["missing_data"] if "no parallelism" in each]
    assert "if there is one parallelism (--dp, --tp, --pp or --cp alone)" in said
    assert "[[tags]] stream = N" in said
    known = {"Process_Group_Ranks": "[0, 1]", "Process_Group_Name": "1"}
    k.write(tmp_path / "rank0.json", [*STEP[:2], k.all_reduce(20, 40, **known)])
    (said,) = [each for each in told(tmp_path)["missing_data"] if "no parallelism" in each]
    assert said.endswith("(--tp, --pp, --dp, --ep, --cp), or [[tags]] in a --config")


def test_an_option_without_effect_is_a_warning(traces):
    found = told(traces, "--dp", "2")["warnings"]
    assert [each.partition(":")[0] for each in found] == ["--dp 2 changed nothing"]
    assert not told(traces)["warnings"]


def test_warnings_are_printed_once_with_their_ranks(tmp_path):
    for rank in range(3):
        k.write(tmp_path / f"rank{rank}.json", STEP[1:], rank=rank, world=3)
    found = told(tmp_path, "--all")["warnings"]
    assert [warning.partition(":")[0] for warning in found] == ["ranks 0-2"]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_unreadable_rank_is_an_error_or_skipped(traces, workers):
    (traces / "rank1.json").write_text('{"traceEvents": [')
    invoke(traces)
    invoke(traces, "--all", code=1)
    found = told(traces, "--all", "--keep-going", "--workers", workers, code=3)
    assert [each["rank"] for each in found["failed"]] == [1]
    text = " ".join(invoke(traces, "--all", "--keep-going", code=3).split())
    assert "skipped: rank 1: " in text
    (traces / "rank0.json").write_text('{"traceEvents": [')
    for all_ranks in (False, True):
        with pytest.raises(FastcommError, match="no rank could be read"):
            info(open_run(traces, config=Config(keep_going=True)), all_ranks=all_ranks)


def test_the_first_readable_rank_is_described_with_keep_going(traces):
    (traces / "rank0.json").write_text('{"traceEvents": [')
    invoke(traces, code=1)
    found = told(traces, "--keep-going", code=3)
    assert [rank["rank"] for rank in found["details"]] == [1]
    assert [rank["rank"] for rank in found["failed"]] == [0]
    assert (found["ranks"], found["missing"]) == ([0, 1], [])


def test_a_store_without_its_tables_is_an_error(store):
    (store / "groups.parquet").unlink()
    assert "groups.parquet" in CliRunner().invoke(main, ["info", str(store)]).stderr


def test_info_is_available_in_python(store):
    run = open_run(store, config=Config())
    found = info(run)
    assert found.stored
    assert found.details[0].stop - found.details[0].start == 100 * NANOSECONDS


def test_a_table_of_operations_shows_parallelism_but_no_kernels(tmp_path):
    write_table(TableJob(), tmp_path)
    assert not any("by their name" in text for text in told(tmp_path, "--all")["warnings"])
    found = compute_metrics(open_run(tmp_path)).to_dict()
    assert {row["tag_source"] for row in found["groups"] if row["tag"] != "OTHER"} == {
        "explicit"
    }


def test_the_clock_of_iterations_is_printed(traces, store):
    for path in (traces, store):
        assert told(path)["iteration_clock"] == "host"
        assert "100 us mean (host clock)" in invoke(path)
