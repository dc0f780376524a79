"""Predict the step time after changes, by a replay of the step's constraints.

`Replay` applies edits of durations. `Reordering` moves operators off their threads and
streams: a moved operator begins when its inputs are written, and the operators that read its
outputs wait for it. All other events keep their order, and close the gap.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.checks import check_type
from fastcomm.critical_path.path import FoundPath
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph import EDGE_KIND, Graph, LongestPath, measured_delays
from fastcomm.graph.edits import KINDS, Edit, EditSweep, conditions
from fastcomm.trace.events import matches
from fastcomm.units import format_ns
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NONE, Flags, Ints
from fastcomm_kernels.graph import Numbers

_NEVER = -(1 << 61)  # weight of a removed constraint
_REMOVED = {"launches": "launch", "gaps": "kernel_kernel", "host-gaps": "dependency"}


_MOST_NS = 1e18  # of all events together: above it integers overflow


def _whole_ns(durations: NDArray[np.floating[Any]], edit: Edit) -> Ints:
    """Round durations to integer ns; raise ConfigError if their sum is too large."""
    if durations.sum() > _MOST_NS:
        raise ConfigError(
            f"{edit}: the events become longer than {format_ns(_MOST_NS)}; factors of several "
            "edits multiply"
        )
    rounded: Ints = np.rint(durations).astype(np.int64)
    return rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedStep:
    """A step before and after edits, replayed on its graph."""

    before_ns: int
    after_ns: int
    replay_error_ns: int  # of the replay without edits, at the worst node
    graph: Graph  # edited
    path: LongestPath | None  # of the edited graph; None if edits change nothing


class Replay:
    """Replays a path's graph, which must be one of the corrected rules, after edits."""

    def __init__(self, critical: FoundPath) -> None:
        """Prepare replays; raise `FastcommError` if the graph has HTA's rules."""
        if not critical.about.rules.is_exact:
            raise FastcommError(
                "a replay needs a graph of the corrected rules, not of "
                f"{critical.about.rules.name}"
            )
        graph = critical.graph
        self.critical = critical
        self.first = graph.incoming[0]
        self.weight = measured_delays(graph, critical.on_device)
        self.rows, self.owner = np.unique(graph.owner, return_inverse=True)
        self.events: pa.Table = critical.events.describe(self.rows)

    def edited(self, edits: Sequence[Edit]) -> Ints:
        """Return the weights of all edges, in ns, after edits in their order.

        Raises ConfigError if an edit selects no event, or makes events too long.
        """
        weight = self.weight.copy()
        for edit in edits:
            if edit.action == "remove":
                weight[self.critical.graph.kind == EDGE_KIND[_REMOVED[edit.target]]] = 0
            elif edit.action == "fuse":
                self._fuse(weight, edit.value)
            else:
                self._stretch(weight, edit)
        return weight

    def _own(self) -> Flags:
        """Return which edges are the duration of an event."""
        graph = self.critical.graph
        own: Flags = (graph.kind == EDGE_KIND["operator"]) & (graph.owner != NONE)
        return own

    def _stretch(self, weight: Ints, edit: Edit) -> None:
        """Scale or set the durations of the selected events, in place."""
        mask = _selected(self.events, edit.target)
        if not mask.any():
            raise _no_match(self.events, edit.target)
        edges = np.flatnonzero(self._own() & mask[self.owner])
        if edit.action == "scale":
            weight[edges] = _whole_ns(weight[edges] * edit.value, edit)
            return
        # The duration of an event may have several pieces, which are scaled alike.
        now = np.zeros(len(self.rows), np.float64)
        np.add.at(now, self.owner[edges], weight[edges])
        share = weight[edges] / np.maximum(now[self.owner[edges]], 1)
        weight[edges] = _whole_ns(share * edit.value, edit)

    def _fuse(self, weight: Ints, below_ns: float) -> None:
        """Merge short kernels with the short kernel before them on their stream, in place."""
        graph = self.critical.graph
        length = self.events["stop"].to_numpy() - self.events["start"].to_numpy()
        short = _selected(self.events, "compute") & (length < below_ns)
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
        """Return the time of each node in ns, from 0, and the edge that determines it.

        `weight` is the time of each edge in ns. A node without edges has the edge NONE.
        """
        return graphs.replay(self.first, self.critical.graph.source, weight, 0)

    def span(self, edits: Sequence[Edit]) -> int:
        """Return the step time after edits, in ns."""
        return int(self.times(self.edited(edits))[0].max(initial=0))

    def run(self, edits: Sequence[Edit]) -> EditedStep:
        """Return the step time before and after edits, and the path of the edited graph."""
        for edit in edits:
            check_type(
                edit, Edit, "what_if: edit", 'edits, as in what_if(scale("compute", 0.8))'
            )
        graph = self.critical.graph
        begin = int(graph.time[0]) if len(graph.time) else 0
        measured = graph.time - begin
        plain, _ = self.times(self.weight)
        weight = self.edited(edits)
        time, through = self.times(weight)
        # Of several longest paths a search takes any: without a change, keep the measured one.
        is_changed = not np.array_equal(weight, self.weight)
        edited = replace(graph, time=time + begin, weight=weight)
        return EditedStep(
            before_ns=int(measured.max(initial=0)),
            after_ns=int(time.max(initial=0)),
            replay_error_ns=int(np.abs(plain - measured).max(initial=0)),
            graph=edited,
            path=_longest(edited, through) if is_changed else None,
        )


