"""Test `fastcomm ingest`: writing, resuming and errors."""

import json
import os
import shutil
import subprocess
import sys
from time import sleep

import duckdb
import pytest
from builders import kineto_text as k
from builders.commands import contents, invoke
from builders.opened import open_run

import fastcomm
from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.formats.config import Config
from fastcomm.formats.store import writer
from fastcomm.formats.store.layout import LAYOUT, read_manifest, to_json
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant
from fastcomm.synthetic.traces import write
from fastcomm.trace.rank_grid import Parallel

STEP = [
    k.mark("ProfilerStep#0", 0, 100),
    k.kernel("gemm", 5, 30),
    *(
        k.all_reduce(
            20 + 10 * n, 5, Process_Group_Ranks="[0, 1, 2]", Process_Group_Description="mesh_tp"
        )
        for n in range(3)
    ),
]


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(3):
        k.write(folder / f"rank{rank}.json", STEP, rank=rank, world=3)
    return folder


def change(path):
    """The same trace, written at another time."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))


def test_a_store_opens_like_its_run(traces, tmp_path):
    result = invoke("ingest", traces, "-o", tmp_path / "store")
    assert "store: 3 ranks, 15 events" in result.stderr
    assert result.stdout == ""
    names = {path.name for path in (tmp_path / "store").iterdir()}
    assert names == {
        "fastcomm.json",
        *(f"{name}.parquet" for name in ("ranks", "groups", "iterations")),
        *(f"rank-{rank:05d}.parquet" for rank in range(3)),
    }
    printed = [
        invoke("metrics", path, "--json").stdout for path in (traces, tmp_path / "store")
    ]
    assert printed[0] == printed[1]


def test_the_manifest_lists_the_source_of_each_rank(traces, tmp_path):
    ingest(plan([traces], tmp_path / "store"))
    said = json.loads((tmp_path / "store" / "fastcomm.json").read_text())
    assert said["layout"] == LAYOUT
    assert said["version"] == fastcomm.__version__
    assert said["complete"] is True
    assert (said["world_size"], said["expected"]) == (3, [0, 1, 2])
    one = said["ranks"][1]
    assert one["file"] == "rank-00001.parquet"
    assert one["source"] == str(traces / "rank1.json")
    assert one["fingerprint"]["size"] == (traces / "rank1.json").stat().st_size
    assert one["clock_note"] == {
        "offset_ns": 0,
        "spread_ns": 0,
        "matches": 3,
        "reference": 0,
        "applies": False,
    }
    manifest = read_manifest(tmp_path / "store")
    assert json.loads(to_json(manifest)) == said


def test_the_same_run_gives_the_same_bytes_with_any_number_of_workers(tmp_path):
    write(Job.of(ranks=3, steps=1, layers=1), tmp_path / "traces")
    folders = [tmp_path / f"store{workers}" for workers in (1, 2)]
    for workers, folder in zip((1, 2), folders, strict=True):
        invoke("ingest", tmp_path / "traces", "-o", folder, "--workers", workers)
    assert contents(folders[0]) == contents(folders[1])


def test_unchanged_ranks_are_not_read_again(traces, tmp_path):
    store = tmp_path / "store"
    assert ingest(plan([traces], store)).written == (0, 1, 2)
    before = contents(store)
    again = ingest(plan([traces], store))
    assert (again.written, again.kept) == ((), (0, 1, 2))
    assert contents(store) == before
    change(traces / "rank1.json")
    assert ingest(plan([traces], store)).written == (1,)
    assert (
        "unchanged since the last ingest, not stored again: ranks 0-2"
        in invoke("ingest", traces, "-o", store).stderr
    )


def test_unchanged_ranks_are_recognized_under_another_path(traces, tmp_path):
    ingest(plan([traces], tmp_path / "store"))
    shutil.copytree(traces, tmp_path / "moved")  # with the times of the files
    assert ingest(plan([tmp_path / "moved"], tmp_path / "store")).kept == (0, 1, 2)


def test_several_ranks_of_one_report_are_stored_apart(tmp_path):
    write_nsys(Job.of(ranks=4, steps=1), tmp_path / "reports", per_report=2)
    found = ingest(plan([tmp_path / "reports"], tmp_path / "store"))
    assert found.written == (0, 1, 2, 3)
    assert ingest(plan([tmp_path / "reports"], tmp_path / "store")).kept == (0, 1, 2, 3)
    assert len({entry.source for entry in found.manifest.ranks}) == 2
    size = sum(path.stat().st_size for path in (tmp_path / "reports").iterdir())
    said = invoke("ingest", tmp_path / "reports", "-o", tmp_path / "store").stderr
    assert f"(the traces: {size / 1e6:.2f} MB)" in said


@pytest.mark.parametrize(
    "options",
    [
        Config(parallel=Parallel(tp=3)),
        Config(clock="host", iterations="Prof"),
        Config(guess_tags=True),
        Config(allow_truncated=True),
    ],
    ids=["parallel", "iterations", "guess", "truncated"],
)
def test_ranks_are_read_again_after_options_change(traces, tmp_path, options):
    store = tmp_path / "store"
    ingest(plan([traces], store))
    assert ingest(plan([traces], store, config=options)).written == (0, 1, 2)
    assert ingest(plan([traces], store, config=options)).written == ()


def test_ranks_are_read_again_by_another_release(traces, tmp_path, monkeypatch):
    ingest(plan([traces], tmp_path / "store"))
    monkeypatch.setattr("fastcomm.ingest.ingest.__version__", "99")
    assert ingest(plan([traces], tmp_path / "store")).written == (0, 1, 2)


def test_a_damaged_rank_of_the_store_is_written_again(traces, tmp_path):
    store = tmp_path / "store"
    ingest(plan([traces], store))
    path = store / "rank-00001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    assert ingest(plan([traces], store)).written == (1,)
    assert path.read_bytes() == whole


def test_an_interrupted_store_is_refused_until_it_is_resumed(traces, tmp_path, monkeypatch):
    store = tmp_path / "store"
    ingest(plan([traces], tmp_path / "whole"))
    written = writer.write

    def fail(trace, path, provenance):
        if trace.meta.rank == 1:
            (path.parent / f".{path.name}.1.unfinished").write_bytes(b"PAR1")
            raise OSError(28, "No space left on device")
        written(trace, path, provenance)

    monkeypatch.setattr(writer, "write", fail)
    with pytest.raises(FastcommError, match=r"rank-00001.parquet: No space left on device"):
        ingest(plan([traces], store))
    with pytest.raises(TraceFileError, match="not whole: 1 of 3 ranks; the same `fastcomm"):
        open_run(store)
    monkeypatch.setattr(writer, "write", written)
    again = ingest(plan([traces], store))
    assert (again.written, again.kept) == ((1, 2), (0,))
    assert contents(store) == contents(tmp_path / "whole")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Traces that an ingest takes some time to read, and their store."""
    folder = tmp_path_factory.mktemp("large")
    write(Job.of(ranks=8, steps=2, layers=1), folder / "traces", filler_bytes=5_000_000)
    ingest(plan([folder / "traces"], folder / "store"))
    return folder / "traces", folder / "store"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_ingest_is_resumed_by_the_next(large, tmp_path, workers):
    traces, whole = large
    words = ["ingest", traces, "-o", tmp_path / "store", "--workers", workers]
    started = subprocess.Popen([sys.executable, "-m", "fastcomm", *map(str, words)])
    while started.poll() is None and not list((tmp_path / "store").glob("rank-*")):
        sleep(0.001)
    started.kill()
    started.wait()
    with pytest.raises(TraceFileError, match="not whole"):
        open_run(tmp_path / "store")
    again = ingest(plan([traces], tmp_path / "store"))
    assert again.kept
    assert sorted(again.written + again.kept) == list(range(8))
    assert contents(tmp_path / "store") == contents(whole)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_unreadable_rank_is_an_error_or_skipped(traces, tmp_path, workers):
    store = tmp_path / "store"
    path = traces / "rank1.json"
    path.write_text(path.read_text()[:-200])
    words = ("ingest", traces, "-o", store, "--workers", workers)
    assert "rank1.json: truncated" in invoke(*words, code=1).stderr
    result = invoke(*words, "--keep-going", code=3)
    assert "skipped: rank 1: " in result.stderr
    run = open_run(store)
    assert run.ranks == (0, 2)
    assert any("left out when the run was stored: rank 1" in note for note in run.warnings)
    assert read_manifest(store).failed[0].rank == 1
    invoke("ingest", traces, "-o", store, "--allow-truncated")
    assert open_run(store).ranks == (0, 1, 2)


