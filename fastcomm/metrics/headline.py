"""The first sentences of a result: the largest part of the step, then the symptoms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from fastcomm.metrics import gaps
from fastcomm.metrics.breakdown import EXACT, Breakdown
from fastcomm.metrics.findings import LEAST_FINDING, Evidence, Finding, Kind, confidence, spread
from fastcomm.metrics.outliers import HeatArrays
from fastcomm.metrics.traffic import Exposure, divided
from fastcomm.units import format_ns, percent

if TYPE_CHECKING:
    from fastcomm.metrics.result import Metrics

PARTS = {
    "compute": "Compute is",
    "exposed": "Exposed communication is",
    "memcpy": "Memory copies are",
    "idle": "Idle time is",
}
NAMES = {
    "compute": "compute",
    "exposed": "exposed communication",
    "memcpy": "copies",
    "idle": "idle time",
}
_LARGE = 0.2  # of the step, to be named beside the largest part
_UNEVEN = 0.015  # of the step; ranks of clean made-up jobs differ by at most 0.1 %
_NEARLY = 0.95  # of the exposed time, to be called nearly all of it


def headline(metrics: "Metrics") -> str:
    """Return the first sentence of a report: the largest part of the step."""
    parts, step = metrics.breakdown.parts, metrics.iteration.mean_ns
    if parts is None or step is None:
        return f"The largest part of the step is n/a: {gaps.reason(metrics.lacks)}."
    largest = max(parts, key=lambda part: parts[part])
    share = parts[largest]
    sentence = (
        f"{PARTS[largest]} the largest part of the step: {percent(share)} "
        f"({format_ns(share * step)} of {format_ns(step)})"
    )
    if largest == "exposed":
        sentence += _whose(metrics.breakdown, share)
        if len(metrics.measured_ranks) == metrics.expected_ranks:
            sentence += _divided(metrics.exposure, share * step, step)
    elif not metrics.volume:
        sentence += "; no communication was recorded"
    return f"{sentence}."


def health(metrics: "Metrics") -> str | None:
    """Return the sentence that stands in for causes; None where there are causes."""
    parts = metrics.breakdown.parts
    if parts is None or any(not each.is_symptom for each in metrics.findings):
        return None
    if uneven := _uneven(metrics):
        return f"{uneven} No cause is found; {_limit(parts)}."
    if metrics.across.matching.matched:
        return f"{_apart(metrics)}; {_limit(parts)}."
    if metrics.findings:
        return None
    why = (
        "only one rank was read"
        if len(metrics.ranks) == 1
        else "no collective is matched across ranks"
    )
    return (
        f"Nothing stands out: {_limit(parts)}. Stragglers and slow links cannot be seen, as "
        f"{why}."
    )


def _apart(metrics: "Metrics") -> str:
    """Return that nothing stands apart; healthy is a run of which all ranks were read."""
    measured, expected = len(metrics.measured_ranks), metrics.expected_ranks
    if missing := expected - measured:
        what = "measured" if measured < len(metrics.ranks) else "read"
        were = "was" if missing == 1 else "were"
        return (
            f"None of the {measured} ranks that were {what} stands apart, and no link among "
            f"them; {missing} of {expected} ranks {were} not {what}"
        )
    nothing = "o rank, stage or link stands apart"
    return f"N{nothing}" if metrics.findings else f"The run is healthy: n{nothing}"


def _limit(parts: Mapping[str, float]) -> str:
    """Return what limits the step: its largest part, and the next one if that is large, too."""
    first, second = sorted(parts, key=lambda part: -parts[part])[:2]
    text = f"{NAMES[first]} limits the step ({percent(parts[first])})"
    return (
        f"{text}, then {NAMES[second]} ({percent(parts[second])})"
        if parts[second] >= _LARGE
        else text
    )


def _uneven(metrics: "Metrics") -> str | None:
    """Return a sentence on a rank that computes much longer than the median rank, or None."""
    grid = HeatArrays.of(metrics.tables["iterations"])
    means, step = grid.mean_by_rank("compute_ns"), metrics.iteration.mean_ns
    if len(means) < 2 or np.isnan(means).any() or not step:  # noqa: PLR2004 - nothing to compare
        return None
    above = float(means.max() - np.sort(means)[(len(means) - 1) // 2])
    if above < _UNEVEN * step:
        return None
    rank = grid.ranks[means.argmax()]
    return (
        f"Ranks compute for unequal times: rank {rank} {format_ns(above)} per step longer than "
        f"the median rank ({percent(above / step)} of the step)."
    )


def parallelism(tag: str) -> str:
    """Return a tag as a sentence says it."""
    return "with unknown parallelism" if tag == "OTHER" else tag


def _whose(breakdown: Breakdown, total: float) -> str:
    tag = breakdown.largest_tag
    share = (breakdown.exact[f"exposed_{tag}"] or 0.0) / total
    much = (
        "all"
        if share == 1
        else "nearly all"
        if share >= _NEARLY
        else "most"
        if share > 1 / 2
        else "the largest part"
    )
    return f", {much} of it {parallelism(tag)}"


def _divided(exposure: Mapping[str, Exposure], total: float, step: float) -> str:
    """Return how the exposed time is divided, in shares of the step; nothing if it is not."""
    parts = divided(exposure)
    if parts is None:
        return ""
    wait, transfer = parts
    rest = (total - wait - transfer) / step
    other = f", {percent(rest)} cannot be divided" if rest >= LEAST_FINDING else ""
    return (
        f"; {percent(wait / step)} of the step waits for the last rank, "
        f"{percent(transfer / step)} is transfer{other}"
    )


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
    is_whole: bool  # whether all ranks of the run are in it


def symptoms(of: StepTimes) -> list[Finding]:
    """Return a finding for each large part of the step other than compute."""
    parts = of.breakdown.parts
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
        if not of.is_whole:
            text += " that was measured, and waiting for the missing ranks is not known"
    if evidence.overlap is not None:
        text += f"; {percent(evidence.overlap)} of communication overlaps compute"
    return Finding(
        kind=kind,
        text=f"{text}.",
        ranks=tuple(ranks),
        cost_ns=share * step,
        share=share,
        confidence=confidence(
            share * step,
            evidence.spread_ns,
            ranks=len(ranks),
            is_matched=of.is_matched and of.is_whole,
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
        "tag": of.breakdown.largest_tag,
        "overlap": of.overlap,
        "exposed_wait_ns": wait,
        "exposed_transfer_ns": transfer,
    }


def _by_step(iterations: pa.Table, columns: Sequence[str]) -> Any:
    """Return the mean over ranks of the sum of some columns, in each step."""
    values = np.sum([iterations[name].to_numpy() for name in columns], axis=0)
    _, step = np.unique(iterations["iteration"].to_numpy(), return_inverse=True)
    return np.bincount(step, weights=values) / np.bincount(step)
