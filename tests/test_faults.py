"""Faults of reading: each ends in one line that says where and what, never in a hang."""

import errno
import gzip
import io
import json
import os
import shutil
import socket
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path

import kineto_text as k
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fault_tools import STEP, nobody, refused, run
from nsys_report import SMALL

from fastcomm import inputs
from fastcomm.critical_path.saved import restore_cpgraph
from fastcomm.errors import FastcommError
from fastcomm.readers import blocks, chrome
from fastcomm.readers.nsys.export import Export
from fastcomm.synthetic import write_nsys

pytestmark = pytest.mark.compiled

BASE = json.dumps(k.document(STEP))
OPERATION = {
    "dp_rank": [0],
    "stage": [0],
    "rank": [0],
    "step": [0],
    "optype": ["forward-compute"],
    "start_ts": [0.5],
    "duration": [1.0],
    "seq_id": [0],
}
SEARCH = "isp --world-size 8 --seq-len 4096 --global-batch 4Mi"
TABLE = """
[table]
rank = "rank"
kind = "optype"
start = "start_ts"
duration = "duration"
unit = "s"
kinds = { forward = "compute" }
"""
SHAPE = "--num-nodes 1 --gpus-per-node 8 --experts-per-gpu 1"
# Every command that opens a file of somebody, and what that file is called.
READERS = [
    ("metrics", "rank0.json"),
    ("metrics", "rank0.json.gz"),
    ("metrics", "nsys_0.sqlite"),
    ("metrics", "pipe"),
    ("metrics", "inspector.log"),
    ("metrics", "table.parquet"),
    ("metrics", "table.csv.gz"),
    ("metrics", "rank-00000.parquet"),
    ("info", "rank0.json"),
    ("ingest -o {folder}/store", "rank0.json"),
    ("critical-path", "rank0.json"),
    ("stats", "trace.json"),
    ("convert -o {folder}/out.json", "trace.json"),
    ("stragglers", "trace.parquet"),
    ("stragglers {folder}/good.parquet --meta", "meta.yaml"),
    (f"dispatch compare {SHAPE}", "w.npz"),
    (f"dispatch compare {SHAPE}", "w.npy"),
    (f"dispatch compare {SHAPE}", "w.parquet"),
    ("dispatch generate -o {folder}/w --popularity", "p.txt"),
    (f"dispatch compare {{folder}}/good.npz {SHAPE} --cluster", "c.toml"),
    (f"{SEARCH} --model 7 --cluster", "c.toml"),
    (
        "isp --model 7 --world-size 8 --seq-len 4096 --global-batch 4Mi --calibrate",
        "all_reduce.csv",
    ),
    (f"{SEARCH} --model", "m.toml"),
    ("what-if {folder}/good.json --edits", "e.toml"),
    ("metrics {folder}/good.json --config", "c.toml"),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "good.json").write_text(BASE)
    (tmp_path / "t.toml").write_text(TABLE)
    pq.write_table(pa.table(OPERATION), tmp_path / "good.parquet")
    (tmp_path / "none").mkdir()
    one = np.zeros((1, 1), np.int64)
    np.savez(tmp_path / "good.npz", src_gpu=one[0], target_experts=one)
    return tmp_path


def words_of(command, folder):
    return command.format(folder=folder).split()


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    made = tmp_path_factory.mktemp("made")
    return {
        kind: write_nsys(SMALL, made / kind, ranks=[0], kind=kind)[0]
        for kind in ("sqlite", "parquetdir", "arrowdir")
    }


@pytest.fixture
def export(exports, tmp_path):
    return Path(shutil.copy(exports["sqlite"], tmp_path / "nsys_0.sqlite"))


# --------------------------------------------------------------- files that are none


def ends(command, name, folder):
    """What is said of a file, unless click refuses the word before we see it."""
    code, said = run(*words_of(command, folder), folder / name)
    assert code in (1, 2), said
    assert "Error: " in said
    return said


@pytest.mark.parametrize(("command", "name"), READERS)
def test_a_pipe_is_refused_and_not_waited_for(folder, command, name):
    os.mkfifo(folder / name)
    assert "pipe; wanted a file" in ends(command, name, folder)


