"""Symptoms: findings on large parts of the step other than compute."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.idle.totals import IdleName
from fastcomm.metrics.breakdown import Breakdown
from fastcomm.metrics.findings.finding import (
    Evidence,
    Finding,
    confidence,
    spread,
    steps_and_spread,
)
from fastcomm.metrics.traffic import Exposure
from fastcomm.units import format_ns, percent

# Share of the step. The bubble of a healthy pipeline alone may be that long: a synthetic job of
# 512 ranks waits in receives for 19 %.
LEAST_PART = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The times of the mean step over all ranks."""

    iterations: pa.Table
    breakdown: Breakdown
    step_ns: float
    exposure: Mapping[str, Exposure]
    overlap: float | None  # share of the communication that overlaps compute
    is_matched: bool  # whether collectives are matched across ranks
    is_whole: bool  # whether all ranks of the run are measured
    is_host_run: bool = False  # whether ranks compute and communicate without a device
    idle: Mapping[str, float | None] = field(default_factory=dict)  # shares by cause
    idle_names: Sequence[IdleName] = ()

    def share(self, part: str) -> float:
        """Return the share of the step of a part, 0 where it is unknown."""
        return (self.breakdown.parts or {}).get(part) or 0.0

    def ns(self, part: str) -> float:
        """Return the time of a part in ns per step."""
        return self.share(part) * self.step_ns

    def is_large(self, part: str) -> bool:
        """Return whether a part takes much of the step, or more than compute."""
        share = self.share(part)
        return share >= LEAST_PART or share > self.share("compute")


def sentence(of: StepTimes, part: str, subject: str) -> str:
    """Return what a part takes of the step, beside compute, without a period."""
    return (
        f"{subject} {format_ns(of.ns(part))} per step ({percent(of.share(part))} of the step), "
        f"compute {percent(of.share('compute'))}"
    )


def finding_of_part(
    of: StepTimes,
    part: str,
    columns: Sequence[str],
    evidence: Sequence[Evidence],
    text: str,
    **more: Any,
) -> Finding:
    """Return the finding on a part of the step.

    Parameters
    ----------
    of, part
        The times, and the name of the part in the breakdown.
    columns
        The parts of the table of iterations that make it up.
    evidence, text
        The numbers behind it, and the sentence without its period.
    **more
        Further fields of the finding.

    """
    iterations = of.iterations.filter(of.iterations["exact_compute_ns"].is_valid())
    ranks = np.unique(iterations["rank"].to_numpy()).tolist()
    costs = _by_step(iterations, [f"exact_{name}_ns" for name in columns])
    spread_ns = spread(costs)
    compute = Evidence(
        key="compute_ns", value=of.ns("compute"), label="compute per step", unit="ns"
    )
    if of.is_host_run:
        text += "; on the host, that includes time in which threads wait for a core"
    return Finding(
        text=f"{text}.",
        ranks=tuple(ranks),
        cost_ns=of.ns(part),
        share=of.share(part),
        # How long threads wait for a core, no event says: a healthy run may have any such part.
        confidence="low"
        if of.is_host_run
        else confidence(
            of.ns(part),
            spread_ns,
            ranks=len(ranks),
            is_matched=of.is_matched and of.is_whole,
        ),
        evidence=(compute, *evidence, *steps_and_spread(len(costs), spread_ns)),
        is_symptom=True,
        **more,
    )


def _by_step(iterations: pa.Table, columns: Sequence[str]) -> Any:
    """Return the sum of some columns in each step, as mean over ranks, in ns."""
    values = np.sum([iterations[name].to_numpy() for name in columns], axis=0)
    _, step = np.unique(iterations["iteration"].to_numpy(), return_inverse=True)
    return np.bincount(step, weights=values) / np.bincount(step)
