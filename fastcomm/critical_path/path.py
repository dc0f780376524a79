"""A graph of constraints, the path through it that determines its time, and its tables."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.checks import invalid_value
from fastcomm.critical_path.across import RankJoin
from fastcomm.critical_path.rules import (
    FACTS,
    OWN,
    TYPES,
    EventDescriptions,
    PathSource,
    TraceEvents,
    classes,
    short_names,
)
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph import EDGE_KIND, EDGE_KINDS, Graph, LongestPath
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import Flags, Ints

_OWNER = ("kind", "process", "thread", "stream", "op", "tag")  # in `breakdown`


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
        targets = self.events.describe(graph.event[graph.target[edges]], ["is_device"])
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
