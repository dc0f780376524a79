"""Replicate experts and place them on GPUs by their load, as EPLB does, with swaps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import ConfigError
from fastcomm_kernels import dispatch

Loads = NDArray[np.float64]
Table = NDArray[np.int64]
_SWAPS = 20  # at most, an expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of replicated experts on GPUs.

    A physical expert is a replica of a logical expert. Physical expert p is on GPU p //
    (replicas / GPUs).
    """

    logical: Table  # logical expert of each physical expert
    experts: int
    gpus: int

    @property
    def replicas(self) -> Table:
        """Number of replicas of each logical expert, shape (experts,)."""
        return np.bincount(self.logical, minlength=self.experts)

    @property
    def physical(self) -> list[list[int]]:
        """Physical experts of each logical expert."""
        return [np.flatnonzero(self.logical == e).tolist() for e in range(self.experts)]

    @property
    def home(self) -> NDArray[np.int32]:
        """GPU of each physical expert, shape (replicas,); GPUs have equally many."""
        per_gpu = len(self.logical) // self.gpus
        return (np.arange(len(self.logical)) // per_gpu).astype(np.int32)

    def to_dict(self) -> dict[str, Any]:
        """Return the placement as a JSON object."""
        return {
            "physical_to_logical": self.logical.tolist(),
            "logical_to_physical": self.physical,
            "replicas": self.replicas.tolist(),
        }


def packed(load: Loads, packs: int) -> tuple[Table, Table]:
    """Pack items of a load into packs of equal size: heaviest first, into the lightest pack.

    Returns
    -------
    pack : ndarray
        Pack of each item.
    place : ndarray
        Position of each item in its pack.

    Raises
    ------
    ConfigError
        If the items do not fill the packs evenly.

    """
    room, remainder = divmod(len(load), packs)
    if remainder:
        raise ConfigError(f"placement: {len(load)} items do not fill {packs} packs evenly")
    if room == 1:
        return np.arange(len(load)), np.zeros(len(load), np.int64)
    order = np.argsort(-load, kind="stable")
    pack = dispatch.packed(load, order, packs)
    return pack, _positions(pack, order)


def _positions(pack: Table, order: Table) -> Table:
    """Return the position of each item in its pack, if packs are filled in an order."""
    by_pack = order[np.argsort(pack[order], kind="stable")]
    room = len(pack) // (int(pack.max(initial=0)) + 1)
    place = np.empty(len(pack), np.int64)
    place[by_pack] = np.arange(len(pack)) % room
    return place


def _balanced(load: Loads, packs: int, floor: float) -> tuple[Table, Table]:
    """Pack items as `packed`, then swap some, until the heaviest pack has at most `floor`."""
    pack, place = packed(load, packs)
    swapped = dispatch.swapped(load, pack, packs, floor, _SWAPS * len(load))
    if (swapped == pack).all():
        return pack, place
    return swapped, _positions(swapped, np.argsort(-load, kind="stable"))


def replicated(load: Loads, total: int) -> Table:
    """Return the logical expert of each replica: one of each, then more of the heaviest.

    The heaviest has the most tokens per replica.

    Parameters
    ----------
    load
        Tokens of each logical expert.
    total
        Number of replicas, at least the number of experts.

    """
    count = np.ones(len(load), np.int64)
    logical = list(range(len(load)))
    for _ in range(total - len(load)):
        heaviest = int(np.argmax(load / count))
        count[heaviest] += 1
        logical.append(heaviest)
    return np.array(logical, np.int64)


def place(load: Loads, replicas: int, groups: int, nodes: int, gpus: int) -> Placement:
    """Place replicas of experts by their load, as EPLB does, then swap some.

    Swaps make the heaviest GPU lighter, and no placement has a heavier one than EPLB's. If
    `nodes` divides `groups`, each group of experts stays in one node, otherwise all GPUs are
    filled together.

    Parameters
    ----------
    load
        Load of each logical expert of one layer, shape (experts,).
    replicas
        Number of physical experts, a multiple of `gpus`.
    groups
        Number of groups of experts, a divisor of the experts.
    nodes, gpus
        Numbers of nodes, and of GPUs of all nodes.

    Raises
    ------
    ConfigError
        If replicas or groups do not suit the cluster and the experts.

    """
    experts = len(load)
    if replicas % gpus or replicas < experts:
        raise ConfigError(
            f"invalid replicas {replicas}: expected a multiple of {gpus} GPUs, at least the "
            f"{experts} experts"
        )
    if groups < 1 or experts % groups:
        raise ConfigError(f"invalid groups {groups}: expected a divisor of {experts} experts")
    load = np.asarray(load, np.float64)
    logical = (
        _place_globally(load, replicas, gpus)
        if groups % nodes
        else _place_by_node(load, replicas, groups, (nodes, gpus))
    )
    return Placement(logical=logical, experts=experts, gpus=gpus)


def _place_globally(load: Loads, replicas: int, gpus: int) -> Table:
    """Return the logical expert of each physical one, placed on all GPUs alike."""
    logical = replicated(load, replicas)
    shared = (load / np.bincount(logical, minlength=len(load)))[logical]
    pack, slot = _balanced(shared, gpus, max(load.sum() / gpus, shared.max(initial=0.0)))
    logical_by_slot = np.empty_like(logical)
    logical_by_slot[pack * (replicas // gpus) + slot] = logical
    return logical_by_slot


def _place_by_node(load: Loads, replicas: int, groups: int, cluster: tuple[int, int]) -> Table:
    """Return each physical expert's logical one; a group of experts stays in one node.

    `replicas` is the number of physical experts, and `cluster` the numbers of nodes and
    GPUs.
    """
    nodes, gpus = cluster
    size = len(load) // groups
    of_groups = load.reshape(groups, size).sum(axis=1)
    # Nodes of more even loads may have experts that are harder to divide: both are tried.
    choices = packed(of_groups, nodes)[0], _balanced(of_groups, nodes, load.sum() / nodes)[0]
    candidates = []
    for node_of in choices[: 1 if (choices[0] == choices[1]).all() else 2]:
        parts = []
        for node in range(nodes):
            own = np.flatnonzero(np.repeat(node_of, size) == node)
            parts.append(own[_place_globally(load[own], replicas // nodes, gpus // nodes)])
        candidates.append(np.concatenate(parts))
    return min(candidates, key=lambda logical: heaviest(load, logical, gpus))


def heaviest(load: Loads, logical: Table, gpus: int) -> float:
    """Return the load of the heaviest GPU, if replicas share the load of their expert."""
    shared = (load / np.bincount(logical, minlength=len(load)))[logical]
    return float(shared.reshape(gpus, -1).sum(axis=1).max())
