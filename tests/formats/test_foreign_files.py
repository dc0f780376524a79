"""Test files in a directory of traces that are not traces."""

import gzip
import json
import sys

import pyarrow as pa
import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.opened import open_run
from builders.rank_folders import STEP, write_ranks
from builders.replay_data import TRIAL, needed

from fastcomm.errors import TraceFileError
from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic.job import TableJob, write_table

FOREIGN = [{"step": 1, "latency": 2.5}, {"step": 2}]


@pytest.fixture
def folder(tmp_path):
    """Eight ranks, named as TensorBoard names them."""
    return write_ranks(tmp_path / "traces")


@pytest.mark.parametrize("command", ["metrics", "info", "report"])
def test_foreign_json_is_ignored_with_a_warning(folder, command, tmp_path):
    (folder / "execution_details.json").write_text(json.dumps(FOREIGN))
    (folder / "config.json").write_text('{"model": "x"}')
    output = ("--html", tmp_path / "page.html", "--no-path") if command == "report" else ()
    for more in ((), ("--keep-going",)):
        invoke(command, folder, *output, *more)
    run = open_run(folder)
    assert run.ranks == tuple(range(8))
    assert run.warnings == (
        f"no traces, not read in {folder}: config.json, execution_details.json",
    )
    error = invoke("metrics", folder / "execution_details.json", code=1).stderr
    assert "execution_details.json: a JSON array without trace events" in error


def test_a_log_of_json_lines_that_is_named_after_a_rank_is_foreign(folder):
    (folder / "metrics_rank0.json").write_text('{"loss": 3.5}\n{"loss": 3.1}\n')
    assert open_run(folder).warnings == (
        f"no traces, not read in {folder}: metrics_rank0.json",
    )


@pytest.mark.parametrize("text", ["[]", "{}", "null", "{", "[", '{"schemaVersion"'])
def test_an_empty_file_named_after_a_rank_is_damaged(tmp_path, text):
    k.write(tmp_path / "rank0.json", STEP, rank=0, world=2)
    (tmp_path / "rank1.json").write_text(text)
    with pytest.raises(TraceFileError, match=r"rank1\.json: "):
        compute_metrics(open_run(tmp_path))
    run = open_run(tmp_path, config=Config(keep_going=True))
    (failed,) = compute_metrics(run).skipped
    assert (failed.rank, failed.path) == (1, str(tmp_path / "rank1.json"))


def test_long_metadata_before_the_events_is_read(tmp_path):
    path = k.write(tmp_path / "host_1.2.pt.trace.json", STEP)
    whole = {"metadata": {"notes": "x" * (3 << 20)}, **json.loads(path.read_text())}
    path.write_text(json.dumps(whole))
    assert compute_metrics(open_run(tmp_path)).ranks == (0,)


@needed
def test_trials_and_uniform_traces_are_errors_that_name_their_commands(tmp_path):
    error = invoke("convert", TRIAL, tmp_path / "x.json", code=1).stderr
    assert error == f"Error: {TRIAL} is a dPRO trial: fastcomm dpro convert {TRIAL}\n"
    for command in ("kernels", "what-if", "metrics"):
        assert f"fastcomm dpro stats {TRIAL}\n" in invoke(command, TRIAL, code=1).stderr
    out = tmp_path / "all.json"
    invoke("dpro", "convert", TRIAL, out)
    for command in ("metrics", "info", "critical-path"):
        assert "a uniform trace" in invoke(command, out, code=1).stderr
    assert "has no dependencies to replay" in invoke("dpro", "replay", out, code=1).stderr
    assert "a trace (dpro)" in invoke("stragglers", out, code=1).stderr


def test_a_uniform_trace_beside_traces_is_not_read(folder):
    rows = [{"name": "FW.a", "ph": "X", "ts": 1, "dur": 2, "pid": "p", "tid": "t"}]
    (folder / "all.json").write_text(json.dumps({"traceEvents": rows}))
    run = open_run(folder)
    assert run.warnings == (f"no traces, not read in {folder}: all.json",)


def test_damaged_json_beside_traces_of_another_format_is_a_warning(tmp_path):
    write_table(TableJob(), tmp_path)
    (tmp_path / "rank0.json").write_text("")
    run = open_run(tmp_path)
    assert f"no traces, not read in {tmp_path}: rank0.json" in run.warnings


def test_a_profiler_trace_named_like_a_trial_is_not_a_trial(tmp_path):
    k.write(tmp_path / "trace.json.gz", STEP)
    assert "1 rank, " in invoke("kernels", tmp_path).stdout
    assert "1 rank," in invoke("metrics", tmp_path).stdout


def zstd(path, data):
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(data)
    return path


