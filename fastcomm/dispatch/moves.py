"""Moves between placements of experts: counted, bounded, and whether they pay.

A move copies the weights of an expert to a GPU that did not have it. A replica that stays on
its GPU does not move, whatever its slot. Loads are in tokens, sizes in bytes, times in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import stdtrit

from fastcomm import files
from fastcomm.checks import shortened
from fastcomm.dispatch.placement import Loads, Placement, Table, heaviest, place, replicated
from fastcomm.errors import ConfigError
from fastcomm_kernels import dispatch
from fastcomm_kernels import placement as kernels

_CLOSE = 1e-12  # relative: changes that gain less are none
_TINY = 1e-300
_FEWEST = 2  # samples with an error
_SURE = 0.99  # of savings that count: chance that they are no noise


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftStep:
    """A recorded step, and what a placement made from the load of the step before it saves.

    The placement that stays and the new one are both measured on this step and all later ones,
    whose loads neither of them is made from. An imbalance is the load of the heaviest GPU over
    the mean, of all layers together.
    """

    step: int
    imbalance_kept: float
    imbalance_anew: float
    moves: int  # of all layers
    move_s: float | None  # to the GPU that gets the most experts; None without its bytes
    saved_s: float  # of the exchange of an iteration; below 0: it takes longer
    error_s: float | None  # of `saved_s`; None of a single layer and step

    @property
    def is_saving(self) -> bool | None:
        """Whether savings exceed their error; None if it is unknown."""
        return None if self.error_s is None else self.saved_s > max(0.0, self.error_s)

    @property
    def pays_after(self) -> float | None:
        """Iterations that save the time of the moves; None if they do not, or it is unknown."""
        if self.move_s is None or not self.is_saving:
            return None
        return self.move_s / self.saved_s

    def to_dict(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        return {
            "step": self.step,
            "imbalance_kept": self.imbalance_kept,
            "imbalance_anew": self.imbalance_anew,
            "moves": self.moves,
            "move_ns": None if self.move_s is None else self.move_s * 1e9,
            "saved_ns": self.saved_s * 1e9,
            "saved_error_ns": None if self.error_s is None else self.error_s * 1e9,
            "is_saving": self.is_saving,
            "pays_after_iterations": self.pays_after,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """What moves of experts cost, and the exchange that they shorten."""

    expert_bytes: int | None  # weights of an expert
    bytes_per_s: float  # to a GPU
    layer_s: Loads  # dispatch and combine of each layer in an iteration


def drift(
    loads: NDArray[np.float64],
    today: Sequence[Placement] | None,
    replicas: int,
    groups: int,
    cluster: tuple[int, int],
    costs: MoveCosts,
) -> tuple[DriftStep, ...]:
    """Return for each step what a placement made from the step before it would save.

    The exchange of a layer is taken to be as long as its heaviest GPU, so that no more is saved
    than the exchange takes.

    Parameters
    ----------
    loads
        Shape (steps, layers, experts).
    today
        The placement of each layer that stays; None is one made from the first step, so that
        the third step is the first of the result.
    replicas, groups, cluster
        As of `bounded`.
    costs
        Of moves, and of the exchange.

    """
    gpus = cluster[1]
    first = 1 if today is not None else 2
    stays = today or [place(load, replicas, groups, *cluster) for load in loads[0]]
    steps = []
    for number in range(first, len(loads)):
        anew = [
            settled(load, old, place(load, replicas, groups, *cluster), groups, cluster)
            for load, old in zip(loads[number - 1], stays, strict=True)
        ]
        later = loads[number:]
        stale, fresh = (
            np.array([_heaviest_of(step, kind, gpus) for step in later])
            for kind in (stays, anew)
        )
        share = 1 - np.divide(fresh, stale, out=np.ones_like(stale), where=stale > 0)
        saved = share * costs.layer_s
        moved = sum(moves_to(old, new) for old, new in zip(stays, anew, strict=True))
        size, mean = costs.expert_bytes, float(later.sum()) / gpus
        steps.append(
            DriftStep(
                step=number,
                imbalance_kept=float(stale.sum()) / mean,
                imbalance_anew=float(fresh.sum()) / mean,
                moves=int(np.sum(moved)),
                move_s=None
                if size is None
                else float(np.max(moved)) * size / costs.bytes_per_s,
                saved_s=float(saved.sum()) / len(later),
                error_s=_error_s(
                    saved, _aging_s(loads[number - 1], later, anew, costs.layer_s)
                ),
            )
        )
    return tuple(steps)


def _error_s(saved: Loads, aging_s: float) -> float | None:
    """Return the error of the mean over steps of the sum over layers, shape (steps, layers).

    It is that of Student's distribution, which 99 % of cases do not exceed, and no less than
    `aging_s`: two placements made from noise differ by chance, and by less than that.
    """
    if saved.size < _FEWEST:
        return None
    layers = saved.shape[1]
    deviation = float(np.sqrt(layers * saved.var(ddof=1) / len(saved)))
    return max(aging_s, float(stdtrit(saved.size - 1, _SURE)) * deviation)


def _aging_s(
    own: Loads, later: Loads, placements: Sequence[Placement], layer_s: Loads
) -> float:
    """Return the part of an exchange that is longer as `own` loads are followed by later ones.

    `placements` are made from `own`, whose noise they suit.
    """
    gpus = placements[0].gpus
    uneven = [
        _heaviest_of(step, placements, gpus) / np.maximum(step.sum(axis=1) / gpus, _TINY)
        for step in (own, *later)
    ]
    after = np.mean(uneven[1:], axis=0)
    return float((layer_s * np.maximum(0.0, 1 - uneven[0] / np.maximum(after, 1.0))).sum())


def _heaviest_of(loads: Loads, placements: Sequence[Placement], gpus: int) -> Loads:
    """Return the load of the heaviest GPU of each layer."""
    pairs = zip(loads, placements, strict=True)
    return np.array([heaviest(load, one.logical, gpus) for load, one in pairs])


def read_placements(path: Path, layers: int, experts: int, gpus: int) -> tuple[Placement, ...]:
    """Read placements: `physical_to_logical` of each layer, as `dispatch place --json` has it.

    SGLang's `physical_to_logical_map`, a list per layer, is read as well.

    Raises
    ------
    ConfigError
        If the file cannot be read, or has other layers, experts or GPUs.

    """
    document = files.json(path)
    rows: Any = None
    if isinstance(document, dict):
        rows = document.get("physical_to_logical_map")
        if rows is None and isinstance(document.get("layers"), list):
            own = [layer for layer in document["layers"] if isinstance(layer, dict)]
            rows = [layer.get("physical_to_logical") for layer in own]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(
            f"{path}: no layers with physical_to_logical, as `fastcomm dispatch place --json` "
            "writes, and no physical_to_logical_map"
        )
    if len(rows) != layers:
        raise ConfigError(f"{path}: {len(rows)} layers, but the workload has {layers}")
    for number, row in enumerate(rows):
        _check_row(row, f"{path}: layer {number}", experts, gpus)
    return tuple(
        Placement(logical=np.array(row, np.int64), experts=experts, gpus=gpus) for row in rows
    )


def _check_row(row: list[Any], where: str, experts: int, gpus: int) -> None:
    """Raise `ConfigError` unless a row has every expert, and equally many for each GPU."""
    bad = [one for one in row if type(one) is not int or not 0 <= one < experts]
    if bad:
        raise ConfigError(
            f"{where}: {shortened(bad[0])} is not an expert from 0 to {experts - 1}"
        )
    if len(row) % gpus or set(row) != set(range(experts)):
        raise ConfigError(
            f"{where}: {len(row)} replicas; expected all {experts} experts, and equally many "
            f"on each of {gpus} GPUs"
        )
