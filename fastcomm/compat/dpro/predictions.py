"""Predict steps with changed durations, another number of hosts, or other groups of tensors."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fastcomm.compat.dpro.dependency import Dependencies, combined, group_name, over_network
from fastcomm.compat.dpro.fusion import Fusion, fusion
from fastcomm.compat.dpro.gaps import Measured
from fastcomm.compat.dpro.job import RING, Topology
from fastcomm.compat.dpro.options import TrialReplayOptions
from fastcomm.compat.dpro.replayed import Replayed, Replayer, ReplayPath
from fastcomm.compat.dpro.trial import Trial
from fastcomm.compat.dpro.uniform import COMMUNICATION, COMPUTATION, OUT, Name, long_name
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.edits import Edit, durations_after
from fastcomm_kernels.arrays import Flags, Floats


class TrialOperations:
    """The operations of a replayed step, as edits select them."""

    def __init__(self, replayer: Replayer) -> None:
        """List the operations of each value of each key."""
        self.size = len(replayer.names)
        self._rows: dict[str, dict[str, list[int]]] = {}
        links, numbers = _links(replayer), _rank_numbers(replayer)
        for row, name in enumerate(replayer.names):
            category = replayer.categories[row]
            self._add("all", "all", row)
            if category in COMPUTATION:
                self._add("compute", "compute", row)
            if category in COMMUNICATION:
                self._add("comm", "comm", row)
            self._add("op", name.sub_op, row)
            self._add("rank", name.pid, row)
            self._add("rank", numbers.get(str(name.pid)), row)
            self._add("link", links.get(row), row)
            self._add("category", category, row)
            self._add("device", replayer.devices[replayer.operations.device[row]], row)
            for tensor in name.tensors:
                self._add("tensor", str(tensor), row)
            exact = replayer.graph.nodes[row], long_name(name.pid, name.standard), name.standard
            for text in dict.fromkeys(exact):
                self._add("name", text, row)

    def _add(self, key: str, value: str | None, row: int) -> None:
        if value:
            self._rows.setdefault(key, {}).setdefault(value, []).append(row)

    @property
    def targets(self) -> dict[str, tuple[str, ...]]:
        """Values that there are by key."""
        return {key: tuple(values) for key, values in self._rows.items()}

    def rows(self, key: str, values: Collection[str] | None) -> Flags:
        """Return the operations whose `key` has one of the values; None is every value."""
        mask = np.zeros(self.size, np.bool_)
        for value, rows in self._rows[key].items():
            if values is None or value in values:
                mask[rows] = True
        return mask


def durations(replayer: Replayer, edits: Sequence[Edit]) -> Floats:
    """Return the duration of each node after edits, which apply in their order.

    ``heal rank:host0.rank1`` gives operations the median duration of the operations of the same
    name on other ranks.

    Parameters
    ----------
    replayer
        Has the measured durations.
    edits
        The edits.

    Returns
    -------
    ndarray
        One value per node, ns.

    Raises
    ------
    ConfigError
        If an edit is not possible, or selects no node.

    """
    heal = partial(_as_peers, replayer)
    operations = TrialOperations(replayer)
    return durations_after(edits, operations, replayer.measured.avg, {"heal": heal})


def _as_peers(replayer: Replayer, durations: Floats, mask: Flags) -> Floats:
    """Return durations in which selected computation takes as long as on other ranks."""
    names = [(name.standard, name.suffix) for name in replayer.names]
    of_peers: dict[tuple[str, str | None], list[float]] = {}
    for name, ns, is_healed in zip(names, durations.tolist(), mask.tolist(), strict=True):
        if not is_healed:
            of_peers.setdefault(name, []).append(ns)
    healed = durations.copy()
    for row in np.flatnonzero(mask).tolist():
        if replayer.categories[row] in COMPUTATION and names[row] in of_peers:
            healed[row] = float(np.median(of_peers[names[row]]))
    return healed


def _links(replayer: Replayer) -> dict[int, str]:
    """Return the link of each transfer, from rank to rank."""
    links: dict[int, str] = {}
    pairs = zip(replayer.graph.source.tolist(), replayer.graph.target.tolist(), strict=True)
    for a, b in pairs:
        if replayer.names[a].sub_op == "SEND" and replayer.names[b].sub_op == "RECV":
            links[a] = links[b] = f"{replayer.names[a].pid}->{replayer.names[b].pid}"
    return links


def _rank_numbers(replayer: Replayer) -> dict[str, str]:
    """Return the number of each process whose rank has a number of its own."""
    number = {pid: pid.rpartition(".rank")[2] for pid in replayer.pids}
    count = Counter(number.values())
    return {pid: n for pid, n in number.items() if n.isdecimal() and count[n] == 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Mean step time saved over the ranks if a node took no time."""

    node: str
    saved_ns: float


