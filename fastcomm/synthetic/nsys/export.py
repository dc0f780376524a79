"""A synthetic job as exports of Nsight Systems: SQLite, parquetdir, arrowdir, by version."""

import random
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fastcomm.errors import FastcommError
from fastcomm.files import check_replaceable
from fastcomm.synthetic import pipeline
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import DEVICES
from fastcomm.synthetic.nsys.process_rows import (
    FIRST_CORRELATION,
    MACHINE,
    PUSH_POP,
    Clock,
    Host,
    ProcessWriter,
    lead_ns,
)
from fastcomm.synthetic.nsys.tables import (
    ExportColumn,
    ExportKind,
    NsysVariant,
    ReportTables,
    Row,
    columns,
    create,
    new_database,
)

__all__ = ["NsysVariant", "write_nsys"]
LAUNCHER = 40_900  # id of the process that starts the others
STAGGER_NS = 1_234_567  # between the starts of two captures
SECRET_ENVIRONMENT, SECRET_OUTPUT = "SECRET-ENVIRONMENT", "SECRET-OUTPUT"
VERSION, SCHEMA = "2026.4.1.131", "3.28.1"
_SYSTEM_CLOCK = 28_254_349_605  # since the machine was started
_ENDINGS = {"sqlite": ".sqlite", "parquetdir": "_pqtdir", "arrowdir": "_arwdir"}
_ENUMS = {
    "ENUM_NSYS_EVENT_TYPE": {
        34: ("NvtxMark", "NvtxMark"),
        39: ("NvtxThread", "NvtxThread"),
        59: ("NvtxPushPopRange", "NvtxPushPopRange"),
        60: ("NvtxStartEndRange", "NvtxStartEndRange"),
        75: ("NvtxDomainCreate", "NvtxDomainCreate"),
    },
    "ENUM_CUDA_MEMCPY_OPER": {
        0: ("CUDA_MEMCPY_KIND_UNKNOWN", "Unknown"),
        1: ("CUDA_MEMCPY_KIND_HTOD", "Host-to-Device"),
        2: ("CUDA_MEMCPY_KIND_DTOH", "Device-to-Host"),
        8: ("CUDA_MEMCPY_KIND_DTOD", "Device-to-Device"),
        10: ("CUDA_MEMCPY_KIND_PTOP", "Peer-to-Peer"),
    },
    "ENUM_CUPTI_SYNC_TYPE": {
        1: ("CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE", "Event sync"),
        2: ("CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT", "Stream wait event"),
        3: ("CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE", "Stream sync"),
        4: ("CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE", "Context sync"),
    },
}


def clock(job: Job, number: int, variant: NsysVariant) -> Clock:
    """Return the clock of a report, wrong by the skew of the variant."""
    start = pipeline.EPOCH_NS - lead_ns(job, variant) - number * STAGGER_NS
    skew = variant.clock_skew_ns.get(number, 0)
    return Clock(origin=-skew if variant.normalized else start, start=start, utc=start + skew)


