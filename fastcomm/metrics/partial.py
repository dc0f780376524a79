"""The partial result of a rank, from which metrics are computed; partials of ranks merge.

The trace of a rank becomes a `Partial`: tables with a row per iteration, per communication
event and per window, and notes on the rank. The merge of partials is associative and
commutative; `result.Metrics` is computed from the merged partial of all ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.idle import totals
from fastcomm.metrics import (
    breakdown,
    missing_data,
    network,
    outside_steps,
    rank_pairs,
    spill_files,
    traffic,
)
from fastcomm.metrics.options import ByteKind
from fastcomm.metrics.outside_steps import Outside, RankOutside
from fastcomm.metrics.rank_arrays import RankArrays, Stack
from fastcomm.metrics.spill_files import EventBatch
from fastcomm.ranks.group_tags import GroupTags, agreed, table_of_tags, with_tags
from fastcomm.trace.columns import alike, filled, lookup
from fastcomm.trace.iterations import NO_MARKS, WHOLE
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run_traces import named_ranks, ranges, warnings_of_ranks, warnings_of_run
from fastcomm.trace.schema import TAG_SOURCES
from fastcomm.trace.trace import MISSING_DATA, Trace
from fastcomm_kernels.arrays import NONE, NULL, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNote:
    """Facts about one rank besides its tables.

    `clock` is the clock that divides its time into iterations, "device" or "host"; null without
    device work. `clock_notes` say why it is the host's.
    """

    rank: int
    path: str
    world_size: int | None
    found_by: str
    warnings: tuple[str, ...]
    missing: tuple[str, ...] = ()  # data, keys of trace.MISSING_DATA
    clock: str | None = None
    clock_notes: tuple[str, ...] = ()
    device_time: RankOutside | None = None  # null where times or steps are unknown
    unused: tuple[str, ...] = ()  # rules and options without effect on this rank, and why
    is_host_run: bool = False  # whether the host computes and communicates, without a device
    steps: str = ""  # numbers of all its iterations, as in "0-3, 7"
    host: str | None = None  # digest of its host's name
    gpu: str | None = None  # name of its device, as the trace has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """The tables of some ranks, sorted by rank, from which metrics are computed."""

    notes: tuple[RankNote, ...]
    iterations: pa.Table  # a row per rank and iteration
    events: pa.Table  # a row per communication event in memory, see `traffic.rows`
    windows: pa.Table  # a row per window between phases in memory
    groups: pa.Table  # a row per rank and process group
    members: pa.Table  # a row per process group: its ranks
    spilled: tuple[EventBatch, ...] = ()  # events in spill files
    spilled_windows: tuple[Path, ...] = ()  # spill files of windows
    tagged: pa.Table | None = None  # a row per rank, process group, operation and tag
    sums: pa.Table | None = None  # `traffic.sums_by_rank` of the spilled events
    idle: pa.Table | None = None  # `idle.totals.EVIDENCE`: a row per rank, cause and name
    sent: pa.Table | None = None  # `network.sent_by_rank`
    exchanged: pa.Table | None = None  # `rank_pairs.exchanged_by_rank`

    def batches(self) -> tuple[EventBatch, ...]:
        """Return all events, in memory and in spill files."""
        if self.spilled and not self.events.num_rows:
            return self.spilled
        return (*self.spilled, spill_files.cut(self.events))

    def all_windows(self) -> breakdown.WindowTables:
        """Return all windows, in memory and in spill files."""
        return (*self.spilled_windows, self.windows)

    def all_sums(self) -> pa.Table:
        """Return `traffic.sums_by_rank` of all ranks: `sums` and those of `events`."""
        return _merged([self.sums, traffic.sums_by_rank(self.events)])

    @classmethod
    def of(
        cls,
        *traces: Trace,
        byte_kind: ByteKind = "payload",
        only: frozenset[int] | None = None,
        by_host: bool = False,
        group_tags: GroupTags | None = None,
    ) -> "Partial":
        """Measure the traces of some ranks.

        Parameters
        ----------
        *traces
            At least one.
        byte_kind
            The kind of bytes in bandwidth and volume.
        only
            Numbers of the iterations to measure; None: all.
        by_host
            Whether to divide time by the host's marks even where iterations on the device's
            clock are known.
        group_tags
            Tags of process groups on which all ranks agreed; by default, those of each trace.

        """
        traces = tuple(with_tags(trace, group_tags or {}) for trace in traces)
        missing = traces[0].meta.missing_data
        is_alike = all(trace.meta.missing_data == missing for trace in traces)
        on_clock = traces if by_host else tuple(trace.on_device_clock() for trace in traces)
        idle_times = [totals.of_trace(trace, by_host=by_host) for trace in traces]
        stack = Stack.of(on_clock, idle_times) if is_alike else None
        if stack is None:
            return merge(
                [
                    cls.of(trace, byte_kind=byte_kind, only=only, by_host=by_host)
                    for trace in traces
                ]
            )
        arrays = RankArrays.of(stack, byte_kind, only)
        return cls(
            notes=tuple(
                _note(trace, outside, by_host=by_host)
                for trace, outside in zip(
                    traces, outside_steps.outside_by_rank(stack), strict=True
                )
            ),
            iterations=missing_data.in_iterations(
                pa.table(
                    {
                        **breakdown.iteration_columns(arrays),
                        **totals.iteration_columns(arrays.idle),
                        **traffic.iteration_columns(arrays),
                    }
                ),
                missing,
            ),
            events=missing_data.in_events(traffic.rows(arrays), missing),
            windows=missing_data.in_windows(breakdown.window_rows(arrays), missing),
            groups=_group_rows(stack, arrays.labels),
            members=_group_members(stack, arrays.labels),
            tagged=_tagged(stack),
            idle=totals.evidence(on_clock, idle_times, only),
            sent=network.sent_by_rank(arrays),
            exchanged=rank_pairs.exchanged_by_rank(stack, arrays),
        )


def _note(trace: Trace, outside: RankOutside, *, by_host: bool) -> RankNote:
    """Return notes on a rank's trace; `by_host` ignores iterations on the device's clock."""
    meta = trace.meta
    on_device = trace.device_iterations is not None and not by_host
    clock = "device" if on_device else "host" if outside.recorded_ns else None
    if not on_device:
        outside = replace(outside, early_events=outside_steps.early_events(trace))
    has_reason = trace.device_iterations is None
    return RankNote(
        rank=meta.rank,
        path=meta.path,
        world_size=meta.world_size,
        found_by=meta.found_by,
        warnings=(*meta.warnings, *(trace.device_notes if on_device else ())),
        missing=meta.missing_data,
        clock=clock,
        clock_notes=trace.device_notes if has_reason else (),
        # In a truncated file, work outside iterations belongs to iterations that were dropped.
        device_time=None if "times" in meta.missing_data or meta.is_truncated else outside,
        unused=meta.unused,
        is_host_run=meta.is_host_run,
        steps=ranges(sorted(set(trace.iterations["number"].to_pylist()))),
        host=meta.host,
        gpu=meta.gpu,
    )


def ranks_with_missing_data(notes: Sequence[RankNote]) -> dict[str, tuple[int, ...]]:
    """Return the ranks with missing data, by key of `trace.MISSING_DATA`."""
    by_key = {
        key: tuple(note.rank for note in notes if key in note.missing) for key in MISSING_DATA
    }
    return {key: ranks for key, ranks in by_key.items() if ranks}


def iteration_clock(notes: Sequence[RankNote]) -> Literal["device", "host"]:
    """Return the clock of all iterations; ranks without device work are ignored."""
    return "device" if any(note.clock == "device" for note in notes) else "host"


def without_device_clock(notes: Sequence[RankNote]) -> tuple[int, ...]:
    """Return the ranks with iterations by the host's clock, in a run with the device's clock.

    Ranks without device work are ignored. Iterations of different clocks are not comparable.
    """
    if iteration_clock(notes) == "host":
        return ()
    return tuple(note.rank for note in notes if note.clock == "host")


def note_warnings(
    notes: Sequence[RankNote],
    missing: Mapping[str, Sequence[int]],
    outside: Outside,
) -> list[str]:
    """Return the warnings about the traces of all ranks.

    Parameters
    ----------
    notes
        Notes of the ranks.
    missing
        Ranks without some data, by key of `trace.MISSING_DATA`.
    outside
        Device work outside of every step.

    """
    by_clock = (
        outside_steps.outside_warning(
            outside,
            iteration_clock(notes),
            is_host_run=any(note.is_host_run for note in notes),
        ),
        outside_steps.early_warning(note.device_time for note in notes),
    )
    return [
        *missing_data.sentences(missing, len(notes)),
        *filter(None, by_clock),
        *warnings_of_run((note.rank, note.clock_notes) for note in notes),
        *warnings_of_ranks(notes),
    ]


def divided_tags(partial: Partial) -> GroupTags:
    """Return one tag for each group and operation on which ranks differ, if one is right."""
    assert partial.tagged is not None  # of at least one rank
    tagged, groups = partial.tagged, partial.groups
    rank = tagged["rank"].to_numpy()
    row = _first_of(groups["rank"].to_numpy(), rank) + filled(tagged["place"], 0)
    label = np.append(filled(groups["group"]), NULL)
    row = np.where(tagged["place"].is_valid().to_numpy(), row, len(label) - 1)
    both = zip(_tag_columns(tagged), _tag_columns(groups), strict=True)
    tag, source, events, ranks = (np.concatenate(pair) for pair in both)
    group = np.concatenate([label[row], label[:-1]])
    op = np.concatenate([tagged["op"].to_numpy(), np.full(groups.num_rows, NONE)])
    return agreed(table_of_tags(ranks, group, op, tag, source, events))


def _tag_columns(table: pa.Table) -> tuple[Ints, ...]:
    """Return the codes of tag and source, the number of events, and the rank of each row."""
    codes = (
        pc.index_in(table[name].combine_chunks(), value_set=names).to_numpy()
        for name, names in (("tag", _TAGS), ("tag_source", _SOURCES))
    )
    return (*codes, table["events"].to_numpy(), table["rank"].to_numpy())


def tag_warnings(groups: pa.Table) -> list[str]:
    """Return a warning if ranks have different parallelisms of one process group.

    `groups` is `Partial.groups`. Guesses agree; the user's rules, or the layout, may contradict
    themselves, such as where two ranks have one group on different streams.
    """
    used = groups.filter(pc.greater(groups["events"], 0)).select(["rank", "group", "tag"])
    kinds = used.group_by(["group", "tag"]).aggregate([("rank", "min")])
    divided = kinds.group_by("group").aggregate([("tag", "count"), ("rank_min", "min")])
    divided = divided.filter(pc.greater(divided["tag_count"], 1)).drop_null()
    if not divided.num_rows:
        return []
    first = divided.sort_by("rank_min_min")["group"][0]
    own = used.filter(pc.equal(used["group"], first)).to_pydict()
    by_tag = {
        tag: [rank for rank, other in zip(own["rank"], own["tag"], strict=True) if other == tag]
        for tag in sorted(set(own["tag"]))
    }
    texts = [f"{tag} on {named_ranks(sorted(set(on)))}" for tag, on in by_tag.items()]
    count = divided.num_rows
    noun = "1 process group" if count == 1 else f"{count} process groups, as of one"
    return [
        f"rules and sizes give ranks different parallelisms of {noun}: {', '.join(texts)}; its "
        "times and volume are divided among these. [[tags]] in a --config can name the group "
        "by its ranks"
    ]


def spill(part: Partial, path: Path) -> Partial:
    """Return the partial with its events and windows moved to spill files. Raises OSError."""
    if not part.events.num_rows and not part.windows.num_rows:
        return part
    windows_path = path.with_name(f"{path.name}.windows")
    spill_files.write(part.windows, windows_path)
    return replace(
        part,
        events=part.events.schema.empty_table(),
        spilled=(*part.spilled, spill_files.spill(part.events, path)),
        windows=part.windows.schema.empty_table(),
        spilled_windows=(*part.spilled_windows, windows_path),
        sums=_merged([part.sums, traffic.sums_by_rank(part.events)]),
    )


def merge(partials: Iterable[Partial]) -> Partial:
    """Merge partials of different ranks; the result does not depend on their order."""
    parts = sorted(partials, key=lambda part: part.notes[0].rank if part.notes else -1)
    notes = (note for part in parts for note in part.notes)
    return Partial(
        notes=tuple(sorted(notes, key=lambda note: note.rank)),
        iterations=_by_rank([part.iterations for part in parts]),
        events=_by_rank([part.events for part in parts]),
        windows=_by_rank([part.windows for part in parts]),
        groups=_by_rank([part.groups for part in parts]),
        members=_distinct_groups([part.members for part in parts]),
        tagged=_merged([part.tagged for part in parts]),
        spilled=tuple(batch for part in parts for batch in part.spilled),
        spilled_windows=tuple(path for part in parts for path in part.spilled_windows),
        sums=_merged([part.sums for part in parts]),
        idle=_merged([part.idle for part in parts]),
        sent=_merged([part.sent for part in parts]),
        exchanged=_merged([part.exchanged for part in parts]),
    )


_WITHOUT_STEPS = NO_MARKS.replace(
    "the whole trace counts as one iteration",
    "other ranks have them, so times of its steps are n/a",
)


def with_steps(partial: Partial) -> Partial:
    """Leave out iterations that are whole traces, where other ranks have steps.

    The mean of a step and of a whole trace would be neither.
    """
    whole = [note.rank for note in partial.notes if note.found_by == WHOLE]
    timed = [note for note in partial.notes if note.steps and "times" not in note.missing]
    if not whole or all(note.rank in whole for note in timed):
        return partial
    has_steps = pc.invert(pc.is_in(pc.field("rank"), pa.array(whole, pa.int64())))
    return replace(
        partial,
        notes=tuple(_stepless(note) if note.rank in whole else note for note in partial.notes),
        iterations=partial.iterations.filter(has_steps),
        windows=partial.windows.filter(has_steps),
        idle=None if partial.idle is None else partial.idle.filter(has_steps),
    )


def _stepless(note: RankNote) -> RankNote:
    """Return the note of a rank whose whole trace is no step."""
    texts = (_WITHOUT_STEPS if text == NO_MARKS else text for text in note.warnings)
    return replace(note, found_by="", steps="", warnings=tuple(texts))


def _merged(tables: list[pa.Table | None]) -> pa.Table | None:
    """Return the rows of all tables, sorted by rank; None without a table."""
    present = [table for table in tables if table is not None]
    return _by_rank(present) if present else None


def _by_rank(tables: list[pa.Table]) -> pa.Table:
    """Return all rows sorted by rank, rows of one rank in their order."""
    table = pa.concat_tables(tables).combine_chunks()
    rank = table["rank"].to_numpy()
    if (rank[1:] < rank[:-1]).any():
        # Taking rows from chunked columns would be several times slower.
        table = table.take(pa.array(np.argsort(rank, kind="stable")))
    return table


_TAGS, _SOURCES = pa.array(TAGS), pa.array(TAG_SOURCES)


def _group_rows(stack: Stack, labels: Sequence[int | None]) -> pa.Table:
    """Return a row per process group; `labels` are `clocks.labels` by description."""
    groups = stack.groups
    groups_of_events = stack.comm["group"].drop_null().to_numpy()
    return pa.table(
        {
            "rank": stack.rank_of_group,
            "group": pa.array(labels, pa.int64()),
            "name": groups["name"],
            "description": groups["description"],
            "size": groups["size"],
            "tag": _TAGS.take(groups["tag"].combine_chunks()),
            "tag_source": _SOURCES.take(groups["tag_source"].combine_chunks()),
            "candidates": _candidates(groups),
            "events": np.bincount(groups_of_events, minlength=groups.num_rows),
        }
    )


def _tagged(stack: Stack) -> pa.Table:
    """Return a row for each rank, process group, operation and tag of its events.

    Events of one group differ in their tag where it serves several parallelisms. `place` is the
    index of the group among the rank's rows in `_group_rows`; null for events of unknown
    groups.
    """
    comm = stack.comm
    group = filled(comm["group"], NONE)
    names = ("op", "tag", "tag_source")
    columns = (stack.rank_of_comm, group, *(comm[name].to_numpy() for name in names))
    first, kind = alike(*columns)
    rank, group, op, tag, source = (column[first] for column in columns)
    place, has_group = group - _first_of(stack.rank_of_group, rank), group >= 0
    return pa.table(
        {
            "rank": rank,
            "place": pa.array(place, mask=~has_group),
            "op": op.astype(np.int64),
            "tag": _TAGS.take(pa.array(tag)),
            "tag_source": _SOURCES.take(pa.array(source)),
            "events": np.bincount(kind, minlength=len(first)),
        }
    )


def described(tagged: pa.Table, groups: pa.Table) -> pa.Table:
    """Append description, size, candidates and level of each row's group.

    Parameters
    ----------
    tagged
        Rows of `_tagged`: `rank`, and as `place` the group's row among those of the rank.
    groups
        Groups of all ranks with their `level`, sorted by rank.

    Returns
    -------
    pyarrow.Table
        `tagged` with four more columns; null without a group, but `candidates` are then empty.

    """
    place, rank = filled(tagged["place"], 0), tagged["rank"].to_numpy()
    first = _first_of(groups["rank"].to_numpy(), rank)
    row = pa.array(
        first + place, mask=tagged["place"].combine_chunks().is_null().to_numpy(False)
    )
    for name in ("description", "size", "candidates", "level"):
        column = groups[name].combine_chunks().take(row)
        tagged = tagged.append_column(
            name, column.fill_null("") if name == "candidates" else column
        )
    return tagged


def _first_of(ranks: Ints, queried: Ints) -> Ints:
    """Return the first row of each of some ranks; 0 for a rank without rows."""
    present, first = np.unique(ranks, return_index=True)
    if not len(present):
        return np.zeros(len(queried), np.int64)
    place = lookup(present, queried)
    return np.where(place >= 0, first[place], 0)


def _candidates(groups: pa.Table) -> pa.Array:
    """Return the tags that fit each group equally well, joined by '/'."""
    texts = ["/".join(TAGS[tag] for tag in fits) for fits in groups["candidates"].to_pylist()]
    return pa.array(texts, pa.string())


def _group_members(stack: Stack, labels: Sequence[int | None]) -> pa.Table:
    """Return a table of the process groups that have labels: `group` (label) and `ranks`.

    It has a row per group, though every rank lists all members. `labels` has the label of each
    row of `stack.groups`, or None for groups that need no comparison.
    """
    label = pa.array(labels, pa.int64())
    table = pa.table({"group": label, "ranks": stack.groups["ranks"]})
    return _distinct_groups([table.filter(label.is_valid())])


def _distinct_groups(tables: Sequence[pa.Table]) -> pa.Table:
    """Return one row per process group."""
    table = pa.concat_tables(tables).combine_chunks()
    _, first = np.unique(table["group"].to_numpy(), return_index=True)
    return table.take(pa.array(first))
