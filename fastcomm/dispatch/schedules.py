"""The schedules: how long one layer takes under each, which link binds, what each GPU carries.

A schedule is a function of the traffic of a layer and the terms of a simulation. All are
exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.traffic import FastSchedule, Matrix, Traffic, schedule, spreadout_s
from fastcomm.errors import FastcommError
from fastcomm.hardware import GpuLinks
from fastcomm_kernels import dispatch

LINKS = ("NIC", "NVLink")
DIRECTIONS = ("send", "receive")
# The columns of a load, as a reader knows them.
LOAD_NAMES = tuple(f"{link} {way}" for link in LINKS for way in DIRECTIONS)
# Fits of the published low-latency tables (EP 16 to 256, 50 GB/s NICs; EP 8, 160 GB/s inside a
# node): a start-up, and the share of each link that is reached.
LOW_LATENCY = {
    "dispatch": (34.6e-6, 46.4 / 50, 86 / 160),
    "combine": (5.7e-6, 39.9 / 50, 113 / 160),
}
# How much a NIC is liked for being a target's, and for being the source's own.
_LIKES = (2, 1), (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The links, sizes and rules of a simulation."""

    token_bytes: int
    combine_bytes: int
    links: GpuLinks = field(default_factory=GpuLinks)
    demand: str = "copies"
    decomposition: str = "threshold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The busiest link: a GPU, which of its links, and the direction."""

    gpu: int
    link: str
    direction: str
    tokens: int

    def __str__(self) -> str:
        return f"GPU {self.gpu} {self.link} {self.direction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One layer under one schedule."""

    seconds: float
    phases: dict[str, float]
    inter_tokens: int
    loads: Matrix  # GPU by NIC send, NIC receive, NVLink send, NVLink receive; in tokens
    bottleneck: Bottleneck
    combine_s: float | None = None


class NoAnswerError(FastcommError):
    """A schedule has no answer for a layer."""


Schedule = Callable[[Traffic, Terms], Timing]


def _weights(
    links: GpuLinks, size: int = 1, nic: float = 1.0, port: float = 1.0
) -> NDArray[np.float64]:
    """Return the seconds per token for each column of a load, at these shares of the links."""
    return np.repeat([size / (links.inter * nic), size / (links.intra * port)], 2)


