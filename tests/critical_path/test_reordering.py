"""Test the replay with reordered operators against the definition."""

from functools import cache

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.rules import CORRECTED, EVENT, PathSource, SavedEvents
from fastcomm.critical_path.what_if import Reordering, StepOperator, pieces_of
from fastcomm.critical_path.window import TimeRange
from fastcomm.graph.graph import EDGE_KIND, Graph, measured_delays

LENGTHS = st.integers(1, 50)


def by_cause(edges):
    """Sorts nodes by time; causes come before effects where that is the same."""
    depth = {}
    for source, target, _ in edges:
        depth[target] = max(depth.get(target, 0), depth.get(source, 0) + 1)
    return lambda node: (node[0], depth.get(node[1], 0))


class Step:
    """Operators on one thread, each with a kernel on one stream or none."""

    def __init__(self, operators):
        """Each is (gap before, length, (launch delay, kernel's length) or None, producers)."""
        self.operators = operators
        nodes, edges = [], []  # (time, event, is_end); (source, target, kind)
        now = stream = 0
        before = last_work = None
        self.rows = []
        for k, (gap, length, work, _) in enumerate(operators):
            now += gap if k else 0
            start, stop = ("h", k, 0), ("h", k, 1)
            nodes += [(now, start), (now + length, stop)]
            if before:
                edges.append((before, start, "dependency"))
            edges.append((start, stop, "operator"))
            if work:
                begin = max(now + work[0], stream)
                stream = begin + work[1]
                own = ("d", k, 0), ("d", k, 1)
                nodes += [(begin, own[0]), (stream, own[1])]
                edges.append((start, own[0], "launch"))
                if last_work:
                    edges.append((last_work, own[0], "kernel_kernel"))
                edges.append((*own, "operator"))
                last_work = own[1]
            now, before = now + length, stop
        nodes.sort(key=by_cause(edges))
        self.place = {name: number for number, (_, name) in enumerate(nodes)}
        rows = sorted({name[:2] for _, name in nodes})
        self.row = {name: number for number, name in enumerate(rows)}
        self.edges = sorted(edges, key=lambda edge: self.place[edge[1]])
        self.graph = self.made(nodes)

    def made(self, nodes):
        time = np.array([moment for moment, _ in nodes], np.int64)
        source, target = (
            np.array([self.place[edge[side]] for edge in self.edges], np.int32)
            for side in (0, 1)
        )
        kind = np.array([EDGE_KIND[edge[2]] for edge in self.edges], np.int8)
        return Graph(
            event=np.array([self.row[name[:2]] for _, name in nodes], np.int32),
            time=time,
            is_end=np.array([name[2] == 1 for _, name in nodes]),
            source=source,
            target=target,
            kind=kind,
            weight=time[target] - time[source],
            owner=np.full(len(source), -1, np.int32),
        )

    def on_device(self):
        return np.array([name[0] == "d" for name in self.place])

    def found(self):
        about = PathSource(rules=CORRECTED, window=TimeRange(start=0, stop=1), path="", rank=0)
        events = SavedEvents(
            pa.table({n: pa.nulls(0, EVENT.field(n).type) for n in EVENT.names})
        )
        return CriticalPath(
            graph=self.graph,
            events=events,
            about=about,
            on_device=self.on_device(),
            path=None,
        )

    def pieces(self):
        return pieces_of(
            self.graph,
            [
                (self.row["h", k], [self.row["d", k]] if work else [], producers)
                for k, (_, _, work, producers) in enumerate(self.operators)
            ],
        )

    def weights(self):
        """The weight of each pair of nodes, and the nodes before each."""
        pairs, into = [edge[:2] for edge in self.edges], {}
        for source, target in pairs:
            into.setdefault(target, []).append(source)
        weight = measured_delays(self.graph, self.on_device()).tolist()
        return dict(zip(pairs, weight, strict=True)), into

    def over(self, k):
        """The node behind which all of an operator is done: who is before did not wait."""
        return max(self.place["h", k, 1], self.place.get(("d", k, 1), 0))

    def span(self, moved):
        """How long the step takes if these operators move, by the definition."""
        weight, into = self.weights()
        operators = self.operators

        def waits_for(k):
            return [p for p in operators[k][3] if p in moved and k not in moved]

        @cache
        def reached(node):
            _, k, is_end = node
            still = bool(is_end) and k in moved
            before = into.get(node, ())
            times = [reached(each) + (0 if still else weight[each, node]) for each in before]
            return max(times + data(node), default=0)

        def data(node):
            side, k, is_end = node
            waits = [] if is_end else waits_for(k)
            own = "d" if operators[k][2] else "h"
            hosts = [host(p) for p in waits if side == "h"]
            over = [p for p in waits if side == own and self.over(p) < self.place[node]]
            return hosts + [device(p) for p in over]

        @cache
        def host(k):
            """When the host part is done."""
            _, length, work, producers = operators[k]
            if k not in moved:
                return reached(("h", k, 1))
            over = [p for p in producers if not work and self.over(p) < self.place["h", k, 1]]
            ready = [host(p) for p in producers] + [device(p) for p in over]
            return max(ready, default=0) + length

        @cache
        def device(k):
            """When all is done."""
            _, _, work, producers = operators[k]
            if not work:
                return host(k)
            if k not in moved:
                return reached(("d", k, 1))
            over = [p for p in producers if self.over(p) < self.over(k)]
            return max([host(k), *(device(p) for p in over)]) + work[1]

        ends = [reached(node) for node in self.place]
        return max(ends + [max(host(k), device(k)) for k in range(len(operators))])


@st.composite
def steps(draw):
    operators = []
    for k in range(draw(st.integers(1, 8))):
        work = draw(st.none() | st.tuples(LENGTHS, LENGTHS))
        producers = draw(st.sets(st.integers(0, k - 1), max_size=3)) if k else set()
        operators.append((draw(LENGTHS), draw(LENGTHS), work, tuple(sorted(producers))))
    return Step(operators)


@given(steps(), st.data())
def test_reordered_operators_wait_only_for_their_data(step, data):
    lane = np.array([name == "d" for name, _ in step.row], np.int32)
    reordering = Reordering(step.found(), lane, step.pieces())
    assert reordering.before_ns == step.span(frozenset()) == step.graph.time.max()
    everything = range(len(step.operators))
    moved = data.draw(st.sets(st.sampled_from(everything)))
    assert reordering.shorter_by(moved) == reordering.before_ns - step.span(frozenset(moved))
    assert reordering.shorter_by([]) == 0


def test_work_outside_the_window_is_ignored():
    step = Step([(0, 5, None, ())])
    (piece,) = pieces_of(step.graph, [(0, [7], ())])
    assert piece == StepOperator(start=0, stop=1, works=(), producers=())
    assert (piece.work_start, piece.work_stop) == (0, 1)