def test_a_device_and_a_socket_are_refused(folder):
    (folder / "rank0.json").symlink_to("/dev/zero")
    assert "rank0.json: a device; wanted a file" in refused("metrics", folder / "rank0.json")
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(folder / "rank1.json"))
        assert "rank1.json: " in refused("metrics", folder / "rank1.json")


@pytest.mark.parametrize("name", ["rank0.json", "nsys_0.sqlite", "rank-00000.parquet"])
def test_a_directory_named_like_a_file_is_searched_and_found_empty(folder, name):
    (folder / name).mkdir()
    assert f"{name}: no trace; wanted" in refused("metrics", folder / name)


@pytest.mark.parametrize(
    ("command", "name"), [pair for pair in READERS if "none" not in pair[0]]
)
def test_a_file_without_permission_is_refused(tmp_path_factory, folder, command, name):
    (folder / name).write_text("{}")
    (folder / name).chmod(0)
    for above in (folder, *folder.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055)
    folder.chmod(0o777)
    with nobody():
        said = ends(command, name, folder)
    assert "ermission denied" in said or "not readable" in said


def test_a_directory_without_permission_is_an_error_with_its_path(folder):
    locked = folder / "none"
    locked.chmod(0)
    for above in (folder, *folder.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055)
    with nobody():
        assert f"{locked}: Permission denied" in refused("metrics", folder)
    locked.chmod(0o755)


def test_a_link_to_itself_is_no_trace(folder):
    (folder / "rank5.json").symlink_to("rank5.json")
    said = refused("metrics", folder / "rank5.json")
    assert "no such file" in said or "symbolic links" in said
    (folder / "good.json").rename(folder / "rank0.json")
    assert run("metrics", folder)[0] == 0


def test_a_link_to_the_directory_above_is_followed_no_further(folder):
    (folder / "good.json").rename(folder / "none" / "rank0.json")
    (folder / "none" / "up").symlink_to("..")
    code, said = run("metrics", folder, "--json")
    assert code == 0, said
    assert json.loads(said)["ranks"] == [0]


# --------------------------------------------------- files that change or fail meanwhile


class Failing(io.BytesIO):
    """A file whose disk fails behind the first block."""

    def read(self, size=-1):
        if self.tell():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(min(size, 1000) if size > 0 else size)


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz", "inspector.log"])
def test_a_read_error_inside_a_file_is_an_error_with_its_path(folder, name, monkeypatch):
    text = BASE.encode() * 9 if name != "inspector.log" else b'{"coll_perf": 1}\n' * 999
    (folder / name).write_bytes(gzip.compress(text, 0) if name.endswith("gz") else text)
    whole = (folder / name).read_bytes()
    monkeypatch.setattr(blocks, "opened", lambda _: Failing(whole))
    assert f"{name}: Input/output error" in refused("metrics", folder / name)


@pytest.mark.parametrize(("command", "name"), READERS)
def test_a_file_that_the_system_cannot_read_is_an_error(folder, command, name):
    # The memory of a process is a file whose first byte nobody can read.
    (folder / name).symlink_to("/proc/self/mem")
    said = ends(command, name, folder)
    assert "Error: " in said


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz"])
def test_a_file_that_is_replaced_while_it_is_read_is_an_error(folder, name, monkeypatch):
    path = folder / name
    k.write(path, STEP)

    def replacing(asked):
        found = inputs.opened(asked)
        if path.stat().st_size == size:
            k.write(folder / ("other" + name), [*STEP, *STEP])
            (folder / ("other" + name)).replace(path)
        return found

    size = path.stat().st_size
    run("metrics", path)  # what rank it is, is known by now
    monkeypatch.setattr(blocks, "opened", replacing)
    assert f"{name}: changed while it was read; wait" in refused("metrics", path)


def test_a_file_that_is_cut_after_it_was_read_does_no_harm(exports, tmp_path):
    path = shutil.copytree(exports["arrowdir"], tmp_path / "arrows")
    rows = Export(path).rows("CUPTI_ACTIVITY_KIND_KERNEL", ("start", "end"))
    file = path / "CUPTI_ACTIVITY_KIND_KERNEL.arrow"
    os.truncate(file, 0)  # a mapped file would end us with SIGBUS from here on
    assert rows.count > 0
    assert (rows["end"] >= rows["start"]).all()
    assert str(file) in refused("metrics", path)


