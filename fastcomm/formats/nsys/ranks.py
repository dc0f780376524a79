"""Find the reports and processes that are ranks, and read each as a trace.

Ranges are projected on the device: from the first to the last work launched inside of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import Lines, TraceFileError, shell_joined
from fastcomm.formats.assembly import TraceOptions, assemble
from fastcomm.formats.config import Config
from fastcomm.formats.nsys import communicators, schema
from fastcomm.formats.nsys import report as nsys_report
from fastcomm.formats.nsys.communication_launches import find_collectives, launch_points
from fastcomm.formats.nsys.communicators import Communicator, CommunicatorRecords
from fastcomm.formats.nsys.events import read_creations, read_events, set_aside_unnamed
from fastcomm.formats.nsys.export import Export
from fastcomm.formats.nsys.nvtx import read_nccl, read_ranges
from fastcomm.formats.nsys.report import Report, read_report
from fastcomm.formats.sources import RankReader, RankSources, rank_from_name, unused
from fastcomm.trace.run_traces import Source, ranges
from fastcomm.trace.trace import SMALL, Meta, Trace
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What the whole run states about one process, beyond its own rows."""

    process: int  # g >> 24
    device: int | None  # the one that is the rank, of a process with several
    rank: int
    world_size: int | None
    communicators: Mapping[int, Communicator] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read(path: Path, options: TraceOptions, member: Member) -> Trace:
    """Read one process of an export as a trace.

    Parameters
    ----------
    path
        The export.
    options
        Patterns, steps and tags; with `whole`, operators and waits are read as well.
    member
        The process, with what the whole run states about it.

    Raises
    ------
    TraceFileError
        If the export is damaged, or no kernel has a name.

    """
    export = Export(path)
    report = read_report(export)
    nccl = read_nccl(export, member.process, report.ends)
    ranges = read_ranges(export, member.process, report.ends, operators=options.whole)
    process_events = read_events(
        export, member.process, ranges, device=member.device, whole=options.whole
    )
    events = process_events.events
    unnamed, share = set_aside_unnamed(events)
    unknown = max(share, report.unowned) > SMALL
    collectives, matched = find_collectives(
        events,
        launch_points(process_events, read_creations(export, member.process)),
        np.where(process_events.node == NULL, -1, events.correlation),
        ranges,
        nccl,
        member.communicators,
        options,
    )
    missing: tuple[str, ...] = ()
    notes = nsys_report.kernel_warnings(export, events, has_gpu=report.has_gpu)
    if notes == (nsys_report.HOST_ALONE,):
        missing = ("device",)
    elif unknown or notes:
        missing = ("device_kinds",) if unknown else ("kernels",)
    elif nsys_report.graph_share(events) > SMALL:
        missing = ("graphs",)
    meta = Meta(
        rank=member.rank,
        world_size=member.world_size,
        format="nsys",
        path=str(path),
        clock=None if report.epoch is None else "unix",
        gpu=nsys_report.gpu_of(export),
        host=nsys_report.host_of(export, member.process),
        missing_data=missing,
        warnings=(
            *report.notes,
            *notes,
            *nsys_report.unnamed_warnings(path, unnamed, share),
            *member.notes,
            *nsys_report.process_warnings(events, nccl, collectives, matched),
        ),
    )
    epoch = report.epoch or 0
    events = replace(events, start=events.start + epoch, stop=events.stop + epoch)
    return assemble(events, process_events.lanes, collectives, options, meta)


_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peek:
    """What one report states before any of its ranks is read."""

    report: Report
    records: dict[int, CommunicatorRecords]  # by process
    mpi: dict[int, int]  # MPI rank by process
    devices: dict[int, dict[int, bool]]  # by process that drives several; whether it is a rank
    operations: int  # number of NCCL ranges that move data
    sizes: int  # number of NCCL ranges with a size


