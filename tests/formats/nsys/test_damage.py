"""Test damaged, unusual and newer exports: an error or warning with the place."""

import contextlib
import json
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.commands import quoted
from builders.examples import in_gate
from builders.nsys_report import SMALL
from builders.opened import open_run
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.cli.main import main
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.metrics.computation import compute_metrics
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant
from fastcomm.timeline.events import KINDS
from fastcomm.timeline.timeline import find_timeline

KERNEL, NVTX = "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"
MATTERS = (KERNEL, NVTX, "CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds", "META_DATA_EXPORT")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return {
        kind: write_nsys(SMALL, folder / kind, ranks=[0, 1], per_report=2, kind=kind)[0]
        for kind in ("sqlite", "parquetdir", "arrowdir")
    }


@pytest.fixture
def export(made, tmp_path):
    return shutil.copy(made["sqlite"], tmp_path / "nsys_0.sqlite")


def change(path, *statements):
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def measured(path):
    return compute_metrics(open_run(path))


def refused(path, match):
    with pytest.raises(FastcommError, match=match) as error:
        measured(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_no_database_is_refused_with_its_first_bytes(tmp_path):
    path = tmp_path / "nsys_0.sqlite"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" * 40)
    refused(path, "no SQLite file: found binary data")
    path.write_bytes(b"")
    refused(path, "no SQLite file")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_truncated_database_is_an_error_with_the_expected_size(export, share):
    whole = export.read_bytes()
    export.write_bytes(whole[: int(len(whole) * share)])
    refused(export, f"truncated: .* bytes, its header states {len(whole)}")


def test_a_database_of_zeros_is_refused(export):
    whole = bytearray(export.read_bytes())
    whole[4096:] = bytes(len(whole) - 4096)
    export.write_bytes(whole)
    refused(export, "malformed|cannot be read as an SQLite file")


def test_a_database_that_is_being_written_is_refused(export):
    with closing(sqlite3.connect(export, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        refused(export, "locked: another program is writing")
        writer.execute("ROLLBACK")
    assert measured(export).ranks == (0, 1)


@pytest.mark.parametrize("suffix", ["-journal", "-wal"])
def test_an_unfinished_export_is_refused(export, suffix):
    export.with_name(export.name + suffix).write_bytes(b"unfinished")
    refused(export, f"{export.name}{suffix} lies beside it")


def test_an_unfinished_export_behind_a_link_is_refused(export, tmp_path):
    export.with_name(f"{export.name}-wal").write_bytes(b"unfinished")
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "nsys_0.sqlite"
    link.symlink_to(export)
    refused(link, f"{export.name}-wal lies beside it")


def test_a_pipe_in_the_place_of_a_log_is_refused_and_nothing_written(export):
    os.mkfifo(export.with_name(f"{export.name}-wal"))
    before = sorted(export.parent.iterdir())
    refused(export, f"{export.name}-wal lies beside it")
    assert sorted(export.parent.iterdir()) == before


def test_a_second_database_in_a_file_is_an_error(export):
    whole = export.read_bytes()
    export.write_bytes(2 * whole)
    refused(export, f"a second document begins at byte {len(whole)}; export each report")


def test_reading_leaves_the_file_and_its_folder_as_they_are(export):
    before = export.read_bytes()
    export.chmod(0o444)
    export.parent.chmod(0o555)
    try:
        measured(export)
        assert [file.name for file in export.parent.iterdir()] == [export.name]
    finally:
        export.parent.chmod(0o755)
    assert export.read_bytes() == before


def test_another_database_is_refused_with_its_tables(tmp_path):
    path = tmp_path / "other.sqlite"
    change(path, "CREATE TABLE customers (id INTEGER)")
    refused(path, "without any table of an Nsight Systems export .* its tables are customers")


def test_an_export_without_any_work_or_range_is_refused(export):
    others = ("MEMCPY", "MEMSET", "RUNTIME")
    tables = [KERNEL, NVTX, *(f"CUPTI_ACTIVITY_KIND_{name}" for name in others)]
    change(export, *(f"DROP TABLE {table}" for table in tables))
    refused(export, "no device work .*, no NVTX range and no call")


@pytest.mark.parametrize(
    "table",
    [NVTX, "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMCPY",
     "NVTX_PAYLOAD_SCHEMAS", "NVTX_PAYLOAD_SCHEMA_ENTRIES", "META_DATA_EXPORT",
     "ANALYSIS_DETAILS", "TARGET_INFO_SESSION_START_TIME"],
)  # fmt: skip
def test_an_absent_table_has_no_rows(export, table):
    change(export, f"DROP TABLE {table}")
    found = measured(export)
    assert found.ranks == (0, 1)
    assert found.breakdown.exact["compute"] > 0


def test_a_missing_required_column_is_named(export):
    change(export, f"ALTER TABLE {KERNEL} RENAME COLUMN streamId TO queueId")
    refused(export, f"table {KERNEL} has no column streamId: this version of the export")


def test_a_table_without_an_optional_column_is_read(export):
    change(export, f"ALTER TABLE {KERNEL} RENAME COLUMN graphNodeId TO g", "SELECT 1")
    assert measured(export).ranks == (0, 1)


def test_values_of_another_type_are_an_error_with_the_column(export):
    change(export, f"UPDATE {KERNEL} SET start = 'soon' WHERE rowid % 50 = 7")
    refused(export, rf"{KERNEL}(\.start)?.*(STRING|string)")


def test_impossible_times_are_an_error(export):
    change(export, f"UPDATE {KERNEL} SET end = start - 1 WHERE rowid % 50 = 7")
    refused(export, f"{KERNEL}: [0-9]+ rows with impossible times; the first has start = ")


@pytest.mark.parametrize("time", ["start = -9223372036854775807", "end = 9223372036854775807"])
@pytest.mark.parametrize("table", [KERNEL, "NVTX_EVENTS"])
def test_times_whose_differences_exceed_64_bits_are_an_error(export, table, time):
    change(export, f"UPDATE {table} SET {time} WHERE end IS NOT NULL AND rowid % 50 = 7")
    refused(export, f"{table}: [0-9]+ rows with impossible times; the first has start = ")


@pytest.mark.parametrize("time", [2**61 + 1, -(2**62), 2**63 - 1])
def test_an_impossible_time_of_the_session_is_an_error(export, time):
    change(export, f"UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = {time}")
    refused(export, f"TARGET_INFO_SESSION_START_TIME.utcEpochNs = {time}")


@pytest.mark.parametrize("shift", ["-" + "9" * 30, "9" * 40])
def test_an_impossible_shift_of_times_is_an_error(export, shift):
    change(
        export,
        "DELETE FROM META_DATA_EXPORT WHERE name LIKE 'EXPORT_PARAM_TIME_%'",
        f"INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PARAM_TIME_SHIFT', '{shift}')",
    )
    refused(export, "EXPORT_PARAM_TIME_SHIFT")


def test_names_with_invalid_text_are_read_as_far_as_possible(export):
    change(export, "UPDATE StringIds SET value = CAST(x'ff' || value AS TEXT)")
    assert measured(export).ranks == (0, 1)


def test_nulls_in_required_columns_are_an_error(export):
    change(
        export,
        f"CREATE TABLE k AS SELECT * FROM {KERNEL}",
        f"DROP TABLE {KERNEL}",
        f"ALTER TABLE k RENAME TO {KERNEL}",
        f"UPDATE {KERNEL} SET end = NULL WHERE rowid = 5",
    )
    refused(export, f"{KERNEL}.end: 1 rows without a value")


def test_a_newer_major_version_is_warned_of(export):
    change(
        export,
        "UPDATE META_DATA_EXPORT SET value = '4.1.0' WHERE name = 'EXPORT_SCHEMA_VERSION'",
        "UPDATE META_DATA_EXPORT SET value = '4' WHERE name = 'EXPORT_SCHEMA_VERSION_MAJOR'",
    )
    assert any(
        "schema version 4.1.0 of the export is newer" in w for w in measured(export).warnings
    )


def test_a_payload_that_is_too_short_is_an_error_with_its_range(export):
    change(
        export,
        f"UPDATE {NVTX} SET binaryData = substr(binaryData, 1, 40) "
        "WHERE binaryData IS NOT NULL AND rowid IN "
        f"(SELECT rowid FROM {NVTX} WHERE binaryData IS NOT NULL ORDER BY rowid LIMIT 3)",
    )
    refused(export, r"NVTX_EVENTS\.binaryData of nccl\w+ \(start = \d+\): 40 bytes, expected")


def test_a_blob_without_a_whole_header_is_an_error(export):
    change(
        export,
        f"UPDATE {NVTX} SET binaryData = x'0102' WHERE rowid = "
        f"(SELECT min(rowid) FROM {NVTX} WHERE binaryData IS NOT NULL)",
    )
    refused(export, "2 bytes, expected 32 or more")


def test_invalid_json_payloads_leave_sizes_unknown(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0], variant=NsysVariant(payload="json"))
    change(path, f"UPDATE {NVTX} SET jsonText = '{{\"Message size' WHERE jsonText IS NOT NULL")
    found = measured(path)
    assert any("no payload on any of them" in text for text in found.warnings)


def test_ranges_without_an_end_are_ignored(export):
    change(export, f"UPDATE {NVTX} SET end = NULL WHERE text LIKE 'aten::%'")
    assert measured(export).breakdown.exact["compute"] > 0


def test_messages_of_an_unfinished_group_have_no_kernels(tmp_path):
    job = Job.of(8, steps=2, micro_batches=2, layers=2)  # several groups a rank
    (export,) = write_nsys(job, tmp_path, ranks=[0])
    ends = "textId IN (SELECT id FROM StringIds WHERE value = 'ncclGroupEnd')"
    change(export, f"DELETE FROM {NVTX} WHERE {ends}")
    found = measured(export)
    assert found.breakdown.exact["compute"] > 0
    assert any("no known size" in text for text in found.warnings)


def test_ranges_of_nccl_that_are_not_known_are_warned_of(export):
    change(
        export,
        "UPDATE StringIds SET value = substr(value, 5) "
        "WHERE value GLOB 'nccl[A-Z]*' AND value NOT GLOB 'ncclDev*'",
    )
    assert any(
        "collected with `nsys profile --trace=nccl`" in w for w in measured(export).warnings
    )


def test_without_nccl_ranges_the_warning_explains_the_capture(export):
    change(
        export,
        f"DELETE FROM {NVTX} WHERE eventType = 75 OR "
        "textId IN (SELECT id FROM StringIds WHERE value GLOB 'nccl[A-Z]*')",
    )
    assert any("no NCCL range at all" in text for text in measured(export).warnings)


@pytest.mark.parametrize("kind", ["parquetdir", "arrowdir"])
def test_a_broken_table_of_a_directory_is_an_error_with_the_file(made, tmp_path, kind):
    path = shutil.copytree(made[kind], tmp_path / made[kind].name)
    (file,) = path.glob(f"{KERNEL}.*")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(path, file.name)


def test_a_column_of_another_type_in_a_directory_is_an_error(made, tmp_path):
    path = shutil.copytree(made["parquetdir"], tmp_path / made["parquetdir"].name)
    file = path / f"{KERNEL}.parquet"
    table = pq.read_table(file)
    place = table.column_names.index("start")
    pq.write_table(table.set_column(place, "start", table["start"].cast(pa.string())), file)
    refused(path, rf"{KERNEL}\.start holds values of type string, expected integer")


def test_a_directory_of_two_exports_is_refused(made, tmp_path):
    path = shutil.copytree(made["parquetdir"], tmp_path / made["parquetdir"].name)
    (path / "StringIds.arrow").write_bytes(b"")
    refused(path, r"files of two exports, \.arrow and \.parquet")


def test_a_report_without_an_export_is_an_error_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/proc/none")  # no nsys
    path = tmp_path / "job.nsys-rep"
    path.write_bytes(b"binary")
    with pytest.raises(FastcommError) as error:
        open_run(path)
    names = f"--output={quoted(tmp_path / 'job.sqlite')} {quoted(path)}"
    command = f"nsys export --type=sqlite --include-blobs=true {names}"
    assert command in str(error.value)
    assert CliRunner().invoke(main, ["metrics", str(tmp_path)]).exit_code == 1


def test_a_report_next_to_its_export_is_ignored(export):
    export.with_suffix(".nsys-rep").write_bytes(b"binary")
    assert open_run(export.parent).ranks == (0, 1)


@pytest.mark.parametrize(("suffix", "kind"), [(".arrows", "arrowdir"), (".h5", "parquetdir")])
def test_an_unsupported_export_is_an_error_that_names_a_supported_one(tmp_path, suffix, kind):
    path = tmp_path / f"job{suffix}"
    path.write_bytes(b"")
    with pytest.raises(FastcommError, match=f"nsys export --type={kind}"):
        open_run(path)


def test_two_processes_of_one_rank_are_an_error_that_names_both(made, tmp_path):
    for name in ("nsys_0.sqlite", "nsys_1.sqlite"):
        shutil.copy(made["sqlite"], tmp_path / name)
    with pytest.raises(TraceFileError, match=r"two processes of rank 0: .*nsys_0.*nsys_1"):
        open_run(tmp_path)


def test_traces_of_two_formats_are_an_error_that_names_one_of_each(export):
    (export.parent / "rank0.json").write_text('{"traceEvents": []}')
    with pytest.raises(FastcommError, match=r"several formats: nsys .*nsys_0.sqlite.* kineto"):
        open_run(export.parent)


def test_a_bad_report_is_an_error_or_skipped_with_keep_going(tmp_path):
    write_nsys(SMALL, tmp_path, ranks=[2, 3])
    change(tmp_path / "nsys_3.sqlite", f"UPDATE {KERNEL} SET start = 'x' WHERE rowid = 9")
    result = CliRunner().invoke(main, ["metrics", str(tmp_path), "--keep-going", "--json"])
    assert result.exit_code == 3
    assert [each["rank"] for each in json.loads(result.stdout)["failed"]] == [3]
    assert CliRunner().invoke(main, ["metrics", str(tmp_path)]).exit_code == 1


@pytest.mark.parametrize("kind", ["sqlite", "parquetdir", "arrowdir"])
@in_gate(10)
@given(data=st.data())
def test_bytes_changed_anywhere_give_numbers_or_an_error_and_nothing_else(
    made, tmp_path_factory, kind, data
):
    folder = tmp_path_factory.mktemp("fuzz")
    path = folder / made[kind].name
    if kind == "sqlite":
        file = Path(shutil.copy(made[kind], path))
    else:
        shutil.copytree(made[kind], path)
        big = [each for each in sorted(path.iterdir()) if each.stem in MATTERS]
        file = data.draw(st.sampled_from(big))
    changed = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(changed)
    with contextlib.suppress(FastcommError):
        assert measured(path).ranks
    shutil.rmtree(folder)


@pytest.mark.parametrize("statement", ["DELETE FROM StringIds", "DROP TABLE StringIds"])
def test_an_export_without_any_string_is_refused(export, statement):
    change(export, statement)
    refused(export, r"kernels, 100.0% of the kernels' time, have no name.*StringIds lacks it")


def test_kernels_without_a_name_are_not_compute(export):
    before = measured(export).to_dict()
    with closing(sqlite3.connect(export)) as database:
        (nccl,) = database.execute(
            "SELECT id FROM StringIds WHERE value LIKE 'nccl%ReduceScatter%bf16%(%'"
        ).fetchone()
    change(export, f"DELETE FROM StringIds WHERE id = {nccl}")
    found = measured(export).to_dict()
    assert any("have no name" in each and "times are n/a" in each for each in found["warnings"])
    assert before["overlap"] != found["overlap"]
    assert {each["reason"] for each in found["unknown"]} >= {"device work of an unknown kind"}


def test_few_kernels_without_a_name_are_counted(export):
    change(export, f"UPDATE {KERNEL} SET demangledName = 12345678 WHERE rowid = 1")
    said = measured(export).to_dict()["warnings"]
    assert any(re.search(r"1 kernels, 0\.\d% .* count as neither", each) for each in said)


def test_reading_a_database_with_a_log_creates_no_files(export):
    before = measured(export).to_dict()
    with closing(sqlite3.connect(export)) as database:
        assert database.execute("PRAGMA journal_mode = wal").fetchone() == ("wal",)
    assert measured(export).to_dict() == before
    assert [path.name for path in export.parent.iterdir()] == [export.name]


def test_work_without_a_process_is_counted_and_all_of_it_is_an_error(export):
    change(export, f"UPDATE {KERNEL} SET globalPid = NULL WHERE rowid = 1")
    said = measured(export).to_dict()["warnings"]
    assert any("0." in each and "name no process (globalPid is NULL)" in each for each in said)
    change(export, f"UPDATE {KERNEL} SET globalPid = NULL WHERE rowid % 2")
    found = measured(export).to_dict()
    assert any("name no process" in each for each in found["warnings"])
    assert {each["reason"] for each in found["unknown"]} >= {"device work of an unknown kind"}
    for table in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"):
        with contextlib.suppress(sqlite3.OperationalError):
            change(export, f"UPDATE CUPTI_ACTIVITY_KIND_{table} SET globalPid = NULL")
    refused(export, "none of its [0-9]+ rows of device work names its process")


def test_whole_graphs_are_busy_and_not_known_to_be_compute(tmp_path):
    write_nsys(SMALL, tmp_path, variant=NsysVariant(graph="graph"), per_report=8)
    (path,) = tmp_path.glob("*.sqlite")
    change(path, f"DROP TABLE {KERNEL}")
    found = measured(path)
    assert found.breakdown.parts is None
    assert "CUDA graphs without the kernels inside" in found.headline
    assert any("cannot be divided into compute" in warning for warning in found.warnings)


def test_whole_graphs_have_a_kind_of_their_own_wherever_kinds_are_shown(tmp_path):
    write_nsys(SMALL, tmp_path, ranks=[0], variant=NsysVariant(graph="graph"), per_report=1)
    (path,) = tmp_path.glob("*.sqlite")
    with closing(sqlite3.connect(path)) as export:
        rows = export.execute("SELECT end - start FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
        ((length,),) = rows.fetchall()
    run = fastcomm.open(path)
    kernels = run.kernels()
    assert kernels.by_category["whole graph"] == length
    assert "whole graph" not in kernels.times_of_median()
    assert (
        run.kernels(by="pass").ns_by_category()["whole graph"].sum() * kernels.steps == length
    )
    steps = [run.critical_path(step=number) for number in (10, 11)]
    assert sum(path.summary_ns().get("gpu_graph_bound", 0) for path in steps) == length
    opened = open_run(path)
    drawn = find_timeline(opened, compute_metrics(opened), steps=[10, 11]).steps
    graphs = [step.events["kind"] == KINDS.index("whole graph") for step in drawn]
    lengths = [
        step.events["duration"][own].sum() for step, own in zip(drawn, graphs, strict=True)
    ]
    assert sum(lengths) == length


def test_a_column_that_only_conditions_use_is_named_if_it_is_absent(export):
    change(export, f"ALTER TABLE {NVTX} DROP COLUMN textId")
    with pytest.raises(TraceFileError) as error:
        measured(export)
    assert f"table {NVTX} has no column textId" in str(error.value)
    assert "SELECT" not in str(error.value)


def test_two_texts_of_one_id_are_an_error(export):
    change(
        export,
        "CREATE TABLE Texts (id INTEGER, value TEXT)",
        "INSERT INTO Texts SELECT id, value FROM StringIds",
        "INSERT INTO Texts SELECT id, 'other ' || value FROM StringIds",
        "DROP TABLE StringIds",
        "ALTER TABLE Texts RENAME TO StringIds",
    )
    with pytest.raises(TraceFileError, match="StringIds has two texts for id"):
        measured(export)


def test_equal_texts_of_one_id_are_none(export):
    expected = measured(export).to_dict()
    change(
        export,
        "CREATE TABLE Texts (id INTEGER, value TEXT)",
        "INSERT INTO Texts SELECT id, value FROM StringIds",
        "INSERT INTO Texts SELECT id, value FROM StringIds",
        "DROP TABLE StringIds",
        "ALTER TABLE Texts RENAME TO StringIds",
    )
    assert measured(export).to_dict()["breakdown"] == expected["breakdown"]


def windows(folder, export):
    """Two reports of the first and the second half of a recording."""
    with closing(sqlite3.connect(export)) as database:
        query = f"SELECT start FROM {KERNEL} ORDER BY start"
        starts = [start for (start,) in database.execute(query)]
    middle, paths = starts[len(starts) // 2], []
    for name, later in (("report.1.sqlite", "<"), ("report.2.sqlite", ">=")):
        paths.append(Path(shutil.copy(export, folder / name)))
        change(paths[-1], f"DELETE FROM {KERNEL} WHERE NOT (start {later} {middle})")
        change(
            paths[-1],
            f"UPDATE {KERNEL} SET end = MIN(end, {middle}) WHERE start < {middle}",
        )
    export.unlink()
    return paths


def test_windows_of_one_process_are_no_ranks(export):
    paths = windows(export.parent, Path(export))
    with pytest.raises(TraceFileError, match="windows of one recording") as error:
        open_run(export.parent)
    assert all(str(path) in str(error.value) for path in paths)
    assert "--capture-range-end=repeat" in str(error.value)
    chosen = str(error.value).split("those of one window: ")[1].split(". If")[0]
    assert chosen == quoted(paths[0])
    assert measured(paths[0]).to_dict()["ranks"] == [0, 1]