# ------------------------------------------------------------------------------ bombs


@pytest.fixture
def small_bombs(monkeypatch):
    """What becomes large here is a MiB and not 64."""
    monkeypatch.setattr(inputs, "SMALL", 1 << 20)


def bomb(path, head=b"", body=b" " * (1 << 20), times=4, tail=b""):
    path.write_bytes(gzip.compress(head + body * times + tail))
    return path


OPERATIONS_CSV = b"rank,step,optype,start_ts,duration\n" + b"0,0,forward,0,1\n" * 300_000


@pytest.mark.usefixtures("small_bombs")
def test_a_gzip_bomb_is_refused_unless_the_ratio_is_allowed(folder, monkeypatch):
    head, tail = BASE.encode().split(b'"traceEvents": [')
    path = bomb(folder / "rank0.json.gz", head + b'"traceEvents": [', tail=tail)
    assert "wanted no bomb: FASTCOMM_MAX_RATIO=N" in refused("metrics", path)
    monkeypatch.setenv("FASTCOMM_MAX_RATIO", "2000")
    assert run("metrics", path)[0] == 0
    monkeypatch.setenv("FASTCOMM_MAX_TEXT_GIB", "0.002")
    assert "becomes more than 0.002 GiB; FASTCOMM_MAX_TEXT" in refused("metrics", path)
    monkeypatch.setenv("FASTCOMM_MAX_RATIO", "many")
    assert "FASTCOMM_MAX_RATIO: found 'many'" in refused("metrics", path)


@pytest.mark.usefixtures("small_bombs")
@pytest.mark.parametrize(
    ("command", "name", "head"),
    [
        ("stats", "trace.json", b'{"traceEvents": ['),
        ("metrics", "a.jsonl.gz", b'{"header": 1, "coll_perf": 1}\n'),
        ("metrics --config {folder}/t.toml", "table.csv.gz", OPERATIONS_CSV),
    ],
)
def test_every_reader_of_gzip_refuses_a_bomb(folder, command, name, head):
    path = bomb(folder / name, head)
    assert "wanted no bomb" in refused(*words_of(command, folder), path)


def test_a_document_that_is_too_large_to_be_held_is_refused(folder, monkeypatch):
    run("ingest", folder / "good.json", "-o", folder / "store")
    monkeypatch.setenv("FASTCOMM_MAX_DOCUMENT_GIB", "1e-7")
    said = refused("metrics", folder / "store")
    assert "fastcomm.json: larger than 1e-07 GiB, and needed as a whole; " in said


@pytest.mark.usefixtures("small_bombs")
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("metrics --config {folder}/t.toml", "table.parquet"),
        ("stragglers", "table.parquet"),
        (f"dispatch compare {SHAPE}", "w.parquet"),
        (
            "isp --model 7 --world-size 8 --seq-len 4096 --global-batch 4Mi --calibrate",
            "events.parquet",
        ),
    ],
)
def test_a_parquet_file_of_one_value_a_million_times_is_a_bomb(folder, command, name):
    rows = 1 << 20
    constant = {name: pa.array(np.zeros(rows, np.int64)) for name in OPERATION if name != "op"}
    constant |= {
        "optype": pa.array(["forward-compute"]).take(pa.array(np.zeros(rows, np.int32))),
        "src": pa.array(np.zeros(rows, np.int32)),
        "expert": pa.array(np.zeros(rows, np.int32)),
        **{key: pa.array(np.ones(rows, np.int64)) for key in ("group_size", "bytes")},
        "op": pa.array(np.zeros(rows, np.int32)),
        "duration_ns": pa.array(np.ones(rows, np.int64)),
    }
    pq.write_table(pa.table(constant), folder / name, compression="zstd")
    assert "wanted no bomb" in refused(*words_of(command, folder), folder / name)


@pytest.mark.usefixtures("small_bombs")
def test_a_store_whose_columns_are_a_bomb_is_refused(folder):
    run("ingest", folder / "good.json", "-o", folder / "store")
    path = folder / "store" / "rank-00000.parquet"
    table = pq.read_table(path)
    many = table.take(pa.array(np.zeros(1 << 18, np.int32)))
    pq.write_table(many.replace_schema_metadata(table.schema.metadata), path)
    assert "wanted no bomb" in refused("metrics", folder / "store")


