"""One critical path through all ranks: a collective cannot end before its last has come.

Where all participants of an instance have arrived is a node of its own: every start leads to
it, and it leads to every end. The path so goes from an end to the last that arrived, and on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.critical_path.analysis import analyse
from fastcomm.critical_path.joining import Joiner, table
from fastcomm.critical_path.result import CriticalPath
from fastcomm.errors import FastcommError
from fastcomm.exchange.instances import RunCommunication
from fastcomm.graph.graph import EDGE_KIND, slack
from fastcomm.options import Window
from fastcomm.result import Result
from fastcomm.trace.run import RunTraces, SkippedRank, expected_ranks
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.graph import Numbers

if TYPE_CHECKING:
    from fastcomm.critical_path.what_if import WhatIf
    from fastcomm.graph.edits import Edit


@dataclass(frozen=True, kw_only=True, repr=False)
class Joined(Result):
    """The critical path through all ranks, and what held it up."""

    path: CriticalPath
    ranks: tuple[int, ...]
    rank_of: Numbers  # by node: index into `ranks`
    slack: Ints  # by node: ns by which it could be later without a longer step
    offsets: dict[int, int]  # ns that a rank's clock is ahead of the first rank's
    collectives: pa.Table  # of COLLECTIVES
    violations: int  # ends before the last arrival, after alignment
    expected_ranks: int  # of the run, read or not
    failed: tuple[SkippedRank, ...] = ()

    @property
    def breakdown(self) -> pa.Table:
        """The path edge by edge, with the rank that each step is on."""
        graph = self.path.graph
        at = self.rank_of[graph.target[self.path.found.edges]]
        ranks = pa.array(np.array(self.ranks, np.int64)[at])
        return self.path.breakdown.add_column(0, "rank", ranks)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """`breakdown` for whatever takes Arrow's PyCapsules: pandas, Polars, DuckDB."""
        return self.breakdown.__arrow_c_stream__(requested_schema)

    def what_if(self, *edits: "Edit") -> "WhatIf":
        """Replay the window on all ranks with edits; see `CriticalPath.what_if`."""
        return self.path.what_if(*edits)

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version.

        An event's id is unique on its rank alone: ids are left out, `to_arrow` has them.
        """
        one = self.path.contents()
        del one["path"]["event_ids"], one["rank"], one["failed"]
        classes = self.by_rank_and_class().rename_columns(["rank", "bound_by", "on_path_ns"])
        return {
            **one,
            "expected_ranks": self.expected_ranks,
            "ranks": self.by_rank().to_pylist(),
            "hold_ups": self.hold_ups().to_pylist(),
            "classes_by_rank": classes.to_pylist(),
            "crossings": self.crossings,
            "collectives": len(set(self.collectives["instance"].to_pylist())),
            "violations": self.violations,
            "failed": [asdict(each) for each in self.failed],
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the path edge by edge, the ranks, who holds them up, and the collectives."""
        return {
            "critical_path": self.breakdown,
            "ranks": self.by_rank(),
            "hold_ups": self.hold_ups(),
            "collectives": self.collectives,
        }

    def figures(self) -> dict[str, str]:
        """Return the ranks, and the key figures of the path through them."""
        figures = self.path.figures()
        del figures["rank"]
        return {"ranks": f"{len(self.ranks)} of {self.expected_ranks}", **figures}

    @property
    def crossings(self) -> int:
        """How often the path goes from one rank to another."""
        graph, edges = self.path.graph, self.path.found.edges
        known = edges[graph.kind[edges] != EDGE_KIND["unexplained"]]
        ends = (self.rank_of[side[known]] for side in (graph.source, graph.target))
        return int(np.not_equal(*ends).sum())

    def by_rank(self) -> pa.Table:
        """Each rank: its time on the path, what it waits for, and what others wait for it."""
        on_path = self.breakdown.group_by("rank").aggregate([("duration_ns", "sum")])
        table = self.collectives
        sums = table.group_by("rank").aggregate(
            [
                ("wait_ns", "sum"),
                ("transfer_ns", "sum"),
                ("slack_ns", "min"),
                ("is_last", "sum"),
            ]
        )
        held = (
            table.filter(table["is_last"]).group_by("rank").aggregate([("held_up_ns", "sum")])
        )
        path, held_up = (
            _by_rank(each, column)
            for each, column in ((on_path, "duration_ns_sum"), (held, "held_up_ns_sum"))
        )
        columns = {
            "wait_ns": _by_rank(sums, "wait_ns_sum"),
            "transfer_ns": _by_rank(sums, "transfer_ns_sum"),
            "arrival_slack_ns": _by_rank(sums, "slack_ns_min"),
            "arrived_last": _by_rank(sums, "is_last_sum"),
        }
        least = np.full(len(self.ranks), _LONG, np.int64)
        np.minimum.at(least, self.rank_of, self.slack)
        rows = [
            {
                "rank": rank,
                "on_path_ns": path.get(rank, 0),
                "slack_ns": None if least[k] == _LONG else int(least[k]),
                **{name: column.get(rank) for name, column in columns.items()},
                "held_up_ns": held_up.get(rank, 0),
                "clock_offset_ns": self.offsets[rank],
            }
            for k, rank in enumerate(self.ranks)
        ]
        return pa.Table.from_pylist(rows, _RANKS)

    def hold_ups(self) -> pa.Table:
        """Each rank in each group: by how much it comes later than all others, less its waits.

        That is what the rank itself is slower by: drift to and fro cancels out. Messages are
        left out: who hands on what it was handed late is not slower.
        """
        table = self.collectives.filter(pc.not_equal(self.collectives["op"], "SendRecv"))
        held = pc.if_else(table["is_last"], table["held_up_ns"], 0)
        later = pc.subtract(held, table["wait_ns"])
        table = table.append_column("held_ns", held).append_column("later_ns", later)
        sums = table.group_by(["rank", "tag", "group"]).aggregate(
            [("held_ns", "sum"), ("wait_ns", "sum"), ("later_ns", "sum")]
        )
        names = ["rank", "tag", "group", "held_up_ns", "wait_ns", "later_ns"]
        order = [("later_ns", "descending"), ("rank", "ascending"), ("group", "ascending")]
        return sums.rename_columns(names).sort_by(order)

    def by_rank_and_class(self) -> pa.Table:
        """How long each rank is on the path, and with what."""
        sums = self.breakdown.group_by(["rank", "bound_by"]).aggregate([("duration_ns", "sum")])
        return sums.sort_by([("duration_ns_sum", "descending"), ("rank", "ascending")])


