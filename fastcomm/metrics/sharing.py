"""Suspects, which delay the steps of a run, and how they share the cost of a delay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.findings import Kind
from fastcomm_kernels.arrays import Floats

Rows = NDArray[np.int64]

_TIED = 0.9  # of the largest cost: ranks that are late by so much are late together


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank or stage that is above its peers in a measure, and the ranks that tie with it."""

    rows: Rows  # of the grid: of the rank, or of a stage
    rank: int
    others: NDArray[np.int64]  # rows of its peers
    mean: float
    middle: float  # median of its peers
    excess: Floats  # above its peers, in each step
    kind: Kind = "straggler"
    tied: tuple[int, ...] = ()  # other ranks
    together: float = 1.0  # the delay with the tied ranks, in multiples of its own
    share: float = 1.0  # of the cost, where other suspects delay the same steps

    @property
    def cost(self) -> float:
        """What the suspect delays a step, in ns, before others share it."""
        return (self.mean - self.middle) * self.together

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that are meant, in order."""
        return tuple(sorted((self.rank, *self.tied)))


def joined_ties(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Join suspects of one kind with nearly the same cost: fixing one of them gains little.

    Together they cost the longest delay among them in each step: that of one where all are
    late in the same steps, and the sum where they take turns.
    """
    found: list[Suspect] = []
    for each in sorted(suspects, key=lambda suspect: (suspect.kind, -suspect.cost)):
        lead = found[-1] if found else None
        if lead and lead.kind == each.kind and each.cost * lead.together >= _TIED * lead.cost:
            excess = np.maximum(lead.excess, each.excess)
            together = lead.together * float(excess.sum() / (lead.excess.sum() or 1.0))
            tied = (*lead.tied, each.rank)
            found[-1] = replace(lead, tied=tied, excess=excess, together=together)
        else:
            found.append(each)
    return found


def sharing(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Divide among suspects what they delay together, so that costs add up to what they delay.

    In each step those who delay it by some time share that time equally; what one delays
    it beyond the others is its own (the Shapley value of the longest delay). Delays of the same
    rank follow each other: they add up, and are one in this.
    """
    if not suspects:
        return []
    place = _places(suspects)
    excess = np.zeros((max(place) + 1, len(suspects[0].excess)))
    for row, each in zip(place, suspects, strict=True):
        excess[row] += each.excess
    own = _shapley(excess)
    kept = np.divide(own, excess, out=np.ones_like(own), where=excess > 0)
    return [
        replace(each, share=float((each.excess * kept[row]).sum() / each.excess.sum()))
        if each.excess.any()
        else each
        for row, each in zip(place, suspects, strict=True)
    ]


def _places(suspects: Sequence[Suspect]) -> list[int]:
    """Return a number for each suspect, which those that share a rank have in common."""
    places: list[int] = []
    for number, each in enumerate(suspects):
        same = (
            place
            for place, other in zip(places, suspects, strict=False)
            if not set(other.ranks).isdisjoint(each.ranks)
        )
        places.append(next(same, number))
    return places


def _shapley(excess: Floats) -> Floats:
    """Return what each row has of the longest delay in each step (column)."""
    falling = -np.sort(-excess, axis=0)
    beyond = falling - np.vstack([falling[1:], np.zeros_like(falling[:1])])
    parts = beyond / np.arange(1, len(excess) + 1)[:, np.newaxis]
    of_place = parts[::-1].cumsum(axis=0)[::-1]
    place = np.argsort(np.argsort(-excess, axis=0, kind="stable"), axis=0)
    return np.take_along_axis(of_place, place, axis=0)