def test_zstandard_is_read_and_its_damage_reported(tmp_path):
    text = json.dumps(k.document(STEP)).encode()
    path = zstd(tmp_path / "rank0.json.zst", text)
    here = compute_metrics(open_run(tmp_path)).to_dict()
    path.unlink()
    (tmp_path / "rank0.json").write_bytes(text)
    assert compute_metrics(open_run(tmp_path)).to_dict() == here
    (tmp_path / "rank0.json").unlink()
    whole = zstd(path, text * 3).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "cut short" in invoke("metrics", tmp_path, code=1).stderr
    path.write_bytes(whole[:9] + b"\xff" * 40)
    assert "rank0.json.zst: " in invoke("metrics", tmp_path, code=1).stderr


PACKED = {
    "run.tar.gz": "an archive; unpack it (tar xf ",
    "run.zip": "an archive; unpack it (unzip ",
    "nsys_0.sqlite.gz": "this compression is not read; decompress the file: gunzip -k ",
    "rank0.json.xz": "this compression is not read; decompress the file: xz -dk ",
}


@pytest.mark.parametrize(("name", "words"), PACKED.items())
def test_packed_files_are_errors_that_explain_unpacking(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"\x1f\x8b" + bytes(100))
    for path in (tmp_path / name, tmp_path):
        error = invoke("metrics", path, code=1).stderr
        assert words in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(b"SQLite format 3\0" + bytes(100), mtime=0), "a SQLite database"),
        (gzip.compress(bytes(257) + b"ustar" + bytes(300), mtime=0), "a tar archive"),
        (b"PK\3\4" + bytes(60), "a ZIP archive"),
        (b"\xfd7zXZ\0" + bytes(60), "compressed by xz"),
        (bytes(range(128, 256)), "binary data"),
        (b"hello", "text that begins with 'hello'"),
    ],
)
def test_files_that_are_not_json_are_identified_by_first_bytes_and_never_printed(
    tmp_path, data, words
):
    path = tmp_path / "rank0.json"
    path.write_bytes(data)
    error = invoke("metrics", path, code=1).stderr
    assert words in error
    assert error.isascii()
    assert "\\x" not in error


def test_standard_input_is_one_clear_line():
    for command in ("metrics", "info"):
        error = invoke(command, "-", code=2).stderr
        assert "standard input cannot be read" in error


def test_compare_takes_urls():
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("upath")
    memory = fsspec.filesystem("memory")
    text = json.dumps(k.document(STEP)).encode()
    memory.pipe("/compared/rank0.json", text)
    try:
        found = invoke("compare", "memory:///compared", "memory:///compared").stdout
        assert "No difference." in found
    finally:
        memory.rm("/compared", recursive=True)


def test_compare_does_not_treat_a_url_as_a_local_path(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    error = invoke("compare", "s3://bucket/a", "s3://bucket/b", code=2).stderr
    assert "BEFORE (s3://bucket/a): s3://bucket/a: " in error


def test_no_error_is_a_dump_of_bytes_for_any_command(tmp_path):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(bytes(range(256)) * 40))
    for command in ("metrics", "info", "kernels", "what-if", "critical-path"):
        assert len(invoke(command, path, code=1).stderr) < 500


STDIN = {
    "metrics": (),
    "kernels": (),
    "stragglers": (),
    "convert": ("x.json",),
}


@pytest.mark.parametrize(("command", "more"), STDIN.items())
def test_standard_input_is_the_same_line_for_every_command(command, more, tmp_path):
    more = [tmp_path / word if word.endswith("json") else word for word in more]
    assert invoke(command, "-", *more, code=2).stderr == (
        "Error: -: standard input cannot be read, since a trace is read more than once; "
        "write it to a file first\n"
    )


@pytest.mark.parametrize(("name", "words"), PACKED.items())
def test_a_packed_table_of_operations_is_an_error_that_explains_unpacking(
    tmp_path, name, words
):
    path = tmp_path / name
    path.write_bytes(b"\x1f\x8b" + bytes(100))
    error = invoke("stragglers", path, code=1).stderr
    assert error == invoke("metrics", path, code=1).stderr
    assert words in error


@pytest.mark.parametrize("name", ["run.pftrace", "run.pftrace.gz", "run.json", "run.json.gz"])
def test_a_timeline_of_fastcomm_is_named_and_not_read(folder, name, tmp_path):
    target = tmp_path / name
    invoke("convert", folder, target, "--to", "perfetto")
    for command in ("metrics", "kernels", "info"):
        text = invoke(command, target, code=1).stderr
        assert f"{name}: a timeline that fastcomm wrote to be looked at" in text
        assert "give the traces that it was made of" in text


def test_a_process_of_operators_alone_is_no_rank(tmp_path):
    path = k.write(
        tmp_path / "rank0.json", [k.event("aten::add", "cpu_op", 10, 5, pid=5, tid=1)]
    )
    with pytest.raises(TraceFileError, match="a process that is no rank"):
        compute_metrics(open_run(path))
