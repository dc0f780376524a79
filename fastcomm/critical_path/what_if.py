"""The step time that a replay of a step's constraints predicts after a change.

Edits change the durations of events. Reordered operators run beside their threads and streams:
such an operator begins when what it reads is written, whatever its thread does then, and who
reads what it writes waits for it; what comes behind takes its place. All else keeps its order.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.critical_path import CriticalPath
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph import EDGE_KIND, Graph, LongestPath, measured_delays
from fastcomm.graph.edits import Edit, selected
from fastcomm.result import Result
from fastcomm.trace.run import SkippedRank
from fastcomm.units import format_ns
from fastcomm_kernels import graph as graphs
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
            raise ConfigError(f"{edit}: {edit.what!r} matches no event ({self._tags()})")
        edges = np.flatnonzero(self._own() & chosen[self.owner])
        if edit.action == "scale":
            weight[edges] = _whole_ns(weight[edges] * edit.value, edit)
            return
        # An event's own time may be in several pieces: they shrink or grow alike.
        now = np.zeros(len(self.rows), np.float64)
        np.add.at(now, self.owner[edges], weight[edges])
        share = weight[edges] / np.maximum(now[self.owner[edges]], 1)
        weight[edges] = _whole_ns(share * edit.value, edit)

    def _tags(self) -> str:
        """Return the parallelisms of the window, for a message."""
        tags = sorted(set(self.events["tag"].drop_null().to_pylist()))
        return f"parallelisms present: {', '.join(tags)}" if tags else "no communication"

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
        return graphs.replay(self.first, self.found.graph.source, weight, 0)

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


_OFF = -(1 << 50)  # the weight of a constraint that does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperator:
    """An operator of the step, by nodes of its graph, and who writes what it reads."""

    start: int
    stop: int
    works: tuple[tuple[int, int], ...]  # start and end of each work that it launched
    producers: tuple[int, ...]  # places among the pieces

    @property
    def work_start(self) -> int:
        """The start of its first work, or its own."""
        return min((start for start, _ in self.works), default=self.start)

    @property
    def work_stop(self) -> int:
        """The end of its last work, or its own."""
        return max((stop for _, stop in self.works), default=self.stop)


class _Extra(NamedTuple):
    """A constraint that weighs `on` while one piece moves and another stays, else `off`."""

    source: int
    target: int
    off: int
    on: int
    moves: int
    stays: int = NONE


class Reordering:
    """The graph of a step with its pieces, any of which may move."""

    def __init__(
        self, found: CriticalPath, lane: Numbers, pieces: Sequence[StepOperator]
    ) -> None:
        graph, self.pieces = found.graph, pieces
        self.graph, self.lane = graph, lane[graph.event]
        nodes, count = len(graph.event), len(pieces)
        stops = [p.stop for p in pieces] + [max(p.stop, p.work_stop) for p in pieces]
        keys = [2 * np.arange(nodes), 2 * np.array(stops, np.int64) + 1]
        order = np.argsort(np.concatenate(keys), kind="stable")
        new = np.empty(len(order), np.int32)
        new[order] = np.arange(len(order), dtype=np.int32)
        # The pieces' nodes stand behind those of the graph before they are put in order.
        self.done = (nodes + np.arange(count), nodes + count + np.arange(count))
        extra = [each for each in self._extra() if new[each.source] < new[each.target]]
        columns = np.array(extra, np.int64).reshape(-1, len(_Extra._fields)).T
        self.off, self.on, self.moves, self.stays = columns[2:]
        source = new[np.concatenate([graph.source, columns[0]])]
        target = new[np.concatenate([graph.target, columns[1]])]
        self.first, by_target = graphs.index(target, len(new))
        self.source = source[by_target]
        place = np.empty(len(by_target), np.int64)
        place[by_target] = np.arange(len(by_target))
        self.old, self.extra = np.split(place, [len(graph.source)])
        self.weight = np.empty(len(source), np.int64)
        self.weight[self.old] = measured_delays(found.graph, found.on_device)
        self.before_ns = self._span(self.weight, np.zeros(count, np.bool_))

    def shorter_by(self, moved: Iterable[int]) -> int:
        """By how many ns the step is shorter if these pieces move."""
        weight, moves = self.weight.copy(), np.zeros(len(self.pieces), np.bool_)
        for place in moved:
            moves[place] = True
            weight[self.old[self._own(self.pieces[place])]] = 0
        return self.before_ns - self._span(weight, moves)

    def _span(self, weight: Ints, moves: np.ndarray) -> int:
        stays = (self.stays == NONE) | ~moves[self.stays]
        weight[self.extra] = np.where(moves[self.moves] & stays, self.on, self.off)
        time, _ = graphs.replay(self.first, self.source, weight, 0)
        return int(time.max(initial=0))

    def _own(self, piece: StepOperator) -> Ints:
        """The edges that are the time of a piece: on its thread, and of its work."""
        graph, first = self.graph, self.graph.into[0]
        edges = np.arange(first[piece.start + 1], first[piece.stop + 1])
        thread = self.lane[piece.start]
        on_thread = (self.lane[graph.source[edges]] == thread) & (
            self.lane[graph.target[edges]] == thread
        )
        works = np.array([first[stop] for _, stop in piece.works], np.int64)
        return np.concatenate([edges[on_thread], works])

    def _extra(self) -> Iterator[_Extra]:
        host, device = (done.tolist() for done in self.done)
        time = self.graph.time
        for k, piece in enumerate(self.pieces):
            length = int(time[piece.stop] - time[piece.start])
            work = sum(int(time[stop] - time[start]) for start, stop in piece.works)
            yield _Extra(piece.stop, host[k], 0, _OFF, k)
            yield _Extra(0, host[k], _OFF, length, k)
            yield _Extra(piece.work_stop, device[k], 0, _OFF, k)
            yield _Extra(host[k], device[k], _OFF if piece.works else 0, work, k)
            for p in piece.producers:
                yield _Extra(host[p], host[k], _OFF, length, k)
                yield _Extra(host[p], piece.start, _OFF, 0, p, k)
                # Work waits for work; a call without any, such as a copy to the host, itself.
                own = (device[k], work) if piece.works else (host[k], length)
                yield _Extra(device[p], own[0], _OFF, own[1], k)
                yield _Extra(device[p], piece.work_start, _OFF, 0, p, k)


def pieces_of(
    graph: Graph, operators: Sequence[tuple[int, Sequence[int], Sequence[int]]]
) -> list[StepOperator]:
    """The pieces of operators: each an event's row, those of its work, and its producers."""
    first, last = graph.places

    def nodes(row: int) -> tuple[int, int]:
        return (int(first[row]), int(last[row])) if row < len(first) else (NONE, NONE)

    found = []
    for row, works, producers in operators:
        start, stop = nodes(row)
        inside = (nodes(work) for work in works)
        found.append(
            StepOperator(
                start=start,
                stop=stop,
                works=tuple(each for each in inside if each[0] != NONE),
                producers=tuple(producers),
            )
        )
    return found