def find(paths: Sequence[Path], config: Config) -> RankSources:
    """Find the ranks of the reports, with the communicators of each rank.

    `fastcomm.formats.nsys.recognition.find` documents parameters and errors.
    """
    with ThreadPoolExecutor(min(_THREADS, len(paths))) as pool:
        peeks = list(pool.map(_peek, paths))
    members = [member for peek in peeks for member in _members(peek)]
    if not config.ranks:
        _check_windows(members)
    # Which device of a process a communicator is on, is not recorded.
    records = {
        number: CommunicatorRecords() if member.device is not None else member.records
        for number, member in enumerate(members)
    }
    rank_of, notes = _ranks(members, records, config.ranks)
    world = communicators.world_size(records.values())
    if any(member.device is not None for member in members):
        world = len(members)
    if world is None:
        world = config.world
    elif max(rank_of.values()) >= world:
        world = None
    joined = communicators.join(records, rank_of, world)
    reading = config.reading(world, rank_of.values())
    sources = [
        _source(
            member.path,
            reading,
            Member(
                process=member.process,
                device=member.device,
                rank=rank_of[number],
                world_size=world,
                communicators=joined[number],
            ),
        )
        for number, member in enumerate(members)
    ]
    return RankSources(
        sources=tuple(sorted(sources, key=lambda source: source.rank)),
        world_size=world,
        warnings=(*notes, *_notes(peeks, records, rank_of, joined)),
    )


def _source(path: Path, reading: TraceOptions, member: Member) -> Source:
    """Return where a rank is read from."""
    rank, size = member.rank, _size(path)
    reader = RankReader(read, path, reading, (member,))
    return Source(rank=rank, path=path, size=size, reader=reader)


def _peek(path: Path) -> _Peek:
    """Read what a report states about its processes and their communicators."""
    export = Export(path)
    if export.is_foreign:
        raise TraceFileError(
            f"{path}: {export.kind} without any table of an Nsight Systems export "
            f"({schema.KERNEL}, {schema.NVTX}, {schema.EXPORT}); its tables are "
            f"{export.tables}. Export the report again with `nsys export`"
        )
    report = read_report(export)
    if not report.processes:
        raise TraceFileError(
            f"{path}: no device work ({', '.join(schema.DEVICE_WORK)}), no NVTX range "
            "and no call of CUDA of any process; collect with `nsys profile -t cuda,nvtx ...`"
        )
    nccl = read_nccl(export, None, report.ends)
    records = {
        process: communicators.records_of_process(nccl.of_process(process))
        for process in report.processes
    }
    return _Peek(
        report=report,
        records=records,
        mpi=nsys_report.mpi_ranks(export),
        devices=export.kernel_devices(),
        operations=int(nccl.is_operation.sum()),
        sizes=int((nccl.size != NULL).sum()),
    )


