"""Predict steps that were not run: durations changed, other bandwidths, hosts or tensors.

A change of durations is by name, tensor, link, device, rank or category. Of those that fit a
node the most exact wins: long name, that without suffix, that without rank as well; tensor,
link, device, rank, category; DELAY_ALL_CMP or DELAY_ALL_COMM; DELAY_ALL.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.edits import DurationChange, read_changes
from fastcomm.readers.dpro import COMMUNICATION, COMPUTATION, OUT, Name, long_name
from fastcomm.readers.dpro.job import RING, Topology
from fastcomm.readers.dpro.trial import Trial
from fastcomm.replay import Replayed, Replayer, ReplayPath
from fastcomm.replay.dependency import Dependencies, head_of, joined, through_network
from fastcomm.replay.fusion import Fusion, fusion
from fastcomm.replay.gaps import Measured
from fastcomm_kernels.arrays import Floats

_ALL = "DELAY_ALL"


def changed(made: Replayer, path: Path) -> Replayed:
    """Replay with the changes of a JSON file."""
    return made.run(durations(made, read_changes(path)))


def durations(made: Replayer, changes: Mapping[str, DurationChange]) -> Floats:
    """The durations with all changes; a key that fits no node is an error."""
    out = made.measured.avg.copy()
    used: set[str] = set()
    links = _links(made)
    for i in range(len(out)):
        for key in _keys(made, i, links.get(i, ())):
            change = changes.get(key)
            if change is not None:
                used.add(key)
                out[i] = change.applied(out[i])
                break
    if unused := [key for key in changes if key not in used and not key.startswith(_ALL)]:
        raise ConfigError(
            f"{unused[0]!r} fits no operation, or a more exact key goes before it; wanted a "
            "long name, tensor:, link:, device:, rank:, category:, or DELAY_ALL[_CMP|_COMM]"
        )
    return out


def _links(made: Replayer) -> dict[int, tuple[str, ...]]:
    """The links of each transfer: from which rank to which, or of which group and its kind."""
    links: dict[int, tuple[str, ...]] = {}
    pairs = zip(made.graph.source.tolist(), made.graph.target.tolist(), strict=True)
    for a, b in pairs:
        if made.names[a].sub_op == "SEND" and made.names[b].sub_op == "RECV":
            links[a] = links[b] = (f"link:{made.names[a].pid}->{made.names[b].pid}",)
    for i, name in enumerate(made.names):
        if name.op_cat == "Comm" and i not in links and name.op_name.count("-") > 1:
            group = name.op_name.rpartition("-")[0]
            links[i] = (f"link:{group}", f"link:{group.partition('-')[0]}")
    return links


def _keys(made: Replayer, i: int, links: tuple[str, ...]) -> tuple[str, ...]:
    """All keys that fit a node, the most exact first."""
    cat = made.categories[i]
    name = made.names[i]
    kind = ""
    if cat in COMPUTATION:
        kind = "DELAY_ALL_CMP"
    elif cat in COMMUNICATION:
        kind = "DELAY_ALL_COMM"
    tensors = tuple(f"tensor:{tensor}" for tensor in name.tensors)
    device = f"device:{made.devices[made.operations.device[i]]}"
    exact = (made.graph.nodes[i], long_name(name.pid, name.standard), name.standard)
    own = (*exact, *tensors, *links, device)
    return (*own, f"rank:{name.pid}", f"category:{cat}", kind, _ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """How much sooner the step ends, in the mean over ranks, if a node took no time."""

    node: str
    saved_ns: float


def bottlenecks(
    replayed: Replayed, path: ReplayPath, *, workers: int = 1, by_name: bool = False
) -> tuple[Removed, ...]:
    """Every node of the critical path that takes time, by what its absence would save.

    With `by_name` all nodes that have a long name, whatever their suffix, count as one.
    """
    on_path = [node for node in dict.fromkeys(path.nodes) if replayed.duration[node] > 0]
    names = replayed.replayer.graph.nodes
    alone = {names[node]: [node] for node in on_path}
    candidates = _by_name(replayed, on_path) if by_name else alone

    def without(name: str) -> Removed:
        duration = replayed.duration.copy()
        duration[candidates[name]] = 0.0
        other = replayed.replayer.run(duration)
        return Removed(node=name, saved_ns=replayed.mean_ns - other.mean_ns)

    # The kernels hold no lock: threads replay at the same time.
    with ThreadPoolExecutor(workers) as pool:
        saved = list(pool.map(without, candidates))
    return tuple(sorted(saved, key=lambda each: -each.saved_ns))


def _by_name(replayed: Replayed, nodes: Sequence[int]) -> dict[str, list[int]]:
    """All nodes of the same names as these, by name."""
    names = replayed.replayer.names
    keys = {(names[node].pid, names[node].standard) for node in nodes}
    by_name: dict[str, list[int]] = {}
    for node, name in enumerate(names):
        if (name.pid, name.standard) in keys:
            by_name.setdefault(long_name(name.pid, name.standard), []).append(node)
    return by_name


BANDWIDTH = 0.85 * 100e9
_NS = 1e9


def daydream(
    made: Replayer, bytes_of: Mapping[int, int], bandwidth: float = BANDWIDTH
) -> Replayed:
    """Replay the first rank alone; `bandwidth` is in bytes a second."""
    pid = next(each for each in made.pids if each)
    own = [name.pid in {pid, None} and name.op_cat != "Comm" for name in made.names]
    nodes = {made.graph.nodes[i]: None for i in np.flatnonzero(own).tolist()}
    edges = {(a, b): None for a, b in made.graph.edges if a in nodes and b in nodes}
    duration: dict[str, float] = {}
    for before, tensors, after in _sent(made, pid):
        for tensor in tensors:
            if tensor not in bytes_of:
                raise FastcommError(
                    f"the size of tensor {tensor} is not known: wanted its output, under its "
                    "name, in metadata.json"
                )
            node = f"{pid}->Comm.{tensor}"
            duration[node] = bytes_of[tensor] / bandwidth * _NS
            edges[before, node] = edges[node, after] = None
    groups = ((tensor,) for tensor in sorted(bytes_of))
    graph = Dependencies.of((*nodes, *duration), edges, groups)
    known = made.measured.at(np.append(np.flatnonzero(own), np.full(len(duration), -1)))
    known.avg[len(nodes) :] = list(duration.values())
    return Replayer.of(graph, known, made.options).run()


def _sent(made: Replayer, pid: str) -> list[tuple[str, tuple[int, ...], str]]:
    """What each group of tensors waits for, its tensors, and what waits for it first."""
    first_after: dict[tuple[int, ...], str] = {}
    befores = []
    edges = zip(made.graph.source.tolist(), made.graph.target.tolist(), strict=True)
    for a, b in edges:
        source, target = made.names[a], made.names[b]
        if source.pid != pid:
            continue
        if source.op_cat == "BW" and target.sub_op == "Sync":
            befores.append((made.graph.nodes[a], target.tensors))
        elif source.sub_op == OUT:
            first_after.setdefault(source.tensors, made.graph.nodes[b])
    return [
        (before, tensors, first_after[tensors])
        for before, tensors in befores
        if tensors in first_after
    ]


# A shorter slice is one that was measured where its neighbour is in the same host.
_LEAST_NS = 10_000


def on_hosts(trial: Trial, made: Replayer, hosts: int) -> Replayed:
    """Replay a step of `trial` on `hosts` hosts; `made` has what its operations take."""
    known = trial.topology
    if known is None or known.algorithm != RING:
        raise FastcommError("no ring of NCCL in the trial: what slices take is not known")
    if hosts < 2:  # noqa: PLR2004
        raise ConfigError(f"{hosts} hosts: wanted 2 or more, for there is no ring of fewer")
    topology = _ring(hosts, tuple(known.ring))
    turns = 2 * (hosts - 1)
    counts = {
        head: {**trial.counts.get(head, {}), "chunkNum": turns}
        for head in map(head_of, made.graph.groups)
    }
    graph = joined(
        topology.pid_of.values(),
        trial.graph,
        made.graph.groups,
        lambda pid, group: through_network(pid, group, trial.graph, counts, topology),
    )
    larger = (len(known.pid_of) - 1) / (hosts - 1)
    return Replayer.of(graph, _taken(made, graph, larger), made.options).run()


def _ring(hosts: int, channels: tuple[int, ...]) -> Topology:
    """Hosts in the order of their numbers, in every channel."""
    after = {rank: (rank + 1) % hosts for rank in range(hosts)}
    return Topology(
        ring=dict.fromkeys(channels, after),
        tree={},
        pid_of={rank: f"host{rank}.rank0" for rank in range(hosts)},
    )


def _taken(made: Replayer, graph: Dependencies, larger: float) -> Measured:
    """Of a node what the first rank's takes, of a slice the first that was measured."""
    first = next(pid for pid in made.pids if pid)
    own = {
        name.standard: i
        for i, name in enumerate(made.names)
        if name.pid in {first, None} and name.suffix is None
    }
    slices, names = _slices(made), graph.parsed()
    at = [own.get(name.standard, -1) if name.suffix is None else -1 for name in names]
    measured = made.measured.at(np.array(at))
    for i, name in enumerate(names):
        if name.suffix is not None:
            measured.avg[i] = _slice(slices, name) * larger
    return measured


