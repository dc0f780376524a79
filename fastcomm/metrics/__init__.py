"""The communication metrics: one question a module.

A rank becomes a `Partial`: tables with a row an iteration, a row a communication event, a row a
window, and notes on the rank. Partials merge in any order, and that of all ranks answers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from fastcomm.metrics import breakdown, gaps, pieces, traffic
from fastcomm.metrics.pieces import Piece
from fastcomm.metrics.view import Stack, View
from fastcomm.options import ByteKind
from fastcomm.trace.columns import alike, filled, lookup
from fastcomm.trace.run import warnings_of_run
from fastcomm.trace.schema import TAG_SOURCES, TAGS
from fastcomm.trace.tags import without_effect
from fastcomm.trace.trace import LACKS, Trace
from fastcomm_kernels.arrays import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNote:
    """What is known of one rank besides its numbers.

    `clock` is "device" or "host": by which clock its iterations are cut; null where no device
    work is recorded. `clock_notes` say why it is the host's.
    """

    rank: int
    path: str
    world_size: int | None
    found_by: str
    warnings: tuple[str, ...]
    lacks: tuple[str, ...] = ()  # of trace.LACKS
    clock: str | None = None
    clock_notes: tuple[str, ...] = ()
    device_time: gaps.RankOutside | None = None  # null where times or steps are unknown
    unused: tuple[str, ...] = ()  # rules and options without effect on this rank, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """The metrics' raw material of some ranks, sorted by rank."""

    notes: tuple[RankNote, ...]
    iterations: pa.Table  # a row an iteration and rank
    events: pa.Table  # a row a communication event that is in memory
    windows: pa.Table  # a row a window between phases that is in memory
    groups: pa.Table  # a row a process group and rank
    members: pa.Table  # a row a process group: who is in it
    away: tuple[Piece, ...] = ()  # events that are in files
    windows_away: tuple[Path, ...] = ()  # files of windows
    tagged: pa.Table | None = None  # a row a rank, process group and tag of its events
    sums: pa.Table | None = None  # of the ranks whose events are away, `traffic.sums_by_rank`

    def pieces(self) -> tuple[Piece, ...]:
        """All events."""
        if self.away and not self.events.num_rows:
            return self.away
        return (*self.away, pieces.cut(self.events))

    def all_windows(self) -> breakdown.Stock:
        """All windows."""
        return (*self.windows_away, self.windows)

    def all_sums(self) -> pa.Table:
        """`traffic.sums_by_rank` of all ranks."""
        return _joined([self.sums, traffic.sums_by_rank(self.events)])

    @classmethod
    def of(
        cls,
        *traces: Trace,
        byte_kind: ByteKind = "payload",
        only: frozenset[int] | None = None,
        by_host: bool = False,
    ) -> "Partial":
        """Measure some ranks; of their iterations, only those of these numbers.

        Iterations are cut by the device's clock where a trace has such windows, unless they
        all have to be `by_host`.
        """
        missing = traces[0].meta.lacks
        is_alike = all(trace.meta.lacks == missing for trace in traces)
        cut = traces if by_host else tuple(trace.on_device_clock() for trace in traces)
        stack = Stack.of(cut) if is_alike else None
        if stack is None:
            return merge(
                [
                    cls.of(trace, byte_kind=byte_kind, only=only, by_host=by_host)
                    for trace in traces
                ]
            )
        view = View.of(stack, byte_kind, only)
        return cls(
            notes=tuple(
                _note(trace, beyond, by_host=by_host)
                for trace, beyond in zip(traces, gaps.outside_by_rank(stack), strict=True)
            ),
            iterations=gaps.in_iterations(
                pa.table(
                    {
                        **breakdown.iteration_columns(view),
                        **traffic.iteration_columns(view),
                    }
                ),
                missing,
            ),
            events=gaps.in_events(traffic.rows(view), missing),
            windows=gaps.in_windows(breakdown.window_rows(view), missing),
            groups=_group_rows(stack, view.labels),
            members=_group_members(stack, view.labels),
            tagged=_tagged(stack),
        )


