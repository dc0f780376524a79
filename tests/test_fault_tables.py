"""Test hostile databases, tables and stores: refused or read, and never executed."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.fault_files import beside
from builders.fault_tools import refused, run
from builders.nsys_report import SMALL

from fastcomm import files
from fastcomm.synthetic.nsys.export import write_nsys


@pytest.fixture
def folder(tmp_path):
    return beside(tmp_path)


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


@pytest.fixture
def small_bombs(monkeypatch):
    """What becomes large here is a MiB and not 64."""
    monkeypatch.setattr(files, "SMALL", 1 << 20)


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


def test_a_view_in_place_of_a_table_is_never_evaluated(export):
    names = ", ".join(f'x AS "{name}"' for name in columns_of(export, KERNEL))
    change(
        export,
        f"DROP TABLE {KERNEL}",
        f"CREATE VIEW {KERNEL} AS {ENDLESS} SELECT {names} FROM c",
    )
    assert f"{KERNEL} is a view, a virtual table or has computed" in refused("metrics", export)


def test_a_virtual_table_is_never_queried(export):
    change(export, f"DROP TABLE {NVTX}", f"CREATE VIRTUAL TABLE {NVTX} USING fts5(start, end)")
    assert f"{NVTX} is a view, a virtual table or has computed" in refused("metrics", export)


def test_triggers_and_other_views_have_no_effect(export):
    before = run("metrics", export, "--json")
    change(
        export,
        f"CREATE VIEW other AS {ENDLESS} SELECT x FROM c",
        f"CREATE TRIGGER t AFTER INSERT ON {KERNEL} BEGIN DELETE FROM {KERNEL}; END",
        f"CREATE INDEX i ON {KERNEL} (start)",
    )
    assert run("metrics", export, "--json") == before


def test_a_computed_column_is_never_evaluated(export):
    change(export, f"ALTER TABLE {NVTX} RENAME COLUMN text TO old",
           f"ALTER TABLE {NVTX} ADD COLUMN text AS (hex(zeroblob(400000000)))")  # fmt: skip
    assert f"{NVTX} is a view, a virtual table or has computed" in refused("info", export)


@pytest.mark.usefixtures("small_bombs")
def test_a_default_value_that_expands_is_a_bomb(export):
    change(export, f"ALTER TABLE {NVTX} RENAME COLUMN text TO old",
           f"ALTER TABLE {NVTX} ADD COLUMN text TEXT DEFAULT '{'x' * 500_000}'")  # fmt: skip
    assert "possibly a decompression bomb" in refused("metrics", export)


def rows_of_many(export):
    """Many rows more of one table, so that its pages form a tree of two levels."""
    change(export, *[f"INSERT INTO {KERNEL} SELECT * FROM {KERNEL}"] * 3)
    with closing(sqlite3.connect(export)) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (root,) = database.execute(query, [KERNEL]).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    return (root - 1) * size, size


@pytest.mark.parametrize("leads_to", [-1, 0, 1 << 20, 3])
def test_pages_that_refer_to_each_other_are_refused(export, leads_to):
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


def test_a_file_that_declares_more_rows_than_memory_is_refused(folder):
    pq.write_table(pa.table({"src": pa.array(np.arange(3000))}), folder / "w.parquet")
    whole = (folder / "w.parquet").read_bytes()
    footer = whole.rindex(b"\xf0.") if b"\xf0." in whole else None
    # 3000 as Thrift writes it: its zigzag varint.
    assert footer is not None
    many = whole.replace(b"\xf0.", b"\xff\x7f")
    (folder / "w.parquet").write_bytes(many)
    assert "w.parquet" in refused("dispatch", "compare", folder / "w.parquet")


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


def test_a_link_to_a_file_outside_the_store_is_refused(folder):
    run("ingest", folder / "good.json", "-o", folder / "store")
    file = folder / "store" / "rank-00000.parquet"
    file.rename(folder / "rank-00000.parquet")
    file.symlink_to(folder / "rank-00000.parquet")
    assert "a link out of the store" in refused("metrics", folder / "store")
    assert "a link out of the store" in refused("info", folder / "store")
