"""Ranks and stages whose own work takes longer than that of their peers.

Own work is compute, and time in which the device has nothing to do. How long it takes is told
by one clock, so nothing here needs clocks that agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.findings import Evidence, Finding, Kind, Subject
from fastcomm.metrics.heat import Grid
from fastcomm.metrics.outliers import LEAST_SHARE, above_peers, peers_of
from fastcomm.units import format_ns

Floats = NDArray[np.float64]

# A stage's work differs by itself: the first embeds, the last has the head.
LEAST_STAGE = 0.02
# Of what a rank computes more, the share that it gets more to do for, to be called hot.
_HOT = 1 / 3
_LEAST_HOT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What there is to judge by."""

    grid: Grid
    stage: Mapping[int, int]  # of ranks
    received: Mapping[int, float]  # bytes of expert parallelism that each rank gets, a step
    waits: Mapping[int, float]  # ns that each rank waits for others, a step
    # what a rank's exchanges with other experts take longer than those of other groups
    longer: Callable[[int], float | None]

    @property
    def step_ns(self) -> float:
        """The mean iteration time."""
        return self.grid.step_ns or 0.0


def slow_ranks(known: Known) -> list[Finding]:
    """Ranks that compute longer than the others of their stage: slow, or with more to do."""
    return _above(known, "compute_ns", _compute_finding)


def jittery_hosts(known: Known) -> list[Finding]:
    """Ranks whose device has nothing to do for longer than the others of their stage."""
    return _above(known, "idle_ns", _idle_finding)


def imbalanced_stages(known: Known) -> list[Finding]:
    """The stage that computes longer than the others, if it does."""
    step, parts = known.step_ns, peers_of(known.grid, known.stage)
    means = known.grid.mean_by_rank("compute_ns")
    # Of a stage its median: one slow rank in it is no imbalance.
    stages = np.array([_median(means[rows]) for rows in parts])
    found = []
    for index, middle, _ in above_peers(stages, LEAST_STAGE * step):
        ranks = tuple(known.grid.ranks[parts[index]].tolist())
        cost = float(stages[index]) - middle
        found.append(
            Finding(
                kind="imbalanced_stage",
                subject=Subject(ranks=ranks, stage=known.stage.get(ranks[0]), tag="PP"),
                cost_ns=cost,
                cost_share=cost / step,
                evidence=Evidence(compute_ns=float(stages[index]), peers_compute_ns=middle),
                words=f"Stage {known.stage.get(ranks[0])} of the pipeline computes "
                f"{format_ns(cost)} a step longer than the other stages, which wait for it.",
            )
        )
    return found


def _median(values: Floats) -> float:
    """The lower of two, so that one slow rank of two is not the stage."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else np.nan


def _above(known: Known, measure: str, judge: "Judge") -> list[Finding]:
    """A finding for each rank whose mean stands apart from its stage's."""
    means, found = known.grid.mean_by_rank(measure), []
    for rows in peers_of(known.grid, known.stage):
        for index, middle, _ in above_peers(means[rows], LEAST_SHARE * known.step_ns):
            rank = int(known.grid.ranks[rows[index]])
            others = known.grid.ranks[np.delete(rows, index)].tolist()
            each = judge(known, rank, others, float(means[rows[index]]), middle)
            found += [each] if each else []
    return found


def _compute_finding(
    known: Known, rank: int, others: Sequence[int], mean: float, middle: float
) -> Finding | None:
    cost = mean - middle
    gets, others_get = _of(known.received, rank), _middle(known.received, others)
    more = gets / others_get - 1 if gets is not None and others_get else None
    if not _is_awaited(known, rank, others, cost):
        return None
    hot = more is not None and more > max(_LEAST_HOT, _HOT * cost / middle)
    kind: Kind = "hot_expert" if hot else "slow_gpu"
    exchange = known.longer(rank) if hot else None
    more_compute, cost = cost, cost + (exchange or 0.0)
    why = (
        f"has hot experts: it gets {more:.0%} more of their tokens than its peers, and computes"
        if hot
        else "is slow: it has the work of its peers, and computes"
    )
    return Finding(
        kind=kind,
        subject=Subject(ranks=(rank,), stage=known.stage.get(rank), tag="EP" if hot else None),
        cost_ns=cost,
        cost_share=cost / known.step_ns,
        evidence=Evidence(
            compute_ns=mean,
            peers_compute_ns=middle,
            **_waits(known, rank, others),
            expert_bytes=gets,
            peers_expert_bytes=others_get,
            longer_exchange_ns=exchange,
        ),
        words=f"Rank {rank} {why} {format_ns(more_compute)} a step longer.",
    )


def _idle_finding(
    known: Known, rank: int, others: Sequence[int], mean: float, middle: float
) -> Finding | None:
    cost = mean - middle
    if not _is_awaited(known, rank, others, cost):
        return None
    return Finding(
        kind="jittery_host",
        subject=Subject(ranks=(rank,), stage=known.stage.get(rank)),
        cost_ns=cost,
        cost_share=cost / known.step_ns,
        evidence=Evidence(idle_ns=mean, peers_idle_ns=middle, **_waits(known, rank, others)),
        words=f"The device of rank {rank} has nothing to do for {format_ns(cost)} a step "
        "longer than its peers: its host launches late.",
    )


def _is_awaited(known: Known, rank: int, others: Sequence[int], cost: float) -> bool:
    """Whether the others are known to wait for a rank, and so longer than it does."""
    own, peers = _of(known.waits, rank), _middle(known.waits, others)
    return own is not None and peers is not None and peers - own >= cost / 2


def _waits(known: Known, rank: int, others: Sequence[int]) -> dict[str, Any]:
    return {
        "wait_ns": _of(known.waits, rank),
        "peers_wait_ns": _middle(known.waits, others),
    }


def _of(values: Mapping[int, float], rank: int) -> float | None:
    return values.get(rank)


def _middle(values: Mapping[int, float], ranks: Sequence[int]) -> float | None:
    known = [values[rank] for rank in ranks if rank in values]
    return float(np.median(known)) if known else None


Judge = Callable[[Known, int, Sequence[int], float, float], Finding | None]