@pytest.mark.usefixtures("small_bombs")
def test_an_npz_bomb_is_refused(folder):
    zeros = np.zeros((1 << 17, 4), np.int64)
    np.savez_compressed(folder / "w.npz", src_gpu=zeros[:, 0], target_experts=zeros)
    assert "wanted no bomb" in refused("dispatch", "compare", folder / "w.npz")


def npy(shape, descr="<i8", data=b""):
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + data


@pytest.mark.parametrize(
    "content",
    [
        npy((1 << 50, 8)),
        npy((1 << 62, 1 << 62)),
        npy((-1, 8)),
        npy((2, 2), data=b"12345678"),
        b"\x93NUMPY\x01\x00\x76\x00{" + b"(" * 116 + b"\n",
        b"\x93NUMPY\x03\x00",
    ],
)
def test_an_array_whose_header_promises_more_than_follows_is_refused(folder, content):
    (folder / "w.npy").write_bytes(content)
    assert "w.npy: no .npy of plain arrays" in refused("dispatch", "compare", folder / "w.npy")
    with zipfile.ZipFile(folder / "w.npz", "w") as archive:
        archive.writestr("src_gpu.npy", content)
        archive.writestr("target_experts.npy", content)
    assert "w.npz: no .npz of plain arrays" in refused("dispatch", "compare", folder / "w.npz")


@pytest.mark.parametrize("name", ["w.npy", "w.npz"])
def test_pickled_objects_in_an_array_are_not_loaded(folder, name):
    class Runs:
        def __reduce__(self):
            return (Path.touch, (folder / "ran",))

    objects = np.array([Runs()], object)
    if name == "w.npy":
        np.save(folder / name, objects, allow_pickle=True)
    else:
        np.savez(folder / name, src_gpu=objects, target_experts=objects)
    assert "no Python object is loaded" in refused("dispatch", "compare", folder / name)
    assert not (folder / "ran").exists()


@pytest.mark.usefixtures("small_bombs")
def test_a_saved_path_with_a_bomb_in_it_is_refused(folder):
    run("critical-path", folder / "good.json", "--save", folder / "path")
    whole = zipfile.ZipFile(folder / "path.zip")
    members = {name: whole.read(name) for name in whole.namelist()}
    many = pq.read_table(io.BytesIO(members["nodes.parquet"]))
    many = many.take(pa.array(np.zeros(1 << 20, np.int32)))
    pq.write_table(many, buffer := io.BytesIO())
    with zipfile.ZipFile(folder / "bomb.zip", "w") as archive:
        for name, content in (members | {"nodes.parquet": buffer.getvalue()}).items():
            archive.writestr(name, content)
    with pytest.raises(FastcommError, match="wanted no bomb"):
        restore_cpgraph(folder / "bomb.zip")
    with zipfile.ZipFile(folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * (1 << 24))
    with pytest.raises(FastcommError, match="compressed or larger"):
        restore_cpgraph(folder / "bomb.zip")


YAML_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_aliases_that_multiply_are_refused(folder):
    (folder / "none" / "rank0.json").write_text(BASE)
    (folder / "none" / "none.yaml").write_text(YAML_BOMB)
    assert "more than 16 YAML aliases" in refused("metrics", folder / "none")
    (folder / "m.yaml").write_text(YAML_BOMB)
    said = refused("stragglers", folder / "good.parquet", "--meta", folder / "m.yaml")
    assert "more than 16 YAML aliases" in said


@pytest.mark.parametrize(
    ("command", "name"), [pair for pair in READERS if pair[1].endswith((".toml", ".yaml"))]
)
def test_a_configuration_that_is_nested_or_huge_is_refused(folder, command, name):
    (folder / name).write_text("a = " + "[" * 100_000)
    assert name in ends(command, name, folder)
    (folder / name).write_text("a: " + "[" * 100_000)
    assert name in ends(command, name, folder)
    (folder / name).write_text("a = " + "9" * 5000)
    assert name in ends(command, name, folder)
    (folder / name).write_text("# " + "x" * (1 << 21))
    assert "larger than 1048576 bytes" in ends(command, name, folder)