def _longest(graph: Graph, through: Numbers) -> LongestPath:
    """Return the path through an edited graph to its latest node.

    `through` has the edge that determines the time of each node; NONE for the first nodes.
    """
    if not len(graph.time):
        return LongestPath.empty()
    return LongestPath.to(int(np.argmax(graph.time)), through, graph.source)


def _selected(events: pa.Table, selection: str) -> Flags:
    """Return which rows of a table with the columns `rules.EVENT` match a selection."""
    mask = np.ones(events.num_rows, np.bool_)
    for key, value in conditions(selection):
        mask &= _matches(events, key, value)
    return mask


def _no_match(events: pa.Table, selection: str) -> ConfigError:
    """Return the error of a selection without events: what is there of each kind."""
    present = []
    for kind in KINDS:
        tags = pc.unique(events["tag"].filter(pa.array(_of_kind(events, kind)))).to_pylist()
        present += [kind] if tags else []
        present += sorted(f"{kind}:{tag}" for tag in tags if tag is not None)
    return ConfigError(
        f"{selection!r} matches no event of the step, which has {', '.join(present) or 'none'}"
    )


def _matches(events: pa.Table, key: str, value: str) -> Flags:
    """Return the rows that match one condition of a selection."""
    if key in KINDS:
        mask = _of_kind(events, key)
        return mask & _equal(events["tag"], value) if value else mask
    if key == "name":
        return _flags(matches(events["name"], value))
    return _equal(events[key], int(value) if key == "stream" else value)


def _of_kind(events: pa.Table, kind: str) -> Flags:
    """Return which events are of a kind: comm, compute, copy (on the device) or host."""
    on_device = _flags(events["is_device"])
    is_comm = _flags(pc.is_valid(events["op"]))
    is_kernel = _equal(events["kind"], "kernel")
    return {
        "comm": is_comm,
        "compute": on_device & is_kernel & ~is_comm,
        "copy": on_device & ~is_kernel & ~is_comm,
        "host": ~on_device,
    }[kind]


def _equal(column: pa.ChunkedArray, value: str | int) -> Flags:
    return _flags(pc.equal(column, value))


def _flags(column: pa.ChunkedArray) -> Flags:
    flags: Flags = column.fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)
    return flags


def sweep(
    replay: Replay, edit: Edit, values: Sequence[float], edits: Sequence[Edit] = ()
) -> EditSweep:
    """Replay a step for several values of an edit.

    Parameters
    ----------
    replay
        The step.
    edit
        The edit; each value replaces its own.
    values
        Factors.
    edits
        Edits that apply before it.

    Returns
    -------
    EditSweep
        The length of the step for each value, ns.

    """
    spans = [replay.span([*edits, replace(edit, value=value)]) for value in values]
    return EditSweep(edit=edit, values=tuple(values), span_ns=tuple(spans))


