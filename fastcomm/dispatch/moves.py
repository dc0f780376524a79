"""Placements with few moves of experts from the placement of today.

A move copies the weights of an expert to a GPU that did not have it. A replica that stays on
its GPU does not move, whatever its slot. Loads are in tokens.
"""

import math
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from fastcomm.dispatch.placement import (
    NEAR,
    Loads,
    Placement,
    Table,
    heaviest,
    least_load,
    place,
)
from fastcomm.errors import ConfigError
from fastcomm_kernels import moves as kernels
from fastcomm_kernels import placement as search

_CLOSE = 1e-12  # relative: changes that gain less are none
_WORK = 1_000_000  # pairs of slots that the search compares, about


def moves_to(before: Placement, after: Placement) -> Table:
    """Return how many experts each GPU gets that it did not have, shape (GPUs,)."""
    return np.asarray((_by_gpu(after) > _by_gpu(before)).sum(axis=1))


def _by_gpu(placement: Placement) -> Table:
    """Return 1 for each expert that a GPU has, else 0, shape (GPUs, experts)."""
    has = np.zeros((placement.gpus, placement.experts), np.int64)
    has[placement.home, placement.logical] = 1
    return has


def relabeled(before: Placement, after: Placement, width: int) -> Placement:
    """Return a placement with its GPUs renamed, so that the fewest experts move.

    Whole nodes of `width` GPUs trade places, and the GPUs of a node among each other, so that
    experts of one node stay together.
    """
    gpus = after.gpus
    common = np.minimum(_by_gpu(before)[:, None], _by_gpu(after)[None]).sum(
        axis=2
    )  # old by new
    nodes = gpus // width
    gain, order = np.zeros((nodes, nodes)), {}
    for old in range(nodes):
        for new in range(nodes):
            block = common[old * width : (old + 1) * width, new * width : (new + 1) * width]
            rows, columns = linear_sum_assignment(-block)
            gain[old, new], order[old, new] = block[rows, columns].sum(), columns
    _, chosen = linear_sum_assignment(-gain)
    source = np.concatenate(
        [new * width + order[old, new] for old, new in enumerate(chosen.tolist())]
    )
    per_gpu = len(after.logical) // gpus
    return replace(after, logical=after.logical.reshape(gpus, per_gpu)[source].ravel())


def settled(
    load: Loads, before: Placement, after: Placement, groups: int, cluster: tuple[int, int]
) -> Placement:
    """Return a placement with few moves from another one, and no GPU heavier than `after` has.

    GPUs are renamed, experts swap so that they are where they were, and slots of a GPU are in
    the order of before. If the placement before is as good, it stays.

    Parameters
    ----------
    load
        Load of each expert of one layer.
    before, after
        The placements of today and of the load.
    groups, cluster
        As of `bounded`.

    """
    gpus = after.gpus
    width = _domain(groups, cluster)
    most = heaviest(load, after.logical, gpus) * (1 + _CLOSE)
    if (
        len(before.logical) == len(after.logical)
        and heaviest(load, before.logical, gpus) <= most
        and _keeps_groups(before, groups, width)
    ):
        return before
    named = relabeled(before, after, width).logical.reshape(gpus, -1)
    was = np.ascontiguousarray(_by_gpu(before).T)
    slots = search.settled(np.asarray(load, np.float64), named, was, width, most)
    if slots.shape[1] * gpus == len(before.logical):
        slots = np.stack(
            [
                _ordered(*pair)
                for pair in zip(before.logical.reshape(gpus, -1), slots, strict=True)
            ]
        )
    return replace(after, logical=slots.ravel())


def _domain(groups: int, cluster: tuple[int, int]) -> int:
    """Return among how many GPUs experts may move: those of a node if groups stay in nodes."""
    nodes, gpus = cluster
    return gpus // nodes if groups % nodes == 0 else gpus


