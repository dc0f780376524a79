"""Findings: the causes of lost time in a run, then its symptoms, each with evidence and cost.

The cost of a cause is what a step gains if it is fixed; ranks and stages that delay the same
steps share that gain (`sharing`). The cost of a symptom is the time it takes of a step. Both
are in ns, as means over steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm_kernels.arrays import Floats

Kind = Literal[
    "straggler",
    "slow_link",
    "jittery_host",
    "imbalanced_stage",
    "hot_expert",
    "late_rank",
    "exposed_communication",
    "copies",
    "idle",
]
SYMPTOMS: tuple[Kind, ...] = ("exposed_communication", "copies", "idle")
Confidence = Literal["high", "medium", "low"]

# A smaller share of a step is no finding; a cause of low confidence needs more.
LEAST_FINDING = 0.005
LEAST_UNSURE = 0.01
_HIGH = 3  # spreads between steps that a cost of high confidence exceeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The numbers behind a finding; which of them are known depends on its kind."""

    stage: int | None = None  # of the pipeline
    group: str | None = None  # description of the process group
    tag: str | None = None  # parallelisms, joined by "+"
    steps: int | None = None  # that the cost is a mean of
    spread_ns: float | None = None  # standard deviation of the cost between steps
    compute_ns: float | None = None  # of the subject, per step
    peers_compute_ns: float | None = None
    idle_ns: float | None = None
    peers_idle_ns: float | None = None
    wait_ns: float | None = None  # in collectives, for others
    peers_wait_ns: float | None = None
    expert_bytes: float | None = None  # of the all-to-alls of expert parallelism
    peers_expert_bytes: float | None = None
    longer_exchange_ns: float | None = None  # than the all-to-alls of other groups
    bus_bw: float | None = None  # bytes per second, of the slowest class of collectives
    peers_bus_bw: float | None = None
    slow_groups: int | None = None  # that have the subject's ranks in common
    exposed_wait_ns: float | None = None  # waiting for the last rank, exposed
    exposed_transfer_ns: float | None = None
    overlap: float | None = None  # share of the communication that overlaps compute
    copies_ns: float | None = None  # that overlap neither compute nor communication


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of lost time, or one symptom."""

    kind: Kind
    text: str
    ranks: tuple[int, ...]
    cost_ns: float  # of a step
    share: float  # of the mean step
    confidence: Confidence
    evidence: Evidence

    @property
    def is_symptom(self) -> bool:
        """Whether it says where time goes, and not why."""
        return self.kind in SYMPTOMS

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings that cost enough: causes first, each kind of them by cost."""
    enough = [each for each in findings if each.share >= _least(each)]
    return tuple(
        sorted(enough, key=lambda each: (each.is_symptom, -each.cost_ns, each.kind, each.ranks))
    )


def _least(finding: Finding) -> float:
    is_unsure = finding.confidence == "low" and not finding.is_symptom
    return LEAST_UNSURE if is_unsure else LEAST_FINDING


def spread(costs: Floats) -> float | None:
    """Return the standard deviation between steps; None for fewer than two known steps."""
    known = costs[~np.isnan(costs)]
    return float(np.std(known, ddof=1)) if len(known) > 1 else None


def confidence(
    cost: float, spread_ns: float | None, *, ranks: int, is_matched: bool
) -> Confidence:
    """Return how far a cost can be trusted.

    Low: one rank, one step, or a cost within the spread between steps. High: matched across
    ranks, and above three times the spread. Medium otherwise.
    """
    if ranks < 2 or spread_ns is None or cost <= spread_ns:  # noqa: PLR2004 - one rank
        return "low"
    return "high" if is_matched and cost > _HIGH * spread_ns else "medium"


def median(values: Mapping[int, float], ranks: Sequence[int]) -> float | None:
    """Return the median of the values of some ranks; None where no value is known."""
    known = [values[rank] for rank in ranks if rank in values]
    return float(np.median(known)) if known else None


