"""Traces of several ranks as one: rank behind rank, each at a time of its own.

To see a rank takes some hundred calls, whatever its size. Thousands of small ranks pay them
once for many: what begins after all before it has ended is like one more iteration of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.trace.schema import NARROW
from fastcomm.trace.trace import Trace

Ints = NDArray[np.int64]

_LATEST = 1 << 62  # ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The tables of one trace that stands for all, rank behind rank in each."""

    events: pa.Table
    comm: pa.Table
    groups: pa.Table
    iterations: pa.Table
    rank: Ints  # of each iteration
    moved: Ints  # ns that times of each iteration's rank are later than in its trace
    rank_of_group: Ints
    event_edges: Ints  # rows of the events where each rank begins, and their end
    comm_edges: Ints
    rank_of_comm: Ints

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Self | None:
        """Put them one behind the other, with the columns of `schema.NARROW`.

        None where they take more time together than a number holds.
        """
        moved = _moved(traces)
        if moved is None:
            return None
        ranks = np.array([trace.meta.rank for trace in traces], np.int64)
        events = [trace.events.select(NARROW["events"].names) for trace in traces]
        comm = [trace.comm.select(NARROW["comm"].names) for trace in traces]
        groups = [trace.groups for trace in traces]
        iterations = [trace.iterations for trace in traces]
        steps = _rows(iterations)
        return cls(
            events=_behind(events, start=moved, stop=moved),
            comm=_behind(
                comm, start=moved, stop=moved, event=_before(events), group=_before(groups)
            ),
            groups=_behind(groups),
            iterations=_behind(iterations, start=moved, stop=moved),
            rank=np.repeat(ranks, steps),
            moved=np.repeat(moved, steps),
            rank_of_group=np.repeat(ranks, _rows(groups)),
            event_edges=np.cumsum([0, *_rows(events)], dtype=np.int64),
            comm_edges=np.cumsum([0, *_rows(comm)], dtype=np.int64),
            rank_of_comm=np.repeat(ranks, _rows(comm)),
        )


def _moved(traces: Sequence[Trace]) -> Ints | None:
    """What is added to the times of each rank, so that it begins behind the one before it."""
    if len(traces) == 1:
        return np.zeros(1, np.int64)
    found, at = list[int](), 0
    for trace in traces:
        tables = [each for each in (trace.events, trace.comm, trace.iterations) if len(each)]
        begin = min((each["start"][0].as_py() for each in tables), default=0)
        end = max((int(each["stop"].to_numpy().max()) for each in tables), default=0)
        found.append(at - begin)
        at += end - begin + 1
    fits = max(at, *map(abs, found)) <= _LATEST
    return np.array(found, np.int64) if fits else None


def _rows(tables: Sequence[pa.Table]) -> list[int]:
    return [table.num_rows for table in tables]


def _before(tables: Sequence[pa.Table]) -> Ints:
    """Of each table how many rows there are in those before it."""
    return np.cumsum([0, *_rows(tables)], dtype=np.int64)[:-1]


def _behind(tables: Sequence[pa.Table], **added: Ints) -> pa.Table:
    """All in one; to some columns something is added, by table."""
    if len(tables) == 1:
        return tables[0]  # to which nothing is added: it need not be copied
    whole = pa.concat_tables(tables).combine_chunks()
    for name, of_each in added.items():
        more = pa.array(np.repeat(of_each, _rows(tables)))
        place = whole.column_names.index(name)
        whole = whole.set_column(place, name, pc.add(whole[name], more))
    return whole
