"""What an nsys report says of itself: processes, clock, versions, and warnings about it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastcomm.errors import TraceFileError, shell_quoted
from fastcomm.readers.communication import Collectives
from fastcomm.readers.nsys import layout
from fastcomm.readers.nsys.events import GRAPH_NAME
from fastcomm.readers.nsys.export import Export
from fastcomm.readers.nsys.layout import STRINGS
from fastcomm.readers.nsys.nvtx import NcclRanges
from fastcomm.readers.nsys.operations import KernelParts
from fastcomm.trace.events import Events
from fastcomm.trace.trace import SMALL
from fastcomm.units import percent
from fastcomm_kernels.arrays import NULL

# Schemas up to this major version have the tables that `layout` names.
_NEWEST_MAJOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One export. Times of the file plus `epoch` are since 1970, where that is known."""

    path: Path
    kind: str
    processes: tuple[int, ...]  # `g >> 24` of those that are ranks, by process number
    has_gpu: bool  # whether the processes have device work
    unowned: float  # share of the rows of device work that name no process
    epoch: int | None
    ends: frozenset[int]  # times of the file at which the capture ended
    said: dict[str, str]  # META_DATA_EXPORT
    notes: tuple[str, ...]


def read_report(export: Export) -> Report:
    """What the small tables say; of the big ones, only which processes they are about."""
    said = _said(export)
    processes, has_gpu, unowned = _processes(export)
    utc = _first(export, layout.SESSION, "utcEpochNs")
    normalized = said.get("EXPORT_PARAM_TIME_NORMALIZE") == "true"
    shift = _number(said.get("EXPORT_PARAM_TIME_SHIFT"))
    epoch = 0 if normalized else None if utc is None else utc - shift
    duration = _first(export, layout.ANALYSIS, "duration")
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
        said=said,
        notes=(*_notes(said, epoch, has_gpu=has_gpu), *_about_unowned(unowned)),
    )


def _said(export: Export) -> dict[str, str]:
    rows = export.rows(layout.EXPORT, ("name", "value"))
    pairs = zip(*(rows.texts(name).to_pylist() for name in ("name", "value")), strict=True)
    return dict(pairs)


def _processes(export: Export) -> tuple[tuple[int, ...], bool, float]:
    """Those with device work; where there is none at all, those with ranges.

    And whether it is the former, and which share of the rows of device work names no process.

    Raises `TraceFileError` where none does.
    """
    for tables in (layout.DEVICE_WORK, (layout.NVTX,)):
        found = {table: export.processes(table) for table in tables}
        some = {each for owners in found.values() for each in owners if each is not None}
        has_gpu = tables is layout.DEVICE_WORK
        unowned = has_gpu and any(None in owners for owners in found.values())
        share = _unowned(export, some) if unowned else 0.0
        if some:
            return tuple(sorted(some, key=layout.process_of)), has_gpu, share
    return (), False, 0.0


def _unowned(export: Export, processes: set[int]) -> float:
    """The share of the rows of device work that name no process; TraceFileError for all."""
    columns = [export.rows(table, ("globalPid",))["globalPid"] for table in layout.DEVICE_WORK]
    owners = np.concatenate(columns)
    if not processes:
        raise TraceFileError(
            f"{export.path}: none of its {len(owners)} rows of device work names its process "
            "(globalPid is NULL), so that nothing tells the ranks; export the report again"
        )
    return float((owners == NULL).mean())


def _first(export: Export, table: str, column: str) -> int | None:
    values = export.rows(table, (column,))[column]
    return int(values[0]) if len(values) and values[0] != NULL else None


def _number(text: str | None) -> int:
    try:
        return int(text or 0)
    except ValueError:
        return 0


def _notes(said: dict[str, str], epoch: int | None, *, has_gpu: bool) -> list[str]:
    notes = []
    if not has_gpu:
        notes.append(
            "no device work in the export, ranges of the host alone, so that compute, "
            "communication, overlap and idle time are n/a; collect with `nsys profile -t "
            "cuda,nvtx ...`"
        )
    major = _number(said.get("EXPORT_SCHEMA_VERSION_MAJOR"))
    if major > _NEWEST_MAJOR:
        notes.append(
            f"schema version {said.get('EXPORT_SCHEMA_VERSION', major)} of the export is newer "
            f"than fastcomm knows ({_NEWEST_MAJOR}.x): tables that were renamed are missed"
        )
    if epoch is None:
        notes.append(
            f"no {layout.SESSION}: the absolute time of the events is unknown; "
            "clocks of several reports cannot be compared"
        )
    return notes