# ------------------------------------------------------------------------- strange JSON

DEEP = "[" * 1_000_000 + "]" * 1_000_000


def with_text(folder, old, new, text=BASE):
    assert old in text
    path = folder / "rank0.json"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"stream": 7', '"stream": 7, "x": ' + DEEP),
        ('"schemaVersion": 1', '"schemaVersion": 1, "x": ' + DEEP),
        ('"pg_config": []', '"pg_config": ' + DEEP),
        ('"pg_config": []', '"pg_config": ' + "[" * 100_000),
        ('"[0, 1]"', '"' + "[" * 100_000 + '"'),
        ('"traceEvents": [', '"x": ' + DEEP + ', "traceEvents": ['),
    ],
)
def test_json_nested_a_million_deep_is_read_around_or_refused(folder, old, new):
    path = with_text(folder, old, new)
    for command in ("metrics", "info", "critical-path"):
        code, said = run(command, path)
        assert code == 0 or str(path) in said


def test_other_documents_nested_a_million_deep_are_refused(folder):
    (folder / "trace.json").write_text(DEEP)
    assert "trace.json: " in refused("stats", folder / "trace.json")
    run("ingest", folder / "good.json", "-o", folder / "store")
    (folder / "store" / "fastcomm.json").write_text(DEEP)
    assert "fastcomm.json: damaged" in refused("metrics", folder / "store")


LONG = "9" * 1000


@pytest.mark.parametrize(
    ("old", "new", "warned"),
    [
        ('"ts": 5', '"ts": ' + LONG, "1 of 4 events do not parse"),
        ('"dur": 30', '"dur": ' + LONG, "1 of 4 events do not parse"),
        ('"dur": 30', '"dur": 30.' + LONG, ""),
        ('"dur": 30', '"dur": 1e' + LONG, "1 of 4 events do not parse"),
        ('"In msg nelems": 1000', '"In msg nelems": ' + LONG, ""),
        ('"baseTimeNanoseconds": 0', f'"baseTimeNanoseconds": {LONG}', "absolute time"),
        ('"baseTimeNanoseconds": 0', f'"baseTimeNanoseconds": {1 << 63}', "absolute time"),
        ('"baseTimeNanoseconds": 0', f'"baseTimeNanoseconds": -{1 << 63}', "absolute time"),
    ],
)
def test_numbers_of_a_thousand_digits_cost_their_event_or_are_unknown(folder, old, new, warned):
    code, said = run("info", with_text(folder, old, new))
    assert code == 0, said
    assert warned in said


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rank": 0', '"rank": ' + LONG, "found a rank of more than 4194304"),
        ('"world_size": 1', f'"world_size": {10**15}', "a world size of more than 4194304"),
    ],
)
def test_ranks_that_no_job_has_are_refused(folder, old, new, message):
    assert message in refused("metrics", with_text(folder, old, new))


def test_a_name_of_megabytes_is_read_up_to_a_limit(folder, monkeypatch):
    path = with_text(folder, "gemm", "g" * 10_000_000)
    assert run("metrics", path)[0] == 0
    monkeypatch.setattr(chrome, "_EVENT_LIMIT", 1 << 20)
    assert "is longer than 1 MiB" in refused("metrics", path)


def test_a_name_that_is_no_utf8_is_read(folder):
    path = folder / "rank0.json"
    path.write_bytes(BASE.replace("gemm", "g\udcff\udcfem").encode(errors="surrogateescape"))
    assert run("metrics", path)[0] == 0
    path.write_text(BASE.replace("gemm", r"\ud800\udc00\ud800"))
    assert run("critical-path", path)[0] == 0


def test_a_negative_duration_costs_its_event_and_is_said(folder):
    code, said = run("info", with_text(folder, '"dur": 30', '"dur": -30'))
    assert code == 0
    assert "1 of 4 events do not parse" in said


def test_a_clock_that_jumps_is_read_as_it_stands(folder):
    events = [*STEP, k.kernel("early", -5e12, 3), k.kernel("late", 9e15, 3)]
    path = folder / "rank0.json"
    path.write_text(json.dumps(k.document(events)))
    code, said = run("metrics", path, "--json")
    assert code == 0, said
    assert json.loads(said)["iterations"] == 1


