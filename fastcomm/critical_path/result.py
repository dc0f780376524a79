"""Critical paths: the chain of work that determines the time of a step.

`CriticalPath` is a path through the graph of one or several ranks. Times are ns. The id of an
event is its position in the trace's file.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from fastcomm.checks import check_path, check_type
from fastcomm.critical_path import candidates, saved
from fastcomm.critical_path.candidates import Candidate
from fastcomm.critical_path.graph_edit import GraphEdit, times_of, with_times
from fastcomm.critical_path.options import WhatIfOptions
from fastcomm.critical_path.path import FoundPath, RankJoin, shares, sums_by
from fastcomm.critical_path.rules import (
    DataDependencies,
    EventDescriptions,
    PathSource,
    TraceEvents,
)
from fastcomm.critical_path.what_if import EditedStep, Replay
from fastcomm.critical_path.window import DeviceTime, step_note
from fastcomm.errors import FastcommError
from fastcomm.graph.edits import Edit, EditSweep, Interval, ParsedEdits, parse_edits
from fastcomm.graph.graph import Graph
from fastcomm.option_fields import takes
from fastcomm.result import Result
from fastcomm.trace.run_traces import SkippedRank
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import Flags

_MOST_CLASSES = 3
_TRIED = pa.schema([("edit", pa.string()), ("after_ns", pa.int64()), ("saved_ns", pa.int64())])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CriticalPath(FoundPath, Result):
    """Critical path through the graph of one rank, or of several joined by collectives."""

    data: DataDependencies | None = None  # if they were requested
    skipped: tuple[SkippedRank, ...] = ()
    warnings: tuple[str, ...] = ()  # of the traces

    @classmethod
    def search(
        cls,
        graph: Graph,
        events: EventDescriptions,
        about: PathSource,
        on_device: Flags,
        join: RankJoin | None = None,
    ) -> Self:
        """Search for the path that determines the time of a window.

        Parameters
        ----------
        graph
            Nodes and constraints of the window.
        events
            Describes the events of the graph's nodes.
        about
            Where the graph is from; its `rules` search.
        on_device
            By node: whether its event is on a device.
        join
            How ranks were joined; None for one rank.

        """
        path, slack = about.rules.search(graph, events, on_device)
        return cls(
            graph=graph,
            events=events,
            about=about,
            on_device=on_device,
            path=path,
            slack=slack,
            join=join,
        )

    @classmethod
    def of(cls, path: FoundPath) -> Self:
        """Return a path with the fields that `path` has."""
        names = (own.name for own in fields(path))
        return cls(**{name: getattr(path, name) for name in names})

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return `breakdown` as a capsule of Arrow's C stream interface."""
        return self.breakdown.__arrow_c_stream__(requested_schema)

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
            "summary": shares(sums),
            "summary_ns": sums,
            "summary_by_tag": shares(self.by_tag_ns(), sum(sums.values())),
            "top_events": self.top("event").to_pylist(),
            "top_operators": self.top("name").to_pylist(),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            **({} if self.data is None else {"data": self.data.to_dict()}),
            "failed": [asdict(rank) for rank in self.skipped],
        }

    def by_rank(self) -> pa.Table:
        """Return a table with a row per rank, in ns: time on the path, waits, and waits caused.

        Columns: rank, on_path_ns, wait_ns, transfer_ns, slack_ns, arrival_slack_ns,
        arrived_last (number of collectives), wait_caused_ns and clock_offset_ns.
        """
        if not self.is_joined:
            return self.across.by_rank({self.about.rank: self.length_ns})
        return self.across.by_rank(sums_by(self.breakdown, "rank"))

    def waits_caused(self) -> pa.Table:
        """Return a table of waits in ns, with a row per rank and process group.

        Columns: rank, tag, group, wait_caused_ns, wait_ns and later_ns, their difference, by
        which the rank itself is slower. Rows are sorted by `later_ns`, the largest first.
        """
        return self.across.waits_caused()

    @takes(WhatIfOptions)
    def what_if(self, options: WhatIfOptions) -> "WhatIf":
        """Predict the step time and the critical path after changes of the recorded work.

        Without edits, the result has candidates: a fixed set of edits, each tried alone.

        Parameters
        ----------
        options
            Fields of `WhatIfOptions`, passed by name. A value FROM:TO:STEP of `scale` or
            `set` is a sweep, whose values are tried one by one.

        Raises
        ------
        ConfigError
            If an edit is invalid, or selects nothing.

        """
        return self.predict(parse_edits(options), bottleneck=options.bottleneck)

    def predict(self, plan_: ParsedEdits, *, bottleneck: bool = False) -> "WhatIf":
        """Predict the step time after the edits of a plan, and for each edit of its sweeps.

        With `bottleneck`, also without each operation of the critical path, before the edits.
        """
        replay, edits = Replay(self), plan_.edits
        replayed = replay.step_after(edits)
        error, reason = replayed.replay_error_ns, candidates.unvalidated(replay)
        tried = None
        if not edits and not plan_.sweeps:
            tried = candidates.try_all(replay, replayed.before_ns, error)
        costly = None
        if bottleneck:
            costly = candidates.bottlenecks(replay, replayed.before_ns, error)

        def swept(variants: tuple[Edit, ...]) -> EditSweep:
            spans = [replay.span([*edits, variant]) for variant in variants]
            return EditSweep(
                edits=variants,
                span_ns=tuple(spans),
                intervals=tuple(
                    Interval.of(span, error, [*edits, variant], reason)
                    for span, variant in zip(spans, variants, strict=True)
                ),
            )

        return WhatIf(
            edits=edits,
            before_ns=replayed.before_ns,
            after_ns=replayed.after_ns,
            replay_error_ns=error,
            interval=Interval.of(replayed.after_ns, error, edits, reason),
            before=self,
            after=self._after(replayed),
            sweeps=tuple(map(swept, plan_.sweeps)),
            candidates=tried,
            bottlenecks=costly,
        )

    def _after(self, replayed: EditedStep) -> "CriticalPath":
        """Return the path of an edited step; itself if the edits change nothing."""
        if replayed.path is None:
            return self
        return CriticalPath(
            graph=replayed.graph,
            events=self.events,
            about=self.about,
            on_device=self.on_device,
            path=replayed.path,
            join=self.across.unmeasured(),
        )

    def edit(self) -> "GraphEdit[CriticalPath]":
        """Return an edit of the graph: events, constraints and weights can be changed.

        `path.edit().remove(17).add_edge(5, 9, 2000).recompute()` is the path of the new graph,
        whose times are those of a replay. Events are named by `event` in `breakdown`, and of
        several ranks by the pair of rank and `event`.

        Raises
        ------
        FastcommError
            If the path was found by HTA's rules.

        """
        return GraphEdit(self, self._with_sources)

    def times(self) -> pa.Table:
        """Return the times of the events of the graph, for `with_times`.

        Columns: rank, event (its id), name, start_ns and duration_ns; a row per event, by rank
        and id.
        """
        return times_of(self)

    def with_times(self, times: pa.Table) -> "CriticalPath":
        """Return the path for other times of all events, such as those of a simulator.

        Constraints that the new times contradict are left out, and counted in `notes`.

        Parameters
        ----------
        times
            A row per event of the graph, with the columns event, start_ns and duration_ns,
            and for several ranks rank; `times()` has all of them. Other columns are ignored.

        Raises
        ------
        ConfigError
            If an event is unknown, missing or repeated, or a time is out of range.
        FastcommError
            If a column is missing or has nulls, or the path was found by HTA's rules.

        """
        check_type(times, pa.Table, "with_times: times", "an Arrow table, as times() returns")
        return self._with_sources(with_times(self, times))

    def _with_sources(self, path: FoundPath) -> "CriticalPath":
        """Return a path with the skipped ranks and the warnings of this one."""
        return replace(CriticalPath.of(path), skipped=self.skipped, warnings=self.warnings)

    def save(self, out_dir: str) -> str:
        """Write the graph and its path to `out_dir` with the ending .zip; return that name.

        Raises FastcommError for a path through several ranks, or if the file cannot be written.
        """
        check_path(out_dir, "save: out_dir", 'save("path")')
        if self.is_joined:
            raise FastcommError(
                "a path through several ranks cannot be saved. Find the path of one rank"
            )
        return saved.save(self, out_dir)


