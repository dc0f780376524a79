"""Read what an export states about itself; export reports with the `nsys` of the user's path.

Only nsys can read its reports. An export is kept: the next command of the same report reads it.
"""

import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from fastcomm.errors import Lines, TraceFileError, inert, shell_quoted
from fastcomm.formats.assembly import DEVICE_KINDS
from fastcomm.formats.communication import Collectives
from fastcomm.formats.nsys import schema
from fastcomm.formats.nsys.export import LATEST, Export
from fastcomm.formats.nsys.nccl_operations import KernelParts
from fastcomm.formats.nsys.nvtx import NcclRanges
from fastcomm.formats.nsys.schema import STRINGS
from fastcomm.trace.events import Events
from fastcomm.trace.schema import WHOLE_GRAPH
from fastcomm.trace.trace import MISSING_DATA, SMALL, gpu_name, host_digest
from fastcomm.units import percent
from fastcomm_kernels import temporary
from fastcomm_kernels.arrays import NULL, Ints

_LOG = logging.getLogger("fastcomm")
# With the payloads of NCCL; the second is for an nsys that does not know the first.
_PAYLOADS = ("--include-blobs=true", "--include-json=true")
_LONGEST = 200  # characters of what nsys says
_PRIVATE = 0o700
HOST_ALONE = (
    "no device work in the export, ranges of the host alone, so that compute, communication, "
    "overlap and idle time are n/a; collect with `nsys profile -t cuda,nvtx ...`"
)
# Schemas up to this major version have the tables that `nsys` names.
_NEWEST_MAJOR = 3


def exported(report: Path) -> Path | None:
    """Return the export of a report; None if there is no nsys, or no place for the export.

    Raises `TraceFileError` if nsys cannot export the report.
    """
    program, folder = _program(), _folder(report)
    if program is None or folder is None:
        return None
    export = folder / report.with_suffix(".sqlite").name
    if export.is_file():
        return export
    _LOG.info("fastcomm: %s: exporting it with %s (once)", report, program)
    unfinished = folder / f"{os.getpid()}.sqlite"
    try:
        for payloads in _PAYLOADS:
            done = _export(program, payloads, unfinished, report)
            if done.returncode == 0 and unfinished.is_file():
                unfinished.replace(export)
                return export
    finally:
        unfinished.unlink(missing_ok=True)
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    reason = lines[-1][:_LONGEST] if lines else "no export, and no reason"
    raise TraceFileError(f"{report}: {program} export: exit code {done.returncode}: {reason}")


