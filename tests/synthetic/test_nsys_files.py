"""Test files of synthetic nsys exports against real ones."""

import gzip
import hashlib
import re
import sqlite3
import tarfile
from collections import Counter, defaultdict
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.big_nsys_report import write_nsys_big
from builders.nsys_report import (
    COMM,
    COPY,
    GRAPH_TRACE,
    KERNEL,
    MEMSET,
    NVTX,
    RUNTIME,
    SMALL,
    Report,
    nests,
    owned,
    written,
)
from builders.shared_data import shared

from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.nsys.tables import NsysVariant

# The columns that the specification names, table by table.
NAMED = {
    "StringIds": "id value",
    KERNEL: "start end deviceId contextId streamId correlationId globalPid demangledName "
    "shortName gridX graphNodeId graphId",
    RUNTIME: "start end globalTid correlationId nameId",
    COPY: "start end deviceId streamId correlationId globalPid bytes copyKind srcDeviceId "
    "dstDeviceId graphNodeId",
    MEMSET: "start end deviceId streamId correlationId globalPid bytes",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start end streamId correlationId globalPid "
    "syncType eventId eventSyncId",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "streamId correlationId globalPid eventId timestamp "
    "eventSyncId",
    NVTX: "start end eventType rangeId text textId globalTid endGlobalTid domainId jsonText "
    "jsonTextId binaryData eventId",
    "NVTX_PAYLOAD_SCHEMAS": "domainId schemaId name type flags numEntries payloadSize alignTo",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": "domainId schemaId idx flags type name description "
    "arrayOrUnionDetail offset",
    "NVTX_PAYLOAD_ENUM_ENTRIES": "domainId schemaId idx name value isFlag",
    "CUDA_GRAPH_EVENTS": "start end globalTid nameId graphId originalGraphId graphExecId",
    "CUDA_GRAPH_NODE_EVENTS": "start end globalTid nameId graphNodeId originalGraphNodeId",
    "ANALYSIS_DETAILS": "duration startTime stopTime",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs systemClockNs",
    "META_DATA_EXPORT": "name value",
}
DEVICE_WORK = (KERNEL, COPY, MEMSET)
GRAPH_COLUMNS = "start end deviceId streamId correlationId globalPid graphId graphExecId"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All ranks of the small job, four in a report."""
    return written(tmp_path_factory.mktemp("nsys"), per_report=4)


def columns(path):
    """Name, type, not null of every column of every table of a SQLite file."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
        return {
            name: {
                row[1]: (row[2], row[3])
                for row in database.execute(f'PRAGMA table_info("{name}")')
            }
            for name in names
        }


def real(name, tmp_path):
    """A real file, unpacked; the test is skipped where it is absent."""
    path = tmp_path / name.removesuffix(".gz")
    path.write_bytes(gzip.decompress(shared(f"nsys/{name}").read_bytes()))
    return path


def schema(file):
    if file.suffix == ".parquet":
        return pq.ParquetFile(file).schema_arrow
    with pa.ipc.open_stream(file) as stream:
        return stream.schema


@pytest.mark.parametrize("kind", ["parquetdir", "arrowdir"])
def test_all_kinds_of_export_hold_the_same_rows(tmp_path, kind):
    variant = NsysVariant(graph="node", mpi_ranks=True)
    (base,) = written(tmp_path, ranks=(0, 1), per_report=2, variant=variant)
    (path,) = write_nsys(
        SMALL, tmp_path, ranks=(0, 1), per_report=2, variant=variant, kind=kind
    )
    assert path.name == {"parquetdir": "nsys_0_pqtdir", "arrowdir": "nsys_0_arwdir"}[kind]
    other = Report(path)
    assert other.tables.keys() == base.tables.keys()
    for name, rows in base.tables.items():
        if name in {"StringIds", "ANALYSIS_FILE"}:  # SQLite has them in order of their key
            assert sorted(other.tables[name], key=lambda row: row["id"]) == rows
        elif name != "META_DATA_EXPORT":
            assert other.tables[name] == rows, name


def test_binary_data_calls_itself_text(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0], kind="parquetdir")
    schema = pq.read_schema(path / f"{NVTX}.parquet")
    assert schema.field("binaryData").type == pa.string()
    assert not pq.ParquetFile(path / f"{NVTX}.parquet").metadata.metadata
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    with closing(sqlite3.connect(path)) as database:
        declared = {row[1]: row[2] for row in database.execute(f"PRAGMA table_info({NVTX})")}
        types = database.execute(
            f"SELECT DISTINCT typeof(binaryData) FROM {NVTX} WHERE binaryData NOT NULL"
        ).fetchall()
    assert declared["binaryData"] == "TEXT"
    assert types == [("blob",)]


def test_the_same_job_gives_the_same_bytes(tmp_path):
    sums = []
    for name in ("one", "two"):
        (path,) = write_nsys(SMALL, tmp_path / name, ranks=(0, 1), per_report=2)
        sums.append(hashlib.sha256(path.read_bytes()).hexdigest())
        (folder,) = write_nsys(SMALL, tmp_path / name, ranks=[2], kind="parquetdir")
        sums.append([file.read_bytes() for file in sorted(folder.iterdir())])
    assert sums[:2] == sums[2:]
    assert not list(tmp_path.rglob("*.unfinished"))