def busiest(loads: Matrix, seconds: NDArray[np.float64]) -> Bottleneck:
    """Return the link with most seconds; `loads` and `seconds` are GPU by link column."""
    gpu, column = np.unravel_index(int(np.argmax(seconds)), seconds.shape)
    return Bottleneck(
        gpu=int(gpu),
        link=LINKS[int(column) // 2],
        direction=DIRECTIONS[int(column) % 2],
        tokens=int(loads[gpu, column]),
    )


def _pipelined(loads: Matrix, terms: Terms) -> Timing:
    """Time loads on both kinds of link at once; the busiest link sets the time."""
    links = terms.links
    starts = links.inter_start_s, links.intra_start_s
    seconds = loads * _weights(links, terms.token_bytes)
    most = [float(seconds[:, :2].max()), float(seconds[:, 2:].max())]
    times = [busy + start if busy else 0.0 for busy, start in zip(most, starts, strict=True)]
    return Timing(
        seconds=max(times),
        phases={"inter": times[0], "intra": times[1]},
        inter_tokens=int(loads[:, 0].sum()),
        loads=loads,
        bottleneck=busiest(loads, seconds),
        combine_s=_combined(most, starts, terms),
    )


def _combined(most: list[float], starts: tuple[float, float], terms: Terms) -> float:
    """Return the seconds of the way back, where sends and receives change places."""
    factor = terms.combine_bytes / terms.token_bytes
    return max(
        busy * factor + start if busy else 0.0 for busy, start in zip(most, starts, strict=True)
    )


def deepep_counts(traffic: Traffic, forwarded: Matrix) -> Matrix:
    """Count tokens by GPU and link: one to the proxy of a node, `forwarded` from there."""
    width, nodes = traffic.width, traffic.nodes
    gpus = nodes * width
    remote = traffic.remote_node_unique
    rank = np.arange(gpus) % width
    by_rank = forwarded.reshape(nodes, width, gpus).sum(axis=0)
    by_rank[rank, np.arange(gpus)] = 0
    counts = np.zeros((gpus, 4), np.int64)
    counts[:, 0] = remote.sum(axis=1)
    counts[:, 1] = remote.reshape(nodes, width, nodes).sum(axis=0).T.ravel()
    counts[:, 2] = by_rank.reshape(width, nodes, width).sum(axis=2).T.ravel()
    counts[:, 3] = by_rank.sum(axis=0)
    return counts


def deepep(traffic: Traffic, terms: Terms) -> Timing:
    """Send once to each node, to the GPU of the source's rank; from there once to each GPU."""
    loads = deepep_counts(traffic, traffic.unique)
    return _pipelined(loads, terms)


def hierarchical(traffic: Traffic, terms: Terms) -> Timing:
    """Send every copy by rail: to the source's rank in the target's node, then on."""
    nodes, width = traffic.nodes, traffic.width
    block = traffic.demand(terms.demand).reshape(nodes, width, nodes, width)
    node, rank = np.arange(nodes), np.arange(width)
    local = block[node, :, node, :]
    block[node, :, node, :] = 0
    across = block.sum(axis=3)  # source node, rank, target node
    onward = block.sum(axis=0)  # rank, target node, rank there
    onward[rank, :, rank] = 0
    sums = (
        across.sum(axis=2),
        across.sum(axis=0).T,
        local.sum(axis=2) + onward.sum(axis=2).T,
        local.sum(axis=1) + onward.sum(axis=0),
    )
    return _pipelined(np.stack([each.ravel() for each in sums], axis=1), terms)


def _multicast_balanced(traffic: Traffic, terms: Terms) -> Timing:
    """Send once to each node, spread evenly over all NICs of both nodes.

    A token enters a node by a GPU that needs it, or leaves by its own: whichever is shorter.
    """
    timings = (_pipelined(_balanced_loads(traffic, likes), terms) for likes in _LIKES)
    return min(timings, key=lambda timing: timing.seconds)


def _balanced_loads(traffic: Traffic, likes: tuple[int, int]) -> Matrix:
    loads = np.zeros((traffic.nodes * traffic.width, 4), np.int64)
    layer, quota = traffic.layer, _quota(traffic)
    dispatch.balanced_loads(layer.src, layer.expert, layer.home, quota, likes, loads)
    return loads


def _quota(traffic: Traffic) -> NDArray[np.int32]:
    """[node, node, rank]: tokens by NIC; remainders take turns, so that totals stay even."""
    width = traffic.width
    pairs = traffic.remote_node_unique.reshape(traffic.nodes, width, -1).sum(axis=1)
    each, rest = np.divmod(pairs, width)
    first = np.cumsum(rest, axis=1) - rest
    turn = (np.arange(width) - first[:, :, None]) % width
    return np.asarray(each[:, :, None] + (turn < rest[:, :, None]), np.int32)


def end_loads(remote: Matrix, local: Matrix) -> Matrix:
    """Return the loads of traffic between GPUs that nobody relays."""
    sums = (remote.sum(axis=1), remote.sum(axis=0), local.sum(axis=1), local.sum(axis=0))
    return np.stack(sums, axis=1)


def direct(traffic: Traffic, terms: Terms) -> Timing:
    """Send from each GPU to each GPU, all at the same time."""
    demand, remote = traffic.demand(terms.demand), traffic.remote(terms.demand)
    ends = end_loads(remote, demand - remote)
    messages = end_loads(np.sign(remote), np.sign(demand - remote))
    seconds, dispatch_s = _direct_s(ends, messages, terms, terms.token_bytes)
    mirror = [1, 0, 3, 2]
    _, combine_s = _direct_s(ends[:, mirror], messages[:, mirror], terms, terms.combine_bytes)
    return Timing(
        seconds=max(dispatch_s),
        phases={"inter": dispatch_s[0], "intra": dispatch_s[1]},
        inter_tokens=int(remote.sum()),
        loads=ends,
        bottleneck=busiest(ends, seconds),
        combine_s=max(combine_s),
    )


def _direct_s(
    ends: Matrix, messages: Matrix, terms: Terms, size: int
) -> tuple[NDArray[np.float64], list[float]]:
    """Return the seconds of each link, and the largest by kind; incast slows a NIC down."""
    links = terms.links
    seconds = ends * _weights(links, size)
    seconds[:, 1] *= 1 + links.incast * np.maximum(messages[:, 1] - 1, 0)
    seconds += messages * np.repeat([links.inter_start_s, links.intra_start_s], 2)
    return seconds, [float(seconds[:, :2].max()), float(seconds[:, 2:].max())]


def spreadout(traffic: Traffic, terms: Terms) -> Timing:
    """Shift by shift, each GPU to the one so many places on."""
    demand, remote = traffic.demand(terms.demand), traffic.remote(terms.demand)
    ends = end_loads(remote, demand - remote)
    took, back = (
        spreadout_s(
            each,
            traffic.width,
            terms.links.inter_cost(size),
            terms.links.intra_cost(size),
        )
        for each, size in ((demand, terms.token_bytes), (demand.T, terms.combine_bytes))
    )
    return Timing(
        seconds=took,
        phases={"shifts": took},
        inter_tokens=int(remote.sum()),
        loads=ends,
        bottleneck=busiest(ends, ends * _weights(terms.links)),
        combine_s=back,
    )


def _low_latency(traffic: Traffic, terms: Terms) -> Timing:
    """DeepEP's low-latency kernels: a message for each expert of a token, nothing shared."""
    demand = traffic.demand("copies")
    remote = traffic.remote("copies")
    loads = end_loads(remote, demand - remote)
    links = terms.links
    most = [int(loads[:, :2].max()), int(loads[:, 2:].max())]
    times = {}
    for what, size in (("dispatch", terms.token_bytes), ("combine", terms.combine_bytes)):
        start, nic, port = LOW_LATENCY[what]
        across = most[0] * size / (links.inter * nic) + (start if most[0] else 0.0)
        times[what] = across, most[1] * size / (links.intra * port)
    _, nic, port = LOW_LATENCY["dispatch"]
    return Timing(
        seconds=max(times["dispatch"]),
        phases=dict(zip(("inter", "intra"), times["dispatch"], strict=True)),
        inter_tokens=int(remote.sum()),
        loads=loads,
        bottleneck=busiest(loads, loads * _weights(links, terms.token_bytes, nic, port)),
        combine_s=max(times["combine"]),
    )


def _fast_exact(traffic: Traffic, terms: Terms) -> Timing:
    """FAST as published."""
    demand = traffic.demand(terms.demand)
    found, back = (
        schedule(
            each,
            traffic.width,
            terms.links.inter_cost(size),
            terms.links.intra_cost(size),
            terms.decomposition,
        )
        for each, size in (
            (demand, terms.token_bytes),
            (np.ascontiguousarray(demand.T), terms.combine_bytes),
        )
    )
    exposed = found.total_s - found.balance_s - float(found.inter_s.sum())
    loads = _fast_loads(found)
    return Timing(
        seconds=found.total_s,
        phases={
            "balance": found.balance_s,
            "inter": float(found.inter_s.sum()),
            "exposed_intra": max(0.0, exposed),
        },
        inter_tokens=int(traffic.remote(terms.demand).sum()),
        loads=loads,
        bottleneck=busiest(loads, loads * _weights(terms.links)),
        combine_s=back.total_s,
    )


def _fast_loads(found: FastSchedule) -> Matrix:
    """Return the load of each GPU: its rail, balance, redistribution, and own node."""
    block = found.balanced
    nodes, width = block.shape[0], block.shape[2]
    node = np.arange(nodes)
    moved = found.moved.reshape(nodes, nodes, width, width).sum(axis=1)
    arriving = block.sum(axis=0)
    arriving[:, np.arange(width), np.arange(width)] = 0
    inside = moved + arriving
    sends = block.sum(axis=3)
    sends[node, node] = 0
    sums = (
        sends.sum(axis=1),
        sends.sum(axis=0),
        inside.sum(axis=2),
        inside.sum(axis=1),
    )
    return np.stack([each.ravel() for each in sums], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A schedule and the class of bounds it is held to."""

    run: Schedule
    bound: str
    copies_only: bool = False  # a token is sent once for each of its experts


STRATEGIES = {
    "deepep": Strategy(run=deepep, bound="proxy"),
    "deepep-ll": Strategy(run=_low_latency, bound="fixed", copies_only=True),
    "fast": Strategy(run=_fast_exact, bound="relayed"),
    "direct": Strategy(run=direct, bound="fixed"),
    "spreadout": Strategy(run=spreadout, bound="fixed"),
    "hierarchical": Strategy(run=hierarchical, bound="proxy"),
    "multicast-balanced": Strategy(run=_multicast_balanced, bound="multicast"),
}
