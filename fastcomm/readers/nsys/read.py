"""One process of a report becomes the trace of a rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.assembly import ReadOptions, assemble
from fastcomm.readers.events import Events
from fastcomm.readers.nsys import messages
from fastcomm.readers.nsys.collectives import find_collectives, launch_points
from fastcomm.readers.nsys.communicators import Communicator
from fastcomm.readers.nsys.events import read_events, set_aside_unnamed
from fastcomm.readers.nsys.export import Export
from fastcomm.readers.nsys.graphs import read_creations
from fastcomm.readers.nsys.nvtx import read_nccl, read_ranges
from fastcomm.readers.nsys.report import Report, read_report
from fastcomm.trace.trace import SMALL, Meta, Trace
from fastcomm_kernels.json_numbers import NULL

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What is known of a process besides its own rows."""

    process: int  # g >> 24
    rank: int
    world_size: int | None
    communicators: Mapping[int, Communicator] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read(path: Path, options: ReadOptions, member: Member) -> Trace:
    """Read one process of an export; only the tables, columns and rows that are needed."""
    export = Export(path)
    report = read_report(export)
    nccl = read_nccl(export, member.process, report.ends)
    ranges = read_ranges(export, member.process, report.ends, operators=options.whole)
    own = read_events(export, member.process, ranges, whole=options.whole)
    events = own.events
    unnamed, share = set_aside_unnamed(events)
    unknown = max(share, report.unowned) > SMALL
    found, matched = find_collectives(
        events,
        launch_points(own, read_creations(export, member.process)),
        np.where(own.node == NULL, -1, events.columns["correlation"]),
        ranges,
        nccl,
        member.communicators,
        options,
    )
    meta = Meta(
        rank=member.rank,
        world_size=member.world_size,
        format="nsys",
        path=str(path),
        clock=None if report.epoch is None else "unix",
        lacks=()
        if report.has_gpu and not unknown
        else ("device_kinds" if unknown else "device",),
        warnings=(
            *report.notes,
            *messages.unnamed(path, unnamed, share),
            *member.notes,
            *messages.about(events, nccl, found, matched),
        ),
    )
    _to_epoch(events, report)
    return assemble(events, own.lanes, found, options, meta)


def _to_epoch(events: Events, report: Report) -> None:
    for name in ("start", "stop"):
        events.columns[name] = events.columns[name] + (report.epoch or 0)