@pytest.mark.parametrize("events", [[], [{"ph": "M", "name": "process_name", "pid": 0}]])
def test_a_trace_without_events_is_refused(folder, events):
    path = folder / "rank0.json"
    path.write_text(json.dumps(k.document(events)))
    assert "rank0.json: no device work, launch or annotation" in refused("metrics", path)


def test_as_many_streams_as_events_take_no_longer_than_one(folder):
    events = [STEP[0], *(k.kernel("g", 5 + n / 1e3, 1, stream=n) for n in range(40_000))]
    path = folder / "rank0.json"
    path.write_text(json.dumps(k.document(events)))
    assert run("metrics", path)[0] == 0


def test_ids_beyond_what_a_float_holds_are_told_apart(folder):
    near = [(1 << 53) + 1, (1 << 53) + 2, (1 << 62) + 1, (1 << 62) + 2]
    events = [STEP[0], *(k.launch(n + 1, each) for n, each in enumerate(near))]
    events += [
        k.kernel("g", 20 + 5 * n, 2, stream=each, correlation=each)
        for n, each in enumerate(near)
    ]
    path = folder / "rank0.json"
    path.write_text(json.dumps(k.document(events)))
    run("ingest", path, "-o", folder / "store")
    stored = pq.read_table(folder / "store" / "rank-00000.parquet").to_pylist()
    assert sorted(row["correlation"] for row in stored if row["name"] == "g") == sorted(near)
    assert {row["thread"] for row in stored if row["name"] == "g"} == set(map(str, near))


def test_a_key_that_stands_twice_has_its_last_value(folder):
    code, said = run("info", with_text(folder, '"dur": 30', '"dur": 7, "dur": 30'))
    assert code == 0, said
    assert "outer object" in refused(
        "metrics", with_text(folder, '"traceEvents"', '"traceEvents": [], "traceEvents"')
    )


# ------------------------------------------------------------------------ hostile SQLite

KERNEL, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"


def change(path, *statements):
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def columns_of(path, table):
    with closing(sqlite3.connect(path)) as database:
        return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


def test_a_view_in_place_of_a_table_is_never_run(export):
    names = ", ".join(f'x AS "{name}"' for name in columns_of(export, KERNEL))
    change(
        export,
        f"DROP TABLE {KERNEL}",
        f"CREATE VIEW {KERNEL} AS {ENDLESS} SELECT {names} FROM c",
    )
    assert f"{KERNEL} is a view, a virtual table or computed" in refused("metrics", export)


def test_a_virtual_table_is_never_asked(export):
    change(export, f"DROP TABLE {NVTX}", f"CREATE VIRTUAL TABLE {NVTX} USING fts5(start, end)")
    assert f"{NVTX} is a view, a virtual table or computed" in refused("metrics", export)


def test_triggers_and_other_views_do_nothing(export):
    before = run("metrics", export, "--json")
    change(
        export,
        f"CREATE VIEW other AS {ENDLESS} SELECT x FROM c",
        f"CREATE TRIGGER t AFTER INSERT ON {KERNEL} BEGIN DELETE FROM {KERNEL}; END",
        f"CREATE INDEX i ON {KERNEL} (start)",
    )
    assert run("metrics", export, "--json") == before


def test_a_column_that_is_computed_is_never_asked(export):
    change(export, f"ALTER TABLE {NVTX} RENAME COLUMN text TO old",
           f"ALTER TABLE {NVTX} ADD COLUMN text AS (hex(zeroblob(400000000)))")  # fmt: skip
    assert f"{NVTX} is a view, a virtual table or computed" in refused("info", export)


@pytest.mark.usefixtures("small_bombs")
def test_a_default_that_multiplies_is_a_bomb(export):
    change(export, f"ALTER TABLE {NVTX} RENAME COLUMN text TO old",
           f"ALTER TABLE {NVTX} ADD COLUMN text TEXT DEFAULT '{'x' * 500_000}'")  # fmt: skip
    assert "wanted no bomb" in refused("metrics", export)


def rows_of_many(export):
    """Many rows more of one table, so that its pages form a tree of two levels."""
    change(export, *[f"INSERT INTO {KERNEL} SELECT * FROM {KERNEL}"] * 3)
    with closing(sqlite3.connect(export)) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (root,) = database.execute(query, [KERNEL]).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    return (root - 1) * size, size