def _about_unowned(share: float) -> list[str]:
    said = (
        f"{share:.2%} of the rows of device work name no process (globalPid is NULL) and are "
        "left out; export the report again"
    )
    return [said] if share else []


def mpi_ranks(export: Export) -> dict[int, int]:
    """The rank that MPI gave each process (`g >> 24`), where it was traced."""
    rows = export.rows(layout.MPI_RANKS, ("globalTid", "rank"))
    processes = rows["globalTid"] >> layout.THREAD_BITS
    ranks = rows["rank"]
    known = ranks != NULL
    pairs = np.unique(np.stack([processes[known], ranks[known]], axis=1), axis=0).tolist()
    found = dict(pairs)
    # A process of several communicators' ranks tells nothing.
    return found if len(found) == len(pairs) else {}


def about(
    events: Events, nccl: NcclRanges, found: Collectives, matched: KernelParts
) -> Iterator[str]:
    """The warnings about one process."""
    yield from _about_graphs(events)
    if len(found.row):
        yield from _about_payloads(nccl)
    if matched.by_order:
        yield (
            f"{matched.by_order} communication kernels were launched by another thread than "
            "the one that called NCCL: their sizes were matched by order"
        )
    if extra := int(matched.extra.sum()):
        yield (
            f"{extra} communication kernels are more than the operations that launched them: "
            "the first of each has the bytes, these have none"
        )


def unnamed(path: Path, count: int, share: float) -> Iterator[str]:
    """The warning about kernels without names; TraceFileError where no kernel has one."""
    if not count:
        return
    said = (
        f"{count} kernels, {share:.1%} of the kernels' time, have no name, since the table "
        f"{STRINGS} lacks it: whether they compute or communicate is unknown"
    )
    if share == 1:
        raise TraceFileError(f"{path}: {said}; export the report again")
    yield f"{said}, and times are n/a" if share > SMALL else f"{said}; they count as neither"


def _about_payloads(nccl: NcclRanges) -> Iterator[str]:
    is_operation = nccl.is_operation
    if nccl.has_domain and not is_operation.any():
        yield (
            "the domain NCCL has no range of a call that fastcomm knows (was it collected with "
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
    """What is wrong with an export without payloads, and the command that mends it."""
    said = report.said
    flags = ("EXPORT_PARAM_INCLUDE_BLOBS", "EXPORT_PARAM_INCLUDE_JSON")
    if any(said.get(flag) == "true" for flag in flags):
        return (
            f"{report.path}: {count} NCCL ranges and no payload on any of them, though the "
            "export asked for payloads: NCCL before 2.16 sends no sizes. Bandwidth and volume "
            "are n/a"
        )
    name = f"{report.path.with_suffix('').name}.nsys-rep"
    original = report.said.get("EXPORT_PARAM_INPUT_FILE") or name
    stem = report.path.with_suffix("")
    return (
        f"{report.path}: {count} NCCL ranges and no payload on any of them "
        "(NVTX_EVENTS.binaryData and jsonText are NULL): this export has no message sizes.\n"
        "Export the report again with its payloads, and give fastcomm the new file:\n"
        f"    nsys export --type=sqlite --include-blobs=true "
        f"--output={shell_quoted(f'{stem}.payload.sqlite')} {shell_quoted(original)}\n"
        "(an nsys that does not know --include-blobs: --include-json=true.) Times, overlap, "
        "windows and counts are complete; bandwidth and volume are n/a."
    )


def _about_graphs(events: Events) -> Iterator[str]:
    rows = events.rows_named(lambda name: name == GRAPH_NAME, "kernel")
    if not len(rows):
        return
    start, stop = events.start, events.stop
    device = events.rows("kernel", "memcpy", "memset")
    hidden = int((stop[rows] - start[rows]).sum())
    whole = int((stop[device] - start[device]).sum())
    share = percent(hidden / max(whole, 1), 0)
    yield (
        f"{len(rows)} launches of CUDA graphs, {share} of the GPU's time, "
        "are one row each: the kernels inside are invisible, communication among them, and "
        "all of it counts as compute. Collect with: nsys profile --cuda-graph-trace=node ..."
    )