@pytest.mark.parametrize("kind", ["sqlite", "arrowdir"])
def test_writing_again_replaces_existing_files(tmp_path, kind):
    write_nsys(SMALL, tmp_path, ranks=[0], kind=kind, variant=NsysVariant(mpi_ranks=True))
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0], kind=kind)
    assert "MPI_RANKS" not in Report(path).tables
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_named_after_the_first_rank(tmp_path):
    paths = write_nsys(SMALL, tmp_path, per_report=3)
    assert [path.name for path in paths] == [f"nsys_{rank}.sqlite" for rank in (0, 3, 6)]
    assert [len(Report(path).processes) for path in paths] == [3, 3, 2]


def test_every_column_of_the_specification_is_there(tmp_path):
    (nodes,) = write_nsys(SMALL, tmp_path / "n", ranks=[0], variant=NsysVariant(graph="node"))
    (trace,) = write_nsys(SMALL, tmp_path / "t", ranks=[0], variant=NsysVariant(graph="graph"))
    found = columns(nodes) | columns(trace)
    for table, names in (NAMED | {GRAPH_TRACE: GRAPH_COLUMNS}).items():
        assert set(names.split()) <= set(found[table]), table


def test_tables_are_declared_as_in_a_real_file(tmp_path):
    wanted = columns(real("mfu_2gpu.sqlite.gz", tmp_path))
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0])
    found = columns(path)
    common = found.keys() & wanted.keys()
    assert len(common) > 20
    for table in common:
        # What a newer version has comes after.
        shared = {name: found[table][name] for name in wanted[table]}
        assert list(found[table])[: len(shared)] == list(shared), table
        assert shared == wanted[table], table
    newer = {name for table in common for name in found[table].keys() - wanted[table].keys()}
    assert newer == {"eventId"}


def test_the_old_schema_has_the_tables_that_are_not_in_the_real_file(tmp_path):
    wanted = real("schema_3.7.2.sql.gz", tmp_path).read_text()
    database = sqlite3.connect(tmp_path / "old.sqlite")
    with closing(database):
        database.executescript(wanted)
    old = columns(tmp_path / "old.sqlite")
    variant = NsysVariant(mpi_ranks=True)
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0], variant=variant)
    found = columns(path)
    for table in ("MPI_RANKS", "ThreadNames", "PROCESSES", "TARGET_INFO_CUDA_STREAM"):
        assert found[table] == old[table]
    gpu = found["TARGET_INFO_GPU"]
    assert gpu.items() <= old["TARGET_INFO_GPU"].items()


@pytest.mark.parametrize("kind", ["parquetdir", "arrowdir"])
def test_columns_have_the_types_of_a_real_directory(tmp_path, kind):
    with tarfile.open(shared(f"nsys/nccl_nvtx_4rank.{kind}.tar.gz")) as archive:
        archive.extractall(tmp_path / "real", filter="data")
    (folder,) = (tmp_path / "real").iterdir()
    (path,) = write_nsys(SMALL, tmp_path, ranks=[0], kind=kind)
    for file in folder.iterdir():
        wanted, found = (schema(one) for one in (file, path / file.name))
        for field in wanted:
            same = found.field(field.name)
            assert (same.type, same.nullable) == (field.type, field.nullable), file.stem
        assert (found.metadata or {}).get(b"table_name") == (wanted.metadata or {}).get(
            b"table_name"
        )


def test_tables_without_rows_are_absent(whole):
    for report in whole:
        assert all(report.tables.values())
        for table in (GRAPH_TRACE, "CUDA_GRAPH_EVENTS", "CUDA_GRAPH_NODE_EVENTS", "MPI_RANKS"):
            assert table not in report.tables


def test_streams_of_device_work_are_listed_in_its_context(whole):
    for report in whole:
        listed = {
            (row["processId"], row["contextId"], row["streamId"])
            for row in report.rows("TARGET_INFO_CUDA_STREAM")
        }
        for process in report.processes:
            for row in (row for name in DEVICE_WORK for row in report.rows(name, process)):
                assert (process & 0xFFFFFF, row["contextId"], row["streamId"]) in listed


def test_private_data_is_where_nsys_stores_it(whole):
    holders = defaultdict(set)
    for name, rows in whole[0].tables.items():
        text = repr(rows)
        for marker in ("SECRET-ENVIRONMENT", "SECRET-OUTPUT"):
            if marker in text:
                holders[marker].add(name)
    assert holders["SECRET-ENVIRONMENT"] == {
        "META_DATA_CAPTURE",
        "META_DATA_EXPORT",
        "TARGET_INFO_SYSTEM_ENV",
    }
    assert holders["SECRET-OUTPUT"] == {"ANALYSIS_FILE", "StringIds"}
    contents = {row["contentId"] for row in whole[0].rows("ProcessStreams")}
    assert all("SECRET-OUTPUT" in whole[0].strings[identity] for identity in contents)


def test_a_big_report_has_its_kernels_launches_and_three_levels_of_ranges(tmp_path):
    report = Report(write_nsys_big(tmp_path / "big.sqlite", kernels=20_010, seed=3))
    assert len(report.rows(KERNEL)) == len(report.rows(RUNTIME)) == 20_010
    names = Counter(
        re.match("[a-z]+", report.name(row))[0]
        for row in report.rows(NVTX)
        if row["eventType"] == 59
    )
    assert names == {"aten": 20_010, "nccl": 400, "layer": 401, "iteration": 2}
    (process,) = report.processes
    for rows in report.ranges(process).values():
        assert nests(rows)
    found = owned(report, process)
    assert len(found) == 400
    assert {fields[COMM] for *_, operations in found for _, fields in operations} == {
        0x8F3C000000000001
    }
    again = write_nsys_big(tmp_path / "again.sqlite", kernels=20_010, seed=3)
    assert again.read_bytes() == (tmp_path / "big.sqlite").read_bytes()
