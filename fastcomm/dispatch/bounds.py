"""What no schedule can beat, by what a class of schedules is allowed to do.

Each bound is a time of one layer; a schedule is held to those of its class.
"""

from dataclasses import dataclass

from fastcomm.dispatch.traffic import Matrix, Traffic, sum_by_node
from fastcomm.hardware.cluster import GpuLinks

CLASSES = ("relayed", "fixed", "multicast", "proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds of one layer, in seconds."""

    relayed_s: float  # no dedupe, any NIC of a node may carry: FAST
    fixed_s: float  # each GPU sends and receives its own: direct, SpreadOut
    multicast_s: float  # once a node, any NIC of it
    proxy_s: float  # once a node, by the NICs of the source's rank: DeepEP
    gpu_s: float  # what a GPU itself needs or has, over all its links
    node_s: float  # what is handed on inside a node, where it arrives once
    joint_s: float  # what the GPUs of a node need, over all their links

    @property
    def optimal_s(self) -> float:
        """What no schedule of any class beats."""
        return max(self.multicast_s, self.gpu_s, self.joint_s)

    def of(self, kind: str) -> float:
        """The bound of a class: one of `CLASSES`."""
        inside = self.node_s if kind in {"multicast", "proxy"} else self.joint_s
        return max(float(getattr(self, f"{kind}_s")), self.gpu_s, inside)


def bounds(traffic: Traffic, links: GpuLinks, size: int, demand: str = "copies") -> Bounds:
    """The bounds of a layer with tokens of `size` bytes."""
    width, remote = traffic.width, traffic.remote(demand)
    nic, port = size / links.inter, size / links.intra
    # The NICs of a single node carry nothing.
    both = size / (links.inter + links.intra) if traffic.nodes > 1 else port
    pairs = traffic.remote_node_unique.reshape(traffic.nodes, width, -1).sum(axis=1)
    arriving = pairs.sum(axis=0)
    needed = traffic.demand("unique")
    needed_by_node = needed.sum(axis=0).reshape(-1, width).sum(axis=1)
    return Bounds(
        relayed_s=_most(sum_by_node(remote, width)) * nic / width,
        fixed_s=_most(remote) * nic,
        multicast_s=_most(pairs) * nic / width,
        proxy_s=_proxy(traffic) * nic,
        gpu_s=float(max(needed.sum(axis=0).max(), traffic.leaving.max())) * both,
        node_s=max(0.0, float((needed_by_node - arriving).max())) * port / width,
        joint_s=float(needed_by_node.max()) * both / width,
    )


def _most(matrix: Matrix) -> float:
    return float(max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max()))


def _proxy(traffic: Traffic) -> float:
    remote = traffic.remote_node_unique
    by_rank = remote.reshape(traffic.nodes, traffic.width, -1).sum(axis=0)
    return float(max(by_rank.max(), remote.sum(axis=1).max()))