_OFF = -(1 << 50)  # weight of a constraint that is not active


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperator:
    """An operator of a step, given by nodes of the graph, and the producers of its inputs."""

    start: int
    stop: int
    works: tuple[tuple[int, int], ...]  # start and end of each piece of work that it launched
    producers: tuple[int, ...]  # positions in the list of operators

    @property
    def work_start(self) -> int:
        """Node at which its first work starts; its own start node without work."""
        return min((start for start, _ in self.works), default=self.start)

    @property
    def work_stop(self) -> int:
        """Node at which its last work ends; its own end node without work."""
        return max((stop for _, stop in self.works), default=self.stop)


class _Extra(NamedTuple):
    """A constraint with weight `on` if `moves` is moved and `stays` is not, else `off`."""

    source: int
    target: int
    off: int
    on: int
    moves: int
    stays: int = NONE


class Reordering:
    """The graph of a step with constraints for moved operators."""

    def __init__(
        self, critical: FoundPath, lane: Numbers, pieces: Sequence[StepOperator]
    ) -> None:
        """Add inactive constraints for all operators; `lane` is by event of the trace."""
        graph, self.pieces = critical.graph, pieces
        self.graph, self.lane = graph, lane[graph.event]
        nodes, count = len(graph.event), len(pieces)
        stops = [p.stop for p in pieces] + [max(p.stop, p.work_stop) for p in pieces]
        keys = [2 * np.arange(nodes), 2 * np.array(stops, np.int64) + 1]
        order = np.argsort(np.concatenate(keys), kind="stable")
        new = np.empty(len(order), np.int32)
        new[order] = np.arange(len(order), dtype=np.int32)
        # Two more nodes per operator: the end of its host part, and of its device part.
        self.done = (nodes + np.arange(count), nodes + count + np.arange(count))
        extra = [edge for edge in self._extra() if new[edge.source] < new[edge.target]]
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
        self.weight[self.old] = measured_delays(critical.graph, critical.on_device)
        self.before_ns = self._span(self.weight, np.zeros(count, np.bool_))

    def shorter_by(self, moved: Iterable[int]) -> int:
        """Return by how many ns the step is shorter if these operators are moved."""
        weight, moves = self.weight.copy(), np.zeros(len(self.pieces), np.bool_)
        for place in moved:
            moves[place] = True
            weight[self.old[self._own(self.pieces[place])]] = 0
        return self.before_ns - self._span(weight, moves)

    def _span(self, weight: Ints, moves: np.ndarray) -> int:
        """Return the step time in ns with the operators flagged in `moves` moved."""
        stays = (self.stays == NONE) | ~moves[self.stays]
        weight[self.extra] = np.where(moves[self.moves] & stays, self.on, self.off)
        time, _ = graphs.replay(self.first, self.source, weight, 0)
        return int(time.max(initial=0))

    def _own(self, piece: StepOperator) -> Ints:
        """Return the edges that are the time of an operator: on its thread, and of its work."""
        graph, first = self.graph, self.graph.incoming[0]
        edges = np.arange(first[piece.start + 1], first[piece.stop + 1])
        thread = self.lane[piece.start]
        on_thread = (self.lane[graph.source[edges]] == thread) & (
            self.lane[graph.target[edges]] == thread
        )
        works = np.array([first[stop] for _, stop in piece.works], np.int64)
        return np.concatenate([edges[on_thread], works])

    def _extra(self) -> Iterator[_Extra]:
        """Yield the constraints that apply to moved operators."""
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
                # Work waits for work. A call without work, such as a copy to the host, waits
                # itself.
                own = (device[k], work) if piece.works else (host[k], length)
                yield _Extra(device[p], own[0], _OFF, own[1], k)
                yield _Extra(device[p], piece.work_start, _OFF, 0, p, k)


def pieces_of(
    graph: Graph, operators: Sequence[tuple[int, Sequence[int], Sequence[int]]]
) -> list[StepOperator]:
    """Convert operators, given by the rows of their event and work, to nodes of a graph.

    Each operator is a triple: row of its event, rows of its work, positions of its producers.
    """
    first, last = graph.places

    def nodes(row: int) -> tuple[int, int]:
        return (int(first[row]), int(last[row])) if row < len(first) else (NONE, NONE)

    pieces = []
    for row, works, producers in operators:
        start, stop = nodes(row)
        inside = (nodes(work) for work in works)
        pieces.append(
            StepOperator(
                start=start,
                stop=stop,
                works=tuple(pair for pair in inside if pair[0] != NONE),
                producers=tuple(producers),
            )
        )
    return pieces
