"""No rank is lost: each is in the result, among the skipped ones, or in an error."""

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import kineto_text as k
import oracle_directories as oracle
import pyarrow as pa
import pytest
from commands import invoke
from conftest import SHARED
from fault_tools import nobody
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcomm.analyses.measure import compute_metrics
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.options import MetricsOptions
from fastcomm.readers.runs import OpenOptions, open_run
from fastcomm.synthetic import Job, TableJob, write, write_table

STEP = [k.mark("ProfilerStep#0", 0, 100), k.kernel("gemm", 5, 30), k.all_reduce(40, 20)]
H100 = SHARED / "data" / "kineto" / "h100_qwen" / "Qwen1.5-0.5B-Chat.json.gz"
TRIAL = SHARED / "data" / "replay" / "trial" / "trace"
NAMES = [f"host_{900 + rank}.170000000{rank}.pt.trace.json.gz" for rank in range(8)]
FOREIGN = [{"step": 1, "latency": 2.5}, {"step": 2}]


@pytest.fixture
def folder(tmp_path):
    """Eight ranks, named as TensorBoard names them."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank, name in enumerate(NAMES):
        k.write(folder / name, STEP, rank=rank, world=8)
    return folder


def spoil(path, how):
    path.unlink()
    if how == "link":
        path.symlink_to("nowhere")
    else:
        whole = gzip.compress(json.dumps(k.document(STEP, rank=3, world=8)).encode())
        path.write_bytes({"empty": b"", "cut": whole[:20], "text": b"no trace"}[how])


STATES = st.one_of(
    st.just(oracle.GOOD),
    st.just(oracle.GOOD),
    st.sampled_from([oracle.UPPER, *oracle.UNREAD]),
    st.sampled_from([oracle.MISSING, *oracle.DAMAGES]),
)


@pytest.mark.compiled
@settings(max_examples=200, deadline=None)
@given(
    style=st.sampled_from(["tensorboard", "rank", "number"]),
    states=st.lists(STATES, min_size=1, max_size=6),
    is_gzipped=st.booleans(),
    foreign=st.sets(st.sampled_from(sorted(oracle.FOREIGN))),
    told=st.sampled_from(["before", "behind", "never"]),
)
def test_every_rank_of_a_directory_is_in_the_result_skipped_or_in_an_error(
    style, states, is_gzipped, foreign, told
):
    # Other names do not tell the rank.
    told = told if style == "rank" else "before"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = oracle.write(folder, style, states, is_gzipped, foreign, told)
        good = {n for n, state in enumerate(states) if state in (oracle.GOOD, oracle.UPPER)}
        named = {path.name for rank, path in paths.items() if states[rank] in oracle.UNREAD}
        bad = {path for n, path in paths.items() if n not in good and path.name not in named}
        if bad or not good:
            with pytest.raises(FastcommError) as raised:
                measured(folder)
            assert not good or any(path.name in str(raised.value) for path in bad)
        else:
            found = measured(folder)
            assert set(found.ranks) == good
            if told != "never":
                assert found.expected_ranks == len(states)
        world = None if told == "never" else len(states)
        check_kept_on(folder, good, bad, world, {*foreign, *named})


def measured(folder, *, keep_going=False):
    run = open_run(folder, options=OpenOptions(keep_going=keep_going))
    return compute_metrics(run, MetricsOptions(with_tables=False), keep_going=keep_going)


def check_kept_on(folder, good, bad, world, foreign):
    """With `keep_going` every damaged file is among the skipped ones, by its path."""
    if not good:
        with pytest.raises(FastcommError):
            measured(folder, keep_going=True)
        return
    found = measured(folder, keep_going=True)
    assert set(found.ranks) == good
    assert {each.path for each in found.failed} == set(map(str, bad))
    assert all(any(name in note for note in found.warnings) for name in foreign)
    known = good | {each.rank for each in found.failed} - {None}
    missing = set(range(max(known) + 1 if world is None else world)) - known
    said = [note for note in found.warnings if "no trace here" in note]
    assert len(said) == bool(missing)
    if world is not None:
        assert found.expected_ranks == world
        assert all(note.startswith(f"{len(missing)} of {world} ") for note in said)


@pytest.mark.parametrize("how", ["empty", "cut", "text", "link"])
def test_a_tensorboard_file_that_cannot_be_read_is_an_error_or_skipped(folder, how):
    bad = folder / NAMES[3]
    spoil(bad, how)
    assert f"{bad}: " in invoke("metrics", folder, code=1).stderr
    found = json.loads(invoke("metrics", folder, "--keep-going", "--json", code=3).stdout)
    (failed,) = found["failed"]
    assert failed.keys() == {"rank", "path", "error"}
    assert (failed["rank"], failed["path"]) == (3, str(bad))
    assert found["ranks"] == [0, 1, 2, 4, 5, 6, 7]
    assert found["world_size"] == 8
    first, second, *_ = invoke("metrics", folder, "--keep-going", code=3).stdout.splitlines()
    assert first.startswith("7 of 8 ranks")
    assert second.startswith("skipped: rank 3:")


def test_a_tensorboard_file_without_permission_is_an_error_or_skipped(folder):
    bad = folder / NAMES[0]
    bad.chmod(0)
    for above in (folder, *folder.parents[:4]):
        above.chmod(above.stat().st_mode | 0o055)
    with nobody():
        assert (
            f"{bad}: cannot be read: Permission denied"
            in invoke("metrics", folder, code=1).stderr
        )
        run = open_run(folder, options=OpenOptions(keep_going=True))
    assert run.ranks == tuple(range(1, 8))
    assert [each.path for each in run.skipped] == [str(bad)]


def test_a_directory_that_cannot_be_listed_is_skipped_with_its_path(folder):
    locked = folder / "node7"
    locked.mkdir(mode=0)
    for above in (folder, *folder.parents[:4]):
        above.chmod(above.stat().st_mode | 0o055)
    with nobody():
        assert f"{locked}: Permission denied" in invoke("metrics", folder, code=1).stderr
        run = open_run(folder, options=OpenOptions(keep_going=True))
    locked.chmod(0o755)
    assert [each.path for each in run.skipped] == [str(locked)]


def test_a_damaged_file_that_is_named_like_the_others_is_no_foreign_file(tmp_path):
    for rank in range(3):
        k.write(tmp_path / f"host{rank}-trace.json", STEP, rank=rank, world=3)
    (tmp_path / "host1-trace.json").write_text("")
    with pytest.raises(TraceFileError, match=r"host1-trace\.json: cannot be read: empty"):
        open_run(tmp_path)
    (tmp_path / "host1-trace.json").rename(tmp_path / "notes.json")
    run = open_run(tmp_path)
    assert run.warnings == (
        f"no traces, not read in {tmp_path}: notes.json",
        "1 of 3 ranks has no trace here: 1",
    )


@pytest.mark.parametrize("command", ["metrics", "info", "report"])
def test_foreign_json_is_ignored_with_a_warning(folder, command, tmp_path):
    (folder / "execution_details.json").write_text(json.dumps(FOREIGN))
    (folder / "config.json").write_text('{"model": "x"}')
    output = ("-o", tmp_path / "page.html", "--no-path") if command == "report" else ()
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
def test_a_file_named_after_a_rank_that_holds_nothing_is_damaged(tmp_path, text):
    k.write(tmp_path / "rank0.json", STEP, rank=0, world=2)
    (tmp_path / "rank1.json").write_text(text)
    with pytest.raises(TraceFileError, match=r"rank1\.json: "):
        compute_metrics(open_run(tmp_path))
    run = open_run(tmp_path, options=OpenOptions(keep_going=True))
    (failed,) = compute_metrics(run, keep_going=True).failed
    assert (failed.rank, failed.path) == (1, str(tmp_path / "rank1.json"))


def test_a_long_envelope_before_the_events_is_read(tmp_path):
    path = k.write(tmp_path / "host_1.2.pt.trace.json", STEP)
    whole = {"metadata": {"notes": "x" * (3 << 20)}, **json.loads(path.read_text())}
    path.write_text(json.dumps(whole))
    assert compute_metrics(open_run(tmp_path)).ranks == (0,)


def test_a_rank_without_a_file_is_said_in_the_first_line(folder, tmp_path):
    (folder / NAMES[5]).unlink()
    assert invoke("metrics", folder).stdout.startswith("7 of 8 ranks")
    assert "7 of 8 ranks: 0-4, 6-7; missing: 5" in invoke("info", folder).stdout
    page = tmp_path / "page.html"
    invoke("report", folder, "--no-path", "-o", page)
    assert "of 8 ranks" in page.read_text()
    second = invoke("compare", folder, folder).stdout.splitlines()[1]
    assert second == "before: 7 of 8 ranks"


def test_compare_names_the_file_and_the_run(folder, tmp_path):
    whole = shutil.copytree(folder, tmp_path / "whole")
    bad = folder / NAMES[2]
    spoil(bad, "empty")
    error = invoke("compare", whole, folder, code=1).stderr
    assert f"AFTER ({folder}): {bad}: cannot be read: empty" in error
    lines = invoke("compare", whole, folder, "--keep-going", code=3).stdout.splitlines()
    assert lines[1] == "after: 7 of 8 ranks"
    assert lines[2].startswith("after: skipped rank 2:")


def test_info_and_ingest_list_a_rank_that_cannot_be_read(folder, tmp_path):
    spoil(folder / NAMES[2], "empty")
    assert NAMES[2] in invoke("info", folder, code=1).stderr
    found = json.loads(invoke("info", folder, "--keep-going", "--json", code=3).stdout)
    assert [each["path"] for each in found["failed"]] == [str(folder / NAMES[2])]
    assert invoke("info", folder, "--keep-going", code=3).stdout.startswith("skipped: ")
    invoke("ingest", folder, "-o", tmp_path / "store", "--keep-going", code=3)
    stored = json.loads(invoke("metrics", tmp_path / "store", "--json", code=3).stdout)
    direct = json.loads(invoke("metrics", folder, "--json", "--keep-going", code=3).stdout)
    assert stored["failed"] == direct["failed"]
    assert stored["world_size"] == 8


def test_convert_keeps_going(folder, tmp_path):
    spoil(folder / NAMES[2], "empty")
    out = tmp_path / "all.json"
    assert NAMES[2] in invoke("convert", folder, "-o", out, code=1).stderr
    result = invoke("convert", folder, "-o", out, "--keep-going", code=3)
    assert "of 7 ranks" in result.stdout
    assert NAMES[2] in result.stderr


def test_a_log_of_the_inspector_that_is_empty_is_an_error_or_skipped(tmp_path):
    for rank in range(3):
        record = {
            "header": {"id": "0x7f", "rank": rank, "n_ranks": 3, "nnodes": 1},
            "metadata": {"inspector_output_format_version": "v4.0", "pid": rank},
            "coll_perf": {"coll": "AllReduce", "coll_sn": 1, "coll_msg_size_bytes": 8},
        }
        (tmp_path / f"nccl-{rank}.log").write_text(json.dumps(record) + "\n")
    assert open_run(tmp_path).ranks == (0, 1, 2)
    (tmp_path / "nccl-1.log").write_text("")
    with pytest.raises(TraceFileError, match=r"nccl-1\.log: cannot be read: the file is empty"):
        open_run(tmp_path)
    run = open_run(tmp_path, options=OpenOptions(keep_going=True))
    assert run.ranks == (0, 2)
    assert [each.path for each in run.skipped] == [str(tmp_path / "nccl-1.log")]


def test_a_table_that_is_damaged_is_an_error_or_skipped(tmp_path):
    write_table(TableJob(), tmp_path / "0")
    bad = tmp_path / "1" / "table.parquet"
    bad.parent.mkdir()
    bad.write_bytes(b"PAR1")
    with pytest.raises(TraceFileError, match=r"1/table\.parquet: no readable Parquet"):
        open_run(tmp_path)
    run = open_run(tmp_path, options=OpenOptions(keep_going=True))
    assert [each.path for each in run.skipped] == [str(bad)]


def test_the_rank_is_found_behind_many_groups(tmp_path):
    groups = [{"pg_name": str(each), "ranks": list(range(8))} for each in range(2000)]
    for rank in range(2):
        path = tmp_path / f"host_{rank}.1.pt.trace.json"
        k.write(path, STEP, rank=rank, world=2)
        whole = json.loads(path.read_text())
        info = {"pg_config": groups, **whole["distributedInfo"]}
        path.write_text(json.dumps(whole | {"distributedInfo": info}))
    assert open_run(tmp_path).ranks == (0, 1)


@pytest.mark.compiled
@pytest.mark.skipif(not H100.exists(), reason="the shared traces are not here")
def test_a_trace_whose_metadata_comes_first_is_one_for_every_command(tmp_path):
    path = shutil.copyfile(H100, tmp_path / H100.name)
    assert invoke("metrics", path).stdout.startswith("1 rank,")
    assert "1 rank, 1 step: " in invoke("stats", path).stdout
    out = tmp_path / "all.json"
    assert "1699 events of 1 rank (uniform)" in invoke("convert", path, "-o", out).stdout
    assert "replayed 49.34 ms a step" in invoke("replay", path).stdout
    error = invoke("stragglers", path, code=1).stderr
    assert "a trace (kineto)" in error
    assert f"fastcomm metrics {path}" in error


@pytest.mark.skipif(not TRIAL.exists(), reason="the shared trial is not here")
def test_a_trial_and_a_uniform_trace_say_which_commands_read_them(tmp_path):
    error = invoke("metrics", TRIAL, code=1).stderr
    assert "a dPRO trial, which `fastcomm stats`, `replay` and `convert` read" in error
    out = tmp_path / "all.json"
    invoke("convert", TRIAL, "-o", out)
    for command in ("metrics", "info", "critical-path"):
        assert "a uniform trace" in invoke(command, out, code=1).stderr
    assert "has no dependencies to replay" in invoke("replay", out, code=1).stderr
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


def test_a_file_that_may_be_read_again_is(folder):
    bad = folder / NAMES[0]
    bad.chmod(0)
    for above in (folder, *folder.parents[:4]):
        above.chmod(above.stat().st_mode | 0o055)
    with nobody(), pytest.raises(TraceFileError, match="Permission denied"):
        open_run(folder)
    bad.chmod(0o644)
    with nobody():
        assert len(open_run(folder).ranks) == 8


def test_a_profiler_trace_named_like_a_trial_is_no_trial(tmp_path):
    k.write(tmp_path / "trace.json.gz", STEP)
    assert "1 rank, " in invoke("stats", tmp_path).stdout
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
def test_what_is_packed_says_how_to_unpack_it(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"\x1f\x8b" + bytes(100))
    for path in (tmp_path / name, tmp_path):
        error = invoke("metrics", path, code=1).stderr
        assert words in error
        assert error.count("\n") == 1


def test_a_packed_rank_among_others_is_an_error_or_skipped(folder):
    path = (folder / NAMES[4]).rename(folder / "rank4.json.xz")
    assert "rank4.json.xz" in invoke("metrics", folder, code=1).stderr
    found = json.loads(invoke("metrics", folder, "--keep-going", "--json", code=3).stdout)
    assert [(each["rank"], each["path"]) for each in found["failed"]] == [(4, str(path))]
    path.rename(folder / "old.tar.gz")
    assert "not read: " in " ".join(open_run(folder).warnings)


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
def test_what_is_no_json_is_told_by_its_bytes_and_never_printed(tmp_path, data, words):
    path = tmp_path / "rank0.json"
    path.write_bytes(data)
    error = invoke("metrics", path, code=1).stderr
    assert words in error
    assert error.isascii()
    assert "\\x" not in error


def test_standard_input_is_one_clear_line():
    for command in ("metrics", "info"):
        error = invoke(command, "-", code=1).stderr
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


def test_a_url_of_compare_is_no_local_path(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    error = invoke("compare", "s3://bucket/a", "s3://bucket/b", code=1).stderr
    assert "BEFORE (s3://bucket/a): s3://bucket/a: " in error


def test_no_error_is_a_dump_of_bytes_for_any_command(tmp_path):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(bytes(range(256)) * 40))
    for command in ("metrics", "info", "stats", "replay", "critical-path"):
        words = [sys.executable, "-m", "fastcomm", command, str(path)]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        assert result.returncode == 1
        assert len(result.stderr) < 500
        assert "Traceback" not in result.stderr


STDIN = {
    "metrics": (),
    "stats": (),
    "replay": (),
    "stragglers": (),
    "convert": ("-o", "x.json"),
}


@pytest.mark.parametrize(("command", "more"), STDIN.items())
def test_standard_input_is_the_same_line_for_every_command(command, more, tmp_path):
    more = [tmp_path / word if word.endswith("json") else word for word in more]
    assert invoke(command, "-", *more, code=1).stderr == (
        "Error: -: standard input cannot be read, since a trace is read more than once; "
        "write it to a file first\n"
    )


def test_the_second_run_of_stats_is_no_standard_input(tmp_path):
    path = k.write(tmp_path / "rank0.json", STEP)
    error = invoke("stats", path, "--compare", "-", code=1).stderr
    assert error.startswith("Error: -: standard input cannot be read")


@pytest.mark.parametrize(("name", "words"), PACKED.items())
def test_a_table_of_operations_that_is_packed_says_how_to_unpack_it(tmp_path, name, words):
    path = tmp_path / name
    path.write_bytes(b"\x1f\x8b" + bytes(100))
    error = invoke("stragglers", path, code=1).stderr
    assert error == invoke("metrics", path, code=1).stderr
    assert words in error


@pytest.fixture
def pair(tmp_path):
    """Four ranks of which one is missing and another is damaged."""
    traces = tmp_path / "traces"
    write(Job.of(4, steps=2, layers=2, micro_batches=2), traces)
    (traces / "rank2.pt.trace.json.gz").unlink()
    spoil(traces / "rank3.pt.trace.json.gz", "cut")
    return traces


@pytest.mark.parametrize("command", ["stats", "replay"])
def test_statistics_and_replays_skip_bad_ranks_and_count_the_missing(command, pair, tmp_path):
    assert "rank3.pt.trace" in invoke(command, pair, code=1).stderr
    done = invoke(command, pair, "--keep-going", "--json", code=3)
    found = json.loads(done.stdout)
    assert found["expected_ranks"] == 4
    assert [each["rank"] for each in found["failed"]] == [3]
    assert "skipped: rank 3: " in done.stderr
    assert "2 of 4 ranks" in invoke(command, pair, "--keep-going", code=3).stdout
    (pair / "rank3.pt.trace.json.gz").unlink()
    found = json.loads(invoke(command, pair, "--json").stdout)
    assert (found["expected_ranks"], found["failed"]) == (4, [])
    assert list(found["ranks"]) == (
        [0, 1] if command == "replay" else ["host0.rank0", "host0.rank1"]
    )
    error = invoke(command, TRIAL, "--keep-going", code=1).stderr
    assert "--keep-going is for traces" in error


def test_a_comparison_of_statistics_skips_bad_ranks_of_either_run(pair):
    done = invoke("stats", pair, "--compare", pair, "--keep-going", code=3)
    assert done.stderr.count("skipped: rank 3: ") == 2


def test_ingest_and_compare_name_missing_ranks_and_foreign_files(folder, tmp_path):
    store = tmp_path / "store"
    assert f"{store}: 8 ranks, " in invoke("ingest", folder, "-o", store).stderr
    whole = shutil.copytree(folder, tmp_path / "whole")
    (folder / NAMES[5]).unlink()
    (folder / "config.json").write_text('{"model": "x"}')
    missing = "1 of 8 ranks has no trace here: 5\n"
    store = tmp_path / "another"
    error = invoke("ingest", folder, "-o", store).stderr
    assert f"{store}: 7 of 8 ranks, " in error
    assert f"warning: no traces, not read in {folder}: config.json\n" in error
    assert f"warning: {missing}" in error
    error = invoke("compare", whole, folder, "--json").stderr
    assert f"warning: after: no traces, not read in {folder}: config.json\n" in error
    assert f"warning: after: {missing}" in error
    assert "before: no traces" not in error
    kept = tmp_path / "kept.json"
    kept.write_text(invoke("metrics", folder, "--json").stdout)
    error = invoke("compare", kept, whole).stderr
    assert f"warning: before: no traces, not read in {folder}: config.json\n" in error


def test_ingest_counts_ranks_that_are_skipped(folder, tmp_path):
    bad = folder / NAMES[2]
    spoil(bad, "empty")
    error = invoke("ingest", folder, "-o", tmp_path / "store", "--keep-going", code=3).stderr
    assert "7 of 8 ranks, " in error
    assert f"skipped: rank 2: {bad}: " in error


def test_conversion_to_chakra_names_missing_ranks_and_foreign_files(folder, tmp_path):
    (folder / NAMES[5]).unlink()
    (folder / "config.json").write_text('{"model": "x"}')
    error = invoke("convert", folder, "--to", "chakra", "-o", tmp_path / "chakra").stderr
    assert f"warning: no traces, not read in {folder}: config.json\n" in error
    assert "warning: 1 of 8 ranks has no trace here: 5\n" in error


def info_behind(path, **info):
    """A trace whose `distributedInfo` stands behind its events."""
    whole = k.document(STEP, **info)
    whole["distributedInfo"] = whole.pop("distributedInfo")
    path.write_text(json.dumps(whole))


def test_a_world_that_is_told_behind_the_events_counts_the_missing_ranks(tmp_path):
    folder, store = tmp_path / "traces", tmp_path / "store"
    folder.mkdir()
    for rank in (0, 2):
        info_behind(folder / f"rank{rank}.json", rank=rank, world=6)
    missing = "4 of 6 ranks have no trace here: 1, 3-5"
    invoke("ingest", folder, "-o", store)
    for paths in ([folder], [store], [folder, "--ranks", "0"]):
        found = json.loads(invoke("metrics", *paths, "--json").stdout)
        assert [text for text in found["warnings"] if "no trace here" in text] == [missing]
        assert found["world_size"] == 6
    for path in (folder, store):
        found = json.loads(invoke("info", path, "--json").stdout)
        assert (found["world_size"], found["missing"]) == (6, [1, 3, 4, 5])
        assert not any("no trace here" in text for text in found["warnings"])
    alone = compute_metrics(open_run(folder / "rank2.json"))
    assert "5 of 6 ranks have no trace here: 0-1, 3-5" in alone.warnings


def test_no_number_of_ranks_is_made_up_where_no_trace_says_it(tmp_path):
    for rank in (0, 2):
        k.write(tmp_path / f"rank{rank}.json", STEP, distributedInfo={})
    found = compute_metrics(open_run(tmp_path))
    assert "ranks have no trace here: 1" in found.warnings


@pytest.mark.parametrize(("sizes", "product"), [(["--dp", 2], 2), (["--dp", 3], 3)])
def test_sizes_that_differ_from_the_number_of_ranks_are_an_error(tmp_path, sizes, product):
    for rank in range(8):
        k.write(tmp_path / f"rank{rank}.json", STEP, distributedInfo={})
    error = invoke("metrics", tmp_path, *sizes, code=1).stderr
    assert f"times dp = {product} is {product}; wanted the world's 8 ranks" in error
    for more in (["--dp", 8], ["--dp", 4, "--tp", 2], ["--tp", 2]):
        invoke("metrics", tmp_path, *more)


@pytest.mark.parametrize("name", ["rank7.JSON", "rank7.Json.Gz", "rank7.PT.TRACE.JSON"])
def test_endings_are_matched_without_regard_to_case(tmp_path, name):
    for rank in range(7):
        k.write(tmp_path / f"rank{rank}.json", STEP, distributedInfo={})
    text = json.dumps(k.document(STEP, distributedInfo={})).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("Gz") else text)
    assert open_run(tmp_path).ranks == tuple(range(8))


@pytest.mark.parametrize(
    "name", ["rank7.gz", "rank7.trace", "rank7.txt", "rank7", "rank7.json/"]
)
def test_a_file_named_after_a_rank_with_another_ending_is_named_in_a_warning(tmp_path, name):
    for rank in range(7):
        k.write(tmp_path / f"rank{rank}.json", STEP, distributedInfo={})
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text("x")
    run = open_run(tmp_path)
    assert run.ranks == tuple(range(7))
    assert run.warnings == (f"no traces, not read in {tmp_path}: {name.rstrip('/')}",)


def test_many_files_are_named_in_one_line_and_those_of_ranks_that_are_read_are_not(tmp_path):
    k.write(tmp_path / "rank0.json", STEP, distributedInfo={})
    for rank in range(100):
        (tmp_path / f"rank{rank}.txt").write_text("x")
    (warning,) = open_run(tmp_path).warnings
    assert warning.startswith(f"no traces, not read in {tmp_path}: rank1.txt, rank10.txt, ")
    assert warning.endswith(" and 87 more")


def test_foreign_files_of_several_directories_are_named_by_their_paths(folder):
    (folder / "node0").mkdir()
    for path in (folder / "a.json", folder / "node0" / "b.json"):
        path.write_text('{"x": 1}')
    (warning,) = open_run(folder).warnings
    assert warning == f"no traces, not read: {folder}/a.json, {folder}/node0/b.json"


@pytest.mark.parametrize(
    ("text", "is_foreign"),
    [
        ('{"meta": {"traceEvents": []}, "x": 1}', True),
        ('{"a": {"b": "}", "traceEvents": []}}', True),
        ('{"x": {"traceEvents": []}, "traceEvents": [{"ph": "X", "cat": "kernel"}]}', False),
        ('{"x": {"y": 1}, "traceEvents": []}', False),
    ],
)
def test_a_list_of_events_inside_of_another_object_makes_no_trace(folder, text, is_foreign):
    (folder / "nested.json").write_text(text)
    if is_foreign:
        run = open_run(folder)
        assert run.warnings == (f"no traces, not read in {folder}: nested.json",)
    else:
        with pytest.raises(TraceFileError, match=r"nested\.json: "):
            open_run(folder)


@pytest.mark.parametrize(("bad", "gone"), [((3, 5), ()), ((3,), (5,))])
def test_an_unreadable_rank_has_no_number_where_several_are_possible(folder, bad, gone):
    for rank in gone:
        (folder / NAMES[rank]).unlink()
    for rank in bad:
        spoil(folder / NAMES[rank], "empty")
    run = open_run(folder, options=OpenOptions(keep_going=True))
    assert [each.rank for each in run.skipped] == [None] * len(bad)
    lines = invoke("metrics", folder, "--keep-going", code=3).stdout.splitlines()
    assert lines[0].startswith("6 of 8 ranks")
    assert lines[1].startswith("skipped: rank of unknown number:")


@pytest.mark.compiled
@pytest.mark.parametrize("part", [0.5, 0.95])
def test_a_rank_of_which_no_step_is_whole_is_not_among_the_measured_ones(tmp_path, part):
    write(Job.of(ranks=4, tp=2, dp=2, steps=2, straggler=None), tmp_path)
    path = sorted(tmp_path.glob("*"))[1]
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text[: int(part * len(text))]))
    done = invoke("metrics", tmp_path, "--allow-truncated")
    assert done.stdout.startswith("3 of 4 ranks, 2 iterations")
    assert "no step of rank 1 counts" in " ".join(done.stdout.split())
    assert "healthy" not in done.stdout
    assert "None of the 3 ranks that were measured stands apart" in " ".join(
        done.stdout.split()
    )
    found = compute_metrics(open_run(tmp_path, options=OpenOptions(allow_truncated=True)))
    assert (found.ranks, found.measured_ranks) == ((0, 1, 2, 3), (0, 2, 3))


@pytest.mark.compiled
def test_waiting_for_a_rank_that_is_missing_is_not_called_transfer(tmp_path):
    write(Job.of(ranks=4, tp=1, dp=4, steps=3, hidden=8192, link_speed=4 * 10**9), tmp_path)
    whole = exposed(tmp_path)
    assert "of it is waiting for the last rank;" in whole.text
    sorted(tmp_path.glob("*"))[0].unlink()
    part = exposed(tmp_path)
    assert "that was measured, and waiting for the missing ranks is not known;" in part.text
    assert part.confidence != "high"


def exposed(folder):
    found = compute_metrics(open_run(folder))
    return next(each for each in found.findings if each.kind == "exposed_communication")
