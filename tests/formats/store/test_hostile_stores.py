"""Test stores of others: what they state makes no connection, and no command slow or crash."""

import json
import shutil
import socket
from threading import Thread
from time import process_time

import pyarrow.parquet as pq
import pytest
from builders.fault_tools import refused, run

from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

EVIL = r"(.|.)*!$"  # takes years for a name of 60 letters
OTHER = ("--iteration-regex", r"^ProfilerStep#(\d+)$")  # than the store's rules
PATTERN = {"regex": "x", "library": "user", "op": "AllReduce", "tag": None, "fused": False}
RULE = {"field": "description", "value": "x", "tag": "DP"}
GRID = {"tp": 2, "cp": 1, "ep": 1, "dp": 1, "pp": 1, "etp": 2, "dp_replicate": 1}
GRID["order"] = "tp-cp-ep-dp-pp"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Traces of two ranks, and their store."""
    folder = tmp_path_factory.mktemp("stored")
    write(Job.of(ranks=2, steps=1, layers=1), folder / "run")
    assert run("ingest", folder / "run", "-o", folder / "store")[0] == 0
    return folder


@pytest.fixture
def store(stored, tmp_path):
    shutil.copytree(stored / "store", tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def server():
    """The URL of a server that hangs up, and the list of its connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        calls = []

        def serve():
            while True:
                try:
                    connection, address = listening.accept()
                except OSError:
                    return
                calls.append(address)
                connection.close()

        thread = Thread(target=serve)
        thread.start()
        yield f"ftp://127.0.0.1:{listening.getsockname()[1]}/rank1.json", calls
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def set_sources(store, url):
    """State a URL as the source of every rank; one rank could not be read from it."""
    path = store / "fastcomm.json"
    manifest = json.loads(path.read_text())
    manifest["ranks"].pop()
    for entry in manifest["ranks"]:
        entry["source"] = url
    manifest["failed"] = [{"rank": None, "source": url, "error": "damaged"}]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "command",
    [
        "info",
        "metrics --keep-going",
        "critical-path",
        "doctor",
        "ingest -o new",
        "compare store",
    ],
)
def test_a_source_that_is_a_url_is_not_opened(store, server, tmp_path, monkeypatch, command):
    url, calls = server
    set_sources(store, url)
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    code, said = run(name, store, *options)
    assert code in (0, 1, 3), said
    assert not calls


def test_a_source_that_is_a_url_is_not_opened_when_a_run_is_stored_there(stored, store, server):
    url, calls = server
    set_sources(store, url)
    run("ingest", stored / "run", "-o", store)
    assert not calls


def test_a_url_on_the_command_line_is_opened(server):
    pytest.importorskip("upath")
    url, calls = server
    assert "127.0.0.1" in refused("metrics", url)
    assert calls


def change(store, part, **values):
    """Change the options that a store states, everywhere; or what it says of ranks."""
    manifest = json.loads((store / "fastcomm.json").read_text())
    options = manifest["reading"]
    if part != "meta":
        (options if part is None else options[part]).update(values)
    for entry in manifest["ranks"]:
        path = store / entry["file"]
        with pq.ParquetFile(path) as file:
            groups = [file.read_row_group(k) for k in range(file.num_row_groups)]
            about = json.loads(file.metadata.metadata[b"fastcomm"])
        about["reading"] = options
        about["meta"].update(values if part == "meta" else {})
        plain = groups[0].schema.remove_metadata()
        with pq.ParquetWriter(path, plain, store_schema=False) as writer:
            writer.add_key_value_metadata({b"fastcomm": json.dumps(about).encode()})
            for group in groups:
                writer.write_table(group.cast(plain))
        entry["size"] = path.stat().st_size
    (store / "fastcomm.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("iterations", {"regex": "("}),
        ("iterations", {"regex": 5}),
        ("iterations", {"ranges": [[0, -(10**30), 10**30]]}),
        ("iterations", {"ranges": [[0, 9, 1]]}),
        ("iterations", {"ranges": [[0.5, 0, 1]]}),
        ("iterations", {"clock": "sundial"}),
        ("tags", {"grid": {**GRID, "tp": 0}}),
        ("tags", {"grid": {**GRID, "tp": "2"}}),
        ("tags", {"grid": {**GRID, "tp": 1 << 20, "etp": 1 << 20, "dp": 1 << 20}}),
        ("tags", {"grid": {**GRID, "order": 7}}),
        ("tags", {"explicit": [{**RULE, "field": "__class__"}]}),
        ("tags", {"explicit": [{**RULE, "value": 3}]}),
        ("tags", {"explicit": [{**RULE, "tag": "evil"}]}),
        (None, {"patterns": [{**PATTERN, "regex": "("}]}),
        (None, {"patterns": [{**PATTERN, "op": "evil"}]}),
        (None, {"patterns": [{**PATTERN, "tag": "evil"}]}),
        (None, {"patterns": [{**PATTERN, "fused": True}]}),
    ],
)
@pytest.mark.parametrize("options", [(), OTHER])
def test_invalid_options_of_a_store_are_an_error(store, part, values, options):
    change(store, part, **values)
    begun = process_time()
    assert "rank-00000.parquet: " in refused("metrics", store, *options)
    assert process_time() - begun < 10


def test_an_invalid_rule_of_steps_in_a_store_is_an_error(store):
    change(store, "meta", found_by="regex (")
    assert "invalid regular expression '('" in refused("metrics", store)


def test_valid_options_of_a_store_are_restored(store):
    change(store, "iterations", regex=r"Step#(\d+)$")
    change(store, "tags", grid=GRID, explicit=[RULE])
    change(store, None, patterns=[PATTERN])
    code, said = run("metrics", store, *OTHER)
    assert code == 0, said


def test_a_regular_expression_of_a_store_is_matched_in_linear_time(store):
    change(store, None, patterns=[{**PATTERN, "regex": EVIL}])
    code, said = run("metrics", store, *OTHER)
    assert code == 0, said


def test_a_store_has_no_regular_expression_of_unbounded_time(stored, store, tmp_path):
    only = "a file may have only regular expressions that RE2 knows"
    change(store, "iterations", regex="(?=Step)S")
    assert only in refused("metrics", store, *OTHER)
    said = refused(
        "ingest", stored / "run", "-o", tmp_path / "new", "--iteration-regex", "(?=P)"
    )
    assert only in said
    assert not (tmp_path / "new").exists()