@dataclass(frozen=True, kw_only=True, repr=False)
class WhatIf(Result):
    """A step before and after its edits."""

    edits: tuple[Edit, ...]
    before_ns: int
    after_ns: int
    replay_error_ns: int  # of the replay without edits, at the worst node
    interval: Interval  # of `after_ns`
    before: CriticalPath
    after: CriticalPath
    sweeps: tuple[EditSweep, ...] = ()
    candidates: tuple[Candidate, ...] | None = None  # that shorten the step; None with edits
    bottlenecks: tuple[Candidate, ...] | None = None  # operations without time, if requested

    @property
    def skipped(self) -> tuple[SkippedRank, ...]:
        """Ranks that could not be read, and are left out."""
        return self.before.skipped

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on how far the numbers can be trusted."""
        return self.before.warnings

    @property
    def speedup(self) -> float | None:
        """Ratio of the step time before to that after; None if nothing remains."""
        return self.before_ns / self.after_ns if self.after_ns else None

    def by_rank(self) -> pa.Table:
        """Return a table with a row per rank: rank, before_ns and after_ns, in ns.

        The time of a rank goes from the first event of the step on any rank to the last on it.
        """
        columns = {"rank": pa.array(self.before.ranks, pa.int64())}
        for name, path in (("before_ns", self.before), ("after_ns", self.after)):
            ends = np.zeros(len(path.ranks), np.int64)
            time = path.graph.time
            np.maximum.at(ends, path.across.rank_of, time - time[:1])
            columns[name] = pa.array(ends)
        return pa.table(columns)

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        before, paths = self.before, {"before": self.before, "after": self.after}
        return {
            "rank": None if before.is_joined else before.about.rank,
            "ranks": list(before.ranks),
            "expected_ranks": before.across.expected_ranks,
            "step": before.step,
            "edits": [str(edit) for edit in self.edits],
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "speedup": self.speedup,
            "by_rank": self.by_rank().to_pylist(),
            "interval": self.interval.to_dict(),
            "summary_ns": {name: path.summary_ns() for name, path in paths.items()},
            # Ids are unique within a rank.
            "path": {
                name: {"event_ids": None if path.is_joined else path.event_ids}
                for name, path in paths.items()
            },
            "sweeps": [one.to_dict() for one in self.sweeps],
            "candidates": _rows(self.candidates),
            "bottlenecks": _rows(self.bottlenecks),
            "notes": list(before.notes),
            "warnings": list(before.warnings),
            "failed": [asdict(rank) for rank in before.skipped],
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the edges of the new path as `path_after`, the times of ranks as `ranks`.

        Sweeps, candidates and bottlenecks are further tables, if there are any.
        """
        sweeps = [one.to_arrow() for one in self.sweeps]
        more = {"sweep": pa.concat_tables(sweeps)} if sweeps else {}
        for name in ("candidates", "bottlenecks"):
            if (rows := _rows(getattr(self, name))) is not None:
                more[name] = pa.Table.from_pylist(rows, _TRIED)
        return {"path_after": self.after.breakdown, "ranks": self.by_rank(), **more}

    def figures(self) -> dict[str, str]:
        """Return the step time before and after, and the edits."""
        return {
            "before": format_ns(self.before_ns),
            "after": format_ns(self.after_ns),
            "edits": ", ".join(map(str, self.edits)) or "none",
            **{one.name: " / ".join(map(format_ns, one.span_ns)) for one in self.sweeps},
        }


def _rows(tried: Sequence[Candidate] | None) -> list[dict[str, Any]] | None:
    """Return the elements of edits that were tried in the JSON document; None if none were."""
    return None if tried is None else [one.to_dict() for one in tried]
