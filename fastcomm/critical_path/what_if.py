"""Predict the step time after changes, by a replay of the step's constraints.

Edits change the weights of the graph's edges, in ns. Where ranks are joined, the end of a
collective has an edge from the last arrival: its weight is the transfer. To remove a wait is to
let that edge begin at the rank's own start.

A moved operator begins when its inputs are written, and the operators that read its outputs
wait for it. All other events keep their order, and close the gap.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.checks import check_type
from fastcomm.critical_path import peers
from fastcomm.critical_path.path import FoundPath
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.edits import Edit, TextColumns, conditions, select
from fastcomm.graph.graph import EDGE_KIND, Graph, LongestPath, measured_delays
from fastcomm.trace.columns import filled
from fastcomm.trace.host_names import DISTRIBUTED_OPERATOR
from fastcomm.trace.run_traces import ranges
from fastcomm.trace.schema import WHOLE_GRAPH
from fastcomm.units import format_ns
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NONE, Flags, Floats, Ints, Numbers

_NEVER = -(1 << 61)  # weight of a removed constraint
_DELAYS = {"launches": "launch", "gaps": "kernel_kernel", "hostgaps": "dependency"}
_MOST_NS = 1e18  # of all events together: above it integers overflow
_S = 1e9
_SPREAD = 4  # ratio of sizes from which on a latency can be told from a bandwidth
_OFF = -(1 << 50)  # weight of a constraint that is not active


def _whole_ns(durations: NDArray[Any], edit: Edit) -> Ints:
    """Round durations to integer ns; raise ConfigError if their sum is too large."""
    if durations.sum() > _MOST_NS:
        raise ConfigError(
            f"{edit}: the events become longer than {format_ns(_MOST_NS)}; factors of several "
            "edits multiply"
        )
    rounded: Ints = np.rint(durations).astype(np.int64)
    return rounded


@dataclass(frozen=True, slots=True)
class Constraints:
    """Source node and weight in ns of each edge of a graph, which edits change."""

    source: Numbers
    weight: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedStep:
    """A step before and after edits, replayed on its graph."""

    before_ns: int
    after_ns: int
    replay_error_ns: int  # of the replay without edits, at the worst node
    graph: Graph  # edited
    path: LongestPath | None  # of the edited graph; None if edits change nothing


class StepEvents(TextColumns):
    """The events of a step, as edits select them."""

    def __init__(
        self,
        events: pa.Table,
        ranks: pa.Array,
        stages: Mapping[int, int],
        *,
        is_host_run: bool = False,
    ) -> None:
        """Take a table of the columns `rules.EVENT`, and the rank of each of its rows.

        `stages` are pipeline stages by rank, as far as they are known. In a run of the host,
        compute is what operators take that enqueue no collective.
        """
        on_device = events["is_device"].fill_null(False)
        is_comm = pc.is_valid(events["op"])
        is_kernel = pc.fill_null(pc.equal(events["kind"], "kernel"), False)
        work = pc.and_not(on_device, is_comm)
        is_graph = pc.equal(events["name"], WHOLE_GRAPH).fill_null(False)
        compute = pc.and_not(pc.and_(work, is_kernel), is_graph)
        if is_host_run:
            is_operator = pc.fill_null(pc.equal(events["kind"], "cpu_op"), False)
            enqueues = pc.match_substring_regex(events["name"], DISTRIBUTED_OPERATOR)
            compute = pc.and_not(is_operator, enqueues)
        parallelism = pc.if_else(is_comm, pc.fill_null(events["tag"], "OTHER"), None)

        def where(mask: pa.ChunkedArray, column: object) -> pa.ChunkedArray:
            return pc.if_else(mask, column, pa.scalar(None, pa.string()))

        super().__init__(
            {
                "comm": parallelism,
                "link": parallelism,
                "wait": parallelism,
                "op": events["op"],
                "compute": where(compute, "compute"),
                "copy": where(pc.and_not(work, is_kernel), "copy"),
                "host": where(pc.invert(on_device), "host"),
                "kernel": where(on_device, events["name"]),
                "rank": ranks.cast(pa.string()),
                "stage": pa.array([stages.get(rank) for rank in ranks.to_pylist()], pa.int64()),
                "stream": events["stream"].cast(pa.string()),
                "thread": events["thread"],
                "name": events["name"],
            }
        )
        self.pairs: dict[str, Flags] = {}

    def between(self, pair: str, is_between: Flags) -> None:
        """Add the rows of communication between a pair of ranks, as in "3-7"."""
        self.targets["link"] = (*self.targets.get("link", ()), pair)
        self.pairs[pair] = is_between

    def rows(self, key: str, values: Collection[str] | None) -> Flags:
        """Return the events whose `key` has one of the values; None is every value."""
        if key == "link" and values:
            mask: Flags = np.zeros(len(self.codes("name")), np.bool_)
            for pair in set(values) & set(self.pairs):
                mask |= self.pairs[pair]
            parallelisms = set(values) - set(self.pairs)
            return mask | super().rows("comm", parallelisms) if parallelisms else mask
        return super().rows(key, values)


class Replay(peers.OwnedEdges):
    """Replays a path's graph, which must be one of the corrected rules, after edits."""

    def __init__(self, critical: FoundPath) -> None:
        """Prepare replays; raise `FastcommError` if the graph has HTA's rules."""
        if not critical.about.rules.is_exact:
            raise FastcommError(
                "a replay needs a graph of the corrected rules, not of "
                f"{critical.about.rules.name}"
            )
        super().__init__(critical)
        graph = critical.graph
        self.first = graph.incoming[0]
        self.plain = Constraints(graph.source, measured_delays(graph, critical.on_device))

    @cached_property
    def selectable(self) -> StepEvents:
        """The events of `events`, as edits select them."""
        rank = np.zeros(len(self.rows), np.int64)
        rank[self.owner] = self.rank
        ranks = pa.array(rank, mask=self.rows == NONE)
        is_host_run = self.critical.about.is_host_run
        return StepEvents(self.events, ranks, self.stage, is_host_run=is_host_run)

    def edited(self, edits: Sequence[Edit]) -> Constraints:
        """Return the constraints after edits in their order.

        Raises ConfigError if an edit selects no event, or makes events too long.
        """
        constraints = Constraints(self.plain.source.copy(), self.plain.weight.copy())
        for edit in edits:
            getattr(self, f"_{edit.action}")(constraints, edit)
        return constraints

    def _edges(self, edit: Edit, *, transfers: bool = False) -> Ints:
        """Return the edges that are time of selected events; of `transfers` only these.

        Raises ConfigError for transfers of a single rank, whose waits are unknown.
        """
        self._add_links(edit)
        is_chosen = self.own & select(self.selectable, edit.target)[self.owner]
        if transfers:
            self._check_joined(edit)
            is_chosen &= self.arrival != NONE
        edges = np.flatnonzero(is_chosen)
        if not len(edges):
            work = "communication that was matched across ranks" if transfers else "work"
            raise ConfigError(f"{edit}: selects no {work}")
        return edges

    def _check_joined(self, edit: Edit) -> None:
        """Raise ConfigError if the step is that of one rank."""
        if not self.critical.is_joined:
            raise ConfigError(
                f"{edit}: needs the traces of several ranks that can be joined; this step is "
                f"that of rank {self.critical.about.rank} alone"
            )

    def _add_links(self, edit: Edit) -> None:
        """Make the link between two ranks selectable if the target names one, as in 3-7."""
        for key, value in conditions(edit.target):
            pair = re.fullmatch(r"(\d{1,9})-(\d{1,9})", value or "")
            if key != "link" or pair is None or value in self.selectable.pairs:
                continue
            self._check_joined(edit)
            rows = np.zeros(len(self.rows), np.bool_)
            rows[self.owner[self.between({int(pair[1]), int(pair[2])})]] = True
            if not rows.any() or pair[1] == pair[2]:
                raise ConfigError(
                    f"{edit}: no collective or message has both of these ranks; the step has "
                    f"ranks {ranges(self.critical.ranks)}"
                )
            self.selectable.between(pair[0], rows)

    def _scale(self, now: Constraints, edit: Edit) -> None:
        edges = self._edges(edit)
        now.weight[edges] = _whole_ns(now.weight[edges] * edit.value, edit)

    def _set(self, now: Constraints, edit: Edit) -> None:
        # The duration of an event may have several pieces, which are scaled alike.
        edges = self._edges(edit)
        whole = self._per_event(now.weight, edges)
        share = now.weight[edges] / np.maximum(whole, 1)
        now.weight[edges] = _whole_ns(share * edit.value, edit)

    def _delay(self, now: Constraints, edit: Edit) -> None:
        edges = self._edges(edit)
        whole = self._per_event(now.weight, edges)
        # An event without own time has one edge that takes the delay.
        share = np.where(whole > 0, now.weight[edges] / np.maximum(whole, 1), 1.0)
        now.weight[edges] = _whole_ns(share * np.maximum(whole + edit.value, 0), edit)

    def _per_event(self, weight: Ints, edges: Ints) -> Floats:
        """Return for each of these edges the weight of all of them that its event owns."""
        sums = np.zeros(len(self.rows), np.float64)
        np.add.at(sums, self.owner[edges], weight[edges])
        return sums[self.owner[edges]]

    def _bandwidth(self, now: Constraints, edit: Edit) -> None:
        """Let the transfers of each selected parallelism reach another bus bandwidth.

        A transfer takes a latency, which stays, and a time in proportion to 1 / bandwidth.
        """
        edges = self._edges(edit, transfers=True)
        sizes = filled(self.events["bus_bytes"], 0)[self.owner[edges]].astype(np.float64)
        if not (sizes > 0).any():
            raise ConfigError(f"{edit}: the traces record no sizes of these collectives")
        tags = self.selectable.codes("comm")[self.owner[edges]]
        before = now.weight[edges].astype(np.float64)
        after = before.copy()
        shortest = float(now.weight[self.arrival != NONE].min())
        for tag in np.unique(tags):
            own = np.flatnonzero((tags == tag) & (sizes > 0))
            if not len(own):
                continue
            latency = _latency(sizes[own], before[own], shortest)
            times = np.maximum(before[own] - latency, 0)
            reached = sizes[own].sum() * _S / max(times.sum(), 1.0)
            after[own] = np.minimum(before[own], latency) + times * reached / edit.value
        now.weight[edges] = _whole_ns(after, edit)

    def _ideal(self, _: Constraints, edit: Edit) -> None:
        raise ConfigError(f"{edit}: ideal times are those of fastcomm stragglers")

    def _heal(self, now: Constraints, edit: Edit) -> None:
        keys = {key for key, _ in conditions(edit.target)}
        if keys not in ({"rank"}, {"stage"}, {"link"}):
            raise ConfigError(f"{edit}: expected rank:5, stage:2 or link:3-7")
        self._check_joined(edit)
        if keys == {"link"}:
            edges = self._edges(edit, transfers=True)
            now.weight[edges] = peers.transfers(self, now.weight, edges, edit)
            return
        self._check_alike(edit)
        if keys == {"stage"} and not self.stage:
            raise ConfigError(
                f"{edit}: the stages of ranks are unknown: they need messages of pipeline "
                "parallelism, and the traces of all ranks"
            )
        is_healed = self.own & select(self.selectable, edit.target)[self.owner]
        healed = np.unique(self.rank[is_healed]).tolist()
        as_peers = peers.of_stages if keys == {"stage"} else peers.of_ranks
        edges, weights = as_peers(self, now.weight, healed, edit)
        now.weight[edges] = weights

    def _check_alike(self, edit: Edit) -> None:
        """Raise ConfigError if the work of a rank has no counterparts on others."""
        if self.critical.about.is_host_run:
            raise ConfigError(
                f"{edit}: ranks are not healed in runs of the host, whose operators differ in "
                "number; shorten what the rank does more: scale rank:5+name:aten::mm=0.5"
            )
        if self.critical.about.is_replay:
            raise ConfigError(
                f"{edit}: ranks are not healed in execution traces, which do not tell whose "
                "operations correspond; shorten what the rank does more: scale rank:5=0.8"
            )

    def _overlap(self, now: Constraints, edit: Edit) -> None:
        """Hide communication under compute of its rank, as far as there is as much."""
        target = edit.target if ":" in edit.target else f"comm:{edit.target}"
        edges = self._edges(replace(edit, target=target))
        is_compute = self.own & select(self.selectable, "compute")[self.owner]
        count = int(self.rank.max(initial=0)) + 1
        compute, comm = (
            np.bincount(self.rank[rows], now.weight[rows], minlength=count)
            for rows in (np.flatnonzero(is_compute), edges)
        )
        exposed = np.maximum(1 - compute / np.maximum(comm, 1), 0)
        now.weight[edges] = _whole_ns(now.weight[edges] * exposed[self.rank[edges]], edit)

    def _remove(self, now: Constraints, edit: Edit) -> None:
        """Take what an edit names out of `now`: work, waits for other ranks, a kind of delay.

        Work loses its time, its launches and the gaps before it. Raises `ConfigError` if no
        work or no waits are selected, and for waits in a step of one rank.
        """
        graph = self.critical.graph
        [*pairs] = conditions(edit.target)
        if len(pairs) == 1 and pairs[0][1] is None and pairs[0][0] in _DELAYS:
            now.weight[graph.kind == EDGE_KIND[_DELAYS[pairs[0][0]]]] = 0
            return
        is_wait = any(key == "wait" for key, _ in pairs)
        edges = self._edges(edit, transfers=is_wait)
        own_start, _ = graph.places
        waits = edges[self.arrival[edges] != NONE]
        now.source[waits] = own_start[graph.owner[waits]]
        if not is_wait:
            now.weight[edges] = 0
            self._skip(now, np.unique(graph.owner[edges]))

    def _skip(self, now: Constraints, rows: Numbers) -> None:
        """Remove the gaps before events that no longer run, and the calls that launch them."""
        graph = self.critical.graph
        behind = graph.event[graph.target]
        is_gap = (graph.kind == EDGE_KIND["kernel_kernel"]) & np.isin(behind, rows)
        now.weight[is_gap] = 0
        launches = (graph.kind == EDGE_KIND["launch"]) & np.isin(behind, rows)
        calls = np.isin(graph.owner, graph.event[graph.source[launches]])
        now.weight[calls & self.own] = 0

    def _fuse(self, now: Constraints, edit: Edit) -> None:
        """Merge short kernels with the short kernel before them on their stream."""
        graph, weight = self.critical.graph, now.weight
        length = self.events["stop"].to_numpy() - self.events["start"].to_numpy()
        short = self.selectable.rows("compute", None) & (length < edit.value)
        short_rows = self.rows[short]
        follows = np.flatnonzero(graph.kind == EDGE_KIND["kernel_kernel"])
        behind = graph.event[graph.target[follows]]
        joined = np.isin(graph.owner[follows], short_rows) & np.isin(behind, short_rows)
        weight[follows[joined]] = 0
        launches = np.flatnonzero(graph.kind == EDGE_KIND["launch"])
        gone = launches[np.isin(graph.owner[launches], behind[joined])]
        weight[gone] = _NEVER
        calls = np.isin(graph.owner, graph.event[graph.source[gone]])
        weight[calls & self.own] = 0

    def times(self, constraints: Constraints) -> tuple[Ints, Numbers]:
        """Return the time of each node in ns, from 0, and the edge that determines it.

        A node without edges has the edge NONE.
        """
        return graphs.replay(self.first, constraints.source, constraints.weight, 0)

    def span(self, edits: Sequence[Edit]) -> int:
        """Return the step time after edits, in ns."""
        return int(self.times(self.edited(edits))[0].max(initial=0))

    def step_after(self, edits: Sequence[Edit]) -> EditedStep:
        """Return the step time before and after edits, and the path of the edited graph."""
        for edit in edits:
            check_type(edit, Edit, "edit", "an Edit, of fastcomm.graph.edits.parse_edits")
        graph = self.critical.graph
        begin = int(graph.time[0]) if len(graph.time) else 0
        measured = graph.time - begin
        plain, _ = self.times(self.plain)
        now = self.edited(edits)
        time, through = self.times(now)
        # Of several longest paths a search takes any: without a change, keep the measured one.
        is_changed = not np.array_equal(now.weight, self.plain.weight)
        is_changed |= not np.array_equal(now.source, self.plain.source)
        edited = replace(graph, time=time + begin, source=now.source, weight=now.weight)
        longest = LongestPath.to_latest(time, through, now.source) if is_changed else None
        return EditedStep(
            before_ns=int(measured.max(initial=0)),
            after_ns=int(time.max(initial=0)),
            replay_error_ns=int(np.abs(plain - measured).max(initial=0)),
            graph=edited,
            path=longest,
        )


def _latency(sizes: Floats, times: Floats, shortest: float) -> float:
    """Return the time in ns of a transfer without bytes.

    It is the intercept of a line through the median time by size, between 0 and the shortest of
    the times. Where sizes are too alike for a line, it is `shortest`, of all transfers.
    """
    distinct, number = np.unique(sizes, return_inverse=True)
    if distinct[-1] < _SPREAD * distinct[0]:
        return shortest
    medians = [float(np.median(times[number == k])) for k in range(len(distinct))]
    _, intercept = np.polyfit(distinct, medians, 1)
    return float(np.clip(intercept, 0, times.min()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperator:
    """An operator of a step, given by nodes of the graph, and the producers of its inputs."""

    start: int
    stop: int
    works: tuple[tuple[int, int], ...]  # start and end of each piece of work that it launched
    producers: tuple[int, ...]  # positions in the list of operators

    @property
    def work_start(self) -> int:
        """Start of its first work, or its own start."""
        return min((start for start, _ in self.works), default=self.start)

    @property
    def work_stop(self) -> int:
        """End of its last work, or its own end."""
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
