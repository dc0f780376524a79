"""Test that ranks without a trace are counted and named."""

import gzip
import json
import shutil

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.opened import open_run
from builders.rank_folders import NAMES, STEP, spoil, write_ranks

from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write


@pytest.fixture
def folder(tmp_path):
    """Eight ranks, named as TensorBoard names them."""
    return write_ranks(tmp_path / "traces")


def test_missing_ranks_are_in_the_first_line(folder, tmp_path):
    (folder / NAMES[5]).unlink()
    assert invoke("metrics", folder).stdout.startswith("7 of 8 ranks")
    assert "7 of 8 ranks: 0-4, 6-7; missing: 5" in invoke("info", folder).stdout
    page = tmp_path / "page.html"
    invoke("report", folder, "--no-path", "--html", page)
    assert "of 8 ranks" in page.read_text()
    first = invoke("compare", folder, folder).stdout.splitlines()[0]
    assert first == "No difference (before: 7 of 8 ranks)"


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
    error = invoke("convert", folder, tmp_path / "chakra", "--to", "chakra").stderr
    assert f"warning: no traces, not read in {folder}: config.json\n" in error
    assert "warning: 1 of 8 ranks has no trace here: 5\n" in error


def info_behind(path, **info):
    """A trace whose `distributedInfo` stands behind its events."""
    whole = k.document(STEP, **info)
    whole["distributedInfo"] = whole.pop("distributedInfo")
    path.write_text(json.dumps(whole))


def test_a_world_size_after_the_events_counts_missing_ranks(tmp_path):
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


def test_an_unrecorded_world_size_is_not_guessed(tmp_path):
    for rank in (0, 2):
        k.write(tmp_path / f"rank{rank}.json", STEP, distributedInfo={})
    found = compute_metrics(open_run(tmp_path))
    assert "ranks have no trace here: 1" in found.warnings


@pytest.mark.parametrize(("sizes", "product"), [(["--dp", 2], 2), (["--dp", 3], 3)])
def test_sizes_that_differ_from_the_number_of_ranks_are_an_error(tmp_path, sizes, product):
    for rank in range(8):
        k.write(tmp_path / f"rank{rank}.json", STEP, distributedInfo={})
    error = invoke("metrics", tmp_path, *sizes, code=2).stderr
    assert f"times dp = {product}, is {product}: expected the world size 8" in error
    for more in (["--dp", 8], ["--dp", 4, "--tp", 2], ["--tp", 2]):
        invoke("metrics", tmp_path, *more)


@pytest.mark.parametrize("name", ["rank7.JSON", "rank7.Json.Gz", "rank7.PT.TRACE.JSON"])
def test_file_endings_are_case_insensitive(tmp_path, name):
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


def test_ignored_files_are_named_in_one_line(tmp_path):
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


@pytest.mark.parametrize(("bad", "gone"), [((3, 5), ()), ((3,), (5,))])
def test_an_unreadable_rank_has_no_number_where_several_are_possible(folder, bad, gone):
    for rank in gone:
        (folder / NAMES[rank]).unlink()
    for rank in bad:
        spoil(folder / NAMES[rank], "empty")
    run = open_run(folder, config=Config(keep_going=True))
    assert [each.rank for each in run.skipped] == [None] * len(bad)
    lines = invoke("metrics", folder, "--keep-going", code=3).stdout.splitlines()
    assert lines[0].startswith("6 of 8 ranks")
    assert lines[1].startswith("skipped: rank of unknown number:")


@pytest.mark.parametrize("part", [0.5, 0.95])
def test_a_rank_without_a_complete_step_is_not_measured(tmp_path, part):
    write(Job.of(ranks=4, tp=2, dp=2, steps=2, layers=2, straggler=None), tmp_path)
    path = sorted(tmp_path.glob("*"))[1]
    text = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(text[: int(part * len(text))]))
    done = invoke("metrics", tmp_path, "--allow-truncated")
    assert done.stdout.startswith("3 of 4 ranks, 2 steps")
    assert "no step of rank 1 counts" in " ".join(done.stdout.split())
    assert "healthy" not in done.stdout
    assert "None of the 3 ranks that were measured stands apart" in " ".join(
        done.stdout.split()
    )
    found = compute_metrics(open_run(tmp_path, config=Config(allow_truncated=True)))
    assert (found.ranks, found.measured_ranks) == ((0, 1, 2, 3), (0, 2, 3))


def test_waiting_for_a_missing_rank_is_not_transfer(tmp_path):
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
