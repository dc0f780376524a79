"""The same step on another number of hosts of one GPU each, in one ring.

Every rank computes what the first one does, and a slice takes what it takes in the trial, as
much longer as chunks are larger: (N - 1)/(n - 1) for n hosts instead of N ranks.
"""

from collections.abc import Mapping

import numpy as np

from fastcomm.errors import ConfigError, FastcommError
from fastcomm.replay.dependency import Dependencies, head_of, joined, through_network
from fastcomm.replay.gaps import Measured
from fastcomm.replay.names import Name
from fastcomm.replay.nccl import RING, Topology
from fastcomm.replay.replayer import Replayed, Replayer
from fastcomm.replay.trial import Trial

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
    slices = _slices(made)
    size = len(graph.nodes)
    found = Measured(
        avg=np.zeros(size),
        gap=np.zeros(size),
        samples=np.zeros(size, np.int64),
        comm_gap=np.zeros(size),
    )
    known = made.measured
    for i, name in enumerate(graph.parsed()):
        if name.suffix is not None:
            found.avg[i] = _slice(slices, name) * larger
        elif name.standard in own:
            j = own[name.standard]
            found.avg[i], found.gap[i] = known.avg[j], known.gap[j]
            found.samples[i], found.comm_gap[i] = known.samples[j], known.comm_gap[j]
    return found


def _slices(made: Replayer) -> dict[tuple[str, str], list[float]]:
    """What was measured of the slices of each loop, channel and part, by chunk."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, avg in zip(made.names, made.measured.avg.tolist(), strict=True):
        if name.suffix is not None:
            loop, channel, chunk, part = name.suffix.split("_")
            row = found.setdefault((name.standard, f"{loop}_{channel}_{part}"), [])
            row += [0.0] * (int(chunk) + 1 - len(row))
            if not row[int(chunk)] and avg > _LEAST_NS:
                row[int(chunk)] = avg
    return found


def _slice(slices: Mapping[tuple[str, str], list[float]], name: Name) -> float:
    """A chunk that the trial does not have is like the one that it would be on its ring."""
    loop, channel, chunk, part = (name.suffix or "").split("_")
    row = slices.get((name.standard, f"{loop}_{channel}_{part}"), [0.0])
    return row[int(chunk) % len(row)]