def findings_table(findings: Sequence[Finding]) -> pa.Table:
    """Return a row per finding, in order; without findings the columns are there, too."""
    rows = [{**asdict(each), **asdict(each.evidence)} for each in findings]
    names = [("kind", pa.string()), ("text", pa.string()), ("ranks", pa.list_(pa.int64()))]
    names += [("cost_ns", pa.float64()), ("share", pa.float64()), ("confidence", pa.string())]
    names += [("stage", pa.int64()), ("group", pa.string()), ("tag", pa.string())]
    return pa.Table.from_pylist(rows, schema=pa.schema(names))


Rows = NDArray[np.int64]

# How long others wait for each of some ranks alone, ns a step, in collectives that all of them
# are in; a rank is left out where none is known.
CausedTogether = Callable[[Sequence[int]], Mapping[int, float]]

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
    def longer(self) -> float:
        """How much longer its own work takes than that of its peers, in ns."""
        return self.mean - self.middle

    @property
    def cost(self) -> float:
        """What the suspect delays a step, in ns, before others share it."""
        return self.longer * self.together

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that are meant, in order."""
        return tuple(sorted((self.rank, *self.tied)))


def joined_ties(suspects: Sequence[Suspect], caused: CausedTogether) -> list[Suspect]:
    """Join suspects of one kind with nearly the same cost: fixing one of them gains little.

    Together they cost the longest delay among them in each step: that of one where all are
    late at once, and the sum where they take turns, in steps or in the collectives of a step.
    """
    ties: list[list[Suspect]] = []
    for each in sorted(suspects, key=lambda suspect: (suspect.kind, -suspect.cost)):
        lead = ties[-1][0] if ties else None
        if lead and lead.kind == each.kind and each.cost >= _TIED * lead.cost:
            ties[-1].append(each)
        else:
            ties.append([each])
    return [_joined(tied, caused) if len(tied) > 1 else tied[0] for tied in ties]


def _joined(tied: Sequence[Suspect], caused: CausedTogether) -> Suspect:
    lead, *others = tied
    excess = np.max([each.excess for each in tied], axis=0)
    by_steps = float(excess.sum() / (lead.excess.sum() or 1.0))
    alone = _alone(tied, caused)
    # One of them delays the step by its cost, each of the others by what it is beyond the rest.
    longest = max(each.cost - own for each, own in zip(tied, alone, strict=True)) + sum(alone)
    together = max(by_steps, longest / lead.cost)
    return replace(
        lead,
        tied=tuple(each.rank for each in others),
        excess=excess * together / by_steps,
        together=together,
    )


def sharing(suspects: Sequence[Suspect], caused: CausedTogether) -> list[Suspect]:
    """Divide among suspects what they delay together, so that costs add up to what they delay.

    Those who delay the same time share it equally; what one delays beyond the others is its
    own: the Shapley value, the mean of what its fix gains over all orders of fixing them.
    By the steps of a run alone that is too little where they are late at different
    collectives of a step. But a suspect that is fixed last gains its cost, and one that is
    fixed sooner at least what others wait for it alone. Delays of the same rank follow each
    other: they add up, and are one in this.
    """
    if not suspects:
        return []
    place = _places(suspects)
    count = max(place) + 1
    excess = np.zeros((count, len(suspects[0].excess)))
    cost, alone = np.zeros((2, count))
    for row, each, awaited in zip(place, suspects, _alone(suspects, caused), strict=True):
        excess[row] += each.excess
        cost[row] += each.cost
        alone[row] = max(alone[row], awaited)
    least = (cost + (count - 1) * np.minimum(alone, cost)) / (count * cost)
    own = _shapley(excess)
    kept = np.divide(own, excess, out=np.ones_like(own), where=excess > 0)
    return [
        replace(
            each,
            share=max(
                float((each.excess * kept[row]).sum() / each.excess.sum()), float(least[row])
            ),
        )
        if each.excess.any()
        else each
        for row, each in zip(place, suspects, strict=True)
    ]


def _alone(suspects: Sequence[Suspect], caused: CausedTogether) -> list[float]:
    """Return what others wait for each suspect alone, at most its cost; 0 where unknown."""
    by_rank = caused(sorted({rank for each in suspects for rank in each.ranks}))
    return [
        min(each.cost, sum(by_rank.get(rank, 0.0) for rank in each.ranks)) for each in suspects
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