@pytest.mark.parametrize("leads_to", [-1, 0, 1 << 20, 3])
def test_pages_that_lead_to_each_other_are_refused(export, leads_to):
    at, size = rows_of_many(export)
    assert run("info", export)[0] == 0
    whole = bytearray(export.read_bytes())
    assert whole[at] == 5, "an inner page"
    root = at // size + 1
    cells = int.from_bytes(whole[at + 3 : at + 5], "big")
    for place in range(at + 12, at + 12 + 2 * cells, 2):
        cell = at + int.from_bytes(whole[place : place + 2], "big")
        whole[cell : cell + 4] = (root if leads_to < 0 else leads_to).to_bytes(4, "big")
    export.write_bytes(whole)
    assert "malformed: page" in refused("metrics", export)


def test_cells_outside_of_their_page_and_strange_page_sizes_are_refused(export):
    at, _ = rows_of_many(export)
    whole = bytearray(export.read_bytes())
    for place, value in ((at + 12, b"\xff\xff"), (at + 3, b"\xff\xff"), (16, b"\0\3")):
        changed = bytearray(whole)
        changed[place : place + 2] = value
        export.write_bytes(changed)
        assert "malformed: " in refused("metrics", export)


@pytest.mark.parametrize("place", [100, 103, 105, 4096, 4099, 4104, 8192, 8200, 12288, 20480])
def test_pages_with_wrong_bytes_are_an_error_or_read(export, place):
    whole = bytearray(export.read_bytes())
    for value in (0, 2, 5, 13, 255):
        whole[place : place + 4] = bytes([value]) * 4
        export.write_bytes(whole)
        code, said = run("metrics", export)
        assert code == 0 or (code == 1 and str(export) in said)


# ------------------------------------------------------------- hostile Parquet and Arrow


@pytest.mark.parametrize("kind", ["parquetdir", "arrowdir"])
def test_a_table_with_wrong_bytes_is_an_error_or_read(exports, tmp_path, kind):
    folder = Path(shutil.copytree(exports[kind], tmp_path / kind))
    for table in (KERNEL, "StringIds"):
        path = next(folder.glob(f"{table}.*"))
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 12)):
            path.write_bytes(whole[:place] + b"\xff\xff\xff\x7f" + whole[place + 4 :])
            code, said = run("info", folder)
            assert code == 0 or (code == 1 and str(folder) in said)
        path.write_bytes(whole)


def test_a_file_that_says_it_has_more_rows_than_memory_is_refused(folder):
    pq.write_table(pa.table({"src": pa.array(np.arange(3000))}), folder / "w.parquet")
    whole = (folder / "w.parquet").read_bytes()
    footer = whole.rindex(b"\xf0.") if b"\xf0." in whole else None
    # 3000 as Thrift writes it: its zigzag varint.
    assert footer is not None
    many = whole.replace(b"\xf0.", b"\xff\x7f")
    (folder / "w.parquet").write_bytes(many)
    assert "w.parquet" in refused("dispatch", "compare", folder / "w.parquet")


# -------------------------------------------------------------- a store that points away


@pytest.mark.parametrize(
    "name", ["../good.parquet", "/etc/passwd", "..", "", "a/b", "x.parquet"]
)
def test_a_manifest_that_names_another_file_is_refused(folder, name):
    run("ingest", folder / "good.json", "-o", folder / "store")
    manifest = folder / "store" / "fastcomm.json"
    said = json.loads(manifest.read_text())
    said["ranks"][0]["file"] = name
    manifest.write_text(json.dumps(said))
    for command in ("metrics", "info"):
        assert f"in file {name!r}" in refused(command, folder / "store")


def test_a_link_out_of_a_store_is_refused(folder):
    run("ingest", folder / "good.json", "-o", folder / "store")
    file = folder / "store" / "rank-00000.parquet"
    file.rename(folder / "rank-00000.parquet")
    file.symlink_to(folder / "rank-00000.parquet")
    assert "a link out of the store" in refused("metrics", folder / "store")
    assert "a link out of the store" in refused("info", folder / "store")
