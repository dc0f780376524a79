"""Symptoms: large parts of the step other than compute. They say where, not why.

A part is large if it takes `LEAST_PART` of the step, or longer than compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.metrics.breakdown import EXACT, Breakdown
from fastcomm.metrics.exposure import Exposure, divided
from fastcomm.metrics.findings import Evidence, Finding, Kind, confidence, spread
from fastcomm.metrics.headline import largest_tag, step_parts
from fastcomm.units import format_ns, percent

_EXPOSED = tuple(name for name in EXACT if name.startswith("exposed_"))
_PARTS: dict[Kind, tuple[str, tuple[str, ...]]] = {
    "exposed_communication": ("exposed", _EXPOSED),
    "copies": ("memcpy", ("memcpy",)),
    "idle": ("idle", ("idle",)),
}
_TEXT = {
    "exposed_communication": "Exposed communication takes",
    "copies": "Memory copies that overlap nothing take",
    "idle": "The device is idle for",
}
# Of the step. Clean made-up jobs of 512 ranks are idle for 29 %, in the bubble of the pipeline.
LEAST_PART = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What symptoms are found in."""

    iterations: pa.Table
    breakdown: Breakdown
    step_ns: float | None
    exposure: Mapping[str, Exposure]
    overlap: float | None  # share of the communication that overlaps compute
    is_matched: bool  # whether collectives are matched across ranks


def symptoms(of: StepTimes) -> list[Finding]:
    """Return a finding for each large part of the step other than compute."""
    parts = step_parts(of.breakdown.exact)
    if parts is None or of.step_ns is None:
        return []
    return [
        _finding(of, kind, parts[part], parts["compute"])
        for kind, (part, _) in _PARTS.items()
        if parts[part] >= LEAST_PART or parts[part] > parts["compute"]
    ]


def _finding(of: StepTimes, kind: Kind, share: float, compute: float) -> Finding:
    step = of.step_ns or 0.0
    known = of.iterations.filter(of.iterations["exact_compute_ns"].is_valid())
    ranks = np.unique(known["rank"].to_numpy()).tolist()
    costs = _by_step(known, [f"exact_{name}_ns" for name in _PARTS[kind][1]])
    evidence = Evidence(
        compute_ns=compute * step,
        steps=len(costs),
        spread_ns=spread(costs),
        **_details(of, kind, share * step),
    )
    text = (
        f"{_TEXT[kind]} {format_ns(share * step)} per step ({percent(share)} of the step), "
        f"compute {percent(compute)}"
    )
    if evidence.exposed_wait_ns is not None and share:
        waiting = evidence.exposed_wait_ns / (share * step)
        text += f"; {percent(waiting)} of it is waiting for the last rank"
    if evidence.overlap is not None:
        text += f"; {percent(evidence.overlap)} of communication overlaps compute"
    return Finding(
        kind=kind,
        text=f"{text}.",
        ranks=tuple(ranks),
        cost_ns=share * step,
        share=share,
        confidence=confidence(
            share * step, evidence.spread_ns, ranks=len(ranks), is_matched=of.is_matched
        ),
        evidence=evidence,
    )


def _details(of: StepTimes, kind: Kind, cost: float) -> dict[str, Any]:
    if kind == "idle":
        return {"idle_ns": cost}
    if kind == "copies":
        return {"copies_ns": cost}
    wait, transfer = divided(of.exposure) or (None, None)
    return {
        "tag": largest_tag(of.breakdown.exact),
        "overlap": of.overlap,
        "exposed_wait_ns": wait,
        "exposed_transfer_ns": transfer,
    }


def _by_step(iterations: pa.Table, columns: Sequence[str]) -> Any:
    """Return the mean over ranks of the sum of some columns, in each step."""
    values = np.sum([iterations[name].to_numpy() for name in columns], axis=0)
    _, step = np.unique(iterations["iteration"].to_numpy(), return_inverse=True)
    return np.bincount(step, weights=values) / np.bincount(step)