def _export(
    program: str, payloads: str, export: Path, report: Path
) -> "subprocess.CompletedProcess[bytes]":
    """Run nsys. Raises `TraceFileError` if it cannot be started."""
    options = ["--type=sqlite", "--force-overwrite=true", payloads, f"--output={export}"]
    try:
        return subprocess.run(
            [program, "export", *options, str(report.absolute())],
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise TraceFileError(f"{report}: {program}: {error.strerror or error}") from error


def _program() -> str | None:
    """Return the path of nsys; None without one, and for one in the working directory."""
    program = shutil.which("nsys")
    if program is None or not Path(program).is_absolute():
        return None
    return None if temporary.is_in_working_directory(Path(program).resolve()) else program


def _folder(report: Path) -> Path | None:
    """Return the directory for the export of a report as it is now; None without a cache."""
    home = temporary.cache_home()
    try:
        status = report.stat()
    except OSError:
        return None
    if home is None:
        return None
    state = f"{report.resolve()} {status.st_size} {status.st_mtime_ns}"
    folder = home / "nsys" / hashlib.sha256(os.fsencode(state)).hexdigest()[:32]
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The metadata of one export. Times are ns of the file."""

    path: Path
    kind: str
    processes: tuple[int, ...]  # `g >> 24` of the processes that are ranks, sorted by number
    has_gpu: bool  # whether the processes have device work
    unowned: float  # share of the rows of device work that name no process
    epoch: int | None  # added to times of the file: ns since 1970; None is unknown
    ends: frozenset[int]  # times at which the capture ended
    parameters: dict[str, str]  # META_DATA_EXPORT
    notes: tuple[str, ...]  # warnings


def read_report(export: Export) -> Report:
    """Read the metadata of an export.

    Of the large tables, only the columns that tell the process are read. Raises
    `TraceFileError` if no row of device work names its process, or if the time at which the
    session began is impossible.
    """
    parameters = _parameters(export)
    processes, has_gpu, unowned = _processes(export)
    utc = _first(export, schema.SESSION, "utcEpochNs")
    normalized = parameters.get("EXPORT_PARAM_TIME_NORMALIZE") == "true"
    shift = _number(parameters.get("EXPORT_PARAM_TIME_SHIFT"))
    epoch = 0 if normalized else None if utc is None else utc - shift
    if epoch is not None and abs(epoch) > LATEST:
        raise TraceFileError(
            f"{export.path}: impossible time of its session: {schema.SESSION}.utcEpochNs = "
            f"{utc}, EXPORT_PARAM_TIME_SHIFT = {shift}"
        )
    duration = _first(export, schema.ANALYSIS, "duration")
    ends = {duration}
    if normalized and utc is not None and duration is not None:
        ends.add(utc + duration)
    return Report(
        path=export.path,
        kind=export.kind,
        processes=processes,
        has_gpu=has_gpu,
        unowned=unowned,
        epoch=epoch,
        ends=frozenset(end for end in ends if end is not None),
        parameters=parameters,
        notes=_notes(parameters, epoch, unowned),
    )


def _parameters(export: Export) -> dict[str, str]:
    """Return the table META_DATA_EXPORT."""
    rows = export.rows(schema.EXPORT, ("name", "value"))
    pairs = zip(*(rows.texts(name).to_pylist() for name in ("name", "value")), strict=True)
    return dict(pairs)


def _processes(export: Export) -> tuple[tuple[int, ...], bool, float]:
    """Return the processes that are ranks, sorted by number.

    These are processes with device work or, if there are none, with NVTX ranges, or with calls.

    Returns
    -------
    tuple of int
        The processes (`g >> 24`).
    bool
        Whether they have device work.
    float
        Share of the rows of device work that name no process.

    Raises
    ------
    TraceFileError
        If no row of device work names its process.

    """
    for tables in (schema.DEVICE_WORK, (schema.NVTX,), (schema.RUNTIME,)):
        owners = set().union(*(export.processes(table) for table in tables))
        processes = {process for process in owners if process is not None}
        has_gpu = tables is schema.DEVICE_WORK
        has_unowned = has_gpu and None in owners
        share = _unowned(export, processes) if has_unowned else 0.0
        if processes:
            return tuple(sorted(processes, key=schema.process_of)), has_gpu, share
    return (), False, 0.0


def _unowned(export: Export, processes: set[int]) -> float:
    """Return the share of device work that names no process; TraceFileError if none does."""
    columns = [export.rows(table, ("globalPid",))["globalPid"] for table in schema.DEVICE_WORK]
    owners = np.concatenate(columns)
    if not processes:
        raise TraceFileError(
            f"{export.path}: none of its {len(owners)} rows of device work names its process "
            "(globalPid is NULL), so the ranks are unknown; export the report again"
        )
    return float((owners == NULL).mean())


def _first(export: Export, table: str, column: str) -> int | None:
    """Return the value of a column in its first row; None if it is missing or null."""
    values = export.rows(table, (column,))[column]
    return int(values[0]) if len(values) and values[0] != NULL else None


def _number(text: str | None) -> int:
    """Return the number in a text; 0 for another text or None."""
    try:
        return int(text or 0)
    except ValueError:
        return 0


def _notes(parameters: dict[str, str], epoch: int | None, unowned: float) -> tuple[str, ...]:
    """Return the warnings about an export as a whole."""
    notes = []
    major = _number(parameters.get("EXPORT_SCHEMA_VERSION_MAJOR"))
    if major > _NEWEST_MAJOR:
        version = parameters.get("EXPORT_SCHEMA_VERSION", major)
        notes.append(
            f"schema version {version} of the export is newer than this fastcomm supports "
            f"({_NEWEST_MAJOR}.x): it ignores renamed tables"
        )
    if epoch is None:
        notes.append(
            f"no {schema.SESSION}: the absolute time of the events is unknown; "
            "clocks of several reports cannot be compared"
        )
    if unowned:
        notes.append(
            f"{unowned:.2%} of the rows of device work name no process (globalPid is NULL) and "
            "are left out; export the report again"
        )
    return tuple(notes)


def kernel_warnings(export: Export, events: Events, *, has_gpu: bool) -> tuple[str, ...]:
    """Return a warning if the kernels of a process are missing, and with them compute.

    `has_gpu` is whether any process has device work.
    """
    if len(events.rows("kernel")):
        return ()
    launches = len(events.unanswered())
    if not launches and not has_gpu:
        return (HOST_ALONE,)
    if not launches and (export.has(schema.KERNEL) or export.has(schema.GRAPH)):
        return ()
    reason = f"the table {schema.KERNEL} has no kernel of the process"
    if not export.has(schema.KERNEL):
        reason = f"no table of kernels ({schema.KERNEL}) in the export"
    calls = f", though {launches} recorded calls launched one" * bool(launches)
    unknown_times = MISSING_DATA["kernels"].partition(": ")[2]
    return (
        f"{reason}{calls}, so that {unknown_times} are n/a; export the report again, or "
        "collect with `nsys profile -t cuda,nvtx ...`",
    )


def host_of(export: Export, process: int) -> str | None:
    """Return a digest of the name of a process's host (`g >> 24`); None if nothing tells it.

    A report that was joined from several machines names the host of each.
    """
    rows = export.rows(
        schema.SYSTEM, ("name", "value", "globalVid"), where=[f"name = '{schema.HOST_NAME}'"]
    )
    rows = rows.where(pc.equal(rows.texts("name"), schema.HOST_NAME).to_numpy())
    if rows.count > 1:
        machine = process >> (schema.MACHINE_BIT - schema.THREAD_BITS)
        rows = rows.where(rows["globalVid"] >> schema.MACHINE_BIT == machine)
    names = set(rows.texts("value").to_pylist())
    return host_digest(names.pop()) if len(names) == 1 else None


def gpu_of(export: Export) -> str | None:
    """Return the name that all devices of an export have; None without one."""
    names = set(export.rows(schema.GPUS, ("name",)).texts("name").to_pylist())
    return gpu_name(names)


def mpi_ranks(export: Export) -> dict[int, int]:
    """Return the MPI rank of each process (`g >> 24`), where MPI was traced."""
    rows = export.rows(schema.MPI_RANKS, ("globalTid", "rank"))
    processes = rows["globalTid"] >> schema.THREAD_BITS
    ranks = rows["rank"]
    has_rank = ranks != NULL
    pairs = np.unique(np.stack([processes[has_rank], ranks[has_rank]], axis=1), axis=0).tolist()
    by_process = dict(pairs)
    # Ranks in several communicators do not tell the rank in the world.
    return by_process if len(by_process) == len(pairs) else {}


def process_warnings(
    events: Events, nccl: NcclRanges, collectives: Collectives, matched: KernelParts
) -> Iterator[str]:
    """Yield the warnings about the communication and the graphs of one process.

    Parameters
    ----------
    events
        Device work and launches of the process.
    nccl
        Its NCCL ranges.
    collectives
        Its communication.
    matched
        How its communication kernels were matched with operations.

    """
    yield from _graph_warnings(events)
    if len(collectives.row):
        yield from _payload_warnings(nccl)
    if matched.by_order:
        yield (
            f"{matched.by_order} communication kernels were launched by another thread than "
            "the one that called NCCL: their sizes were matched by order"
        )
    if extra := int(matched.extra.sum()):
        yield (
            f"{extra} communication kernels exceed the operations that launched them: the "
            "first kernel of each operation has its bytes, these have none"
        )


def unnamed_warnings(path: Path, count: int, share: float) -> Iterator[str]:
    """Yield a warning about kernels without names, if there are some.

    Parameters
    ----------
    path
        The export.
    count
        Number of kernels without a name.
    share
        Their share of the time of all kernels, 0 to 1.

    Raises
    ------
    TraceFileError
        No kernel has a name.

    """
    if not count:
        return
    text = (
        f"{count} kernels, {share:.1%} of the kernels' time, have no name, since the table "
        f"{STRINGS} lacks it: whether they compute or communicate is unknown"
    )
    if share == 1:
        raise TraceFileError(f"{path}: {text}; export the report again")
    yield f"{text}, and times are n/a" if share > SMALL else f"{text}; they count as neither"


def _payload_warnings(nccl: NcclRanges) -> Iterator[str]:
    """Yield warnings about missing NCCL ranges, sizes and communicators."""
    is_operation = nccl.is_operation
    if nccl.has_domain and not is_operation.any():
        yield (
            "the NVTX domain NCCL has no range of an NCCL call (was it collected with "
            "`nsys profile --trace=nccl`?): message sizes and groups are unknown. Collect with "
            "`nsys profile -t cuda,nvtx ...`"
        )
    elif not is_operation.any():
        yield (
            "no NCCL range at all: message sizes and groups are unknown. Collect with `nsys "
            "profile -t cuda,nvtx ...`; NCCL_NVTX_DISABLE must not be set; RCCL has no ranges"
        )
    elif (nccl.size[is_operation] != NULL).any() and (
        nccl.communicator[is_operation] == NULL
    ).all():
        yield (
            "sizes but no communicator (NCCL 2.16 to 2.24 sends none): groups are unknown; "
            "tag them by their streams in --config, or give a Kineto trace of the same run"
        )


def without_payloads(report: Report, count: int) -> str:
    """Return the warning about an export without payloads, with the command to export it again.

    `count` is the number of NCCL ranges without a payload.
    """
    parameters = report.parameters
    flags = ("EXPORT_PARAM_INCLUDE_BLOBS", "EXPORT_PARAM_INCLUDE_JSON")
    if any(parameters.get(flag) == "true" for flag in flags):
        return (
            f"{report.path}: {count} NCCL ranges and no payload on any of them, though the "
            "export asked for payloads: NCCL before 2.16 sends no sizes. Bandwidth and volume "
            "are n/a"
        )
    name = f"{report.path.with_suffix('').name}.nsys-rep"
    original = parameters.get("EXPORT_PARAM_INPUT_FILE") or name
    stem = report.path.with_suffix("")
    return Lines(
        f"{inert(str(report.path))}: {count} NCCL ranges and no payload on any of them "
        "(NVTX_EVENTS.binaryData and jsonText are NULL): this export has no message sizes.\n"
        "Export the report again with its payloads, and give fastcomm the new file:\n"
        f"    nsys export --type=sqlite --include-blobs=true "
        f"--output={shell_quoted(f'{stem}.payload.sqlite')} {shell_quoted(original)}\n"
        "(an nsys that does not know --include-blobs: --include-json=true.) Times, overlap, "
        "windows and counts are complete; bandwidth and volume are n/a."
    )


def graph_share(events: Events) -> float:
    """Return the share of launches of whole CUDA graphs in the time of device work, 0 to 1."""
    start, stop = events.start, events.stop
    graphs, device = _graphs(events), events.rows(*DEVICE_KINDS)
    own, whole = (
        float((stop[rows] - start[rows]).sum(dtype=np.float64)) for rows in (graphs, device)
    )
    return own / whole if whole else 0.0


def _graphs(events: Events) -> Ints:
    """Return the rows of CUDA graphs that were traced as a whole."""
    return events.rows_named(lambda name: name == WHOLE_GRAPH, "kernel")


def _graph_warnings(events: Events) -> Iterator[str]:
    """Yield a warning about CUDA graphs that were traced as a whole."""
    count, share = len(_graphs(events)), graph_share(events)
    if not count:
        return
    effect = (
        "the device is busy then, which cannot be divided into compute, communication and "
        "copies, and times are n/a"
        if share > SMALL
        else "they count as compute"
    )
    yield (
        f"{count} launches of CUDA graphs, {percent(share, 0)} of the GPU's time, are one row "
        f"each, without the kernels inside, communication included: {effect}. Collect with: "
        "nsys profile --cuda-graph-trace=node ..."
    )