def report(
    job: Job, ranks: Sequence[int], number: int, variant: NsysVariant, kind: ExportKind
) -> ReportTables:
    """Return all tables of one report."""
    tables = ReportTables()
    time = clock(job, number, variant)
    processes = [
        ProcessWriter(Host(job, rank, place, variant, tables, time))
        for place, rank in enumerate(ranks)
    ]
    for process in processes:
        process.write()
        _add_process(tables, process)
        if variant.mpi_ranks:
            tables.add("MPI_RANKS", globalTid=process.main, rank=process.rank)
    _add_launcher(tables, time)
    _add_session(tables, time, variant, processes)
    _add_capture(tables, variant, ranks[0] // DEVICES)
    _add_export(tables, f"nsys_{ranks[0]}", variant, kind)
    _add_enums(tables)
    for name in sorted(tables.rows):
        random.Random(f"{job.seed} {number} {name}").shuffle(tables.rows[name])
    return tables


_GPU = {
    "vmId": MACHINE,
    "name": "NVIDIA H100 80GB HBM3",
    "isDiscrete": 1,
    "smCount": 132,
    "chipName": "GH100",
}
_STREAM = {"hwId": 0, "vmId": 1, "priority": 0, "flag": 2}


def _add_process(tables: ReportTables, process: ProcessWriter) -> None:
    """Add names of a process and its threads, its output, its GPU and the streams of that."""
    host = process.host
    tables.add("PROCESSES", globalPid=host.global_pid, pid=host.process, name="python3")
    names = {0: "python3", 61: "pt_autograd_0", 77: "pt_nccl_watchdg", 300: "ncclLaunch"}
    for thread, name in names.items():
        identity = host.thread(thread)
        tables.add("ThreadNames", nameId=tables.string(name), priority=20, globalTid=identity)
    home, rank = f"/home/{SECRET_OUTPUT}", process.rank
    output = {
        "filenameId": tables.string(f"{home}/stdout.log"),
        "contentId": tables.string(f"loss 2.71 {SECRET_OUTPUT} of rank {rank}\n"),
    }
    tables.add("ProcessStreams", globalPid=host.global_pid, **output)
    maps = {"filename": f"{home}/maps", "globalPid": host.global_pid}
    content = tables.string(f"7f00-7fff r-xp {SECRET_OUTPUT}")
    tables.add("ANALYSIS_FILE", id=rank + 1, contentId=content, **maps)
    tables.add("TARGET_INFO_GPU", id=rank % 8, cuDevice=host.device, **_GPU)
    for stream in (7, 14, 20, 24, 28, 32, 36):
        own = {"streamId": stream, "processId": host.process, "contextId": 1 + host.device}
        tables.add("TARGET_INFO_CUDA_STREAM", **own, **_STREAM)


def _add_launcher(tables: ReportTables, time: Clock) -> None:
    """Add the process that started the others: it calls CUDA and has ranges, but no work."""
    process = MACHINE | LAUNCHER << 24
    thread = process | LAUNCHER
    start = time(time.start + 300_000)
    tables.add("PROCESSES", globalPid=process, pid=LAUNCHER, name="torchrun")
    call = {"start": start + 1_000, "end": start + 4_000, "eventClass": 0, "returnValue": 0}
    call |= {
        "correlationId": FIRST_CORRELATION
        + 1,  # as if it had launched the first work of a rank
        "nameId": tables.string("cudaGetDeviceCount_v3020"),
    }
    tables.add("CUPTI_ACTIVITY_KIND_RUNTIME", globalTid=thread, **call)
    name = {"text": "rendezvous", "eventType": PUSH_POP, "domainId": 0}
    tables.add("NVTX_EVENTS", start=start, end=start + 9_000, globalTid=thread, **name)


def _add_session(
    tables: ReportTables, time: Clock, variant: NsysVariant, processes: list[ProcessWriter]
) -> None:
    """Add the times of the capture, and a range per process that is never closed."""
    ends = [row["end"] for row in tables.rows["CUPTI_ACTIVITY_KIND_RUNTIME"]]
    last = max(end for end in ends if isinstance(end, int)) + time.origin
    duration = last - time.start + 50_000_000
    for process in processes:
        # A range that was never closed has the end of the capture.
        host = process.host
        host.range(process.main, "epoch", time.start + 610_000, time.start + duration)
    span = {"startTime": _SYSTEM_CLOCK, "stopTime": _SYSTEM_CLOCK + duration}
    tables.add("ANALYSIS_DETAILS", globalVid=MACHINE, duration=duration, **span)
    if variant.session_start:
        text = datetime.fromtimestamp(time.utc // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        clocks = {"utcEpochNs": time.utc, "systemClockNs": _SYSTEM_CLOCK}
        tables.add("TARGET_INFO_SESSION_START_TIME", utcTime=text, localTime=text, **clocks)


def _add_capture(tables: ReportTables, variant: NsysVariant, node: int) -> None:
    """Add how the profiler was started, with a host and environment that must stay private."""
    mode = "Node" if variant.graph == "node" else "Graph"
    for name, value in (
        ("CAPTURE_EVENT_TYPE", "NvtxEvents"),
        ("CAPTURE_EVENT_TYPE", "Cuda"),
        ("CUDA_GRAPH_TRACE_OPTIONS:MODE", mode),
        ("CUDA_TRACE_SCOPE", "ProcessTree"),
        ("NVTX_OPTIONS:NVTX_DOMAIN_FILTER_STRING", ""),
        ("APPLICATION_ENVIRONMENT", f"WANDB_MODE={SECRET_ENVIRONMENT}"),
        ("APPLICATION_WORKING_DIRECTORY", f"/home/{SECRET_ENVIRONMENT}"),
    ):
        tables.add("META_DATA_CAPTURE", name=name, value=value)
    for name, value in (
        ("Hostname", f"{SECRET_ENVIRONMENT}-node{node:04d}"),
        ("DeviceEnvironment", f"WANDB_MODE={SECRET_ENVIRONMENT}"),
    ):
        row = {"name": name, "value": value, "nameEnum": 4, "devStateName": "Running"}
        tables.add("TARGET_INFO_SYSTEM_ENV", globalVid=MACHINE, **row)
    kind = {"timestamp": 1_000_000, "timestampType": 2, "source": 2, "severity": 1}
    tables.add("DIAGNOSTIC_EVENT", text="CUDA profiling has started.", **kind)


def _add_export(
    tables: ReportTables, name: str, variant: NsysVariant, kind: ExportKind
) -> None:
    """Add the table that describes the export; `name` is the report's, without ending."""
    major, minor, micro = SCHEMA.split(".")
    for key, value in {
        "PRODUCT_NAME": "NVIDIA Nsight Systems",
        "PRODUCT_VERSION": VERSION,
        "SCHEMA_VERSION": SCHEMA,
        "SCHEMA_VERSION_MAJOR": major,
        "SCHEMA_VERSION_MINOR": minor,
        "SCHEMA_VERSION_MICRO": micro,
        "PLATFORM": "linux-desktop",
        "HOST": SECRET_ENVIRONMENT,
        "PARAM_EXPORT_TYPE": "SQLite" if kind == "sqlite" else kind,
        "PARAM_INPUT_FILE": f"{name}.nsys-rep",
        "PARAM_OUTPUT_FILE": name + _ENDINGS[kind],
        "PARAM_LAZY": "true",
        "PARAM_INCLUDE_JSON": str(variant.has_json).lower(),
        "PARAM_INCLUDE_BLOBS": str(variant.has_blobs).lower(),
        "PARAM_TIME_NORMALIZE": str(variant.normalized).lower(),
        "PARAM_TIME_SHIFT": "0",
    }.items():
        tables.add("META_DATA_EXPORT", name=f"EXPORT_{key}", value=value)


def _add_enums(tables: ReportTables) -> None:
    for table, labels in _ENUMS.items():
        for number, (name, label) in labels.items():
            tables.add(table, id=number, name=name, label=label)


def write_nsys(
    job: Job,
    directory: Path,
    *,
    ranks: Iterable[int] | None = None,
    kind: ExportKind = "sqlite",
    per_report: int = 1,
    variant: NsysVariant | None = None,
) -> list[Path]:
    """Write the reports of all ranks, or of some, and return their paths.

    `per_report` consecutive ranks share a report.
    """
    directory.mkdir(parents=True, exist_ok=True)
    chosen = list(range(job.ranks)) if ranks is None else sorted(ranks)
    paths = []
    for number, first in enumerate(range(0, len(chosen), per_report)):
        members = chosen[first : first + per_report]
        tables = report(job, members, number, variant or NsysVariant(), kind)
        path = directory / f"nsys_{members[0]}{_ENDINGS[kind]}"
        _write(tables, path, kind)
        paths.append(path)
    return paths


def _write(tables: ReportTables, path: Path, kind: ExportKind) -> None:
    """Write to a temporary path, and rename it when complete."""
    check_replaceable(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    _remove(unfinished)
    try:
        if kind == "sqlite":
            _write_sqlite(tables, unfinished)
        else:
            _write_directory(tables, unfinished, kind)
        _remove(path)
        unfinished.rename(path)
    except (OSError, sqlite3.Error) as error:
        raise FastcommError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        _remove(unfinished)


def _remove(path: Path) -> None:
    """Remove a file or a directory tree, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_sqlite(tables: ReportTables, path: Path) -> None:
    """Write all tables to a new SQLite file."""
    with new_database(path) as database:
        for table, rows in tables.rows.items():
            present = columns(table)
            database.execute(create(table))
            marks = ", ".join("?" * len(present))
            database.executemany(
                f'INSERT INTO "{table}" VALUES ({marks})',
                ([row.get(column.name) for column in present] for row in rows),
            )


def _write_directory(tables: ReportTables, folder: Path, kind: ExportKind) -> None:
    """Write each table to a file of its own, Arrow or Parquet, in a new folder."""
    folder.mkdir()
    for name, rows in tables.rows.items():
        table = _table(name, rows)
        if kind == "arrowdir":
            with pa.ipc.new_stream(folder / f"{name}.arrow", table.schema) as stream:
                stream.write_table(table)
            continue
        # Parquet 1.0 has no uint32: such columns become int64, as in real files.
        form = {"version": "1.0", "compression": "NONE", "store_schema": False}
        pq.write_table(
            table, folder / f"{name}.parquet", row_group_size=max(1, len(rows)), **form
        )


def _table(name: str, rows: list[Row]) -> pa.Table:
    present = columns(name)
    schema = pa.schema([column.arrow for column in present], metadata={"table_name": name})
    return pa.table([_array(column, rows) for column in present], schema=schema)


def _array(column: ExportColumn, rows: list[Row]) -> pa.Array:
    """Return a column of rows as an array; a row without the column has null."""
    values = [row.get(column.name) for row in rows]
    if column.kind != "b":
        return pa.array(values, type=column.arrow.type)
    # Bytes typed as text, as nsys writes them; they need not be valid UTF-8.
    packed = pa.array(values, type=pa.binary())
    return pa.Array.from_buffers(pa.string(), len(packed), packed.buffers(), packed.null_count)
