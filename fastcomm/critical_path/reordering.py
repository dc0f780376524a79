"""How much shorter a step would be if some operators ran beside their threads and streams.

Such an operator begins when what it reads is written, whatever its thread does then, and who
reads what it writes waits for it; its place on the thread, and that of its work on the stream,
is taken by what comes behind. All else keeps its order.

To the graph of the step come two nodes an operator: when its host part and when its device work
is done. They are bound as today, or, of an operator that moves, by its producers alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastcomm.critical_path.result import CriticalPath
from fastcomm.graph.graph import Graph, measured_delays
from fastcomm_kernels import binding
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.graph import NONE, Numbers

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
        time, _ = binding.replay(self.first, self.source, weight, 0)
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
