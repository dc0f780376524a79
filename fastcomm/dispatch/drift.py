"""Whether placing experts anew pays, as the loads of experts drift from step to step.

Loads are in tokens, sizes in bytes, times in seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from fastcomm.dispatch.moves import moves_to, placed_anew
from fastcomm.dispatch.placement import Loads, Placement, heaviest_by_step, place

_FEWEST = 2  # samples with an error
_SURE = 0.99  # of savings that count: chance that they are no noise
_TINY = 1e-300


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
    def pays_after(self) -> int | None:
        """Iterations that save the time of the moves; None if none do, or it is unknown."""
        if self.move_s is None or not self.is_saving:
            return None
        return math.ceil(self.move_s / self.saved_s)

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
    """What moves of experts cost, how many there may be, and the exchange that they shorten."""

    expert_bytes: int | None  # weights of an expert
    bytes_per_s: float  # to a GPU
    layer_s: Loads  # dispatch and combine of each layer in an iteration, as it is placed
    most_moves: int | None = None  # of a layer; None is any number


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
    than the exchange takes with the placement that stays.

    Parameters
    ----------
    loads
        Shape (steps, layers, experts).
    today
        The placement of each layer that stays; None is the one of `placed_by`, made from the
        first step, so that the third step is the first of the result.
    replicas, groups, cluster
        As of `bounded`.
    costs
        Of moves, and of the exchange with the placement that stays.

    """
    gpus = cluster[1]
    first = 1 if today is not None else 2
    stays = today or placed_by(loads[0], replicas, groups, cluster)
    all_stale, means = _heaviest_of(loads, stays), loads.sum(axis=2) / gpus
    steps = []
    for number in range(first, len(loads)):
        anew = [
            placed_anew(load, old, replicas, groups, cluster, costs.most_moves)
            for load, old in zip(loads[number - 1], stays, strict=True)
        ]
        later, stale = loads[number:], all_stale[number:]
        aged = _heaviest_of(loads[number - 1 :], anew)  # and the load that it is made from
        fresh, uneven = aged[1:], aged / np.maximum(means[number - 1 :], _TINY)
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
                error_s=_error_s(saved, _aging_s(uneven, costs.layer_s)),
            )
        )
    return tuple(steps)


def placed_by(
    loads: Loads, replicas: int, groups: int, cluster: tuple[int, int]
) -> list[Placement]:
    """Return a placement of each layer, whose loads have the shape (layers, experts)."""
    return [place(load, replicas, groups, *cluster) for load in loads]


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


def _aging_s(uneven: Loads, layer_s: Loads) -> float:
    """Return the part of an exchange that is longer as a load is followed by later ones.

    `uneven` has the heaviest GPU over the mean, shape (steps, layers): first of the load that
    the placements are made from, whose noise they suit, and then of the later ones.
    """
    after = np.mean(uneven[1:], axis=0)
    return float((layer_s * np.maximum(0.0, 1 - uneven[0] / np.maximum(after, 1.0))).sum())


def _heaviest_of(loads: Loads, placements: Sequence[Placement]) -> Loads:
    """Return the load of the heaviest GPU by step and layer; one placement is of a layer."""
    by_layer = [
        heaviest_by_step(loads[:, layer], one.logical, one.gpus)
        for layer, one in enumerate(placements)
    ]
    return np.stack(by_layer, axis=1)
