"""Read one Perfetto trace as the trace of a rank, by the Kineto reader.

Files of PyTorch have no envelope: groups are those that collectives name. Files of rocprofv3
name collectives in calls of RCCL.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastcomm.errors import TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto.categories import UnknownWork, settled
from fastcomm.formats.kineto.chrome import Scanned, Selection
from fastcomm.formats.kineto.graph_nodes import with_order
from fastcomm.formats.kineto.host import named_rows
from fastcomm.formats.kineto.reader import Encoding
from fastcomm.formats.kineto.reader import read as read_as
from fastcomm.formats.perfetto.packets import RANK_START, RANK_STRIDE, Packets, read_packets
from fastcomm.formats.perfetto.timeline import SliceTimeline, timeline
from fastcomm.trace.columns import alike, lookup
from fastcomm.trace.events import enclosing
from fastcomm.trace.run_traces import MOST_RANKS
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm.units import counted
from fastcomm_kernels.arrays import NONE, NULL, Ints

_WORLD = "default_pg"  # the group of all ranks
_GROUP = ("Process Group Name", "Process Group Description", "Process Group Ranks")
_PARTNERS = ("send", "recv")  # collectives whose rank is that of the other side
_NOTE = (
    "a Perfetto trace of PyTorch does not tell copies between devices from others, and cuts a "
    "kernel at the start of the next one on its lane: compute and communication may be too "
    "short. The JSON of the same run has both"
)
_NO_EPOCH = "no clock of the trace counts from 1970: the absolute time of the events is unknown"
_CALL = re.compile(r"nccl(AllReduce|AllGather|ReduceScatter|AllToAllv?|Broadcast|Bcast|Reduce"
                   r"|Gather|Scatter|Send|Recv)$")  # fmt: skip


def read(path: Path, options: TraceOptions, rank: int | None = None) -> Trace:
    """Read the trace of one rank.

    Parameters
    ----------
    path
        The file.
    options
        What to read; with `whole`, all events rather than those that metrics need.
    rank
        The rank; None if unknown.

    Raises
    ------
    TraceFileError
        If the file is not such a trace, or has no events of a training job.

    """
    return read_as(path, options, rank, encoding=PERFETTO)


def scan(
    path: Path,
    selection: Selection,
    *,
    allow_truncated: bool = False,
    marks: str | None = None,
) -> tuple[Scanned, UnknownWork]:
    """Return the events that a selection keeps, and work of unknown kind, as JSON has them.

    Raises `TraceFileError` if the file is not such a trace, or has no events.
    """
    packets = read_packets(path, selection, allow_truncated=allow_truncated)
    events = timeline(packets, selection)
    scanned = events.scanned
    if not scanned.event_count and events.open_slices:
        raise TraceFileError(
            f"{path}: none of {counted(events.open_slices, 'slice')} has an end: the file has "
            "too little of the recording. Record it anew"
        )
    if not scanned.event_count:
        raise TraceFileError(
            f"{path}: a Perfetto trace without events of a training job: no slice and no stage "
            f"of device work in {packets.packet_count} packets. Expected a trace of the "
            "PyTorch profiler or of rocprofv3"
        )
    world, groups = distributed(packets)
    info: dict[str, Any] = {"pg_config": groups}
    if world is not None:
        info["world_size"] = world
    scanned = replace(
        scanned,
        envelope={**scanned.envelope, "distributedInfo": info},
        warnings=(*scanned.warnings, *_warnings(path, events)),
    )
    if selection.positions:
        scanned = with_order(scanned, lambda _: events.waits)
    return settled(_with_rccl(scanned), selection, marks)


def _warnings(path: Path, events: SliceTimeline) -> list[str]:
    """Return what the file does not tell."""
    notes = [_NOTE] if events.is_from_torch else []
    if events.open_slices:
        notes.append(
            f"{path}: {events.open_slices} slices have no end, or no possible time, and were "
            "left out"
        )
    if events.unnamed:
        notes.append(
            f"{path}: {counted(events.unnamed, 'event')} without a name, as where the "
            "recording has lost the packets with names: communication may be missing"
        )
    return notes


PERFETTO = Encoding(
    format="perfetto",
    scan=scan,
    unknown_categories=lambda _: (),
    work_categories=lambda _: (),
    apart=(
        "Traces of several ranks were joined, or one process drives the devices: give fastcomm "
        "a file for each rank, as the profiler wrote it, or the JSON"
    ),
    clock_notes=lambda clock: [] if clock == "unix" else [_NO_EPOCH],
)


def distributed(packets: Packets) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the number of ranks, or None, and groups as `distributedInfo` has them."""
    details = packets.details
    first, _ = alike(*(details[name] for name in (*_GROUP, "Group size")))
    groups, sizes = [], []
    for row in first.tolist():
        name, description, text = (_text(packets, key, row) for key in _GROUP)
        size = int(details["Group size"][row])
        ranks = _ranks(text)
        if name is None and description is None:
            continue
        if ranks is not None:
            sizes.append(max(ranks) + 1)
        if description == _WORLD and 0 < size <= MOST_RANKS:
            sizes.append(size)
        groups.append(
            {
                "pg_name": name or "",
                "pg_desc": description,
                **({"pg_size": size} if size != NULL else {}),
                **({"ranks": ranks} if ranks is not None else {}),
            }
        )
    return max(sizes, default=None), groups