def bottlenecks(
    replayed: Replayed, path: ReplayPath, *, workers: int = 1
) -> tuple[Removed, ...]:
    """Return the nodes of the critical path by how much time their removal would save.

    Parameters
    ----------
    replayed
        The replayed step.
    path
        Its critical path.
    workers
        Number of threads.

    """
    on_path = [node for node in dict.fromkeys(path.nodes) if replayed.duration[node] > 0]
    names = replayed.replayer.graph.nodes

    def without(node: int) -> Removed:
        duration = replayed.duration.copy()
        duration[node] = 0.0
        other = replayed.replayer.replay(duration)
        return Removed(node=names[node], saved_ns=replayed.mean_ns - other.mean_ns)

    # The kernels release the GIL, so that threads replay in parallel.
    with ThreadPoolExecutor(workers) as pool:
        removed = list(pool.map(without, on_path))
    return tuple(sorted(removed, key=lambda node: -node.saved_ns))


BANDWIDTH = 0.85 * 100e9  # bytes/s
_NS = 1e9


def daydream(
    replayer: Replayer, bytes_of: Mapping[int, int], bandwidth: float = BANDWIDTH
) -> Replayed:
    """Predict a step as Daydream does: one rank, and communication at a bandwidth.

    Source: Zhu et al., Daydream (USENIX ATC 2020).

    Parameters
    ----------
    replayer
        Replayer of the measured step.
    bytes_of
        Bytes of each tensor.
    bandwidth
        Of the network, bytes per second.

    Raises
    ------
    FastcommError
        If the size of a tensor is unknown.

    """
    pid = next(pid for pid in replayer.pids if pid)
    own = [name.pid in {pid, None} and name.op_cat != "Comm" for name in replayer.names]
    nodes = {replayer.graph.nodes[i]: None for i in np.flatnonzero(own).tolist()}
    edges = {(a, b): None for a, b in replayer.graph.edges if a in nodes and b in nodes}
    duration: dict[str, float] = {}
    for before, tensors, after in _sent(replayer, pid):
        for tensor in tensors:
            if tensor not in bytes_of:
                raise FastcommError(
                    f"metadata.json does not have the size of tensor {tensor}. Add its output "
                    "under its name"
                )
            node = f"{pid}->Comm.{tensor}"
            duration[node] = bytes_of[tensor] / bandwidth * _NS
            edges[before, node] = edges[node, after] = None
    groups = ((tensor,) for tensor in sorted(bytes_of))
    graph = Dependencies.of((*nodes, *duration), edges, groups)
    measured = replayer.measured.at(np.append(np.flatnonzero(own), np.full(len(duration), -1)))
    measured.avg[len(nodes) :] = list(duration.values())
    return Replayer.of(graph, measured, replayer.options).replay()


