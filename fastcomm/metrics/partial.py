"""What is kept of a rank once its trace is read: small tables that merge in any order."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from fastcomm.metrics import bandwidth, breakdown, members, missing, outside, pieces, windows
from fastcomm.metrics import bandwidth as metrics_bandwidth
from fastcomm.metrics import breakdown as metrics_breakdown
from fastcomm.metrics.pieces import Piece
from fastcomm.metrics.view import Stack, View
from fastcomm.options import ByteKind
from fastcomm.trace.trace import Trace


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
    device_time: outside.RankOutside | None = None  # null where times or steps are unknown
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
    sums: pa.Table | None = None  # of the ranks whose events are away, `bandwidth.sums_by_rank`

    def pieces(self) -> tuple[Piece, ...]:
        """All events."""
        if self.away and not self.events.num_rows:
            return self.away
        return (*self.away, pieces.cut(self.events))

    def all_windows(self) -> windows.Stock:
        """All windows."""
        return (*self.windows_away, self.windows)

    def all_sums(self) -> pa.Table:
        """`bandwidth.sums_by_rank` of all ranks."""
        return _joined([self.sums, metrics_bandwidth.sums_by_rank(self.events)])

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
        lacking = traces[0].meta.lacks
        is_alike = all(trace.meta.lacks == lacking for trace in traces)
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
                for trace, beyond in zip(traces, outside.by_rank(stack), strict=True)
            ),
            iterations=missing.in_iterations(
                pa.table(
                    {
                        **metrics_breakdown.iteration_columns(view),
                        **breakdown.columns(view),
                        **metrics_breakdown.overlap_columns(view),
                        **bandwidth.iteration_columns(view),
                    }
                ),
                lacking,
            ),
            events=missing.in_events(bandwidth.rows(view), lacking),
            windows=missing.in_windows(windows.rows(view), lacking),
            groups=members.rows(stack, view.labels),
            members=members.group_members(stack, view.labels),
            tagged=members.tagged(stack),
        )


def _note(trace: Trace, beyond: outside.RankOutside, *, by_host: bool) -> RankNote:
    meta = trace.meta
    on_device = trace.device_iterations is not None and not by_host
    clock = "device" if on_device else "host" if beyond.recorded_ns else None
    if not on_device:
        beyond = replace(beyond, early_events=outside.early_events(trace))
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
        sums=_joined([part.sums, metrics_bandwidth.sums_by_rank(part.events)]),
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
        members=members.once([part.members for part in parts]),
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