def _size(path: Path) -> int:
    """Return the bytes of an export."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size


class _Place(NamedTuple):
    """What is a rank: a process of a report, or a device of one that drives several."""

    peek: _Peek
    process: int  # g >> 24
    device: int | None

    @property
    def path(self) -> Path:
        """The report."""
        return self.peek.report.path

    @property
    def records(self) -> CommunicatorRecords:
        """The communicators of the process."""
        return self.peek.records[self.process]

    @property
    def keys(self) -> tuple[str, ...]:
        """How a user names it in a configuration, the most precise first."""
        name, process = self.path.name, schema.process_of(self.process)
        of_device = () if self.device is None else (f"{name}:{process}:{self.device}",)
        return (*of_device, f"{name}:{process}", name)

    def __str__(self) -> str:
        """Return "process 71", or "GPU 2 of process 71"."""
        device = "" if self.device is None else f"GPU {self.device} of "
        return f"{device}process {schema.process_of(self.process)}"


def _members(peek: _Peek) -> Iterator[_Place]:
    """Yield the ranks in a report."""
    for process in peek.report.processes:
        devices = peek.devices.get(process, {None: True})
        for device in (device for device, is_rank in devices.items() if is_rank):
            yield _Place(peek, process, device)


_Members = Sequence[_Place]


def _check_windows(members: _Members) -> None:
    """Raise TraceFileError if reports are windows that were recorded of one process.

    They are if the process, its device, the host and the start of the session are equal, and
    one window ends before the other begins.
    """
    of_process: dict[tuple[int, int | None, int | None], list[_Place]] = {}
    for member in members:
        key = member.process, member.device, member.peek.report.epoch
        if key[-1] is not None:
            of_process.setdefault(key, []).append(member)
    first: dict[tuple[str | None, *tuple[int | None, ...]], Path] = {}
    several: list[_Place] = []
    for key, places in of_process.items():
        windows = sorted(_windows(places))
        for host, _, _, number in windows:
            first.setdefault((host, *key), places[number].path)
        for (host, _, stop, one), (other_host, start, _, other) in pairwise(windows):
            if host == other_host and stop <= start:
                several = several or [places[one], places[other]]
    if several:
        chosen = shell_joined(map(str, sorted({*first.values()})))
        raise TraceFileError(
            f"two reports of {several[0]}: {several[0].path} and {several[1].path}. They are "
            "windows of one recording (nsys --capture-range-end=repeat): pass those of one "
            f"window: {chosen}. If they are different ranks, state these in a table [ranks] in "
            "--config"
        )


def _windows(places: _Members) -> Iterator[tuple[str, int, int, int]]:
    """Yield the host, start, stop and number of places of one process that have device work."""
    for number, place in enumerate(places) if len(places) > 1 else ():
        export = Export(place.path)
        rows = export.rows(schema.KERNEL, ("start", "end"), process=place.process)
        host = str(nsys_report.host_of(export, place.process))
        if rows.count:
            yield host, int(rows["start"].min()), int(rows["end"].max()), number


def _ranks(
    members: _Members, records: Mapping[int, CommunicatorRecords], explicit: Mapping[str, int]
) -> tuple[dict[int, int], list[str]]:
    """Return the rank of each process, from the best evidence for all, and warnings."""
    for ranks, warning in _evidence(members, records, explicit):
        if len(ranks) == len(members):
            _check_different(ranks, members)
            return ranks, [warning] if warning else []
    raise AssertionError("the order of the files always gives ranks")


def _evidence(
    members: _Members, records: Mapping[int, CommunicatorRecords], explicit: Mapping[str, int]
) -> Iterator[tuple[dict[int, int], str]]:
    """Yield ranks by index of the process, the best evidence first, each with a warning."""
    if explicit:
        yield _explicit(members, explicit), ""
    by_world = communicators.global_ranks(records) or {}
    conflicts = [
        number for number, rank in _named(members).items() if by_world.get(number) != rank
    ]
    yield (
        by_world,
        _contradiction(members, by_world, conflicts) if by_world and conflicts else "",
    )
    yield (
        {
            number: member.peek.mpi[member.process]
            for number, member in enumerate(members)
            if member.process in member.peek.mpi and member.device is None
        },
        "",
    )
    yield _named(members), ""
    guess = (
        "the ranks are a guess, by the order of files and processes: neither NCCL nor MPI nor "
        "file names state them. State them in a table [ranks] in --config"
    )
    if any(member.device is not None for member in members):
        names = ", ".join(map(str, members))
        guess = (
            f"the ranks are a guess: each device of a process is one, in this order: {names}. "
            "State them in a table [ranks] in --config"
        )
    yield (
        {number: number for number in range(len(members))},
        guess if len(members) > 1 else "",
    )


def _contradiction(
    members: _Members, by_world: Mapping[int, int], conflicts: Sequence[int]
) -> str:
    """Return the warning about file names that contradict the largest communicator.

    `by_world` has the rank in that communicator by position in `members`; `conflicts` are the
    positions whose file names say another rank, at least one.
    """
    path = members[conflicts[0]].path
    return (
        f"{path.name} is rank {by_world[conflicts[0]]} of the largest communicator, unlike its "
        f"name; {len(conflicts)} such reports. The communicator is used; a table [ranks] in "
        "--config overrides both"
    )


def _named(members: _Members) -> dict[int, int]:
    """Return the ranks that the names of the reports state, by position in `members`.

    Reports without a rank in their name are left out. Empty if any report has several
    processes.
    """
    if any(
        len(member.peek.report.processes) > 1 or member.device is not None for member in members
    ):
        return {}
    ranks = ((number, rank_from_name(member.path.name)) for number, member in
             enumerate(members))  # fmt: skip
    return {number: rank for number, rank in ranks if rank is not None}


def _explicit(members: _Members, explicit: Mapping[str, int]) -> dict[int, int]:
    """Return ranks that the user states, keyed as in `_Place.keys`."""
    ranks = {}
    for number, member in enumerate(members):
        for key in member.keys:
            if key in explicit:
                ranks[number] = explicit[key]
                break
    return ranks


def _check_different(ranks: Mapping[int, int], members: _Members) -> None:
    """Raise TraceFileError if two processes have one rank."""
    first: dict[int, int] = {}
    for number, rank in ranks.items():
        if rank in first:
            places = " and ".join(
                f"{members[n].path} ({members[n]})" for n in (first[rank], number)
            )
            raise TraceFileError(
                f"two processes of rank {rank}: {places}. State the ranks in a table [ranks] "
                "in --config, or pass one of them"
            )
        first[rank] = number


def _notes(
    peeks: Sequence[_Peek],
    records: Mapping[int, CommunicatorRecords],
    rank_of: Mapping[int, int],
    joined: Mapping[int, Mapping[int, communicators.Communicator]],
) -> Iterator[str]:
    """Yield warnings about unused devices, missing payloads, and members that are unknown."""
    for peek in peeks:
        names = [
            f"GPU {device} of process {schema.process_of(process)}"
            for process, devices in peek.devices.items()
            for device, is_rank in devices.items()
            if not is_rank
        ]
        yield from (f"{peek.report.path}: {text}" for text in unused(names))
    without_sizes = [peek for peek in peeks if peek.operations and not peek.sizes]
    if without_sizes:
        first, *others = without_sizes
        more = f"\n({len(others)} more reports lack them too.)" if others else ""
        yield Lines(nsys_report.without_payloads(first.report, first.operations) + more)
    incomplete = {
        key
        for communicators_ in joined.values()
        for key, communicator in communicators_.items()
        if communicator.ranks is None
    }
    uncreated = {
        key for record in records.values() for key in record.used - record.memberships.keys()
    }
    if missing := incomplete & uncreated:
        users = sorted(
            rank_of[number] for number, record in records.items() if record.used & missing
        )
        yield (
            f"{len(missing)} communicators were created before the capture began (ranks "
            f"{ranges(users)} use them): their members are unknown unless the traces of all "
            "ranks are given. If they are, state the sizes of the job (--tp, --pp, --dp ...)"
        )


def project(path: Path, process: int | None = None) -> pa.Table:
    """Return one row per range of a process or of all; see `project` of `recognition`."""
    export = Export(path)
    report = read_report(export)
    chosen = [p for p in report.processes if process in (None, schema.process_of(p))]
    return pa.concat_tables([_project(export, process, report.ends) for process in chosen])


def _project(export: Export, process: int, ends: frozenset[int]) -> pa.Table:
    """Return the ranges of a process with the device work that they launched.

    `ends` are the times in ns at which the capture ended: a range that was never closed
    has one of them. The table has the start of the first and the end of the last work, and
    its count.
    """
    ranges = read_ranges(export, process, ends, operators=True, numbered=True)
    process_events = read_events(export, process, ranges, whole=False)
    events = process_events.events
    points = launch_points(process_events, read_creations(export, process))
    work = events.rows("kernel", "memcpy", "memset")
    work = work[points.thread[work] != NULL]
    rows = np.flatnonzero(ranges.kind == schema.PUSH_POP)
    threads = np.concatenate([ranges.thread[rows], points.thread[work]])
    lanes: NDArray[np.int32] = np.unique(threads, return_inverse=True)[1].astype(np.int32)
    range_lane, lane = lanes[: len(rows)], lanes[len(rows) :]
    order = np.lexsort((-ranges.stop[rows], ranges.start[rows], range_lane))
    rows, range_lane = rows[order], range_lane[order]
    by_launch = np.lexsort((points.start[work], lane))
    work, lane = work[by_launch], lane[by_launch]
    first, last, count = matching.projected(
        (range_lane, ranges.start[rows], ranges.stop[rows]),
        (lane, points.start[work], points.stop[work]),
        (events.start[work], events.stop[work]),
    )
    projected = np.flatnonzero(count > 0)
    rows = rows[projected]
    thread = ranges.thread[rows]
    return pa.table(
        {
            "process": np.full(len(rows), schema.process_of(process)),
            "thread": thread & ((1 << schema.THREAD_BITS) - 1),
            "name": ranges.name.take(pa.array(rows)).cast(pa.string()),
            "start": ranges.start[rows],
            "stop": ranges.stop[rows],
            "first": first[projected],
            "last": last[projected],
            "count": count[projected],
        }
    )
