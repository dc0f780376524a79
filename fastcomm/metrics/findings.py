"""Findings: the causes of lost time in a run, then its symptoms, each with evidence and cost.

The cost of a cause is what a step gains if it is fixed; ranks and stages that delay the same
steps share that gain. The cost of a symptom is the time it takes of a step. Both are
in ns, as means over steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

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
