"""Test that runs at URLs are read like local files."""

import json
import shutil
import tempfile
from pathlib import Path

import fsspec
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from builders import kineto_text as k
from click.testing import CliRunner

from fastcomm import files
from fastcomm.cli.main import main
from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.formats.nsys.sqlite import Database
from fastcomm.formats.opening import open_run
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.traces import write

STEP = [
    k.mark("ProfilerStep#0", 0, 100),
    k.kernel("gemm", 5, 30),
    k.all_reduce(20, 5, Process_Group_Ranks="[0, 1]", Process_Group_Description="mesh_tp"),
]
CARD = """\
workload: {hardware: {network_topo: {bandwidth_gbps: [400, 3600]}}}
Model-executor: {model_plan_parallelization: {tp: 2}}
"""


def invoke(*words, code=0):
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output + result.stderr
    return result


def measured(path, *words):
    """What metrics says of a run, but for where it is."""
    text = invoke("metrics", path, "--json", *words).stdout
    return text.replace(str(path).rstrip("/"), "PLACE")


@pytest.fixture
def memory():
    """A folder of the file system of fsspec that is in this process's memory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def upload(system, folder, target):
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe(f"{target}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"memory://{target}"


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "run"
    for rank in range(2):
        path = folder / f"node{rank}" / f"rank{rank}.json"
        path.parent.mkdir(parents=True)
        k.write(path, STEP, rank=rank, world=2)
    (folder / "run.yaml").write_text(CARD)
    return folder


def test_remote_json_with_a_card_measures_like_local_files(traces, memory):
    url = upload(memory, traces, "/jobs/run")
    assert measured(url) == measured(traces)
    assert measured(f"{url}/") == measured(traces)
    assert json.loads(measured(url))["link_bandwidth"] is None
    named = json.loads(invoke("metrics", f"{url}/node*/rank*.json", "--json").stdout)
    assert named["ranks"] == [0, 1]
    one = json.loads(invoke("metrics", f"{url}/node1/rank1.json", "--json").stdout)
    assert one["ranks"] == [1]


def test_remote_gzipped_json_measures_like_local_files(tmp_path, memory):
    write(Job.of(ranks=2, steps=1, layers=1), tmp_path / "run")
    assert measured(upload(memory, tmp_path / "run", "/gz")) == measured(tmp_path / "run")


@pytest.mark.parametrize("whole", [False, True])
def test_a_remote_store_measures_like_a_local_one(traces, tmp_path, memory, whole):
    invoke("ingest", traces, "-o", tmp_path / "store")
    url = upload(memory, tmp_path / "store", "/store")
    if not whole:
        assert measured(url) == measured(tmp_path / "store")
        here, there = (
            json.loads(invoke("info", path, "--json").stdout)
            for path in (tmp_path / "store", url)
        )
        assert there == here
        return
    here, there = (
        json.loads(invoke("critical-path", path, "--json").stdout)
        for path in (tmp_path / "store", url)
    )
    assert here.pop("path_of_trace") != there.pop("path_of_trace")
    assert there == here


def staged():
    return list(Path(tempfile.gettempdir()).glob("fastcomm-*"))


@pytest.mark.parametrize("form", ["sqlite", "parquetdir", "arrowdir"])
def test_a_remote_nsys_export_measures_like_a_local_one(tmp_path, memory, form, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    write_nsys(Job.of(ranks=2, steps=1, layers=1), tmp_path / "run", kind=form)
    url = upload(memory, tmp_path / "run", "/nsys")
    assert measured(url) == measured(tmp_path / "run")
    assert staged() == []


def test_the_temporary_copy_of_a_sqlite_file_is_removed(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_nsys(Job.of(ranks=2, steps=1, layers=1), tmp_path / "run")
    url = upload(memory, tmp_path / "run", "/nsys")
    (report, *_) = files.place(url).iterdir()
    database = Database(report)
    assert len(staged()) == 1
    assert database.columns()
    del database
    assert staged() == []


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_remote_tables_of_operations_measure_like_local_ones(tmp_path, memory, suffix):
    config = tmp_path / "table.toml"
    config.write_text(
        '[table]\nrank = "rank"\nkind = "op"\nstart = "t0"\nstop = "t1"\nunit = "us"\n'
        '[table.kinds]\ngemm = "compute"\nreduce = "AllReduce"\n'
    )
    (tmp_path / "run").mkdir()
    rows = "rank,op,t0,t1\n0,gemm,0,5\n0,reduce,5,9\n1,gemm,0,6\n1,reduce,6,9\n"
    (tmp_path / "run" / "ops.csv").write_text(rows)
    if suffix == ".parquet":
        table = pa_csv.read_csv(tmp_path / "run" / "ops.csv")
        pq.write_table(table, tmp_path / "run" / "ops.parquet")
        (tmp_path / "run" / "ops.csv").unlink()
    url = upload(memory, tmp_path / "run", "/table")
    memory.pipe("/table.toml", config.read_bytes())
    here = measured(tmp_path / "run", "--config", config)
    assert measured(url, "--config", "memory:///table.toml") == here


def test_a_rank_is_ingested_from_a_url_once(traces, tmp_path, memory):
    url = upload(memory, traces, "/run")
    invoke("ingest", url, "-o", tmp_path / "store")
    assert "not stored again" in invoke("ingest", url, "-o", tmp_path / "store").stderr
    assert open_run(tmp_path / "store").ranks == (0, 1)


def test_a_damaged_remote_file_is_an_error_with_its_url(traces, memory):
    url = upload(memory, traces, "/run")
    memory.pipe("/run/node0/rank0.json", b'{"traceEvents": [')
    error = invoke("metrics", url, code=1).stderr
    assert "memory://run/node0/rank0.json: truncated" in error
    with pytest.raises(FastcommError, match=r"memory://nothing: no such file or directory"):
        open_run("memory://nothing")
    memory.rm("/run/node0/rank0.json")
    run = open_run(url)
    memory.rm("/run/node1/rank1.json")
    with pytest.raises(TraceFileError, match=r"rank1\.json"):
        run.read(1)


def test_errors_of_a_package_are_reported_with_the_url(traces, memory, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("of a package")

    url = upload(memory, traces, "/run")
    run = open_run(url)
    monkeypatch.setattr(type(memory), "_open", refuse)
    with pytest.raises(TraceFileError, match=r"rank0\.json: RuntimeError: of a package"):
        run.read(0)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/run", "s3fs"),
        ("nonsense://bucket/run", "nonsense"),
    ],
)
def test_a_url_without_its_package_is_an_error(url, words):
    pytest.importorskip("fsspec")
    error = invoke("metrics", url, code=2).stderr
    assert f"{url}: " in error
    assert words in error
    assert "expected a URL of fsspec whose package is installed" in error


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "upath", None)
    with pytest.raises(ConfigError, match=r"pip install 'fastcomm\[remote\]'"):
        open_run("s3://bucket/run")


@pytest.mark.parametrize("command", ["metrics", "ingest", "critical-path", "kernels"])
def test_nothing_is_written_to_a_url(traces, command):
    error = invoke(command, traces, "--output", "s3://bucket/out", code=2).stderr
    assert "--output s3:/" in error
    assert "a URL can be read and not written" in error
    assert not Path("s3:").exists()


def test_a_local_path_needs_no_extra(monkeypatch, traces):
    for name in ("upath", "fsspec"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    shutil.rmtree(traces / "node1")
    assert open_run(traces).ranks == (0,)