def _keeps_groups(placement: Placement, groups: int, width: int) -> bool:
    """Return whether the experts of each group are in one domain of `width` GPUs."""
    if width == placement.gpus:
        return True
    group = placement.logical // (placement.experts // groups)
    pairs = np.unique(np.stack([group, placement.home // width]), axis=1)
    return bool(pairs.shape[1] == groups)


def _ordered(old: Table, new: Table) -> Table:
    """Return the experts of a GPU in the slots that they had, the others in those left over."""
    ordered, rest = np.full(len(old), -1, np.int64), new.tolist()
    for slot, expert in enumerate(old.tolist()):
        if expert in rest:
            ordered[slot] = expert
            rest.remove(expert)
    ordered[ordered < 0] = rest
    return ordered


def bounded(
    load: Loads,
    before: Placement,
    replicas: int,
    groups: int,
    cluster: tuple[int, int],
    most_moves: int,
) -> Placement:
    """Return a placement with at most `most_moves` moves from another one.

    That is the best one of all if it has few enough moves. Otherwise the one before gets its
    new replicas, those without a move on GPUs that have the expert, and then, as long as moves
    remain, the replica or the swap that helps the heaviest GPU most. Some of these moves are
    undone and made elsewhere if that is better.

    Parameters
    ----------
    load
        Load of each expert of one layer.
    before
        The placement of today.
    replicas, groups
        As of `placement.place`.
    cluster
        Numbers of nodes and of GPUs.
    most_moves
        Bound of the moves of the layer.

    Raises
    ------
    ConfigError
        If an argument does not suit the others.

    """
    gpus, load = cluster[1], np.asarray(load, np.float64)
    best = settled(load, before, place(load, replicas, groups, *cluster), groups, cluster)
    fits = moves_to(before, best).sum() <= most_moves
    target = NEAR * least_load(load, replicas, gpus)
    if fits and heaviest(load, best.logical, gpus) <= target:
        return best
    slots, domain = _with_empty(before, replicas), _domain(groups, cluster)
    new = int((slots == before.experts).sum())
    needed = max(0, new - most_moves)
    choices = [best] if fits else []
    # A replica on a GPU that has the expert is no move, and leaves one for elsewhere.
    for twins in sorted({needed, new}):
        if choices and heaviest(load, choices[-1].logical, gpus) <= target:
            break
        goal = domain, most_moves - new + twins, target
        choices.append(_changed(load, _with_twins(load, slots, twins), goal))
    return min(
        choices,
        key=lambda one: (heaviest(load, one.logical, gpus), int(moves_to(before, one).sum())),
    )


def _with_twins(load: Loads, slots: Table, number: int) -> Table:
    """Return slots, a `number` of the empty ones with an expert that their GPU has.

    These are on the heaviest GPUs, and each is the expert that makes its GPU least heavier.
    """
    slots, experts = slots.copy(), len(load)
    for _ in range(number):
        full = slots < experts
        own = np.where(full, slots, 0)
        count = np.bincount(slots[full], minlength=experts)
        share = np.where(full, (load / count)[own], 0.0)
        same = (slots[:, :, None] == slots[:, None, :]).sum(axis=2)
        rise = np.where(full, (same + 1) * load[own] / (count[own] + 1) - same * share, np.inf)
        weight = np.where(full.all(axis=1), -np.inf, share.sum(axis=1))
        gpu = int(np.argmax(weight))
        empty = int(np.flatnonzero(~full[gpu])[0])
        slots[gpu, empty] = slots[gpu, int(np.argmin(rise[gpu]))]
    return slots


def placed_anew(
    load: Loads,
    before: Placement,
    replicas: int,
    groups: int,
    cluster: tuple[int, int],
    most_moves: int | None,
) -> Placement:
    """Return the best placement, or with at most `most_moves` moves; arguments as `bounded`."""
    if most_moves is not None:
        return bounded(load, before, replicas, groups, cluster, most_moves)
    return settled(load, before, place(load, replicas, groups, *cluster), groups, cluster)


def _with_empty(before: Placement, replicas: int) -> Table:
    """Return the experts of each GPU, shape (GPUs, slots); empty slots have a new expert."""
    gpus, room = before.gpus, replicas // before.gpus
    own = before.logical.reshape(gpus, -1)
    if own.shape[1] > room:
        raise ConfigError(
            f"the placement before has {own.size} replicas, more than {replicas}; pass more "
            "--replicas"
        )
    return np.pad(own, ((0, 0), (0, room - own.shape[1])), constant_values=before.experts)


def _changed(load: Loads, slots: Table, goal: tuple[int, int, float]) -> Placement:
    """Return the placement after changes of slots, which are as `_with_empty` returns them.

    `goal` has the width of a domain of GPUs, the bound of moves without those into empty slots,
    and the load of the heaviest GPU that suffices.
    """
    # High powers of loads near 1 are numbers.
    scale = math.sqrt(load.sum() / len(slots) * load.max()) or 1.0
    scaled, suffices = np.append(load, 0.0) / scale, goal[2] / scale
    new = kernels.changed(scaled, slots, (goal[0], goal[1], suffices), _WORK)
    ordered = [_ordered(*pair) for pair in zip(slots, new, strict=True)]
    return Placement(logical=np.concatenate(ordered), experts=len(load), gpus=len(slots))