def _sent(replayer: Replayer, pid: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return (operation before, tensors, first operation after) of each group of a rank."""
    first_after: dict[tuple[int, ...], str] = {}
    befores = []
    edges = zip(replayer.graph.source.tolist(), replayer.graph.target.tolist(), strict=True)
    for a, b in edges:
        source, target = replayer.names[a], replayer.names[b]
        if source.pid != pid:
            continue
        if source.op_cat == "BW" and target.sub_op == "Sync":
            befores.append((replayer.graph.nodes[a], target.tensors))
        elif source.sub_op == OUT:
            first_after.setdefault(source.tensors, replayer.graph.nodes[b])
    return [
        (before, tensors, first_after[tensors])
        for before, tensors in befores
        if tensors in first_after
    ]


# A shorter slice was measured between neighbors in one host.
_LEAST_NS = 10_000


def on_hosts(trial: Trial, replayer: Replayer, hosts: int) -> Replayed:
    """Predict a step on another number of hosts with one rank each.

    Parameters
    ----------
    trial
        The trial, with rings of NCCL.
    replayer
        Replayer of a step of the trial.
    hosts
        Number of hosts, at least 2.

    Raises
    ------
    FastcommError
        If the trial has no rings, or there are fewer than 2 hosts.

    """
    original = trial.topology
    if original is None or original.algorithm != RING:
        raise FastcommError(
            "cannot predict other hosts: the trial has no rings of NCCL, whose slices would "
            "be scaled"
        )
    if hosts < 2:  # noqa: PLR2004
        raise ConfigError(f"cannot predict a ring of {hosts} hosts: expected 2 or more")
    topology = _ring(hosts, tuple(original.ring))
    turns = 2 * (hosts - 1)
    counts = {
        head: {**trial.counts.get(head, {}), "chunkNum": turns}
        for head in map(group_name, replayer.graph.groups)
    }
    pids, groups = topology.pid_of.values(), replayer.graph.groups
    graph = combined(pids, trial.graph, groups, over_network(trial.graph, counts, topology))
    scale = (len(original.pid_of) - 1) / (hosts - 1)
    return Replayer.of(graph, _scaled(replayer, graph, scale), replayer.options).replay()


def _ring(hosts: int, channels: tuple[int, ...]) -> Topology:
    """Return a topology in which every channel is a ring of the hosts in order."""
    after = {rank: (rank + 1) % hosts for rank in range(hosts)}
    return Topology(
        ring=dict.fromkeys(channels, after),
        tree={},
        pid_of={rank: f"host{rank}.rank0" for rank in range(hosts)},
    )


def _scaled(replayer: Replayer, graph: Dependencies, scale: float) -> Measured:
    """Return times for the nodes of a graph: of the first rank, and of slices times `scale`."""
    first = next(pid for pid in replayer.pids if pid)
    own = {
        name.standard: i
        for i, name in enumerate(replayer.names)
        if name.pid in {first, None} and name.suffix is None
    }
    slices, names = _slices(replayer), graph.parsed()
    at = [own.get(name.standard, -1) if name.suffix is None else -1 for name in names]
    measured = replayer.measured.at(np.array(at))
    for i, name in enumerate(names):
        if name.suffix is not None:
            measured.avg[i] = _slice(slices, name) * scale
    return measured


def _slices(replayer: Replayer) -> dict[tuple[str, str], list[float]]:
    """Return the first long enough time of each slice, by name, loop, channel and part.

    The lists have one time per chunk, or 0.
    """
    slices: dict[tuple[str, str], list[float]] = {}
    for name, avg in zip(replayer.names, replayer.measured.avg.tolist(), strict=True):
        if name.suffix is not None:
            loop, channel, chunk, part = name.suffix.split("_")
            row = slices.setdefault((name.standard, f"{loop}_{channel}_{part}"), [])
            row += [0.0] * (int(chunk) + 1 - len(row))
            if not row[int(chunk)] and avg > _LEAST_NS:
                row[int(chunk)] = avg
    return slices


def _slice(slices: Mapping[tuple[str, str], list[float]], name: Name) -> float:
    """Return the time of a slice; chunks that the trial does not have repeat its chunks."""
    loop, channel, chunk, part = (name.suffix or "").split("_")
    row = slices.get((name.standard, f"{loop}_{channel}_{part}"), [0.0])
    return row[int(chunk) % len(row)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Predicted steps; those that were not requested are None."""

    daydream: Replayed | None = None
    hosts: Replayed | None = None
    fusion: Fusion | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the part of a replay's JSON document about predictions."""
        document: dict[str, Any] = {}
        if self.daydream is not None:
            document["daydream"] = {
                "step_end_ns": self.daydream.by_pid(),
                "bandwidth_bytes_per_s": BANDWIDTH,
            }
        if self.hosts is not None:
            hosts = len(self.hosts.by_pid())
            document["other_hosts"] = {"hosts": hosts, "mean_step_ns": self.hosts.mean_ns}
        if self.fusion is not None:
            document["fusion"] = self.fusion.to_dict()
        return document


def predictions(trial: Trial, replayer: Replayer, options: TrialReplayOptions) -> Predictions:
    """Predict the steps that are requested, from a replayer of a step of the trial."""
    hosts, fuse = options.hosts, options.fuse
    return Predictions(
        daydream=daydream(replayer, trial.parameters.bytes_of) if options.daydream else None,
        hosts=None if hosts is None else on_hosts(trial, replayer, hosts),
        fusion=None if fuse is None else fusion(trial, replayer, fuse),
    )
