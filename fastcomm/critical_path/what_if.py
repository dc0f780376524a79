"""The step time that a replay of a step's constraints predicts after edits."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.critical_path.result import CriticalPath
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.edits import Edit, selected
from fastcomm.graph.graph import EDGE_KIND, Graph, LongestPath, measured_delays
from fastcomm.result import Result
from fastcomm.trace.run import SkippedRank
from fastcomm.units import format_ns
from fastcomm_kernels import binding
from fastcomm_kernels.arrays import Flags, Ints
from fastcomm_kernels.graph import NONE, Numbers

_NEVER = -(1 << 61)  # the weight of a constraint that is no more
_REMOVED = {"launches": "launch", "gaps": "kernel_kernel", "host-gaps": "dependency"}


_MOST_NS = 1e18  # of all events together: above it integers overflow


def _whole_ns(durations: NDArray[np.floating[Any]], edit: Edit) -> Ints:
    """Return durations as whole ns; ConfigError where they are too long to be added."""
    if durations.sum() > _MOST_NS:
        raise ConfigError(
            f"{edit}: the events become longer than {format_ns(_MOST_NS)}; factors of several "
            "edits multiply"
        )
    whole: Ints = np.rint(durations).astype(np.int64)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSweep:
    """How long a step takes, by the value of one edit."""

    edit: Edit  # its own value means nothing
    values: tuple[float, ...]
    span_ns: tuple[int, ...]

    @property
    def name(self) -> str:
        """What is edited."""
        return f"{self.edit.action} {self.edit.what}"

    def to_arrow(self) -> pa.Table:
        """One row a value."""
        columns = {"value": pa.array(self.values), "span_ns": pa.array(self.span_ns)}
        return pa.table({"edit": [self.name] * len(self.values), **columns})


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
        """How many times as fast; None where nothing is left."""
        return self.before_ns / self.after_ns if self.after_ns else None

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        before, after = self.before, self.after
        return {
            "rank": None if before.is_joined else before.about.rank,
            "edits": [str(edit) for edit in self.edits],
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "speedup": self.speedup,
            "replay_error_ns": self.replay_error_ns,
            "summary_ns": {"before": before.summary_ns(), "after": after.summary_ns()},
            "path": {
                "before": {"event_ids": _event_ids(before)},
                "after": {"event_ids": _event_ids(after)},
            },
            "sweeps": [
                {"edit": each.name, "values": list(each.values), "span_ns": list(each.span_ns)}
                for each in self.sweeps
            ],
            "notes": list(before.notes),
            "failed": [asdict(each) for each in self.failed],
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the new path edge by edge, and the sweeps if there are any."""
        sweeps = [each.to_arrow() for each in self.sweeps]
        more = {"sweep": pa.concat_tables(sweeps)} if sweeps else {}
        return {"path_after": self.after.breakdown, **more}

    def figures(self) -> dict[str, str]:
        """Return the step before and after, and the edits."""
        return {
            "before": format_ns(self.before_ns),
            "after": format_ns(self.after_ns),
            "edits": ", ".join(map(str, self.edits)) or "none",
        }


def _event_ids(path: CriticalPath) -> list[int] | None:
    """Return the ids of the events on a path; None where they are of several ranks."""
    return None if path.is_joined else path.event_ids


