"""Test `fastcomm doctor`: findings, and data that it must not print."""

import getpass
import json
import os
import socket
from pathlib import Path

import pytest
from builders import dask_cluster as c
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.errors import ClusterError
from fastcomm.executors import dask, processes
from fastcomm.formats.store.layout import Manifest, to_json
from fastcomm.info import doctor
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.version import __version__
from fastcomm_kernels import _jit


def invoke(*words, code=0):
    result = CliRunner().invoke(main, ["doctor", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.stdout


def found(*words, code=0):
    return json.loads(invoke(*words, "--json", code=code))["checks"]


def test_doctor_prints_versions_machine_cache_and_a_self_test():
    said = found()
    assert said["fastcomm"]["found"] == f"{__version__} ({processes.code()})"
    assert {"python", "numba", "numpy", "pyarrow", "distributed", "cores", "memory"} <= {*said}
    assert said["cache"]["found"].endswith("B")
    assert said["self-test"] == {
        "found": "a step of known numbers is measured right",
        "state": "ok",
    }
    assert "dask" not in said
    lines = invoke().splitlines()
    assert [line[2:].split()[0] for line in lines] == list(said)


def test_the_time_that_a_group_of_processes_is_granted_is_in_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert found()["cores"]["found"].endswith(", for 1.5 of them time is granted")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert "granted" not in found()["cores"]["found"]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_doctor_prints_no_names_of_users_hosts_or_paths(words, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "who"))
    monkeypatch.setenv("FASTCOMM_TEST_TOKEN", "a-secret-of-the-environment")
    text = invoke(*words, "--dask", "tcp://127.0.0.1:1", "--dask-wait", "0.1", code=1)
    hidden = [getpass.getuser(), socket.gethostname(), "who", "127.0.0.1", "secret"]
    hidden += [str(Path.cwd()), str(_jit.cache_folder()), os.sep + "home", os.sep + "tmp"]
    hidden += [value for value in os.environ.values() if os.sep in value]
    assert [word for word in hidden if word in text] == []


def test_failed_checks_are_marked_and_exit_with_1(monkeypatch):
    monkeypatch.setattr(_jit, "cache_folder", lambda: None)
    monkeypatch.setattr(_jit, "has_jit", lambda: False)
    monkeypatch.setitem(doctor._EXPECTED, "time_ns", 1)
    text = invoke(code=1)
    bad = {line.split()[1]: line for line in text.splitlines() if line.startswith("!")}
    assert {*bad} == {"cache", "kernels", "self-test"}
    assert "set XDG_CACHE_HOME" in bad["cache"]
    assert "time_ns is 9000, expected 1" in bad["self-test"]


def test_a_crash_of_the_self_test_is_reported_by_its_type_only(monkeypatch):
    def broken():
        raise RuntimeError("of /home/somebody")

    monkeypatch.setattr("fastcomm.preparation.run_metric_kernels", broken)
    said = found(code=1)["self-test"]
    assert said == {"found": "failed: RuntimeError", "state": "bad"}


def test_a_missing_optional_package_is_not_a_fault(monkeypatch):
    theirs = processes.installed
    monkeypatch.setattr(
        doctor, "installed", lambda name: None if name == "networkx" else theirs(name)
    )
    said = found()["networkx"]
    assert said == {"found": "not installed: no hta.CPGraph.to_networkx", "state": "ok"}


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: flip(path, 40), "rank 1: its file is missing or damaged"),
        (lambda path: flip(path, -40), "rank 1: its file has another footer"),
        (lambda path: path.write_bytes(b"PAR1"), "rank 1: its file has another size"),
        (lambda path: path.unlink(), "rank 1: its file is missing or damaged"),
    ],
    ids=["page", "footer", "size", "missing"],
)
def test_files_of_a_store_are_compared_with_their_checksums(tmp_path, damage, words):
    write(Job.of(ranks=2, steps=1, layers=1), tmp_path / "traces")
    ingest(plan([tmp_path / "traces"], tmp_path / "store"))
    said = found(tmp_path / "store")["store"]
    assert said == {
        "found": "2 ranks, sizes, footers, pages and tables are as written",
        "state": "ok",
    }
    damage(tmp_path / "store" / "rank-00001.parquet")
    said = found(tmp_path / "store", code=1)["store"]
    assert said["found"].startswith(words)
    assert said["state"] == "bad"


@pytest.mark.parametrize("name", ["ranks", "groups", "iterations"])
def test_tables_of_a_store_are_compared_with_their_checksums(tmp_path, name):
    write(Job.of(ranks=2, steps=1, layers=1), tmp_path / "traces")
    store = tmp_path / "store"
    ingest(plan([tmp_path / "traces"], store))
    for damage in (lambda path: flip(path, 40), lambda path: path.unlink(), os.mkfifo):
        damage(store / f"{name}.parquet")
        assert found(store, code=1)["store"] == {
            "found": f"{name}.parquet: missing, or not what was written; ingest again",
            "state": "bad",
        }


def test_a_table_outside_of_its_store_is_reported(tmp_path):
    write(Job.of(ranks=1, steps=1, layers=1), tmp_path / "traces")
    store = tmp_path / "store"
    ingest(plan([tmp_path / "traces"], store))
    path = store / "fastcomm.json"
    said = json.loads(path.read_text())
    said["tables"][0]["name"] = "../../secret"
    path.write_text(json.dumps(said))
    assert found(store, code=1)["store"]["found"].startswith("cannot be opened")


def test_an_unreadable_or_incomplete_store_is_reported_without_its_path(tmp_path):
    (tmp_path / "fastcomm.json").write_text("{")
    said = found(tmp_path, code=1)["store"]
    assert said == {"found": "cannot be opened: `fastcomm info` says why", "state": "bad"}
    manifest = Manifest(version="1", complete=False)
    (tmp_path / "fastcomm.json").write_text(to_json(manifest))
    assert found(tmp_path, code=1)["store"]["found"].startswith("not whole")


def test_traces_are_reported_as_no_store(tmp_path):
    write(Job.of(ranks=1, steps=1, layers=1), tmp_path)
    for path in (tmp_path, next(tmp_path.iterdir())):
        store = found(path, code=1)["store"]
        assert store["found"].startswith("not a store: ")
        assert "`fastcomm info --all`" in store["found"]


def test_doctor_checks_a_cluster(tmp_path):
    cluster = c.Cluster(tmp_path)
    try:
        cluster.worker("only")
        with dask.connected(cluster.address) as engine:
            engine.client.wait_for_workers(1, timeout=30)
        said = found("--dask", cluster.address)["dask"]
        assert said["found"].startswith("reachable, 1 workers with 1 threads; versions as here")
        assert said["found"].endswith("on a worker a step of known numbers is measured right")
        cluster.kill("only")
        said = found("--dask", cluster.address, code=1)["dask"]
        assert said == {"found": "reachable, 0 workers with 0 threads", "state": "bad"}
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("address", "words"),
    [("nowhere", "no such address, or no extra dask"), ("tcp://127.0.0.1:1", "failed: ")],
)
def test_an_unreachable_cluster_is_reported_without_its_address(address, words):
    said = found("--dask", address, "--dask-wait", "0.1", code=1)["dask"]
    assert said["state"] == "bad"
    assert said["found"].startswith(words)


def test_another_fastcomm_version_on_the_cluster_is_reported(monkeypatch):
    def other(*_, **__):
        raise ClusterError("tcp://somebody:1: fastcomm 9")

    monkeypatch.setattr(dask, "connected", other)
    assert found("--dask", "x:1", code=1)["dask"]["found"] == "failed: runs another fastcomm"
