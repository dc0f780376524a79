"""Write device work and communication of all ranks as one timeline, on one clock.

The ranks are read twice: first their communication, which aligns clocks and tells who waits for
whom, then the work of the chosen steps, which every worker writes as text. A rank is a process;
its threads are steps, streams, and the communication of each stream. A wait is a slice inside
its collective or message, and an arrow comes from the member that arrived last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import preparation
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.executors.executor import OpenedRun, of_each
from fastcomm.formats.perfetto.ranks import SUFFIXES
from fastcomm.metrics.across_ranks import expected_members
from fastcomm.metrics.agreement import Agreement, gather_alike
from fastcomm.metrics.computation import material_of
from fastcomm.metrics.matched_communication import MESSAGE_COLUMNS, AlignedEvents, Share
from fastcomm.metrics.partial import Partial
from fastcomm.process import temporary_folder
from fastcomm.ranks.arrivals import CommunicationEvents, MatchedEvents
from fastcomm.ranks.clocks import offset_by_row
from fastcomm.ranks.group_tags import GroupTags, with_tags
from fastcomm.timeline.events import KINDS, Arrays, take, work
from fastcomm.timeline.timeline import time_zero
from fastcomm.trace.columns import alike, filled
from fastcomm.trace.perfetto_trace import PerfettoTimeline
from fastcomm.trace.run_traces import (
    ParallelMap,
    SkippedRank,
    named_ranks,
    ranges,
    warnings_of_ranks,
)
from fastcomm.trace.schema import OPS
from fastcomm.trace.timelines import (
    ChromeTimeline,
    DrawnWaits,
    Piece,
    Place,
    Slices,
    TimelineFormat,
    is_compressed,
    join,
    threads,
)
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NULL, Flags, Ints

STEPS = 1  # thread of the steps; those of streams have even numbers
_COLUMNS = (*MESSAGE_COLUMNS, "thread", "bytes", "stream")
_LONGEST = 60  # characters that name the members of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfettoFile:
    """Counts of the written trace."""

    ranks: int
    events: int  # device work and communication
    arrows: int
    skipped: Sequence[SkippedRank]
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimelineFile:
    """The file to write, and the folder of its pieces."""

    target: Path
    folder: Path

    def timeline(self, scene: "_Scene") -> TimelineFormat:
        """Return the format that the file's name says."""
        if self.target.name.lower().endswith(SUFFIXES):
            return PerfettoTimeline(scene.origin, int(scene.ranks[-1]))
        return ChromeTimeline()

    def write(self, name: str, texts: Iterable[bytes]) -> Piece:
        """Write a piece."""
        compressed = is_compressed(self.target)
        return Piece.write(self.folder / name, texts, compressed=compressed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """When the chosen steps of each rank begin and end, and the arrows between ranks."""

    ranks: Ints
    begin: Ints  # by rank, on its clock
    stop: Ints
    zero: Ints  # by rank: the moment on its clock that is time 0
    is_far: Flags  # by rank: whether its clock cannot be compared
    skipped: tuple[SkippedRank, ...]
    warnings: tuple[str, ...]
    agreement: Agreement
    arrows: int = 0
    pieces: tuple[Piece, ...] = ()  # waits and arrows

    @property
    def origin(self) -> int:
        """Time 0 on the clock of the first rank whose clock can be compared, ns from 0."""
        return max(int(self.zero[np.argmin(self.is_far)]), 0)

    def place(self, rank: Ints) -> Ints:
        """Return the index of each rank."""
        return np.searchsorted(self.ranks, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """The text of one rank."""

    rank: int
    events: int
    piece: Piece


def convert(run: OpenedRun, target: Path, steps: Sequence[int] | None = None) -> PerfettoFile:
    """Write the steps of a run as one trace for Perfetto and chrome://tracing.

    Parameters
    ----------
    run
        The traces.
    target
        File to write: packets of Perfetto if its name has one of `SUFFIXES`, else JSON;
        gzipped if it ends in ``.gz``. Workers write beside it.
    steps
        Numbers of the steps: all work from the first of them to the end of the last. Default:
        all steps.

    Raises
    ------
    ConfigError
        If no rank has one of the steps.
    FastcommError
        If a rank cannot be read or has no steps with times, or the file cannot be written.

    """
    run.compile(preparation.compile_kernels)
    only = None if steps is None else frozenset(steps)
    with temporary_folder(target.parent) as folder:
        output = _TimelineFile(folder=folder, target=target)
        finish = partial(_scene_of, only=only, output=output)
        scene = gather_alike(run, partial(_measured, only=only), finish)
        write = partial(_write, scene=replace(scene, pieces=()), output=output)
        written, skipped = run.only(scene.ranks.tolist()).gather(of_each(write))
        in_order = sorted(written, key=lambda part: part.rank)
        pieces = (*(part.piece for part in in_order), *scene.pieces)
        timeline = output.timeline(scene)
        join(timeline.begin, pieces, timeline.end(in_order[-1].rank), target, folder)
    return PerfettoFile(
        ranks=len(written),
        events=sum(part.events for part in written),
        arrows=scene.arrows,
        skipped=tuple(dict.fromkeys((*scene.skipped, *skipped))),
        warnings=scene.warnings,
    )


def _measured(
    *traces: Trace, only: frozenset[int] | None, by_host: bool, group_tags: GroupTags
) -> Partial:
    """Return the partial result of ranks; events have the thread that they are drawn on."""
    part = Partial.of(*traces, only=only, by_host=by_host, group_tags=group_tags)
    rank, thread = part.events["rank"].to_numpy(), np.empty(part.events.num_rows, np.int64)
    for trace in traces:
        if "times" in trace.meta.missing_data:
            raise FastcommError(
                f"{trace.meta.path}: no times, and nothing can be drawn without"
            )
        begin, stop = _steps(trace, only, by_host=by_host)
        inside = intervals.segment_of(trace.comm["start"].to_numpy(), begin, stop) >= 0
        own, _ = _communication_threads(trace)
        thread[rank == trace.meta.rank] = own[inside]
    return replace(part, events=part.events.append_column("thread", pa.array(thread)))


def _steps(trace: Trace, only: frozenset[int] | None, *, by_host: bool) -> tuple[Ints, Ints]:
    """Return begin and stop of the chosen steps."""
    steps = (trace if by_host else trace.on_device_clock()).iterations
    number, begin, stop = (steps[name].to_numpy() for name in ("number", "start", "stop"))
    chosen = slice(None) if only is None else np.isin(number, list(only))
    return begin[chosen], stop[chosen]


def _communication_threads(trace: Trace) -> tuple[Ints, dict[int, str]]:
    """Return the thread of each communication event, an odd number, and titles of threads."""
    stream, kind = filled(trace.comm["stream"]), _lane_kind(trace)
    start, stop = (trace.comm[name].to_numpy() for name in ("start", "stop"))

    def title(row: int) -> str:
        return "communication" + ("" if stream[row] == NULL else f", {kind} {stream[row]}")

    thread, titles = threads(1, stream, (start, stop), title)
    return 2 * thread + 1, {2 * number + 1: text for number, text in titles.items()}


def _lane_kind(trace: Trace) -> str:
    """Return what work runs on: streams, or threads of a run without devices."""
    return "thread" if trace.meta.is_host_run else "stream"


def _scene_of(
    whole: Partial,
    skipped: Sequence[SkippedRank],
    parallel_map: ParallelMap,
    agreement: Agreement,
    *,
    only: frozenset[int] | None,
    output: _TimelineFile,
) -> _Scene:
    """Align the clocks, and write waits and arrows."""
    _check_steps(whole, only)
    material = material_of(whole)
    aligned = AlignedEvents.of(
        material.batches,
        parallel_map,
        is_host_run=material.is_host_run,
        job=expected_members(material),
    )
    scene = _clocks(whole, aligned, skipped, agreement)
    draw = partial(_draw, aligned=aligned, scene=scene, output=output)
    drawn = parallel_map(draw, list(enumerate(aligned.shares())))
    return replace(
        scene,
        pieces=tuple(piece for piece, _ in drawn),
        arrows=sum(count for _, count in drawn),
    )


def _check_steps(whole: Partial, only: frozenset[int] | None) -> None:
    """Raise `ConfigError` if no rank has one of the steps, `FastcommError` without steps."""
    present = whole.iterations["iteration"].unique().to_pylist()
    if missing := sorted((only or frozenset()).difference(present)):
        numbers = sorted({note.steps or "no steps" for note in whole.notes})
        raise ConfigError(f"no step {ranges(missing)}; the run has {' or '.join(numbers)}")
    if not present:
        raise FastcommError("no rank has a step, and only the work of steps is drawn")


def _clocks(
    whole: Partial,
    aligned: AlignedEvents,
    skipped: Sequence[SkippedRank],
    agreement: Agreement,
) -> _Scene:
    """Return when the steps of each rank begin and end, and time 0 of each."""
    rank, begin, stop = (
        whole.iterations[name].to_numpy() for name in ("rank", "start_ns", "stop_ns")
    )
    ranks, place = np.unique(rank, return_inverse=True)
    first, last = np.full(len(ranks), np.iinfo(np.int64).max), np.full(len(ranks), NULL)
    np.minimum.at(first, place, begin)
    np.maximum.at(last, place, stop)
    zero, is_far = time_zero(first, last, offset_by_row(ranks, aligned.clocks.offsets))
    warnings = warnings_of_ranks(whole.notes)
    if is_far.any():
        warnings.append(
            f"the clocks of {named_ranks(ranks[is_far].tolist())} cannot be compared with "
            "those of the others: they begin at 0, and their waits are not drawn"
        )
    return _Scene(
        ranks=ranks,
        begin=first,
        stop=last,
        zero=zero,
        is_far=is_far,
        skipped=tuple(skipped),
        warnings=tuple(warnings),
        agreement=agreement,
    )


def _draw(
    item: tuple[int, Share],
    *,
    aligned: AlignedEvents,
    scene: _Scene,
    output: _TimelineFile,
) -> tuple[Piece, int]:
    """Write the waits in a share of the communication, and an arrow for each; count these."""
    number, share = item
    table = aligned.read(share, _COLUMNS)
    events, thread = CommunicationEvents.of(table), filled(table["thread"])
    matched, _ = aligned.match(events)
    place = scene.place(events.rank)
    start, length = events.start - scene.zero[place], events.stop - events.start
    rows, awaited, wait = _waits(matched, scene.is_far[place])
    wait = np.minimum(wait, length[rows])
    waits = DrawnWaits(
        place=Place(pid=events.rank[rows], tid=thread[rows], time=start[rows]),
        length=wait,
        awaited=Place(pid=events.rank[awaited], tid=thread[awaited], time=start[awaited]),
        arrival=start[rows] + np.minimum(wait, np.maximum(length[rows] - 1, 0)),
    )
    texts = output.timeline(scene).waits(number, waits) if len(rows) else ()
    return output.write(f"waits-{number}", texts), len(rows)


def _waits(matched: MatchedEvents, is_far: Flags) -> tuple[Ints, Ints, Ints]:
    """Return the events that wait, the event that each waits for, and for how long.

    `is_far` is whether the clock of an event's rank cannot be compared.
    """
    if not len(matched.size):
        return matched.row, matched.row, matched.wait
    place = np.arange(len(matched.row))
    last = np.maximum.reduceat(np.where(matched.is_awaited, place, -1), matched.first)
    is_known = (last >= 0) & ~np.logical_or.reduceat(is_far[matched.row], matched.first)
    last, is_known = (np.repeat(column, matched.size) for column in (last, is_known))
    waits = np.flatnonzero(is_known & (matched.wait > 0) & (last != place))
    return matched.row[waits], matched.row[last[waits]], matched.wait[waits]


def _write(trace: Trace, *, scene: _Scene, output: _TimelineFile) -> _Written:
    """Write the work of a rank in the chosen steps."""
    trace = with_tags(trace, scene.agreement.group_tags)
    rank = trace.meta.rank
    place = int(scene.place(np.array([rank]))[0])
    begin, stop, zero = (int(times[place]) for times in (scene.begin, scene.stop, scene.zero))
    columns, threads = _columns(trace)
    columns = take(columns, (columns["start"] >= begin) & (columns["start"] < stop))
    heads, head = _heads(trace, columns)
    start = columns["start"] - zero
    steps = (trace if scene.agreement.by_host else trace.on_device_clock()).iterations
    steps = steps.filter(
        pc.and_(pc.greater_equal(steps["start"], begin), pc.less_equal(steps["stop"], stop))
    )
    step_heads = [
        {"name": f"step {number}", "cat": "step", "pid": rank, "tid": STEPS}
        for number in steps["number"].to_pylist()
    ]
    step_start, step_stop = (steps[name].to_numpy() - zero for name in ("start", "stop"))
    slices = Slices(
        heads=[*step_heads, *heads],
        head=np.concatenate([np.arange(len(step_heads)), head + len(step_heads)]),
        start=np.concatenate([step_start, start]),
        stop=np.concatenate([step_stop, start + columns["duration"]]),
    )
    name = f"rank {rank}" + (" (clock not aligned)" if scene.is_far[place] else "")
    present = set(np.unique(columns["thread"]).tolist())
    used = {thread: text for thread, text in threads.items() if thread in present}
    texts = output.timeline(scene).rank(rank, name, {STEPS: "steps", **used}, slices)
    return _Written(rank=rank, events=len(start), piece=output.write(f"rank-{rank}", texts))


def _columns(trace: Trace) -> tuple[Arrays, dict[int, str]]:
    """Return the work of a rank with the thread of each event, and the titles of threads."""
    columns = work(trace)
    is_comm = columns["op"] != NULL
    own = take(columns, ~is_comm)
    lane = trace.events["lane"].to_numpy()[own["event"]].astype(np.int64)
    stop = own["start"] + own["duration"]
    kind, name = _lane_kind(trace), trace.lanes["thread"].to_pylist()
    thread, lane_titles = threads(
        1, lane, (own["start"], stop), lambda row: f"{kind} {name[lane[row]]}"
    )
    titles = {2 * number: text for number, text in lane_titles.items()}
    on_comm, comm_titles = _communication_threads(trace)
    group, size = (filled(trace.comm[name]) for name in ("group", "payload_bytes"))
    unknown = np.full(len(thread), NULL)
    columns["thread"] = np.concatenate([2 * thread, on_comm])
    columns["group"] = np.concatenate([unknown, group])
    columns["bytes"] = np.concatenate([unknown, size])
    return columns, titles | comm_titles


_IN_HEAD = ("thread", "kind", "name", "op", "group", "bytes")


def _heads(trace: Trace, columns: Arrays) -> tuple[list[dict[str, Any]], Ints]:
    """Return what events have in common, and the index of each event in it."""
    rank, names = trace.meta.rank, trace.events["name"].combine_chunks().dictionary
    groups = [
        {
            "group": row["description"] or row["name"],
            "members": None if row["ranks"] is None else _members(row["ranks"]),
        }
        for row in trace.groups.to_pylist()
    ]
    first, head = alike(*(columns[name] for name in _IN_HEAD))
    heads = []
    for thread, kind, name, op, group, size in zip(
        *(columns[name][first].tolist() for name in _IN_HEAD), strict=True
    ):
        common = {"name": names[name].as_py(), "cat": KINDS[kind], "pid": rank, "tid": thread}
        if op != NULL:
            args = {"operation": OPS[op], **(groups[group] if group != NULL else {})}
            args["bytes"] = None if size == NULL else size
            common["args"] = {key: value for key, value in args.items() if value is not None}
        heads.append(common)
    return heads, head


def _members(ranks: Sequence[int]) -> str:
    """Return the members of a group; their number if they are many."""
    text = ranges(ranks)
    return text if len(text) <= _LONGEST else f"{len(ranks)} ranks"
