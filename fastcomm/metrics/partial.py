"""What is kept of a rank once its trace is read: small tables that merge in any order."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from fastcomm.metrics import (
    bandwidth,
    breakdown,
    iterations,
    lacks,
    membership,
    overlap,
    windows,
)
from fastcomm.metrics.view import ByteKind, View
from fastcomm.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNote:
    """What is said of one rank besides its numbers."""

    rank: int
    path: str
    world_size: int | None
    found_by: str
    warnings: tuple[str, ...]
    lacks: tuple[str, ...] = ()  # of trace.LACKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """The metrics' raw material of some ranks, sorted by rank."""

    notes: tuple[RankNote, ...]
    iterations: pa.Table  # a row an iteration and rank
    events: pa.Table  # a row a communication event
    windows: pa.Table  # a row a window between phases
    groups: pa.Table  # a row a process group and rank

    @classmethod
    def of(
        cls,
        trace: Trace,
        *,
        byte_kind: ByteKind = "payload",
        only: frozenset[int] | None = None,
    ) -> Self:
        """Measure one rank; of its iterations, only those of these numbers."""
        view = View.of(trace, byte_kind, only)
        meta = trace.meta
        return cls(
            notes=(
                RankNote(
                    rank=meta.rank,
                    path=meta.path,
                    world_size=meta.world_size,
                    found_by=meta.found_by,
                    warnings=meta.warnings,
                    lacks=meta.lacks,
                ),
            ),
            iterations=lacks.in_iterations(
                pa.table(
                    {
                        **iterations.columns(view),
                        **breakdown.columns(view),
                        **overlap.columns(view),
                        **bandwidth.iteration_columns(view),
                    }
                ),
                meta.lacks,
            ),
            events=lacks.in_events(bandwidth.rows(view), meta.lacks),
            windows=lacks.in_windows(windows.rows(view), meta.lacks),
            groups=membership.rows(trace, view.labels),
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
    )


def _by_rank(tables: list[pa.Table]) -> pa.Table:
    """The rows of all, sorted by rank, those of one rank in their order."""
    table = pa.concat_tables(tables).combine_chunks()
    rank = table["rank"].to_numpy()
    if (rank[1:] < rank[:-1]).any():
        # Rows are taken from whole columns: from many pieces it takes several times as long.
        table = table.take(pa.array(np.argsort(rank, kind="stable")))
    return table