def stated_rank(packets: Packets) -> int | None:
    """Return the rank that the collectives of a trace state; None without one."""
    details = packets.details
    names = (*_GROUP, "Collective name", "Rank", RANK_START, RANK_STRIDE)
    first, _ = alike(*(details[name] for name in names))
    for row in first.tolist():
        own, start, stride = (int(details[name][row]) for name in names[-3:])
        if own < 0 or _text(packets, "Collective name", row) in _PARTNERS:
            continue
        ranks = _ranks(_text(packets, "Process Group Ranks", row))
        if _text(packets, "Process Group Description", row) == _WORLD:
            return own
        if start >= 0 and stride >= 0:
            return start + own * stride
        if ranks is not None and own < len(ranks):
            return ranks[own]
    return None


def _text(packets: Packets, name: str, row: int) -> str | None:
    """Return the text of a detail, or None."""
    code = int(packets.details[name][row])
    return None if code == NULL else packets.texts[code]


def _ranks(text: str | None) -> list[int] | None:
    """Return the ranks of a list such as "[0, 1]"; None if it is truncated or empty."""
    try:
        ranks = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks)
    return ranks if is_list and min(ranks) >= 0 and max(ranks) < MOST_RANKS else None


def _with_rccl(scanned: Scanned) -> Scanned:
    """Give kernels that a call of RCCL launched the name of the collective.

    It is the call of the kernel's correlation, else the one around its launch.
    """
    calls = named_rows(scanned, "runtime", _CALL.match)
    kernels = np.flatnonzero(scanned.columns["kind"] == KIND["kernel"])
    if not len(calls) or not len(kernels):
        return scanned
    call = _calls_of(scanned, calls, kernels)
    is_found = call >= 0
    kernels, call = kernels[is_found], call[is_found]
    texts, codes = list(scanned.texts), dict[int, int]()
    for code in np.unique(scanned.columns["name"][call]).tolist():
        codes[code] = len(texts)
        texts.append(texts[code].removeprefix("nccl").lower())
    before = len(scanned.details["Collective name"]) - 1
    rows = {name: np.full(len(kernels), NULL, np.int64) for name in scanned.details}
    names = scanned.columns["name"][call].tolist()
    rows["Collective name"] = np.array([codes[name] for name in names], np.int64)
    details = {
        name: np.concatenate([column[:-1], rows[name], column[-1:]])
        for name, column in scanned.details.items()
    }
    detail = scanned.columns["detail"].copy()
    detail[kernels] = before + np.arange(len(kernels))
    return replace(
        scanned, columns={**scanned.columns, "detail": detail}, details=details, texts=texts
    )


def _calls_of(scanned: Scanned, calls: Ints, kernels: Ints) -> Ints:
    """Return the row of the RCCL call of each kernel, or NONE; `calls` are its rows."""
    columns = scanned.columns
    correlation = columns["correlation"]

    def with_correlation(rows: Ints) -> Ints:
        rows = rows[np.argsort(correlation[rows], kind="stable")]
        place = lookup(correlation[rows], correlation[kernels])
        return np.where(place >= 0, rows[place], NONE)

    own = with_correlation(calls)
    launch = with_correlation(np.flatnonzero(columns["kind"] == KIND["runtime"]))
    lane = np.unique(columns["thread"], return_inverse=True)[1].astype(np.int32)
    start, stop = columns["start"], columns["stop"]
    around = enclosing(
        (lane[calls], start[calls], stop[calls]), (lane[launch], start[launch], stop[launch])
    )
    outer = np.where((launch >= 0) & (around >= 0), calls[around], NONE)
    return np.where(own >= 0, own, outer)
