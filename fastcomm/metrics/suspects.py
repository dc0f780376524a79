"""Ranks and pipeline stages whose own work takes longer than that of their peers.

Own work is compute, and time in which the device is idle. Both are durations on one clock, so
nothing here needs aligned clocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.findings import (
    LEAST_FINDING,
    Evidence,
    Finding,
    Kind,
    confidence,
    median,
    percent,
    spread,
)
from fastcomm.metrics.heat import Grid
from fastcomm.metrics.outliers import LEAST_SHARE, above_peers, peers_of
from fastcomm.units import format_ns

Floats = NDArray[np.float64]

# A stage's work differs by itself: the first embeds, the last has the head.
LEAST_STAGE = 0.015
# Of what a rank computes more, the share that it gets more to do for, to be called hot.
_HOT = 1 / 3
_LEAST_HOT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The measurements that ranks are judged by."""

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

    def ranks_of(self, rows: NDArray[np.int64]) -> list[int]:
        """Return the ranks of some rows of the grid."""
        ranks: list[int] = self.grid.ranks[rows].tolist()
        return ranks


def stragglers(known: Known) -> list[Finding]:
    """Return stragglers and hot experts: ranks that compute longer than their stage."""
    return _above(known, "compute_ns", LEAST_FINDING, _compute_finding)


def jittery_hosts(known: Known) -> list[Finding]:
    """Return ranks whose device is idle for longer than others of their stage."""
    # Idle time varies by itself, as ranks wait for others between two collectives.
    return _above(known, "idle_ns", LEAST_SHARE, _idle_finding)


def imbalanced_stages(known: Known) -> list[Finding]:
    """Return the pipeline stage that computes longer than the others, if there is one."""
    step, parts = known.step_ns, peers_of(known.grid, known.stage)
    means = known.grid.mean_by_rank("compute_ns")
    # Of a stage its median: one straggler in it is no imbalance.
    stages = np.array([_lower_median(means[rows]) for rows in parts])
    found = []
    for index, middle, _ in above_peers(stages, LEAST_STAGE * step):
        ranks = tuple(known.grid.ranks[parts[index]].tolist())
        stage, cost = known.stage.get(ranks[0]), float(stages[index]) - middle
        others = np.concatenate([rows for place, rows in enumerate(parts) if place != index])
        evidence = Evidence(
            stage=stage,
            tag="PP",
            compute_ns=float(stages[index]),
            peers_compute_ns=middle,
            **_steps(known, "compute_ns", parts[index], others),
        )
        text = (
            f"Pipeline stage {stage} has more work than the others, which wait for it: "
            f"+{_per_step(cost, step, 'compute')}."
        )
        found.append(_finding(known, "imbalanced_stage", ranks, cost, text, evidence))
    return found


def _lower_median(values: Floats) -> float:
    """Return the lower of two middle values, so that one straggler of two is not the stage."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else np.nan


def _above(known: Known, measure: str, least: float, judge: "Judge") -> list[Finding]:
    """Return a finding for each rank whose mean is above its stage's by a share of the step."""
    means, found = known.grid.mean_by_rank(measure), []
    for rows in peers_of(known.grid, known.stage):
        for index, middle, _ in above_peers(means[rows], least * known.step_ns):
            suspect = _Suspect(
                row=int(rows[index]),
                rank=int(known.grid.ranks[rows[index]]),
                others=np.delete(rows, index),
                mean=float(means[rows[index]]),
                middle=middle,
            )
            if _is_awaited(known, suspect):
                found.append(judge(known, suspect))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspect:
    """A rank that is above its peers in a measure."""

    row: int  # of the grid
    rank: int
    others: NDArray[np.int64]  # rows of its peers
    mean: float
    middle: float  # median of its peers

    @property
    def cost(self) -> float:
        return self.mean - self.middle


def _compute_finding(known: Known, of: _Suspect) -> Finding:
    others = known.ranks_of(of.others)
    tokens, peers_tokens = known.received.get(of.rank), median(known.received, others)
    more = tokens / peers_tokens - 1 if tokens is not None and peers_tokens else 0.0
    is_hot = more > max(_LEAST_HOT, _HOT * of.cost / of.middle)
    exchange = known.longer(of.rank) if is_hot else None
    cost = of.cost + (exchange or 0.0)
    evidence = Evidence(
        stage=known.stage.get(of.rank),
        tag="EP" if is_hot else None,
        compute_ns=of.mean,
        peers_compute_ns=of.middle,
        expert_bytes=tokens,
        peers_expert_bytes=peers_tokens,
        longer_exchange_ns=exchange,
        **_waits(known, of.rank, others),
        **_steps(known, "compute_ns", np.array([of.row]), of.others),
    )
    if is_hot:
        work = _per_step(cost, known.step_ns, "compute and all-to-all")
        text = (
            f"Rank {of.rank} has hot experts: {100 * more:.0f} % more expert tokens than its "
            f"peers, +{work}."
        )
        return _finding(known, "hot_expert", (of.rank,), cost, text, evidence)
    work = _per_step(cost, known.step_ns, "compute")
    text = f"Rank {of.rank} is a straggler: same work as its peers, +{work}."
    return _finding(known, "straggler", (of.rank,), cost, text, evidence)


def _idle_finding(known: Known, of: _Suspect) -> Finding:
    evidence = Evidence(
        stage=known.stage.get(of.rank),
        idle_ns=of.mean,
        peers_idle_ns=of.middle,
        **_waits(known, of.rank, known.ranks_of(of.others)),
        **_steps(known, "idle_ns", np.array([of.row]), of.others),
    )
    text = (
        f"The host of rank {of.rank} launches late: the device is idle longer than its peers, "
        f"+{_per_step(of.cost, known.step_ns)}."
    )
    return _finding(known, "jittery_host", (of.rank,), of.cost, text, evidence)


def _finding(
    known: Known, kind: Kind, ranks: tuple[int, ...], cost: float, text: str, evidence: Evidence
) -> Finding:
    return Finding(
        kind=kind,
        text=text,
        ranks=ranks,
        cost_ns=cost,
        share=cost / known.step_ns,
        confidence=confidence(
            cost,
            evidence.spread_ns,
            ranks=len(known.grid.ranks),
            is_matched=bool(known.waits),
        ),
        evidence=evidence,
    )


def _per_step(cost: float, step: float, what: str = "") -> str:
    """Return a cost in words: "2.16 ms compute per step (2.7 % of the step)"."""
    return (
        f"{format_ns(cost)}{what and ' '}{what} per step ({percent(cost / step)} of the step)"
    )


def _steps(
    known: Known, measure: str, rows: NDArray[np.int64], others: NDArray[np.int64]
) -> dict[str, Any]:
    """Return how many steps a difference was measured over, and its spread between them."""
    difference = known.grid.middle(measure, rows) - known.grid.middle(measure, others)
    return {"steps": int((~np.isnan(difference)).sum()), "spread_ns": spread(difference)}


def _is_awaited(known: Known, of: _Suspect) -> bool:
    """Whether the others wait for a rank: by half of what it takes longer, or more."""
    own, peers = known.waits.get(of.rank), median(known.waits, known.ranks_of(of.others))
    return own is not None and peers is not None and peers - own >= of.cost / 2


def _waits(known: Known, rank: int, others: Sequence[int]) -> dict[str, Any]:
    return {"wait_ns": known.waits.get(rank), "peers_wait_ns": median(known.waits, others)}


Judge = Callable[[Known, _Suspect], Finding]