def test_a_rank_that_became_unreadable_leaves_no_old_file(traces, tmp_path):
    store = tmp_path / "store"
    ingest(plan([traces], store))
    (traces / "rank1.json").write_text('{"traceEvents": [')
    found = ingest(plan([traces], store, config=Config(keep_going=True)))
    assert found.kept == (0, 2)
    assert not (store / "rank-00001.parquet").exists()


def test_skipping_all_ranks_is_an_error(tmp_path):
    (tmp_path / "rank0.json").write_text('{"traceEvents": [')
    with pytest.raises(FastcommError, match="no rank could be read"):
        ingest(
            plan(
                [tmp_path / "rank0.json"],
                tmp_path / "store",
                config=Config(keep_going=True),
            )
        )


def test_ingest_can_be_limited_to_ranks(traces, tmp_path):
    store = tmp_path / "store"
    invoke("ingest", traces, "-o", store, "--ranks", "0,2")
    assert open_run(store).ranks == (0, 2)
    with pytest.raises(ConfigError, match="a store with rank 2, which this run does not have"):
        plan([traces], store, ranks=[0, 1])
    invoke("ingest", traces, "-o", store)
    assert open_run(store).ranks == (0, 1, 2)


def test_the_rank_of_a_single_file_may_follow_its_events(tmp_path):
    path = tmp_path / "on_demand.json"
    events = ", ".join(json.dumps(event) for event in STEP)
    info = '"distributedInfo": {"rank": 3, "world_size": 8}'
    path.write_text(f'{{"schemaVersion": 1, "traceEvents": [{events}], {info}}}')
    for _ in range(2):
        assert ingest(plan([path], tmp_path / "store")).manifest.expected == (3,)
    assert (tmp_path / "store" / "rank-00003.parquet").exists()
    assert open_run(tmp_path / "store").read(3).meta.world_size == 8