def _note(trace: Trace, beyond: gaps.RankOutside, *, by_host: bool) -> RankNote:
    meta = trace.meta
    on_device = trace.device_iterations is not None and not by_host
    clock = "device" if on_device else "host" if beyond.recorded_ns else None
    if not on_device:
        beyond = replace(beyond, early_events=gaps.early_events(trace))
    has_reason = trace.device_iterations is None
    return RankNote(
        rank=meta.rank,
        path=meta.path,
        world_size=meta.world_size,
        found_by=meta.found_by,
        warnings=(*meta.warnings, *(trace.device_notes if on_device else ())),
        lacks=meta.lacks,
        clock=clock,
        clock_notes=trace.device_notes if has_reason else (),
        # Of a file that is cut, what lies in no step is of the steps that were left out.
        device_time=None if "times" in meta.lacks or meta.is_truncated else beyond,
        unused=meta.unused,
    )


def lacking(notes: Sequence[RankNote]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that are missing some data, by the words of `LACKS`."""
    by_word = {word: tuple(note.rank for note in notes if word in note.lacks) for word in LACKS}
    return {word: ranks for word, ranks in by_word.items() if ranks}


def iteration_clock(notes: Sequence[RankNote]) -> Literal["device", "host"]:
    """Return the clock of all iterations; ranks without device work do not count."""
    return "device" if any(note.clock == "device" for note in notes) else "host"


def without_device_clock(notes: Sequence[RankNote]) -> tuple[int, ...]:
    """Return the ranks by the host's clock in a run whose other ranks are by the device's.

    Ranks without device work do not count. Iterations of two clocks are not comparable.
    """
    if iteration_clock(notes) == "host":
        return ()
    return tuple(note.rank for note in notes if note.clock == "host")


def note_warnings(
    notes: Sequence[RankNote], lacks: Mapping[str, Sequence[int]], beyond: gaps.Outside
) -> list[str]:
    """Return what a user should know of all ranks before trusting the numbers."""
    by_clock = (
        gaps.outside_warning(beyond, iteration_clock(notes)),
        gaps.early_warning(note.device_time for note in notes),
    )
    return [
        *gaps.sentences(lacks, len(notes)),
        *filter(None, by_clock),
        *warnings_of_run((note.rank, note.clock_notes) for note in notes),
        *without_effect([note.unused for note in notes]),
        *warnings_of_run((note.rank, note.warnings) for note in notes),
    ]


def put_away(part: Partial, path: Path) -> Partial:
    """The same with its events and windows in files. Raises OSError."""
    if not part.events.num_rows and not part.windows.num_rows:
        return part
    windows_path = path.with_name(f"{path.name}.windows")
    pieces.write(part.windows, windows_path)
    return replace(
        part,
        events=part.events.schema.empty_table(),
        away=(*part.away, pieces.put_away(part.events, path)),
        windows=part.windows.schema.empty_table(),
        windows_away=(*part.windows_away, windows_path),
        sums=_joined([part.sums, traffic.sums_by_rank(part.events)]),
    )


def merge(partials: Iterable[Partial]) -> Partial:
    """One partial of all; the same bytes in whatever order they come. Ranks differ."""
    parts = sorted(partials, key=lambda part: part.notes[0].rank if part.notes else -1)
    notes = (note for part in parts for note in part.notes)
    return Partial(
        notes=tuple(sorted(notes, key=lambda note: note.rank)),
        iterations=_by_rank([part.iterations for part in parts]),
        events=_by_rank([part.events for part in parts]),
        windows=_by_rank([part.windows for part in parts]),
        groups=_by_rank([part.groups for part in parts]),
        members=_once([part.members for part in parts]),
        tagged=_joined([part.tagged for part in parts]),
        away=tuple(piece for part in parts for piece in part.away),
        windows_away=tuple(path for part in parts for path in part.windows_away),
        sums=_joined([part.sums for part in parts]),
    )


def _joined(tables: list[pa.Table | None]) -> pa.Table | None:
    known = [table for table in tables if table is not None]
    return _by_rank(known) if known else None


def _by_rank(tables: list[pa.Table]) -> pa.Table:
    """The rows of all, sorted by rank, those of one rank in their order."""
    table = pa.concat_tables(tables).combine_chunks()
    rank = table["rank"].to_numpy()
    if (rank[1:] < rank[:-1]).any():
        # Rows are taken from whole columns: from many pieces it takes several times as long.
        table = table.take(pa.array(np.argsort(rank, kind="stable")))
    return table


_TAGS, _SOURCES = pa.array(TAGS), pa.array(TAG_SOURCES)


def _group_rows(stack: Stack, labels: Sequence[int | None]) -> pa.Table:
    """One row a process group; `labels` are what `clocks.labels` says of them as described."""
    groups = stack.groups
    used = stack.comm["group"].drop_null().to_numpy()
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
            "events": np.bincount(used, minlength=groups.num_rows),
        }
    )


def _tagged(stack: Stack) -> pa.Table:
    """Return a row for each rank, process group and tag of its events.

    Events of one group differ in their tag where it serves several parallelisms. `place` is the
    group's place among those of its rank in `_group_rows`; null for events of no known group.
    """
    comm = stack.comm
    group = filled(comm["group"], -1)
    columns = (stack.rank_of_comm, group, comm["tag"].to_numpy(), comm["tag_source"].to_numpy())
    first, kind = alike(*columns)
    rank, group, tag, source = (column[first] for column in columns)
    place, known = group - _first_of(stack.rank_of_group, rank), group >= 0
    return pa.table(
        {
            "rank": rank,
            "place": pa.array(place, mask=~known),
            "tag": _TAGS.take(pa.array(tag)),
            "tag_source": _SOURCES.take(pa.array(source)),
            "events": np.bincount(kind, minlength=len(first)),
        }
    )


def described(found: pa.Table, groups: pa.Table) -> pa.Table:
    """Return the rows of `_tagged` with what `_group_rows` says of each group."""
    place, rank = filled(found["place"], 0), found["rank"].to_numpy()
    first = _first_of(groups["rank"].to_numpy(), rank)
    row = pa.array(
        first + place, mask=found["place"].combine_chunks().is_null().to_numpy(False)
    )
    for name in ("description", "size", "candidates"):
        column = groups[name].combine_chunks().take(row)
        found = found.append_column(
            name, column.fill_null("") if name == "candidates" else column
        )
    return found


def _first_of(ranks: Ints, asked: Ints) -> Ints:
    """Return the first row of each asked rank; 0 for a rank that has none."""
    known, first = np.unique(ranks, return_index=True)
    if not len(known):
        return np.zeros(len(asked), np.int64)
    place = lookup(known, asked)
    return np.where(place >= 0, first[place], 0)


def _candidates(groups: pa.Table) -> pa.Array:
    """Return the tags that fit each group equally well, joined by "/"."""
    words = ["/".join(TAGS[tag] for tag in fits) for fits in groups["candidates"].to_pylist()]
    return pa.array(words, pa.string())


def _group_members(stack: Stack, labels: Sequence[int | None]) -> pa.Table:
    """The ranks of each process group that several can be in, as far as they are known.

    Once each, by label: every rank of a group of thousands says who they all are.
    """
    label = pa.array(labels, pa.int64())
    table = pa.table({"group": label, "ranks": stack.groups["ranks"]})
    return _once([table.filter(label.is_valid())])


def _once(tables: Sequence[pa.Table]) -> pa.Table:
    """The members of all groups of several such tables."""
    table = pa.concat_tables(tables).combine_chunks()
    _, first = np.unique(table["group"].to_numpy(), return_index=True)
    return table.take(pa.array(first))
