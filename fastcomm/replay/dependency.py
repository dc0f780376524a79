"""The dependency graph of a step: operations of all ranks, and NCCL's ring between them.

Nodes are long names, edges are as columns. NCCL_ALLREDUCE is no node: its SEND and RECV are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import FastcommError
from fastcomm.replay.local_graph import LocalGraph
from fastcomm.replay.names import Name, category, coarse, long_name
from fastcomm.replay.nccl import Topology
from fastcomm.replay.trial import Trial
from fastcomm.replay.uniform import UniformTrace
from fastcomm_kernels.json_numbers import NULL

Ints = NDArray[np.int64]
IN, OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
STAGES = ("QUEUE", IN, OUT)
# Under no rank's number: the chunk from which on a RECV is the last of its rank.
_LAST = -2
_COUNTS = ("loopNum", "channelNum", "chunkNum", "sliceNum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Nodes in the order of their first edge; edge k goes from `source[k]` to `target[k]`."""

    nodes: tuple[str, ...]
    source: Ints
    target: Ints
    groups: tuple[tuple[int, ...], ...]

    @property
    def edges(self) -> Iterator[tuple[str, str]]:
        """The edges by name."""
        for a, b in zip(self.source.tolist(), self.target.tolist(), strict=True):
            yield self.nodes[a], self.nodes[b]

    def parsed(self) -> list[Name]:
        """The nodes in their parts."""
        return [Name.of(node) for node in self.nodes]

    def table(self) -> pa.Table:
        """One row an edge."""
        return pa.table({"source": self.source, "target": self.target})


def dependencies(trial: Trial, step: int) -> Dependencies:
    """The graph of a trial; `step` tells which tensors were sent together."""
    if trial.topology is None:
        raise FastcommError(
            "no nccl_rank_graph.json in any rank: who sends to whom is not known"
        )
    groups = tensor_groups(trial.trace, step)
    edges: dict[tuple[str, str], None] = {}
    nodes: dict[str, None] = {}
    for pid in trial.trace.pids:
        nodes.update((_node(pid, n), None) for n in trial.graph.nodes if n[:5] != "Comm.")
        edges.update(dict.fromkeys(_local(pid, trial.graph)))
        for group in groups:
            edges.update(dict.fromkeys(_group(pid, group, trial, trial.topology)))
    for edge in edges:
        nodes.update(dict.fromkeys(edge))
    number = {name: i for i, name in enumerate(nodes)}
    return Dependencies(
        nodes=tuple(nodes),
        source=np.fromiter((number[a] for a, _ in edges), np.int64, len(edges)),
        target=np.fromiter((number[b] for _, b in edges), np.int64, len(edges)),
        groups=groups,
    )


def tensor_groups(trace: UniformTrace, step: int) -> tuple[tuple[int, ...], ...]:
    """Tensors that are sent together; a later group takes over tensors of an earlier one."""
    rows = np.flatnonzero(trace.counts & (trace.step == step) & (trace.step != NULL))
    parsed = {name: Name.of(name) for name in dict.fromkeys(trace.names)}
    groups: dict[tuple[int, ...], None] = {}
    owner: dict[int, tuple[int, ...]] = {}
    for key in dict.fromkeys(trace.key[rows].tolist()):
        name = parsed[trace.names[key]]
        if name.op_cat == "Comm" and name.sub_op != "Sync" and name.tensors not in groups:
            groups[name.tensors] = None
            owner.update(dict.fromkeys(name.tensors, name.tensors))
    return tuple(group for group in groups if group in owner.values())


def _local(pid: str, graph: LocalGraph) -> Iterator[tuple[str, str]]:
    """What one rank computes; an update of this step does not hold up its forward ops."""
    for a, b in graph.edges:
        closing = a.startswith("UPDATE_") and b.startswith("FW.")
        if not (closing or a.startswith("Comm.") or b.startswith("Comm.")):
            yield _node(pid, a), _node(pid, b)


def _node(pid: str, name: str) -> str:
    """The long name of a node of one rank; the end is that of all."""
    return name if name == "END" else f"{pid}->{name}"


def _group(
    pid: str, group: tuple[int, ...], trial: Trial, topology: Topology
) -> Iterator[tuple[str, str]]:
    """What one rank does to send a group of tensors."""
    head = f"Comm.{'+'.join(map(str, group))}"
    sync, queue, taken, given = (f"{pid}->{head}.{each}" for each in ("Sync", *STAGES))
    for tensor in group:
        before = trial.graph.predecessors.get(f"Comm.{tensor}", ())
        if backward := next((each for each in before if each.startswith("BW.")), None):
            yield f"{pid}->{backward}", sync
    rank = topology.rank_of.get(pid)
    channels = {h: ring for h, ring in topology.ring.items() if rank in ring}
    peers = sorted({each for ring in channels.values() for each in ring})
    for peer in peers or ([] if rank is None else [rank]):
        yield long_name(topology.pid_of.get(peer, pid), f"{head}.Sync"), queue
    yield queue, taken
    if not channels:
        yield taken, given
    yield from _slices(pid, head, trial.counts.get(head, {}), topology)
    for tensor in group:
        for after in trial.graph.successors.get(f"Comm.{tensor}", ()):
            yield given, f"{pid}->{after}"


def _slices(
    pid: str, head: str, counts: Mapping[str, int], topology: Topology
) -> Iterator[tuple[str, str]]:
    """The slices that a rank sends to the next, and those that it receives."""
    loops, channels, chunks, slices = (counts.get(each, 0) for each in _COUNTS)
    rank = topology.rank_of.get(pid, -1)
    rings = {
        h: ring
        for h, ring in sorted(topology.ring.items())
        if rank in ring and (not channels or h < channels)
    }
    for h, ring in rings.items():
        if ring[rank] not in topology.pid_of:
            raise FastcommError(f"{pid} sends to rank {ring[rank]} of NCCL, which has no files")
        known = 2 * (len(ring) - 1)
        rings[h] = {**ring, _LAST: known - 1}
    most = chunks or max((ring[_LAST] + 1 for ring in rings.values()), default=0)
    for loop, c, s, h in product(range(loops or 1), range(most), range(slices or 1), rings):
        other = topology.pid_of[rings[h][rank]]
        places = (f"{loop}_{h}_{at}_{s}" for at in (c, c - 1))
        yield from _hop(f"{pid}->{head}.", f"{other}->{head}.", tuple(places), c, most)
        if c >= rings[h][_LAST]:
            yield f"{other}->{head}.RECV~>{loop}_{h}_{c}_{s}", f"{other}->{head}.{OUT}"


def _hop(
    own: str, other: str, suffix: tuple[str, ...], c: int, chunks: int
) -> Iterator[tuple[str, str]]:
    """What a rank waits for to send chunk `c`, and who waits for it."""
    send = f"{own}SEND~>{suffix[0]}"
    yield f"{own}{IN}", send
    if c < chunks - 1 or c == 0:
        yield f"{own}{IN}", f"{own}RECV~>{suffix[0]}"
    if c > 0:
        yield f"{own}RECV~>{suffix[1]}", send
    yield send, f"{other}RECV~>{suffix[0]}"


def kinds(nodes: Sequence[Name]) -> list[str]:
    """The fine category of each node."""
    known: dict[str, str] = {}
    return [known.setdefault(each.standard, category(each.standard)) for each in nodes]


def is_operator(kinds_: Sequence[str]) -> NDArray[np.bool_]:
    """Which nodes are operators of a framework."""
    return np.array([coarse(each) == "operator" for each in kinds_], bool)
