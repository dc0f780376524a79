"""Test exports whose tables have versions in their names, and exports without kernels."""

import json
import sqlite3
from contextlib import closing

import pytest
from builders.commands import invoke
from builders.nsys_report import COPY, KERNEL, MEMSET, NVTX, RUNTIME, SMALL
from builders.opened import open_run

from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic.nsys.export import write_nsys


@pytest.fixture(scope="module", params=["sqlite", "parquetdir"])
def export(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    (path,) = write_nsys(SMALL, folder, kind=request.param, ranks=[0])
    return path


def copied(export, tmp_path):
    """The export in a folder of its own."""
    path = tmp_path / export.name
    if export.is_file():
        path.write_bytes(export.read_bytes())
    else:
        path.mkdir()
        for file in export.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
    return path


def rename(path, table, name):
    if path.is_file():
        with closing(sqlite3.connect(path)) as database:
            database.execute(f'ALTER TABLE "{table}" RENAME TO "{name}"')
            database.commit()
    else:
        (path / f"{table}.parquet").rename(path / f"{name}.parquet")


def run(path, statement):
    with closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()


@pytest.mark.parametrize(
    "names",
    [
        {KERNEL: f"{KERNEL}_V3"},
        {KERNEL: f"{KERNEL}_v12", COPY: f"{COPY}_V2"},
        {KERNEL: f"{KERNEL}_4", RUNTIME: f"{RUNTIME}_V3"},
    ],
)
def test_a_table_with_a_version_in_its_name_is_read(export, tmp_path, names):
    wanted = compute_metrics(open_run(export)).to_dict()
    path = copied(export, tmp_path)
    for table, name in names.items():
        rename(path, table, name)
    assert compute_metrics(open_run(path)).to_dict() == wanted


def test_of_several_versions_the_newest_with_rows_is_read(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    wanted = compute_metrics(open_run(path)).to_dict()
    for name in (f"{KERNEL}_V2", f"{KERNEL}_V10"):
        run(path, f'CREATE TABLE "{name}" AS SELECT * FROM {KERNEL} LIMIT 5')
    assert compute_metrics(open_run(path)).to_dict() == wanted
    rename(path, KERNEL, f"{KERNEL}_V11")
    run(path, f'CREATE TABLE {KERNEL} AS SELECT * FROM "{KERNEL}_V11" WHERE 0')
    assert compute_metrics(open_run(path)).to_dict() == wanted


def test_other_tables_with_like_names_are_not_read(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    wanted = compute_metrics(open_run(path)).to_dict()
    run(path, f"CREATE VIEW {KERNEL}_SUMMARY AS SELECT 1")
    run(path, f'CREATE TABLE "{NVTX}_OLD" AS SELECT 1 AS x')
    assert compute_metrics(open_run(path)).to_dict() == wanted


def test_a_view_in_place_of_a_version_of_a_table_is_refused(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    rename(path, KERNEL, "hidden")
    run(path, f'CREATE VIEW "{KERNEL}_V3" AS SELECT * FROM hidden')
    assert f"{KERNEL}_V3 is a view" in invoke("metrics", path, code=1).stderr


NO_WORK = [f"DROP TABLE {table}" for table in (KERNEL, COPY, MEMSET)]
ONLY_GRAPHS = [
    f"DELETE FROM {RUNTIME} WHERE nameId NOT IN (SELECT id FROM StringIds WHERE value LIKE "
    "'%LaunchKernel%')",
    "UPDATE StringIds SET value = 'cudaGraphLaunch_v10000' WHERE value LIKE '%LaunchKernel%'",
]


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        ([f"DROP TABLE {KERNEL}"], "no table of kernels"),
        ([f"DROP TABLE {KERNEL}", f"DROP TABLE {RUNTIME}"], "no table of kernels"),
        ([f"DELETE FROM {KERNEL}"], "has no kernel of the process, though"),
        ([f'ALTER TABLE {KERNEL} RENAME TO "OTHER_KERNELS"'], "no table of kernels"),
        (NO_WORK, "no table of kernels"),
        ([*NO_WORK, f"DROP TABLE {NVTX}"], "no table of kernels"),
        ([*NO_WORK, f"ALTER TABLE {RUNTIME} RENAME TO {RUNTIME}_V3"], "no table of kernels"),
        ([*NO_WORK, *ONLY_GRAPHS], "no table of kernels"),
        ([*NO_WORK[1:], f"DELETE FROM {KERNEL}"], "has no kernel of the process, though"),
    ],
)
def test_without_kernels_compute_is_not_available(tmp_path, statements, words):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    for statement in statements:
        run(path, statement)
    data = json.loads(invoke("metrics", path, "--json").stdout)
    exact = data["breakdown"]["exact"]
    assert {exact[name] for name in ("compute", "idle", "memcpy", "exposed_DP")} == {None}
    assert data["overlap"]["average_overlap_ratio"] is None
    assert any(words in text for text in data["warnings"])
    assert any("no kernels" in reason["reason"] for reason in data["unknown"])
    for command in ("info", "report"):
        more = ("--html", tmp_path / "page.html") if command == "report" else ()
        invoke(command, path, *more)


def test_a_process_that_launches_nothing_but_copies_computes_nothing(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    run(path, f"DELETE FROM {KERNEL}")
    run(
        path,
        f"DELETE FROM {RUNTIME} WHERE nameId IN (SELECT id FROM StringIds WHERE value LIKE "
        "'%Launch%')",
    )
    data = json.loads(invoke("metrics", path, "--json").stdout)
    assert data["breakdown"]["exact"]["compute"] == 0


@pytest.mark.parametrize(
    ("kind", "ends", "is_communication"),
    [
        (10, (0, 1), True),
        (8, (0, 1), True),
        (8, (0, 0), False),
        (8, (0, None), False),
        (8, None, False),  # exports without the columns
        (1, (0, 1), False),
    ],
)
def test_copies_between_devices_are_communication(tmp_path, kind, ends, is_communication):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    run(path, f"UPDATE {COPY} SET copyKind = {kind}")
    for place, name in enumerate(("srcDeviceId", "dstDeviceId")):
        if ends is None:
            run(path, f"ALTER TABLE {COPY} DROP COLUMN {name}")
        else:
            end = "NULL" if ends[place] is None else ends[place]
            run(path, f"UPDATE {COPY} SET {name} = {end}")
    exact = json.loads(invoke("metrics", path, "--json").stdout)["breakdown"]["exact"]
    assert (exact["memcpy"] < 1e-6) == is_communication  # what is left are memsets
