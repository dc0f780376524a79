"""Test the command line: outputs, warnings and exit codes."""

import json
import subprocess
import sys

import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from builders import kineto_text as k
from click.testing import CliRunner

from fastcomm.cli.main import main

STEP = [
    k.mark("ProfilerStep#3", 0, 100),
    k.kernel("gemm", 5, 30),
    k.all_reduce(20, 40, Process_Group_Description="TENSOR_MODEL_PARALLEL_GROUP"),
    k.all_reduce(70, 10, Process_Group_Description="DATA_PARALLEL_GROUP"),
]


@pytest.fixture
def run_folder(tmp_path):
    for rank in range(3):
        k.write(tmp_path / f"rank{rank}.json", STEP, rank=rank, world=3)
    return tmp_path


def invoke(*words, code=0):
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output + result.stderr
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_metrics_begins_with_headline_and_findings(run_folder):
    lines = invoke("metrics", run_folder, "--link-bandwidth", "400Gbit/s").stdout.splitlines()
    assert lines[0] == (
        "3 ranks, 1 step (ProfilerStep#N; host clock): 100.0 us a step, 100.0 us p99"
    )
    assert lines[1] == (
        "  Exposed communication is the largest part of the step: 35.0 % (35.0 us of 100 us), "
        "most of it TP."
    )
    # A long step alone does not make a rank slow.
    assert not any("slowest rank is" in line for line in lines)


def test_metrics_prints_one_json_object(run_folder):
    found = json.loads(invoke("metrics", run_folder, "--json").stdout)
    assert found["ranks"] == [0, 1, 2]
    assert found["breakdown"]["exact"]["exposed_TP"] == 0.25
    assert found["windows"] == [
        {
            "from": "TP",
            "to": "DP",
            "count": 3,
            "mean_ns": 10_000,
            "p50_ns": 10_000,
            "p95_ns": 10_000,
        }
    ]


def test_metrics_writes_every_table_as_csv_and_parquet(run_folder, tmp_path):
    folder = tmp_path / "out"
    printed = invoke("metrics", run_folder, "--json", "--output", folder).stdout
    assert json.loads((folder / "metrics.json").read_text()) == json.loads(printed)
    names = {path.stem for path in folder.glob("*.parquet")}
    assert names == {path.stem for path in folder.glob("*.csv")}
    assert {
        "iterations",
        "windows",
        "windows_cdf",
        "bandwidth_by_rank",
        "collectives",
        "groups",
    } <= names
    for name in names:
        assert (
            pq.read_table(folder / f"{name}.parquet").num_rows
            == pa_csv.read_csv(folder / f"{name}.csv").num_rows
        )
    assert not list(folder.glob(".*"))


def test_the_same_input_gives_the_same_bytes_with_any_number_of_workers(run_folder):
    one, two = (invoke("metrics", run_folder, "--json", "--workers", n).stdout for n in (1, 2))
    assert one == two


def test_an_error_of_the_user_is_one_line_and_exit_code_1(tmp_path):
    (tmp_path / "rank0.json").write_text("no json")
    result = invoke("metrics", tmp_path / "rank0.json", code=1)
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: {tmp_path / 'rank0.json'}: no JSON trace")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["metrics"], ["metrics", "x", "--workers", "0"], ["nope"]])
def test_wrong_usage_is_exit_code_2(words):
    invoke(*words, code=2)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08\x00garbage", b"PNG"])
def test_keep_going_survives_a_file_that_cannot_even_be_opened(run_folder, content):
    (run_folder / "rank1.json").write_bytes(content)
    found = json.loads(invoke("metrics", run_folder, "--keep-going", "--json", code=3).stdout)
    assert found["ranks"] == [0, 2]
    assert [each["rank"] for each in found["failed"]] == [1]


