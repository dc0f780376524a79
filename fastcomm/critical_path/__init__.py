"""Critical paths: the chain of work that determines the time of a step.

`CriticalPath` is a path through the graph of one or several ranks. Times are ns. The id of an
event is its position in the trace's file.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.checks import check_path, invalid_value
from fastcomm.critical_path.across import RankJoin
from fastcomm.critical_path.rules import (
    FACTS,
    OWN,
    TYPES,
    DataDependencies,
    EventDescriptions,
    PathSource,
    TraceEvents,
    classes,
    short_names,
)
from fastcomm.critical_path.window import DeviceTime, step_note
from fastcomm.errors import FastcommError
from fastcomm.graph import EDGE_KIND, EDGE_KINDS, Graph, LongestPath
from fastcomm.graph.edits import Edit, EditSweep
from fastcomm.result import Result
from fastcomm.trace.run import SkippedRank
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import Flags, Ints

_MOST_CLASSES = 3
_OWNER = ("kind", "process", "thread", "stream", "op", "tag")  # in `breakdown`


class CriticalPath(Result):
    """Critical path through the graph of one rank, or of several joined by collectives."""

    def __init__(
        self,
        graph: Graph,
        events: EventDescriptions,
        about: PathSource,
        on_device: Flags,
        path: LongestPath | None,
        slack: Ints | None = None,
        across: RankJoin | None = None,
    ) -> None:
        """Describe a path; `about` says where the graph is from."""
        self.graph = graph
        self.events = events
        self.about = about
        self.on_device = on_device  # by node
        self.path = path  # None if the graph has no valid one
        self.slack = slack  # by edge of the path, ns; -1 without another constraint
        if across is not None:
            self.across = across
        self.data: DataDependencies | None = None  # if they were requested
        self.failed: tuple[SkippedRank, ...] = ()  # ranks that were skipped
        self.warnings: tuple[str, ...] = ()  # of the traces

    @classmethod
    def search(
        cls,
        graph: Graph,
        events: EventDescriptions,
        about: PathSource,
        on_device: Flags,
        across: RankJoin | None = None,
    ) -> Self:
        """Search for the path of a graph of `events` by the rules of `about`."""
        path, slack = about.rules.search(graph, events, on_device)
        return cls(graph, events, about, on_device, path, slack, across)

    @property
    def valid_path(self) -> LongestPath:
        """The path; raises FastcommError if there is none."""
        if self.path is None:
            raise FastcommError(f"{self.about.path}: the graph has no critical path")
        return self.path

    @cached_property
    def across(self) -> RankJoin:
        """Ranks, slack and collectives of the graph."""
        return RankJoin.of_one(self.about.rank, len(self.graph.event))

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

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return `breakdown` as a capsule of Arrow's C stream interface."""
        return self.breakdown.__arrow_c_stream__(requested_schema)

    @cached_property
    def _bound_by(self) -> pa.Array:
        """Class of each edge of the path."""
        graph, edges, about = self.graph, self.valid_path.edges, self.about
        owners = self.events.describe(graph.owner[edges], FACTS)
        targets = self.events.describe(graph.event[graph.target[edges]], ["is_device"])
        edge_class = about.rules.edge_class
        return classes(edge_class, graph.kind[edges], owners, targets, about.data_load)

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return `breakdown` as `critical_path`, and further tables.

        For several ranks these are `ranks`, `waits_caused` and `collectives`; with data
        dependencies `operators` and `subgraphs`.
        """
        tables = {"critical_path": self.breakdown}
        if self.data is not None:
            tables |= self.data.to_arrow()
        if self.is_joined:
            tables |= {"ranks": self.by_rank(), **self.across.to_arrow()}
        return tables

    def figures(self) -> dict[str, str]:
        """Return the step, ranks, rules, the length of the path, its largest classes."""
        sums = sorted(self.summary_ns().items(), key=lambda pair: -pair[1])
        largest = ", ".join(f"{name} {format_ns(ns)}" for name, ns in sums[:_MOST_CLASSES])
        count = f"{len(self.ranks)} of {self.across.expected_ranks}"
        return {
            **({} if self.step is None else {"step": str(self.step)}),
            **({"ranks": count} if self.is_joined else {"rank": str(self.about.rank)}),
            "rules": self.about.rules.name,
            "length": format_ns(self.length_ns),
            "largest": largest,
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what makes the path unreliable, and on a device that is busy along it."""
        about, events = self.about, self.events
        if not (self.path and about.rules.is_exact and isinstance(events, TraceEvents)):
            return about.notes
        device = DeviceTime.of(events.trace, self.breakdown, self.graph.event)
        more = (device.note(), step_note(events.trace, about.window, self.wall_ns))
        return (*about.notes, *(note for note in more if note))

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version; shares refer to the path.

        For several ranks it has no ids of events, which are unique only within a rank.
        """
        graph, path, about = self.graph, self.valid_path, self.about
        sums, counts = self.summary_ns(), graph.counts()
        kinds = (name for name in about.rules.edge_kinds if name != "join" or counts[name])
        ranks, ids = {"rank": about.rank}, {"event_ids": self.event_ids}
        if self.is_joined:
            ranks = self.across.contents(self.breakdown, self.by_rank(), self.crossings)
            ids = {}
        return {
            "rules": about.rules.name,
            "path_of_trace": about.path,
            **ranks,
            "step": about.window.step,
            "window": {"start_ns": about.window.start, "stop_ns": about.window.stop},
            "events": about.clipped,
            "nodes": graph.connected_nodes,
            "nodes_listed": len(graph.event),
            "edges": {name: counts[name] for name in kinds},
            "path": {
                "nodes": len(path.nodes),
                "events": self.event_count,
                "length_ns": self.length_ns,
                "wall_ns": self.wall_ns,
                "coverage": self.length_ns / self.wall_ns if self.wall_ns else None,
                **ids,
            },
            "summary": _shares(sums),
            "summary_ns": sums,
            "summary_by_tag": _shares(self.by_tag_ns(), sum(sums.values())),
            "top_events": self.top("event").to_pylist(),
            "top_operators": self.top("name").to_pylist(),
            "notes": list(self.notes),
            **({} if self.data is None else {"data": self.data.to_dict()}),
            "failed": [asdict(rank) for rank in self.failed],
        }

    def by_rank(self) -> pa.Table:
        """Return a table with a row per rank, in ns: time on the path, waits, and waits caused.

        Columns: rank, on_path_ns, wait_ns, transfer_ns, slack_ns, arrival_slack_ns,
        arrived_last (number of collectives), wait_caused_ns and clock_offset_ns.
        """
        if not self.is_joined:
            return self.across.by_rank({self.about.rank: self.length_ns})
        return self.across.by_rank(_sums(self.breakdown, "rank"))

    def waits_caused(self) -> pa.Table:
        """Return a table of waits in ns, with a row per rank and process group.

        Columns: rank, tag, group, wait_caused_ns, wait_ns and later_ns, their difference, by
        which the rank itself is slower. Rows are sorted by `later_ns`, the largest first.
        """
        return self.across.waits_caused()

    def summary_ns(self) -> dict[str, int]:
        """Return the ns of each class of time on the path, such as "gpu_compute_bound"."""
        weight = self.graph.weight[self.valid_path.edges]
        table = pa.table({"bound_by": self._bound_by, "duration_ns": weight})
        return dict(sorted(_sums(table, "bound_by").items()))

    def summary(self) -> dict[str, float]:
        """Return the share of each class of time on the path, from 0 to 1."""
        return _shares(self.summary_ns())

    def by_tag_ns(self) -> dict[str, int]:
        """Return the ns of communication on the path by parallelism, such as "TP"."""
        table = self.breakdown
        is_comm = pc.equal(table["bound_by"], "gpu_communication_bound")
        sums = _sums(table.filter(pc.and_(is_comm, pc.is_valid(table["tag"]))), "tag")
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

    def what_if(self, *edits: Edit) -> "WhatIf":
        """Predict the step time and the critical path after changes of the recorded work.

        Edits are made by `fastcomm.scale`, `fastcomm.set_time` and `fastcomm.remove`, as in
        `what_if(fastcomm.scale("compute", 0.8))`.

        Raises
        ------
        ConfigError
            If an argument is no edit, or an edit selects no event.

        """
        from fastcomm.critical_path.what_if import Replay

        return Replay(self).run(edits)

    def save(self, out_dir: str) -> str:
        """Write the graph and its path to `out_dir` with the ending .zip; return that name."""
        check_path(out_dir, "save: out_dir", 'save("path")')
        from fastcomm.critical_path.saved import save  # imports this module

        return save(self, out_dir)


@dataclass(frozen=True, kw_only=True, repr=False)
class WhatIf(Result):
    """A step before and after its edits."""

    edits: tuple[Edit, ...]
    before_ns: int
    after_ns: int
    replay_error_ns: int  # of the replay without edits, at the worst node
    before: CriticalPath
    after: CriticalPath
    sweeps: tuple[EditSweep, ...] = ()
    failed: tuple[SkippedRank, ...] = ()

    @property
    def speedup(self) -> float | None:
        """Ratio of the step time before to that after; None if nothing remains."""
        return self.before_ns / self.after_ns if self.after_ns else None

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        before, paths = self.before, {"before": self.before, "after": self.after}
        return {
            "rank": None if before.is_joined else before.about.rank,
            "step": before.step,
            "edits": [str(edit) for edit in self.edits],
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "speedup": self.speedup,
            "replay_error_ns": self.replay_error_ns,
            "summary_ns": {name: path.summary_ns() for name, path in paths.items()},
            # Ids are unique within a rank.
            "path": {
                name: {"event_ids": None if path.is_joined else path.event_ids}
                for name, path in paths.items()
            },
            "sweeps": [
                {"edit": one.name, "values": list(one.values), "span_ns": list(one.span_ns)}
                for one in self.sweeps
            ],
            "notes": list(before.notes),
            "failed": [asdict(rank) for rank in self.failed],
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the edges of the new path as `path_after`, and the sweeps if there are any."""
        sweeps = [one.to_arrow() for one in self.sweeps]
        more = {"sweep": pa.concat_tables(sweeps)} if sweeps else {}
        return {"path_after": self.after.breakdown, **more}

    def figures(self) -> dict[str, str]:
        """Return the step time before and after, and the edits."""
        return {
            "before": format_ns(self.before_ns),
            "after": format_ns(self.after_ns),
            "edits": ", ".join(map(str, self.edits)) or "none",
        }


def _sums(table: pa.Table, key: str) -> dict[Any, int]:
    """Return the sum of the durations by a column, in ns."""
    sums = table.group_by(key).aggregate([("duration_ns", "sum")])
    return dict(zip(sums[key].to_pylist(), sums["duration_ns_sum"].to_pylist(), strict=True))


def _shares(sums: dict[str, int], whole: int | None = None) -> dict[str, float]:
    total = sum(sums.values()) if whole is None else whole
    return {name: ns / total if total else 0.0 for name, ns in sums.items()}
