"""The ranks that a critical path goes through: which holds the others up, and by how much.

Times are nanoseconds on the clock of the first rank.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.exchange.arrivals import Instances
from fastcomm.trace.schema import OPS, TAGS
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.graph import Numbers

_LONG = 1 << 62  # a slack that nothing limits
COLLECTIVES = pa.schema(
    [
        pa.field("instance", pa.int64()),
        pa.field("rank", pa.int64()),
        pa.field("op", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("group", pa.string()),
        pa.field("start", pa.int64()),  # ns, on the first rank's clock
        pa.field("stop", pa.int64()),
        pa.field("arrived", pa.int64()),  # when the last had come that it waits for
        pa.field("wait_ns", pa.int64()),  # until then
        pa.field("transfer_ns", pa.int64()),
        pa.field("held_up_ns", pa.int64()),  # how much later it is than the one before the last
        pa.field("is_last", pa.bool_()),  # of all for whom those wait that wait for it
        pa.field("slack_ns", pa.int64()),  # it could come so much later without a longer step
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
            "slack_ns",  # the least of all that it does, by which a later one is no later step
            "arrival_slack_ns",  # the least of its arrivals at collectives
            "arrived_last",  # at how many collectives
            "held_up_ns",  # by how much all the others would have come earlier
            "clock_offset_ns",
        )
    ]
)


def collectives(joined: Instances, slack: Ints) -> pa.Table:
    """Return a row of `COLLECTIVES` for each part; `slack` is that of its start."""
    until = joined.until
    caused, is_last = joined.wait_caused()
    words = {"op": (OPS, joined.op), "tag": (TAGS, joined.tag)}
    columns = {
        "instance": joined.instance,
        "rank": joined.rank,
        **{name: pa.array(names).take(pa.array(at)) for name, (names, at) in words.items()},
        "group": pa.array(joined.group, pa.string()),
        "start": joined.start,
        "stop": joined.stop,
        "arrived": until,
        "wait_ns": until - joined.start,
        "transfer_ns": np.maximum(joined.stop - until, 0),
        "held_up_ns": caused,
        "is_last": is_last,
        "slack_ns": slack,
    }
    return pa.table(columns, COLLECTIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJoin:
    """How the graphs of ranks are joined into the one of a path; one rank is joined to none."""

    ranks: tuple[int, ...]
    rank_of: Numbers  # by node: index into `ranks`
    slack: Ints  # by node: ns by which it could be later without a longer step
    offsets: dict[int, int]  # ns that a rank's clock is ahead of the first rank's
    collectives: pa.Table  # of COLLECTIVES
    violations: int  # ends before the last arrival, after alignment
    expected_ranks: int  # of the run, read or not

    @classmethod
    def of_one(cls, rank: int, nodes: int) -> Self:
        """Return the join of one rank, whose graph has that many nodes."""
        return cls(
            ranks=(rank,),
            rank_of=np.zeros(nodes, np.int32),
            slack=np.full(nodes, _LONG, np.int64),
            offsets={rank: 0},
            collectives=COLLECTIVES.empty_table(),
            violations=0,
            expected_ranks=1,
        )

    def unmeasured(self) -> Self:
        """Return the join without waits and slack, which an edit of the graph changes."""
        unknown = np.full(len(self.slack), _LONG, np.int64)
        return replace(self, slack=unknown, collectives=COLLECTIVES.empty_table())

    @property
    def clocks_agree(self) -> bool:
        """Whether no part of most collectives ends before the last rank has arrived."""
        table = self.collectives
        early = table.filter(pc.less(table["stop"], table["arrived"]))["instance"]
        return 2 * len(early.unique()) <= len(table["instance"].unique())

    def by_rank(self, on_path_ns: dict[int, int]) -> pa.Table:
        """Return each rank's time on the path, its waits, and the waits that it causes.

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
        held = (
            table.filter(table["is_last"]).group_by("rank").aggregate([("held_up_ns", "sum")])
        )
        held_up = _by_rank(held, "held_up_ns_sum")
        no_wait = 0 if table.num_rows else None
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
                "on_path_ns": on_path_ns.get(rank, 0),
                "slack_ns": None if least[k] == _LONG else int(least[k]),
                **{name: column.get(rank) for name, column in columns.items()},
                "held_up_ns": held_up.get(rank, no_wait),
                "clock_offset_ns": self.offsets[rank],
            }
            for k, rank in enumerate(self.ranks)
        ]
        return pa.Table.from_pylist(rows, _RANKS)

    def hold_ups(self) -> pa.Table:
        """Return by how much each rank of each group comes later than all others.

        Its own waits are subtracted. This is what the rank itself is slower by: drift to and
        fro cancels out. Messages are left out: a rank that passes on what it received late is
        not slower.
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


def _by_rank(table: pa.Table, column: str) -> dict[int, int]:
    return dict(zip(table["rank"].to_pylist(), table[column].to_pylist(), strict=True))
