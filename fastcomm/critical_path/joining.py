"""The graphs of several ranks as one: where all members of a collective have come is a node.

Every start of an instance leads to that node, and it leads to every end. The rows of a rank's
events come behind those of the ranks before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.critical_path.collectives import Instance
from fastcomm.critical_path.events import EVENT, Events
from fastcomm.critical_path.result import About, CriticalPath
from fastcomm.critical_path.window import Window
from fastcomm.graph.graph import EDGE_KIND, Graph
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.graph import NONE, Column, Numbers

COLLECTIVES = pa.schema(
    [
        pa.field("instance", pa.int64()),
        pa.field("rank", pa.int64()),
        pa.field("op", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("group", pa.string()),
        pa.field("start", pa.int64()),  # ns, on the first rank's clock
        pa.field("stop", pa.int64()),
        pa.field("arrived", pa.int64()),  # when the last of all had come
        pa.field("wait_ns", pa.int64()),  # for the last to come
        pa.field("transfer_ns", pa.int64()),
        pa.field("held_up_ns", pa.int64()),  # how much later than the one before the last is
        pa.field("is_last", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class RunEvents:
    """The events of several ranks; a row is the rank's row behind those of the ranks before."""

    first: Column  # row of each rank's first event, and one behind the last
    events: tuple[Events, ...]

    def describe(self, rows: Numbers) -> pa.Table:
        """The events of these rows; row -1 is all null."""
        parts, places = [], []
        for k, events in enumerate(self.events):
            chosen = np.flatnonzero((rows >= self.first[k]) & (rows < self.first[k + 1]))
            parts.append(events.describe((rows[chosen] - self.first[k]).astype(np.int32)))
            places.append(chosen)
        nothing = np.flatnonzero(rows < 0)
        empty = pa.table({field.name: pa.nulls(len(nothing), field.type) for field in EVENT})
        order = np.argsort(np.concatenate([*places, nothing]), kind="stable")
        return pa.concat_tables([*parts, empty]).combine_chunks().take(order)

    def ids(self, rows: Numbers) -> Column:
        """The ids of these rows: unique on one rank alone."""
        found = np.empty(len(rows), np.int64)
        for k, events in enumerate(self.events):
            chosen = (rows >= self.first[k]) & (rows < self.first[k + 1])
            found[chosen] = events.ids((rows[chosen] - self.first[k]).astype(np.int32))
        return found


