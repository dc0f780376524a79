"""Placements with few moves of experts from the placement of today.

A move copies the weights of an expert to a GPU that did not have it. A replica that stays on
its GPU does not move, whatever its slot. Loads are in tokens.
"""

from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from fastcomm.dispatch.placement import Loads, Placement, Table, heaviest, place, replicated
from fastcomm.errors import ConfigError
from fastcomm_kernels import dispatch
from fastcomm_kernels import placement as kernels

_CLOSE = 1e-12  # relative: changes that gain less are none


def moves_to(before: Placement, after: Placement) -> Table:
    """Return how many experts each GPU gets that it did not have, shape (GPUs,)."""
    old, new = _by_gpu(before), _by_gpu(after)
    return np.asarray(np.maximum(new - old, 0).sum(axis=1))


def _by_gpu(placement: Placement) -> Table:
    """Return the number of replicas of each expert on each GPU, shape (GPUs, experts)."""
    counts = np.zeros((placement.gpus, placement.experts), np.int64)
    np.add.at(counts, (placement.home, placement.logical), 1)
    return counts


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
    slots = kernels.settled(np.asarray(load, np.float64), named, was, width, most)
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

    That is the best one if it has few enough moves. Otherwise the one before gets its new
    replicas, then replicas of cold experts make room for those of hot ones, and pairs of
    experts trade places, as long as the heaviest GPU becomes lighter and moves remain.

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
        If new replicas alone are more moves, or an argument does not suit the others.

    """
    gpus, width = cluster[1], _domain(groups, cluster)
    best = settled(load, before, place(load, replicas, groups, *cluster), groups, cluster)
    if moves_to(before, best).sum() <= most_moves:
        return best
    slots = _filled(load, before, replicas, width)
    rest = most_moves - (replicas - len(before.logical))
    if rest < 0:
        raise ConfigError(
            f"--max-moves {most_moves}: {replicas - len(before.logical)} new replicas are more "
            "moves already"
        )
    parts = []
    for first in range(0, gpus, width):
        part, rest = _improved(load, slots[first : first + width], rest)
        parts.append(part)
    logical = np.concatenate(parts).ravel()
    changed = Placement(logical=logical, experts=len(load), gpus=gpus)
    return min(
        (changed, Placement(logical=slots.ravel(), experts=len(load), gpus=gpus)),
        key=lambda one: heaviest(load, one.logical, gpus),
    )


def _filled(load: Loads, before: Placement, replicas: int, width: int) -> Table:
    """Return the experts of each GPU, shape (GPUs, slots), with new replicas in empty slots.

    New replicas stay with their expert among the first, second ... `width` GPUs.
    """
    gpus, room = before.gpus, replicas // before.gpus
    slots = np.full((gpus, room), -1, np.int64)
    own = before.logical.reshape(gpus, -1)
    if own.shape[1] > room:
        raise ConfigError(
            f"the placement before has {own.size} replicas, more than {replicas}; pass more "
            "--replicas"
        )
    slots[:, : own.shape[1]] = own
    if own.shape[1] == room:
        return slots
    for first in range(0, gpus, width):
        part = slots[first : first + width]
        experts = np.unique(part[part >= 0])
        share = load[experts]
        extra = replicated(share, part.size - int((part >= 0).sum()) + len(experts))
        counts = np.bincount(extra, minlength=len(experts))
        weight = _weights(load, part)
        new = np.repeat(experts, counts - 1)
        for expert in new[np.argsort(-(load[new]), kind="stable")]:
            free = np.flatnonzero((part < 0).any(axis=1))
            gpu = free[np.argmin(weight[free])]
            part[gpu, np.argmax(part[gpu] < 0)] = expert
            weight = _weights(load, part)
    return slots


def _weights(load: Loads, slots: Table) -> Loads:
    """Return the load of each GPU, if replicas share that of their expert; -1 is empty."""
    counts = np.bincount(slots[slots >= 0], minlength=len(load))
    shared = np.append(load / np.maximum(counts, 1), 0.0)
    return np.asarray(shared[slots].sum(axis=1))


def _improved(load: Loads, slots: Table, moves: int) -> tuple[Table, int]:
    """Return slots after moves that make the heaviest GPU lighter, and the moves that remain.

    `moves` is their bound.
    """
    slots = slots.copy()
    while moves > 0:
        heavy = float(_weights(load, slots).max())
        better = _replaced(load, slots)
        if better is None or float(_weights(load, better).max()) >= heavy * (1 - _CLOSE):
            break
        slots, moves = better, moves - 1
    counts = np.bincount(slots.ravel(), minlength=len(load))
    shared = (load / np.maximum(counts, 1))[slots.ravel()]
    pack = np.repeat(np.arange(len(slots)), slots.shape[1])
    floor = max(float(shared.sum()) / len(slots), float(shared.max(initial=0.0)))
    swapped = dispatch.swapped(shared, pack, len(slots), floor, moves // 2)
    moves -= int((swapped != pack).sum())
    order = np.argsort(swapped, kind="stable")
    return slots.ravel()[order].reshape(slots.shape), max(0, moves)


def _replaced(load: Loads, slots: Table) -> Table | None:
    """Return slots with one more replica of the hottest expert; None if none can go.

    It takes the slot of a replica whose expert has others, where the heaviest GPU is lightest.
    """
    counts = np.bincount(slots.ravel(), minlength=len(load))
    hottest = int(np.argmax(load / np.maximum(counts, 1)))
    best, heavy = None, np.inf
    for gpu, slot in np.argwhere(counts[slots] > 1).tolist():
        if slots[gpu, slot] == hottest or hottest in slots[gpu]:
            continue
        trial = slots.copy()
        trial[gpu, slot] = hottest
        most = float(_weights(load, trial).max())
        if most < heavy:
            best, heavy = trial, most
    return best