@pytest.mark.parametrize("workers", [1, 2])
def test_keep_going_skips_and_lists_unreadable_files(run_folder, workers):
    path = run_folder / "rank1.json"
    path.write_text(path.read_text()[:-200])
    result = invoke("metrics", run_folder, "--workers", workers, code=1)
    assert "rank1.json: truncated" in result.stderr
    result = invoke(
        "metrics", run_folder, "--keep-going", "--json", "--workers", workers, code=3
    )
    found = json.loads(result.stdout)
    assert found["ranks"] == [0, 2]
    assert [each["rank"] for each in found["failed"]] == [1]
    assert "--allow-truncated" in found["failed"][0]["error"]
    text = invoke("metrics", run_folder, "--keep-going", code=3).stdout
    assert text.splitlines()[1].startswith("skipped: rank 1:")


def test_a_truncated_file_is_read_with_allow_truncated(run_folder):
    path = run_folder / "rank1.json"
    path.write_text(path.read_text()[:-200])
    found = json.loads(invoke("metrics", run_folder, "--allow-truncated", "--json").stdout)
    assert found["ranks"] == [0, 1, 2]
    assert any(
        "rank 1: " in warning and "truncated" in warning for warning in found["warnings"]
    )


def test_skipping_all_ranks_is_an_error(tmp_path):
    (tmp_path / "rank0.json").write_text('{"traceEvents": [')
    invoke("metrics", tmp_path, "--keep-going", code=1)


def test_metrics_can_be_limited_to_ranks_and_iterations(run_folder):
    found = json.loads(
        invoke("metrics", run_folder, "--json", "--ranks", "0,2", "--steps", "3").stdout
    )
    assert found["ranks"] == [0, 2]
    for option, value in (
        ("--ranks", "a"),
        ("--ranks", "1-"),
        ("--steps", "9"),
        ("--ranks", "7"),
    ):
        invoke("metrics", run_folder, option, value, code=2)


def test_parallel_options_take_precedence_over_the_configuration(tmp_path):
    events = [
        k.mark("ProfilerStep#0", 0, 100),
        k.all_reduce(10, 5, Process_Group_Ranks="[0, 1]"),
    ]
    k.write(tmp_path / "rank0.json", events, rank=0, world=8)
    config = tmp_path / "job.toml"
    config.write_text('[parallel]\npp = 2\ntp = 4\n[link]\nbandwidth = "8Gbit/s"\n')
    found = json.loads(invoke("metrics", tmp_path, "--config", config, "--json").stdout)
    assert set(found["volume"]) == {"OTHER"}
    assert found["link_bandwidth"] == 1e9
    found = json.loads(
        invoke("metrics", tmp_path, "--config", config, "--tp", 2, "--json").stdout
    )
    assert set(found["volume"]) == {"TP"}
    assert found["groups"][0]["tag_source"] == "ranks"


def test_names_from_a_trace_are_not_interpreted_as_markup(tmp_path):
    event = k.all_reduce(10, 5, Process_Group_Description="[bold]x[/nope]")
    k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#0", 0, 100), event])
    assert "[bold]x[/nope]" in invoke("metrics", tmp_path, "--full").stdout


def test_the_demo_writes_a_job_and_measures_it(tmp_path):
    (tmp_path / "demo").mkdir()
    result = invoke("demo", tmp_path / "demo", "--num-ranks", 2)
    assert result.stdout.startswith("2 ranks, ")
    assert len(list((tmp_path / "demo").iterdir())) == 2


def test_the_demo_replaces_its_own_files_alone(tmp_path):
    words = ("demo", tmp_path / "demo", "--json")
    invoke(*words, "--num-ranks", 2, "--fault", "none")
    before = (tmp_path / "demo" / "rank1.pt.trace.json.gz").read_bytes()
    invoke(*words, "--num-ranks", 2)
    assert (tmp_path / "demo" / "rank1.pt.trace.json.gz").read_bytes() != before
    names = sorted(path.name for path in (tmp_path / "demo").iterdir())
    for more in (("--num-ranks", 1), ("--format", "nsys"), ("--format", "table")):
        assert "has other files, such as rank" in invoke(*words, *more, code=1).stderr
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == names


def test_a_pipe_gets_plain_text_and_no_progress(run_folder):
    done = subprocess.run(
        [sys.executable, "-m", "fastcomm", "metrics", run_folder],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr == ""