class Joiner:
    """The graphs of all ranks on their way into one."""

    def __init__(
        self,
        found: Mapping[int, CriticalPath],
        same: Sequence[Instance],
        ahead: Mapping[int, int],
    ) -> None:
        self.found, self.same, self.ahead = found, same, ahead
        self.ranks = tuple(found)
        graphs_ = [each.graph for each in found.values()]
        self.nodes = np.cumsum([0, *(len(graph.event) for graph in graphs_)])
        largest = [int(graph.event.max(initial=-1)) + 1 for graph in graphs_]
        self.rows = np.cumsum([0, *largest])
        self.place = [_node_of(graph) for graph in graphs_]
        self.violations = 0

    def path(self, mismatches: int) -> tuple[CriticalPath, Numbers, pa.Table]:
        """The path through the one graph, the rank of its nodes, and a table of COLLECTIVES."""
        table, starts, ends, arrived, owner = self._instances()
        time, event, is_end, rank_of, on_device = self._node_columns(arrived, owner)
        order = np.argsort(time, kind="stable")
        new = np.empty(len(order), np.int32)
        new[order] = np.arange(len(order), dtype=np.int32)
        graph = self._graph((event[order], time[order], is_end[order]), new, starts, ends)
        about = self._about(graph, table, mismatches)
        path = CriticalPath(graph, self._events(), about, on_device[order])
        path.critical_path()
        return path, rank_of[order], table

    def _events(self) -> RunEvents:
        return RunEvents(self.rows, tuple(each.events for each in self.found.values()))

    def _about(self, graph: Graph, table: pa.Table, mismatches: int) -> About:
        first = next(iter(self.found.values())).about
        partial = sum(not each.is_whole for each in self.same)
        notes = {note for each in self.found.values() for note in each.about.notes}
        if partial:
            notes.add(
                f"{partial} of {len(self.same)} collectives lack ranks: the path is partial"
            )
        if self.violations:
            notes.add(f"{self.violations} ends are before the last arrival, clocks aligned")
        if mismatches:
            notes.add(f"{mismatches} collectives do not match in size and are not joined")
        window = Window(start=int(graph.time[0]), stop=int(graph.time[-1]))
        clipped = sum(each.about.clipped for each in self.found.values())
        return About(
            rules="corrected",
            window=window,
            path=first.path,
            rank=first.rank,
            clipped=clipped,
            data_load=first.data_load,
            notes=tuple(sorted(notes)),
        )

    def _instances(self) -> tuple[pa.Table, Numbers, Numbers, Column, Column]:
        """A row a member; (start node, instance), (end node, instance); and the arrivals."""
        index = {rank: k for k, rank in enumerate(self.ranks)}
        rows, starts, ends, arrived, owner = [], [], [], [], []
        for number, each in enumerate(self.same):
            times = [
                (member.start - self.ahead[member.rank], member.stop - self.ahead[member.rank])
                for member in each.members
            ]
            latest = sorted(start for start, _ in times)
            last, before = latest[-1], latest[-2]
            arrived.append(last)
            for member, (start, stop) in zip(each.members, times, strict=True):
                k = index[member.rank]
                first_node, last_node = (side[member.row] for side in self.place[k])
                starts.append((self.nodes[k] + first_node, number))
                if stop < last:
                    self.violations += 1
                else:
                    ends.append((self.nodes[k] + last_node, number))
                if start == last:
                    mine = self.rows[k] + member.row
                rows.append(
                    (
                        *(
                            number,
                            member.rank,
                            each.op,
                            each.tag,
                            each.group,
                            start,
                            stop,
                            last,
                        ),
                        *(last - start, max(0, stop - last), last - before, start == last),
                    )
                )
            owner.append(mine)
        columns = zip(*rows, strict=True)
        table = pa.table(dict(zip(COLLECTIVES.names, columns, strict=True)), COLLECTIVES)
        pairs = [np.array(side, np.int32).reshape(-1, 2) for side in (starts, ends)]
        return table, pairs[0], pairs[1], np.array(arrived, np.int64), np.array(owner, np.int64)

    def _node_columns(
        self, arrived: Column, owner: Column
    ) -> tuple[Column, Numbers, np.ndarray, Numbers, np.ndarray]:
        """The columns of all nodes, rank behind rank, and then where all have arrived."""
        found = list(self.found.values())
        times = [each.graph.time - self.ahead[rank] for rank, each in self.found.items()]
        events = [each.graph.event + self.rows[k] for k, each in enumerate(found)]
        ranks = [np.full(len(each.graph.event), k) for k, each in enumerate(found)]
        joins = len(arrived)
        rank_of = np.searchsorted(self.rows, owner, side="right") - 1
        return (
            np.concatenate([*times, arrived]),
            np.concatenate([*events, owner]).astype(np.int32),
            np.concatenate([*(each.graph.is_end for each in found), np.zeros(joins, np.bool_)]),
            np.concatenate([*ranks, rank_of]).astype(np.int32),
            np.concatenate([*(each.on_device for each in found), np.ones(joins, np.bool_)]),
        )

    def _graph(
        self,
        nodes: tuple[Numbers, Column, np.ndarray],
        new: Numbers,
        starts: Numbers,
        ends: Numbers,
    ) -> Graph:
        """All edges between all nodes, in order of their targets."""
        joins = int(self.nodes[-1])
        sources, targets, kinds, owners = [], [], [], []
        for k, each in enumerate(self.found.values()):
            graph = each.graph
            sources.append(graph.source + self.nodes[k])
            targets.append(graph.target + self.nodes[k])
            kinds.append(graph.kind)
            owners.append(np.where(graph.owner == NONE, NONE, graph.owner + self.rows[k]))
        source, target = np.concatenate(sources), np.concatenate(targets)
        # What ends an instance is bound by its arrivals, no more by its own start.
        own = np.searchsorted(target, ends[:, 0])
        source[own] = joins + ends[:, 1]
        alone = self.nodes[1:-1][np.diff(self.nodes)[1:] > 0]
        alone = np.append(self.nodes[:1], alone)
        alone = alone[new[alone] > 0]
        back = np.argsort(new)
        source = new[np.concatenate([source, starts[:, 0], back[new[alone] - 1]])]
        target = new[np.concatenate([target, joins + starts[:, 1], alone])]
        more = [
            np.full(len(starts), EDGE_KIND["join"], np.int8),
            np.full(len(alone), EDGE_KIND["unexplained"], np.int8),
        ]
        kind = np.concatenate([*kinds, *more])
        none = np.full(len(starts) + len(alone), NONE)
        owner = np.concatenate([*owners, none]).astype(np.int32)
        _, order = graphs.index(target, len(new))
        source, target = source[order], target[order]
        time = nodes[1]
        return Graph(
            event=nodes[0],
            time=time,
            is_end=nodes[2],
            source=source,
            target=target,
            kind=kind[order],
            weight=time[target] - time[source],
            owner=owner[order],
        )


def _node_of(graph: Graph) -> tuple[Numbers, Numbers]:
    """The nodes of each row's start and end."""
    size = int(graph.event.max(initial=-1)) + 1
    first, last = np.full(size, NONE, np.int32), np.full(size, NONE, np.int32)
    number = np.arange(len(graph.event), dtype=np.int32)
    first[graph.event[~graph.is_end]] = number[~graph.is_end]
    last[graph.event[graph.is_end]] = number[graph.is_end]
    return first, last