def _slices(made: Replayer) -> dict[tuple[str, str], list[float]]:
    """What was measured of the slices of each loop, channel and part, by chunk."""
    slices: dict[tuple[str, str], list[float]] = {}
    for name, avg in zip(made.names, made.measured.avg.tolist(), strict=True):
        if name.suffix is not None:
            loop, channel, chunk, part = name.suffix.split("_")
            row = slices.setdefault((name.standard, f"{loop}_{channel}_{part}"), [])
            row += [0.0] * (int(chunk) + 1 - len(row))
            if not row[int(chunk)] and avg > _LEAST_NS:
                row[int(chunk)] = avg
    return slices


def _slice(slices: Mapping[tuple[str, str], list[float]], name: Name) -> float:
    """A chunk that the trial does not have is like the one that it would be on its ring."""
    loop, channel, chunk, part = (name.suffix or "").split("_")
    row = slices.get((name.standard, f"{loop}_{channel}_{part}"), [0.0])
    return row[int(chunk) % len(row)]


def partial(made: Replayer, tensors: Collection[int]) -> Replayed:
    """Replay the groups that hold one of the tensors, with their backward ops and updates."""
    chosen = set(tensors)
    comm = np.array([bool(chosen & set(name.tensors)) for name in made.names])
    if not comm.any():
        raise FastcommError(f"no communication of tensor {', '.join(map(str, sorted(chosen)))}")
    kept = comm.copy()
    graph = made.graph
    backward = made.is_of("BW")
    update = np.array([name.op_cat.startswith("UPDATE") for name in made.names])
    before, after = comm[graph.target], comm[graph.source]
    kept[graph.source[before & backward[graph.source]]] = True
    kept[graph.target[after & update[graph.target]]] = True
    number = np.cumsum(kept) - 1
    inside = kept[graph.source] & kept[graph.target]
    part = Dependencies(
        nodes=tuple(node for node, own in zip(graph.nodes, kept, strict=True) if own),
        source=number[graph.source[inside]],
        target=number[graph.target[inside]],
        groups=tuple(group for group in graph.groups if chosen & set(group)),
    )
    measured = made.measured.at(np.flatnonzero(kept))
    return Replayer.of(part, measured, made.options).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What was asked for; the rest is None."""

    daydream: Replayed | None = None
    hosts: Replayed | None = None
    fusion: Fusion | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the predictions as they stand in the JSON of a replay."""
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
            document["fusion"] = {
                "groups": [list(group) for group in self.fusion.groups],
                "mean_step_ns": self.fusion.replayed.mean_ns,
                "before_ns": self.fusion.before.mean_ns,
                "speedup": self.fusion.speedup,
                "tried": self.fusion.tried,
                "model_error": self.fusion.model.error,
            }
        return document


def predictions(
    trial: Trial,
    made: Replayer,
    *,
    with_daydream: bool = False,
    hosts: int | None = None,
    fuse: int | None = None,
) -> Predictions:
    """Predict Daydream's step, one on `hosts` hosts, the best of `fuse` ways to send."""
    return Predictions(
        daydream=daydream(made, trial.parameters.bytes_of) if with_daydream else None,
        hosts=None if hosts is None else on_hosts(trial, made, hosts),
        fusion=None if fuse is None else fusion(trial, made, fuse),
    )