def test_a_directory_with_other_files_is_refused(traces, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    plan([traces], other)  # empty
    (other / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"other: has files and no fastcomm.json"):
        plan([traces], other)
    with pytest.raises(ConfigError, match=r"thesis.tex: a file; name a directory"):
        plan([traces], other / "thesis.tex")
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_an_output_that_overlaps_the_input_is_refused(traces, tmp_path):
    with pytest.raises(ConfigError, match="is the input"):
        plan([traces], traces)
    with pytest.raises(ConfigError, match=r"store: lies in .*traces, which is read"):
        plan([traces], traces / "store")
    with pytest.raises(ConfigError, match=r"rank0.json lies in it, which is read"):
        plan([traces / "rank0.json"], tmp_path)
    invoke("ingest", traces, "-o", traces, code=2)


def test_a_store_of_a_store_is_the_same_run(traces, tmp_path):
    ingest(plan([traces], tmp_path / "one"))
    ingest(plan([tmp_path / "one"], tmp_path / "two"))
    runs = [open_run(tmp_path / name) for name in ("one", "two")]
    one, two = (compute_metrics(run).to_dict() for run in runs)
    assert one == two


def manifest(**members):
    """Text of a manifest of the layout that is read."""
    return json.dumps({"layout": LAYOUT, **members})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged, not JSON"),
        ("[]", "damaged, not a JSON object"),
        (
            '{"layout": 99}',
            f"a store of layout 99, this fastcomm reads layout {LAYOUT}; remove",
        ),
        ("{}", "a store of layout None"),
        (manifest(), "damaged"),
        (manifest(version="1", complete=True, ranks=[], more=1), "damaged"),
        (
            manifest(version="1", complete=True, ranks=[], failed=[], tables=[]),
            "a store without a rank",
        ),
    ],
)
def test_an_invalid_manifest_is_an_error_with_its_path(tmp_path, text, message):
    (tmp_path / "fastcomm.json").write_text(text)
    with pytest.raises(TraceFileError, match=message) as raised:
        open_run(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_manifest_cannot_name_files_outside_its_store(traces, tmp_path):
    ingest(plan([traces], tmp_path / "store"))
    path = tmp_path / "store" / "fastcomm.json"
    path.write_text(path.read_text().replace("rank-00001", "../rank-00001"))
    with pytest.raises(TraceFileError, match="rank 1 in file"):
        open_run(tmp_path / "store")


def test_clocks_that_disagree_are_in_the_manifest_and_in_the_table_of_ranks(tmp_path):
    (tmp_path / "traces").mkdir()
    for rank, ahead in enumerate((0, 7_000_000, 0)):
        events = [{**event, "ts": event["ts"] + ahead} for event in STEP]
        k.write(tmp_path / "traces" / f"rank{rank}.json", events, rank=rank, world=3)
    found = ingest(plan([tmp_path / "traces"], tmp_path / "store"))
    notes = [entry.clock_note for entry in found.manifest.ranks]
    assert [note.offset_ns for note in notes] == [0, 7_000_000_000, 0]
    assert [note.applies for note in notes] == [False, True, False]
    rows = duckdb.sql(
        f"""SELECT e.rank, min(e.start - r.clock_correction_ns)
        FROM '{tmp_path}/store/rank-*.parquet' e JOIN '{tmp_path}/store/ranks.parquet' r
        USING (rank) WHERE op IS NOT NULL GROUP BY e.rank ORDER BY e.rank"""
    ).fetchall()
    assert rows == [(0, 20_000), (1, 20_000), (2, 20_000)]


def test_the_clocks_of_reports_that_disagree_are_found(tmp_path):
    skewed = NsysVariant(clock_skew_ns={1: 30_000_000, 2: -4_000_000})
    job = Job.of(ranks=4, steps=2, layers=2)
    write_nsys(job, tmp_path / "reports", variant=skewed)
    found = ingest(plan([tmp_path / "reports"], tmp_path / "store"))
    notes = [entry.clock_note for entry in found.manifest.ranks]
    assert [note.applies for note in notes] == [False, True, True, False]
    for note, skew in zip(notes, (0, 30_000_000, -4_000_000, 0), strict=True):
        assert note.reference == 0
        assert abs(note.offset_ns - skew) < 100_000
        assert note.matches > 20


def test_a_store_contains_no_environment(traces, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2hunter2")
    path = traces / "rank0.json"
    said = json.loads(path.read_text())
    said |= {"host_name": "node-of-hunter2", "env": {"KEY": "hunter2hunter2"}}
    path.write_text(json.dumps(said))
    ingest(plan([traces], tmp_path / "store"))
    for text in contents(tmp_path / "store").values():
        assert b"hunter2" not in text


def test_the_store_of_another_run_is_not_overwritten(tmp_path):
    for name, seed in (("first", 1), ("second", 2)):
        write(Job.of(ranks=2, steps=1, layers=1, seed=seed), tmp_path / name)
    store = tmp_path / "store"
    invoke("ingest", tmp_path / "first", "-o", store)
    done = invoke("ingest", tmp_path / "second", "-o", store, code=2)
    assert "which is another run; name another directory" in done.stderr
    (tmp_path / "first").rename(tmp_path / "moved")
    invoke("ingest", tmp_path / "moved", "-o", store)
