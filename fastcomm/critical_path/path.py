"""A graph of constraints, the path through it that determines its time, and its tables.

Of several ranks, `RankJoin` tells which rank makes others wait, and how long. Times are ns on
the clock of the first rank.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.checks import invalid_value
from fastcomm.critical_path.rules import (
    FACTS,
    OWN,
    TARGET_FACTS,
    TYPES,
    EventDescriptions,
    PathSource,
    TraceEvents,
    classes,
    short_names,
)
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.graph import EDGE_KIND, EDGE_KINDS, Graph, LongestPath
from fastcomm.ranks.instances import Instances
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import OPS
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import Flags, Ints, Numbers

_OWNER = ("kind", "process", "thread", "stream", "op", "tag")  # in `breakdown`
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
        summed = [(name, "sum") for name in ("wait_ns", "transfer_ns", "is_last", "caused_ns")]
        table = self._with_caused.group_by("rank").aggregate([*summed, ("slack_ns", "min")])
        sums = {row["rank"]: row for row in table.to_pylist()}
        no_row = {"caused_ns_sum": 0 if sums else None}
        least = np.full(len(self.ranks), _UNLIMITED, np.int64)
        np.minimum.at(least, self.rank_of, self.slack)
        rows = []
        for rank, slack in zip(self.ranks, least.tolist(), strict=True):
            own = sums.get(rank, no_row)
            rows.append(
                {
                    "rank": rank,
                    "on_path_ns": on_path_ns.get(rank, 0),
                    "wait_ns": own.get("wait_ns_sum"),
                    "transfer_ns": own.get("transfer_ns_sum"),
                    "slack_ns": None if slack == _UNLIMITED else slack,
                    "arrival_slack_ns": own.get("slack_ns_min"),
                    "arrived_last": own.get("is_last_sum"),
                    "wait_caused_ns": own["caused_ns_sum"],
                    "clock_offset_ns": self.offsets[rank],
                }
            )
        return pa.Table.from_pylist(rows, _RANKS)

    @property
    def _with_caused(self) -> pa.Table:
        """`collectives` with the wait that each arrival causes, 0 if it is not the last."""
        table = self.collectives
        caused = pc.if_else(table["is_last"], table["wait_caused_ns"], 0)
        return table.append_column("caused_ns", caused)

    def waits_caused(self) -> pa.Table:
        """Return a table of the waits that each rank of each group causes, minus its own waits.

        The difference, `later_ns`, is by how much the rank itself is slower: delays that
        alternate between ranks cancel out. Messages do not count, because a rank that forwards
        late data is not slower.
        """
        table = self._with_caused.filter(pc.not_equal(self.collectives["op"], "SendRecv"))
        later = pc.subtract(table["caused_ns"], table["wait_ns"])
        sums = table.append_column("later_ns", later).group_by(["rank", "tag", "group"])
        sums = sums.aggregate([(name, "sum") for name in ("caused_ns", "wait_ns", "later_ns")])
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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FoundPath:
    """A graph of constraints, and the path through it that determines its time."""

    graph: Graph
    events: EventDescriptions
    about: PathSource  # where the graph is from
    on_device: Flags  # by node
    path: LongestPath | None  # None if the graph has no valid one
    slack: Ints | None = None  # by edge of the path, ns; -1 without another constraint
    join: RankJoin | None = None  # of several ranks

    @property
    def valid_path(self) -> LongestPath:
        """The path; raises FastcommError if there is none."""
        if self.path is None:
            raise FastcommError(f"{self.about.path}: the graph has no critical path")
        return self.path

    def check_exact(self, method: str) -> None:
        """Raise FastcommError, which begins with `method`, if the graph has HTA's rules."""
        if not self.about.rules.is_exact:
            raise FastcommError(
                f"{method}: the graph has the rules of {self.about.rules.name}; find the path "
                "without compat"
            )

    @cached_property
    def across(self) -> RankJoin:
        """Ranks, slack and collectives of the graph."""
        return self.join or RankJoin.of_one(self.about.rank, len(self.graph.event))

    @property
    def trace(self) -> Trace:
        """The trace of the one rank whose path was searched; ConfigError for another path."""
        if not isinstance(self.events, TraceEvents):
            raise ConfigError(
                f"{self.about.path}: this needs the path of one rank by a profiler's trace"
            )
        return self.events.trace

    @property
    def step(self) -> int | None:
        """Number of the step in the trace; None if the window is another part."""
        return self.about.window.step

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose events the graph has."""
        return self.across.ranks

    @property
    def is_joined(self) -> bool:
        """Whether the path goes through several ranks."""
        return len(self.ranks) > 1

    @property
    def crossings(self) -> int:
        """Number of times that the path goes from one rank to another."""
        graph, edges = self.graph, self.valid_path.edges
        explained = edges[graph.kind[edges] != EDGE_KIND["unexplained"]]
        ends = (self.across.rank_of[side[explained]] for side in (graph.source, graph.target))
        return int(np.not_equal(*ends).sum())

    @property
    def event_ids(self) -> list[int]:
        """Ids of the events on the path, sorted. They are unique within a rank."""
        rows = np.unique(self.graph.event[self.valid_path.nodes])
        return sorted(self.events.ids(rows).tolist())

    @property
    def event_count(self) -> int:
        """Number of events on the path."""
        return len(np.unique(self.graph.event[self.valid_path.nodes]))

    @property
    def length_ns(self) -> int:
        """Length of the path in ns: the sum of the weights of its edges, negative ones as 0."""
        return int(np.maximum(self.graph.weight[self.valid_path.edges], 0).sum())

    @property
    def wall_ns(self) -> int:
        """Time from the first node of the graph to the last, in ns."""
        return self.graph.span_ns

    @cached_property
    def breakdown(self) -> pa.Table:
        """Table of the edges of the path: type, class, times, and the event of each.

        For several ranks it has a column `rank`.
        """
        graph, edges = self.graph, self.valid_path.edges
        owners = self.events.describe(graph.owner[edges])
        targets = self.events.describe(graph.event[graph.target[edges]])
        slack = np.full(len(edges), -1) if self.slack is None else self.slack
        ranks = np.array(self.ranks)[self.across.rank_of[graph.target[edges]]]
        return pa.table(
            {
                **({"rank": ranks} if self.is_joined else {}),
                "type": pa.array([TYPES[kind] for kind in EDGE_KINDS]).take(
                    pa.array(graph.kind[edges])
                ),
                "bound_by": self._bound_by,
                "start_ns": graph.time[graph.source[edges]],
                "stop_ns": graph.time[graph.target[edges]],
                "duration_ns": graph.weight[edges],
                "slack_ns": pa.array(slack, mask=slack < 0),
                "event": owners["id"],
                "name": owners["name"],
                "short_name": short_names(owners["name"]),
                **{key: owners[key] for key in _OWNER},
                "to_event": targets["id"],
            }
        )

    @cached_property
    def _bound_by(self) -> pa.Array:
        """Class of each edge of the path."""
        graph, edges, about = self.graph, self.valid_path.edges, self.about
        owners = self.events.describe(graph.owner[edges], FACTS)
        targets = self.events.describe(graph.event[graph.target[edges]], TARGET_FACTS)
        edge_class = about.rules.edge_class
        return classes(edge_class, graph.kind[edges], owners, targets, about.data_load)

    def summary_ns(self) -> dict[str, int]:
        """Return the ns of each class of time on the path, such as "gpu_compute_bound"."""
        weight = self.graph.weight[self.valid_path.edges]
        table = pa.table({"bound_by": self._bound_by, "duration_ns": weight})
        return dict(sorted(sums_by(table, "bound_by").items()))

    def summary(self) -> dict[str, float]:
        """Return the share of each class of time on the path, from 0 to 1."""
        return shares(self.summary_ns())

    def by_tag_ns(self) -> dict[str, int]:
        """Return the ns of communication on the path by parallelism, such as "TP"."""
        table = self.breakdown
        is_comm = pc.equal(table["bound_by"], "gpu_communication_bound")
        sums = sums_by(table.filter(pc.and_(is_comm, pc.is_valid(table["tag"]))), "tag")
        return dict(sorted(sums.items()))

    def top(self, by: str = "event", count: int = 10) -> pa.Table:
        """Return a table of the events with the most time of their own on the path.

        Parameters
        ----------
        by
            "event", or "name" to add up events of one name.
        count
            Maximum number of rows.

        Returns
        -------
        Table
            Columns name, kind, self_ns (own time on the path), edges (number of edges), and by
            event also event (its id), the largest own time first.

        Raises
        ------
        ConfigError
            If an argument is invalid.

        """
        if by not in ("event", "name"):
            raise invalid_value("top: by", by, "one of event, name")
        if not isinstance(count, int) or count < 0:
            raise invalid_value("top: count", count, "a whole number, as in top(count=5)")
        table = self.breakdown
        is_own = pc.is_in(table["bound_by"], value_set=pa.array(OWN))
        table = table.filter(pc.and_(pc.is_valid(table["event"]), is_own))
        keys = ["event", "name", "kind"] if by == "event" else ["name", "kind"]
        aggregates = [("duration_ns", "sum"), ("duration_ns", "count")]
        sums = table.group_by(keys).aggregate(aggregates)
        order = [("self_ns", "descending"), (keys[0], "ascending")]
        return sums.rename_columns([*keys, "self_ns", "edges"]).sort_by(order).slice(0, count)


def sums_by(table: pa.Table, key: str) -> dict[Any, int]:
    """Return the sum of the column `duration_ns`, in ns, for each value of the column `key`."""
    sums = table.group_by(key).aggregate([("duration_ns", "sum")])
    return dict(zip(sums[key].to_pylist(), sums["duration_ns_sum"].to_pylist(), strict=True))


def shares(sums: dict[str, int], whole: int | None = None) -> dict[str, float]:
    """Return each part divided by the sum of all, or by `whole`; 0 if that is 0."""
    total = sum(sums.values()) if whole is None else whole
    return {name: ns / total if total else 0.0 for name, ns in sums.items()}
