"""Predict the step time after operators are moved off their threads and streams.

A moved operator begins when its inputs are written, and the operators that read its outputs
wait for it. All other events keep their order, and close the gap.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastcomm.critical_path.path import FoundPath
from fastcomm.graph import Graph, measured_delays
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NONE, Ints, Numbers

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
