"""Find the reports and processes that are ranks, and read each as a trace.

Ranges are projected on the device: from the first to the last work launched inside of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers import OpenOptions, RankSources, rank_from_name
from fastcomm.readers.assembly import TraceOptions, assemble
from fastcomm.readers.nsys import communicators, layout, report
from fastcomm.readers.nsys import report as nsys_report
from fastcomm.readers.nsys.collectives import find_collectives, launch_points
from fastcomm.readers.nsys.communicators import Communicator, CommunicatorRecords
from fastcomm.readers.nsys.events import read_creations, read_events, set_aside_unnamed
from fastcomm.readers.nsys.export import Export
from fastcomm.readers.nsys.nvtx import read_nccl, read_ranges
from fastcomm.readers.nsys.report import Report, read_report
from fastcomm.trace.run import Source, ranges
from fastcomm.trace.trace import SMALL, Meta, Trace
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What is known of a process besides its own rows."""

    process: int  # g >> 24
    rank: int
    world_size: int | None
    communicators: Mapping[int, Communicator] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read(path: Path, options: TraceOptions, member: Member) -> Trace:
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
        np.where(own.node == NULL, -1, events.correlation),
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
            *nsys_report.unnamed(path, unnamed, share),
            *member.notes,
            *nsys_report.about(events, nccl, found, matched),
        ),
    )
    epoch = report.epoch or 0
    events = replace(events, start=events.start + epoch, stop=events.stop + epoch)
    return assemble(events, own.lanes, found, options, meta)


_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peek:
    """What is known of a report before any of its ranks is read."""

    report: Report
    said: dict[int, CommunicatorRecords]  # by process
    mpi: dict[int, int]
    operations: int  # ranges of NCCL that move data
    sizes: int  # those that say how much


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """The ranks of the reports, with the communicators that each is in."""
    with ThreadPoolExecutor(min(_THREADS, len(paths))) as pool:
        peeks = list(pool.map(_peek, paths))
    members = [(peek, process) for peek in peeks for process in peek.report.processes]
    said = {number: peek.said[process] for number, (peek, process) in enumerate(members)}
    rank_of, by = _ranks(members, said, options.config.ranks)
    world = communicators.world_size(said.values())
    if world is None:
        world = options.world
    elif max(rank_of.values()) >= world:
        world = None
    joined = communicators.join(said, rank_of, world)
    reading = options.reading(world, rank_of.values())
    sources = [
        Source(
            rank=rank_of[number],
            path=peek.report.path,
            size=_size(peek.report.path),
            read=partial(
                read,
                peek.report.path,
                reading,
                Member(
                    process=process,
                    rank=rank_of[number],
                    world_size=world,
                    communicators=joined[number],
                ),
            ),
        )
        for number, (peek, process) in enumerate(members)
    ]
    return RankSources(
        sources=tuple(sorted(sources, key=lambda source: source.rank)),
        world_size=world,
        warnings=(*by, *_notes(peeks, said, rank_of, joined)),
    )


def _peek(path: Path) -> _Peek:
    export = Export(path)
    if export.is_strange:
        raise TraceFileError(
            f"{path}: {export.kind} without any table of an Nsight Systems export "
            f"({layout.KERNEL}, {layout.NVTX}, {layout.EXPORT}); found {export.tables}"
        )
    about = report.read_report(export)
    if not about.processes:
        raise TraceFileError(
            f"{path}: no device work ({', '.join(layout.DEVICE_WORK)}) and no NVTX range of "
            "any process; collect with `nsys profile -t cuda,nvtx ...`"
        )
    nccl = read_nccl(export, None, about.ends)
    said = {process: communicators.said_by(nccl.of(process)) for process in about.processes}
    return _Peek(
        report=about,
        said=said,
        mpi=report.mpi_ranks(export),
        operations=int(nccl.is_operation.sum()),
        sizes=int((nccl.size != NULL).sum()),
    )


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size


_Members = Sequence[tuple[_Peek, int]]


def _ranks(
    members: _Members, said: Mapping[int, CommunicatorRecords], explicit: Mapping[str, int]
) -> tuple[dict[int, int], list[str]]:
    """The rank of each process by the best evidence that tells all of them apart."""
    for ranks, warning in _evidence(members, said, explicit):
        if len(ranks) == len(members):
            _check_different(ranks, members)
            return ranks, [warning] if warning else []
    raise AssertionError("the order of the files always tells")


