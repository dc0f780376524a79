"""Attribute a critical path through several ranks: which rank makes others wait, how long.

Times are ns on the clock of the first rank.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.exchange.instances import Instances
from fastcomm.trace.schema import OPS, TAGS
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.graph import Numbers

_UNLIMITED = 1 << 62  # slack
COLLECTIVES = pa.schema(
    [
        pa.field("instance", pa.int64()),
        pa.field("rank", pa.int64()),
        pa.field("op", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("group", pa.string()),
        pa.field("start", pa.int64()),  # ns, on the first rank's clock
        pa.field("stop", pa.int64()),
        pa.field("arrived", pa.int64()),  # arrival of the last rank that it waits for
        pa.field("wait_ns", pa.int64()),  # from its start to `arrived`
        pa.field("transfer_ns", pa.int64()),  # from `arrived` to its end
        pa.field("wait_caused_ns", pa.int64()),  # time after the second last arrival
        pa.field("is_last", pa.bool_()),  # whether it is the last rank that others wait for
        pa.field("slack_ns", pa.int64()),  # possible delay of its start without a longer step
    ]
)
_RANKS = pa.schema(
    [
        pa.field(name, pa.int64())
        for name in (
            "rank",
            "on_path_ns",
            "wait_ns",
            "transfer_ns",
            "slack_ns",  # least slack of its events
            "arrival_slack_ns",  # least slack of its arrivals at collectives
            "arrived_last",  # number of collectives at which it arrived last
            "wait_caused_ns",  # wait that it caused at these
            "clock_offset_ns",
        )
    ]
)


def collectives(joined: Instances, slack: Ints) -> pa.Table:
    """Return a table of `COLLECTIVES`, one row per participant of each instance.

    Parameters
    ----------
    joined
        The matched collectives and messages.
    slack
        Slack of the start of each participant, ns.

    """
    until = joined.until
    caused, is_last = joined.wait_caused()
    coded = {"op": (OPS, joined.op), "tag": (TAGS, joined.tag)}
    columns = {
        "instance": joined.instance,
        "rank": joined.rank,
        **{name: pa.array(names).take(pa.array(at)) for name, (names, at) in coded.items()},
        "group": pa.array(joined.group, pa.string()),
        "start": joined.start,
        "stop": joined.stop,
        "arrived": until,
        "wait_ns": until - joined.start,
        "transfer_ns": np.maximum(joined.stop - until, 0),
        "wait_caused_ns": caused,
        "is_last": is_last,
        "slack_ns": slack,
    }
    return pa.table(columns, COLLECTIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoin:
    """Ranks, slack and collectives of a graph that joins the graphs of one or several ranks."""

    ranks: tuple[int, ...]
    rank_of: Numbers  # by node: position in `ranks`
    slack: Ints  # by node: ns by which it could be later without a longer step
    offsets: dict[int, int]  # ns by which a rank's clock is ahead of the first rank's
    collectives: pa.Table  # of COLLECTIVES
    violations: int  # collectives that end before the last arrival, after alignment
    expected_ranks: int  # of the run, including ranks that were not read

    @classmethod
    def of_one(cls, rank: int, nodes: int) -> Self:
        """Return the join of a single rank, whose graph has `nodes` nodes."""
        return cls(
            ranks=(rank,),
            rank_of=np.zeros(nodes, np.int32),
            slack=np.full(nodes, _UNLIMITED, np.int64),
            offsets={rank: 0},
            collectives=COLLECTIVES.empty_table(),
            violations=0,
            expected_ranks=1,
        )

    def unmeasured(self) -> Self:
        """Return a copy without waits and slack, which an edit of the graph invalidates."""
        unknown = np.full(len(self.slack), _UNLIMITED, np.int64)
        return replace(self, slack=unknown, collectives=COLLECTIVES.empty_table())

    @property
    def clocks_agree(self) -> bool:
        """Whether most collectives have no participant that ends before the last arrival."""
        table = self.collectives
        early = table.filter(pc.less(table["stop"], table["arrived"]))["instance"]
        return 2 * len(early.unique()) <= len(table["instance"].unique())

    def by_rank(self, on_path_ns: dict[int, int]) -> pa.Table:
        """Return a table of each rank's time on the path, its waits, and the waits it causes.

        `on_path_ns` is the time on the path by rank.
        """
        table = self.collectives
        sums = table.group_by("rank").aggregate(
            [
                ("wait_ns", "sum"),
                ("transfer_ns", "sum"),
                ("slack_ns", "min"),
                ("is_last", "sum"),
            ]
        )
        caused = (
            table.filter(table["is_last"])
            .group_by("rank")
            .aggregate([("wait_caused_ns", "sum")])
        )
        waits_caused = _by_rank(caused, "wait_caused_ns_sum")
        no_wait = 0 if table.num_rows else None
        columns = {
            "wait_ns": _by_rank(sums, "wait_ns_sum"),
            "transfer_ns": _by_rank(sums, "transfer_ns_sum"),
            "arrival_slack_ns": _by_rank(sums, "slack_ns_min"),
            "arrived_last": _by_rank(sums, "is_last_sum"),
        }
        least = np.full(len(self.ranks), _UNLIMITED, np.int64)
        np.minimum.at(least, self.rank_of, self.slack)
        rows = [
            {
                "rank": rank,
                "on_path_ns": on_path_ns.get(rank, 0),
                "slack_ns": None if least[k] == _UNLIMITED else int(least[k]),
                **{name: column.get(rank) for name, column in columns.items()},
                "wait_caused_ns": waits_caused.get(rank, no_wait),
                "clock_offset_ns": self.offsets[rank],
            }
            for k, rank in enumerate(self.ranks)
        ]
        return pa.Table.from_pylist(rows, _RANKS)

    def waits_caused(self) -> pa.Table:
        """Return a table of the waits that each rank of each group causes, minus its own waits.

        The difference, `later_ns`, is by how much the rank itself is slower: delays that
        alternate between ranks cancel out. Messages do not count, because a rank that forwards
        late data is not slower.
        """
        table = self.collectives.filter(pc.not_equal(self.collectives["op"], "SendRecv"))
        caused = pc.if_else(table["is_last"], table["wait_caused_ns"], 0)
        later = pc.subtract(caused, table["wait_ns"])
        table = table.append_column("caused_ns", caused).append_column("later_ns", later)
        sums = table.group_by(["rank", "tag", "group"]).aggregate(
            [("caused_ns", "sum"), ("wait_ns", "sum"), ("later_ns", "sum")]
        )
        names = ["rank", "tag", "group", "wait_caused_ns", "wait_ns", "later_ns"]
        order = [("later_ns", "descending"), ("rank", "ascending"), ("group", "ascending")]
        return sums.rename_columns(names).sort_by(order)

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the tables `waits_caused` and `collectives`; times in ns."""
        return {"waits_caused": self.waits_caused(), "collectives": self.collectives}

    def contents(self, breakdown: pa.Table, ranks: pa.Table, crossings: int) -> dict[str, Any]:
        """Return the part of a path's JSON document that is about its ranks.

        Parameters
        ----------
        breakdown
            Table of the edges of the path.
        ranks
            Result of `by_rank`.
        crossings
            Number of times that the path goes from one rank to another.

        """
        keys = ["rank", "bound_by"]
        classes = breakdown.group_by(keys).aggregate([("duration_ns", "sum")])
        order = [("duration_ns_sum", "descending"), ("rank", "ascending")]
        classes = classes.sort_by(order).rename_columns([*keys, "on_path_ns"])
        return {
            "expected_ranks": self.expected_ranks,
            "ranks": ranks.to_pylist(),
            "waits_caused": self.waits_caused().to_pylist(),
            "classes_by_rank": classes.to_pylist(),
            "crossings": crossings,
            "collectives": len(self.collectives["instance"].unique()),
            "violations": self.violations,
        }


def _by_rank(table: pa.Table, column: str) -> dict[int, int]:
    return dict(zip(table["rank"].to_pylist(), table[column].to_pylist(), strict=True))