_LONG = 1 << 62
_RANKS = pa.schema(
    [
        pa.field(name, pa.int64())
        for name in (
            "rank",
            "on_path_ns",
            "wait_ns",
            "transfer_ns",
            "slack_ns",  # the least of all that it does, by which a later one is no later step
            "arrival_slack_ns",  # the least of its arrivals at collectives
            "arrived_last",  # at how many collectives
            "held_up_ns",  # by how much all the others would have come earlier
            "clock_offset_ns",
        )
    ]
)


def _by_rank(table: pa.Table, column: str) -> dict[int, int]:
    return dict(zip(table["rank"].to_pylist(), table[column].to_pylist(), strict=True))


def join_ranks(
    run: RunTraces, wanted: Window | None = None, data_load: Sequence[str] = ()
) -> Joined:
    """The critical path of a window through all ranks of a run.

    Raises `FastcommError` where no communication is the same on two ranks.
    """
    traces = {rank: run.read(rank) for rank in run.ranks}
    return joined(traces, wanted, data_load)


def joined(
    traces: Mapping[int, Trace],
    wanted: Window | None = None,
    data_load: Sequence[str] = (),
    found: Mapping[int, CriticalPath] | None = None,
) -> Joined:
    """Return the same for traces in memory; `found` are their paths, where these are known.

    The number of expected ranks is the largest world size that a trace says.
    """
    found = found or {
        rank: analyse(trace, wanted, data_load=data_load) for rank, trace in traces.items()
    }
    inside = {
        rank: np.isin(traces[rank].comm["event"].to_numpy(), each.graph.event)
        for rank, each in found.items()
    }
    comm = RunCommunication.of(traces)
    ahead = comm.ahead()
    same, notes = comm.instances(inside, ahead)
    if not len(same):
        raise FastcommError(
            f"{', '.join(map(str, traces))}: no communication of one group is on two of these "
            "ranks; wanted process groups on the events"
        )
    joiner = Joiner(found, same, ahead)
    path, rank_of, starts = joiner.path(notes)
    room = slack(path.graph, path.on_device)
    return Joined(
        path=path,
        ranks=tuple(found),
        rank_of=rank_of,
        slack=room,
        offsets=ahead,
        collectives=table(same, room[starts]),
        violations=joiner.violations,
        expected_ranks=expected_ranks(tuple(found), _world_size(traces)),
    )


def _world_size(traces: Mapping[int, Trace]) -> int | None:
    sizes = [trace.meta.world_size for trace in traces.values()]
    return max((size for size in sizes if size is not None), default=None)