def _evidence(
    members: _Members, said: Mapping[int, CommunicatorRecords], explicit: Mapping[str, int]
) -> Iterator[tuple[dict[int, int], str]]:
    """Ranks by number of the process, the best evidence first, and what to warn of."""
    if explicit:
        yield _explicit(members, explicit), ""
    by_world = communicators.global_ranks(said) or {}
    differ = [
        number for number, rank in _named(members).items() if by_world.get(number) != rank
    ]
    yield by_world, _contradiction(members, by_world, differ) if by_world and differ else ""
    yield (
        {
            number: peek.mpi[process]
            for number, (peek, process) in enumerate(members)
            if process in peek.mpi
        },
        "",
    )
    yield _named(members), ""
    several = (
        "the ranks are a guess, by the order of files and processes: neither NCCL nor MPI nor "
        "the names of the files tell them; a table [ranks] in --config does"
    )
    yield (
        {number: number for number in range(len(members))},
        several if len(members) > 1 else "",
    )


def _contradiction(
    members: _Members, by_world: Mapping[int, int], differ: Sequence[int]
) -> str:
    path = members[differ[0]][0].report.path
    return (
        f"{path.name} is rank {by_world[differ[0]]} of the largest communicator, which counts, "
        f"and not what its name says; {len(differ)} such reports; a table [ranks] in --config "
        "goes before both"
    )


def _named(members: _Members) -> dict[int, int]:
    """What the names of reports of one process each say."""
    if any(len(peek.report.processes) > 1 for peek, _ in members):
        return {}
    ranks = ((number, rank_from_name(peek.report.path.name)) for number, (peek, _) in
             enumerate(members))  # fmt: skip
    return {number: rank for number, rank in ranks if rank is not None}


def _explicit(members: _Members, explicit: Mapping[str, int]) -> dict[int, int]:
    """What the user says: by file name, or by file name, colon, process number."""
    found = {}
    for number, (peek, process) in enumerate(members):
        name = peek.report.path.name
        for key in (f"{name}:{layout.process_of(process)}", name):
            if key in explicit:
                found[number] = explicit[key]
                break
    return found


def _check_different(ranks: Mapping[int, int], members: _Members) -> None:
    first: dict[int, int] = {}
    for number, rank in ranks.items():
        if rank in first:
            places = " and ".join(
                f"{members[n][0].report.path} (process {layout.process_of(members[n][1])})"
                for n in (first[rank], number)
            )
            raise TraceFileError(f"two processes of rank {rank}: {places}")
        first[rank] = number


def _notes(
    peeks: Sequence[_Peek],
    said: Mapping[int, CommunicatorRecords],
    rank_of: Mapping[int, int],
    joined: Mapping[int, Mapping[int, communicators.Communicator]],
) -> Iterator[str]:
    silent = [peek for peek in peeks if peek.operations and not peek.sizes]
    if silent:
        more = f"\n({len(silent) - 1} more reports lack them too.)" if len(silent) > 1 else ""
        yield nsys_report.without_payloads(silent[0].report, silent[0].operations) + more
    unknown = {
        key for mine in joined.values() for key, each in mine.items() if each.ranks is None
    }
    late = {key for each in said.values() for key in each.used - each.memberships.keys()}
    if missing := unknown & late:
        users = sorted(rank_of[number] for number, each in said.items() if each.used & missing)
        yield (
            f"{len(missing)} communicators were made before the capture began (ranks "
            f"{ranges(users)} use them): who is in them is known only if all ranks are here; "
            "say the sizes of the job (--tp, --pp, --dp ...) to vouch for that"
        )


def project(path: Path, process: int | None = None) -> pa.Table:
    """A row a range, of one process or of all; `nsys.project` says what is in it."""
    export = Export(path)
    report = read_report(export)
    chosen = [p for p in report.processes if process in (None, layout.process_of(p))]
    return pa.concat_tables([_project(export, each, report.ends) for each in chosen])


def _project(export: Export, process: int, ends: frozenset[int]) -> pa.Table:
    ranges = read_ranges(export, process, ends, operators=True, numbered=True)
    own = read_events(export, process, ranges, whole=False)
    events, points = own.events, launch_points(own, read_creations(export, process))
    work = events.rows("kernel", "memcpy", "memset")
    work = work[points.thread[work] != NULL]
    rows = np.flatnonzero(ranges.kind == layout.PUSH_POP)
    both = np.concatenate([ranges.thread[rows], points.thread[work]])
    lanes: NDArray[np.int32] = np.unique(both, return_inverse=True)[1].astype(np.int32)
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
    kept = np.flatnonzero(count > 0)
    rows = rows[kept]
    thread = ranges.thread[rows]
    return pa.table(
        {
            "process": np.full(len(rows), layout.process_of(process)),
            "thread": thread & ((1 << layout.THREAD_BITS) - 1),
            "name": ranges.name.take(pa.array(rows)).cast(pa.string()),
            "start": ranges.start[rows],
            "stop": ranges.stop[rows],
            "first": first[kept],
            "last": last[kept],
            "count": count[kept],
        }
    )