class Replay:
    """A graph of the corrected rules, ready to be edited and run again."""

    def __init__(self, found: CriticalPath) -> None:
        if not found.about.rules.is_exact:
            raise FastcommError(
                "a replay needs the constraints of the corrected rules; found those of "
                f"{found.about.rules.name}"
            )
        graph = found.graph
        self.found = found
        self.first = graph.into[0]
        self.weight = measured_delays(graph, found.on_device)
        self.rows, self.owner = np.unique(graph.owner, return_inverse=True)
        self.events: pa.Table = found.events.describe(self.rows)

    def edited(self, edits: Sequence[Edit]) -> Ints:
        """The weights of all edges after the edits, one after the other."""
        weight = self.weight.copy()
        for edit in edits:
            if edit.action == "remove":
                weight[self.found.graph.kind == EDGE_KIND[_REMOVED[edit.what]]] = 0
            elif edit.action == "fuse":
                self._fuse(weight, edit.value)
            else:
                self._stretch(weight, edit)
        return weight

    def _own(self) -> Flags:
        """The edges that are the own time of an event."""
        graph = self.found.graph
        own: Flags = (graph.kind == EDGE_KIND["operator"]) & (graph.owner != NONE)
        return own

    def _stretch(self, weight: Ints, edit: Edit) -> None:
        chosen = selected(self.events, edit.what)
        if not chosen.any():
            raise ConfigError(f"{edit}: no event of the window is meant by {edit.what!r}")
        edges = np.flatnonzero(self._own() & chosen[self.owner])
        if edit.action == "scale":
            weight[edges] = _whole_ns(weight[edges] * edit.value, edit)
            return
        # An event's own time may be in several pieces: they shrink or grow alike.
        now = np.zeros(len(self.rows), np.float64)
        np.add.at(now, self.owner[edges], weight[edges])
        share = weight[edges] / np.maximum(now[self.owner[edges]], 1)
        weight[edges] = _whole_ns(share * edit.value, edit)

    def _fuse(self, weight: Ints, below_ns: float) -> None:
        """Short kernels become one with the short kernel before them on their stream."""
        graph = self.found.graph
        length = self.events["stop"].to_numpy() - self.events["start"].to_numpy()
        short = selected(self.events, "compute") & (length < below_ns)
        short_rows = self.rows[short]
        follows = np.flatnonzero(graph.kind == EDGE_KIND["kernel_kernel"])
        behind = graph.event[graph.target[follows]]
        joined = np.isin(graph.owner[follows], short_rows) & np.isin(behind, short_rows)
        weight[follows[joined]] = 0
        launches = np.flatnonzero(graph.kind == EDGE_KIND["launch"])
        gone = launches[np.isin(graph.owner[launches], behind[joined])]
        weight[gone] = _NEVER
        calls = np.isin(graph.owner, graph.event[graph.source[gone]])
        weight[calls & self._own()] = 0

    def times(self, weight: Ints) -> tuple[Ints, Numbers]:
        """When each node is reached, from 0 on, and the edge that binds it."""
        return binding.replay(self.first, self.found.graph.source, weight, 0)

    def span(self, edits: Sequence[Edit]) -> int:
        """How long the step takes after the edits."""
        return int(self.times(self.edited(edits))[0].max(initial=0))

    def run(self, edits: Sequence[Edit]) -> WhatIf:
        """The step before and after the edits, with both paths."""
        graph = self.found.graph
        begin = int(graph.time[0]) if len(graph.time) else 0
        measured = graph.time - begin
        plain, _ = self.times(self.weight)
        weight = self.edited(edits)
        time, through = self.times(weight)
        return WhatIf(
            edits=tuple(edits),
            before_ns=int(measured.max(initial=0)),
            after_ns=int(time.max(initial=0)),
            replay_error_ns=int(np.abs(plain - measured).max(initial=0)),
            before=self.found,
            after=self._after(replace(graph, time=time + begin, weight=weight), through),
        )

    def _after(self, graph: Graph, through: Numbers) -> CriticalPath:
        path = (
            LongestPath.to(int(np.argmax(graph.time)), through, graph.source)
            if len(graph.time)
            else LongestPath.empty()
        )
        found = self.found
        return CriticalPath(
            graph,
            found.events,
            found.about,
            found.on_device,
            path,
            across=found.across.unmeasured(),
        )


def sweep(
    replay: Replay, edit: Edit, values: Sequence[float], edits: Sequence[Edit] = ()
) -> EditSweep:
    """The step for each value of `edit`, after `edits`."""
    spans = [replay.span([*edits, replace(edit, value=value)]) for value in values]
    return EditSweep(edit=edit, values=tuple(values), span_ns=tuple(spans))


def what_if(found: CriticalPath, edits: Sequence[Edit]) -> WhatIf:
    """A step before and after edits; the graph itself is not changed."""
    return Replay(found).run(edits)
