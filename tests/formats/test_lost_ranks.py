"""Test that every rank is in the result, among the skipped ranks, or in an error."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.examples import in_gate
from builders.fault_tools import nobody
from builders.opened import open_run
from builders.rank_folders import NAMES, STEP, spoil, write_ranks
from builders.replay_data import TRIAL, needed
from builders.shared_data import needs, path_of
from hypothesis import given
from hypothesis import strategies as st
from oracles import directories as oracle

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.synthetic.job import Job, TableJob, write_table
from fastcomm.synthetic.traces import write

H100 = path_of("kineto/h100_qwen/Qwen1.5-0.5B-Chat.json.gz")


STATES = st.one_of(
    st.just(oracle.GOOD),
    st.just(oracle.GOOD),
    st.sampled_from([oracle.UPPER, *oracle.UNREAD]),
    st.sampled_from([oracle.MISSING, *oracle.DAMAGES]),
)


@pytest.fixture
def folder(tmp_path):
    """Eight ranks, named as TensorBoard names them."""
    return write_ranks(tmp_path / "traces")


@in_gate(10)
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
    run = open_run(folder, config=Config(keep_going=keep_going))
    return compute_metrics(run, MetricsOptions(with_tables=False))


def check_kept_on(folder, good, bad, world, foreign):
    """With `keep_going` every damaged file is among the skipped ones, by its path."""
    if not good:
        with pytest.raises(FastcommError):
            measured(folder, keep_going=True)
        return
    found = measured(folder, keep_going=True)
    assert set(found.ranks) == good
    assert {each.path for each in found.skipped} == set(map(str, bad))
    assert all(any(name in note for note in found.warnings) for name in foreign)
    known = good | {each.rank for each in found.skipped} - {None}
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


def test_a_tensorboard_file_without_permission_is_an_error_or_skipped(public):
    folder = write_ranks(public / "traces")
    invoke("metrics", folder)  # imports modules, which others may be unable to read
    bad = folder / NAMES[0]
    bad.chmod(0)
    with nobody():
        assert (
            f"{bad}: cannot be read: Permission denied"
            in invoke("metrics", folder, code=1).stderr
        )
        run = open_run(folder, config=Config(keep_going=True))
    assert run.ranks == tuple(range(1, 8))
    assert [each.path for each in run.skipped] == [str(bad)]


def test_a_directory_that_cannot_be_listed_is_skipped_with_its_path(public):
    folder = write_ranks(public / "traces")
    invoke("metrics", folder)  # imports modules, which others may be unable to read
    locked = folder / "node7"
    locked.mkdir(mode=0)
    with nobody():
        assert f"{locked}: Permission denied" in invoke("metrics", folder, code=1).stderr
        run = open_run(folder, config=Config(keep_going=True))
    locked.chmod(0o755)
    assert [each.path for each in run.skipped] == [str(locked)]


def test_a_damaged_file_named_like_the_traces_is_not_ignored(tmp_path):
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


def test_compare_names_the_file_and_the_run(folder, tmp_path):
    whole = shutil.copytree(folder, tmp_path / "whole")
    bad = folder / NAMES[2]
    spoil(bad, "empty")
    error = invoke("compare", whole, folder, code=1).stderr
    assert f"AFTER ({folder}): {bad}: cannot be read: empty" in error
    lines = invoke("compare", whole, folder, "--keep-going", code=3).stdout.splitlines()
    assert lines[0] == "No difference (after: 7 of 8 ranks)"
    assert lines[1].startswith("after: skipped rank 2:")


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


def test_convert_skips_unreadable_ranks_with_keep_going(folder, tmp_path):
    spoil(folder / NAMES[2], "empty")
    out = tmp_path / "all.json"
    assert NAMES[2] in invoke("convert", folder, out, code=1).stderr
    result = invoke("convert", folder, out, "--keep-going", code=3)
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
    run = open_run(tmp_path, config=Config(keep_going=True))
    assert run.ranks == (0, 2)
    assert [each.path for each in run.skipped] == [str(tmp_path / "nccl-1.log")]


def test_a_table_that_is_damaged_is_an_error_or_skipped(tmp_path):
    write_table(TableJob(), tmp_path / "0")
    bad = tmp_path / "1" / "table.parquet"
    bad.parent.mkdir()
    bad.write_bytes(b"PAR1")
    with pytest.raises(TraceFileError, match=r"1/table\.parquet: not a readable Parquet"):
        open_run(tmp_path)
    run = open_run(tmp_path, config=Config(keep_going=True))
    assert [each.path for each in run.skipped] == [str(bad)]


def test_the_rank_after_a_long_list_of_groups_is_found(tmp_path):
    groups = [{"pg_name": str(each), "ranks": list(range(8))} for each in range(2000)]
    for rank in range(2):
        path = tmp_path / f"host_{rank}.1.pt.trace.json"
        k.write(path, STEP, rank=rank, world=2)
        whole = json.loads(path.read_text())
        info = {"pg_config": groups, **whole["distributedInfo"]}
        path.write_text(json.dumps(whole | {"distributedInfo": info}))
    assert open_run(tmp_path).ranks == (0, 1)


@needs("kineto")
def test_every_command_reads_a_trace_that_begins_with_metadata(tmp_path):
    path = shutil.copyfile(H100, tmp_path / H100.name)
    assert invoke("metrics", path).stdout.startswith("1 rank,")
    assert "1 rank, 1 step." in invoke("kernels", path).stdout
    out = tmp_path / "all.json"
    assert "1699 events of 1 rank (uniform)" in invoke("convert", path, out).stdout
    assert "49.38 ms; " in invoke("what-if", path).stdout
    error = invoke("stragglers", path, code=1).stderr
    assert "a trace (kineto)" in error
    assert f"fastcomm metrics {path}" in error


def test_a_file_that_becomes_readable_is_read(public):
    folder = write_ranks(public / "traces")
    open_run(folder)  # imports modules, which others may be unable to read
    bad = folder / NAMES[0]
    bad.chmod(0)
    with nobody(), pytest.raises(TraceFileError, match="Permission denied"):
        open_run(folder)
    bad.chmod(0o644)
    with nobody():
        assert len(open_run(folder).ranks) == 8


def test_a_packed_trace_among_others_is_an_error_or_skipped(folder):
    path = (folder / NAMES[4]).rename(folder / "rank4.json.xz")
    assert "rank4.json.xz" in invoke("metrics", folder, code=1).stderr
    found = json.loads(invoke("metrics", folder, "--keep-going", "--json", code=3).stdout)
    assert [(each["rank"], each["path"]) for each in found["failed"]] == [(4, str(path))]
    path.rename(folder / "old.tar.gz")
    assert "not read: " in " ".join(open_run(folder).warnings)


@pytest.fixture
def pair(tmp_path):
    """Four ranks of which one is missing and another is damaged."""
    traces = tmp_path / "traces"
    write(Job.of(4, steps=2, layers=2, micro_batches=2), traces)
    (traces / "rank2.pt.trace.json.gz").unlink()
    spoil(traces / "rank3.pt.trace.json.gz", "cut")
    return traces


@pytest.mark.parametrize("command", ["kernels", "what-if"])
def test_sums_and_replays_skip_bad_ranks_and_count_the_missing(command, pair, tmp_path):
    assert "rank3.pt.trace" in invoke(command, pair, code=1).stderr
    done = invoke(command, pair, "--keep-going", "--json", code=3)
    found = json.loads(done.stdout)
    assert found["expected_ranks"] == 4
    assert [each["rank"] for each in found["failed"]] == [3]
    assert "skipped: rank 3: " in done.stderr
    (pair / "rank3.pt.trace.json.gz").unlink()
    found = json.loads(invoke(command, pair, "--json").stdout)
    assert (found["expected_ranks"], found["failed"]) == (4, [])
    assert found["ranks"] == [0, 1]


@needed
@pytest.mark.parametrize("command", ["stats", "replay"])
def test_keep_going_is_refused_for_trials(command):
    error = invoke("dpro", command, TRIAL, "--keep-going", code=2).stderr
    assert "No such option '--keep-going'" in error


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
        assert "nested.json: not read: it is of no rank" in open_run(folder).warnings[0]
