"""The first sentences of a report, and symptoms: findings on large parts of the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.metrics import gaps, idle
from fastcomm.metrics.breakdown import EXACT, Breakdown, IterationTimes
from fastcomm.metrics.findings import (
    LEAST_FINDING,
    Evidence,
    Finding,
    FindingKind,
    confidence,
    spread,
)
from fastcomm.metrics.idle import IdleName
from fastcomm.metrics.outliers import HeatArrays, lower_median
from fastcomm.metrics.traffic import Exposure, HostCommunication, Volume, divided
from fastcomm.units import format_ns, percent

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
_LARGE = 0.2  # of the step: minimum to name the second largest part
# Share of the step that a rank computes longer than the median, to be called uneven; ranks of
# healthy synthetic jobs differ by at most 0.1 %.
_UNEVEN = 0.015
_NEARLY = 0.95  # of the exposed time, to be called nearly all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The figures of a run that its first sentences are about."""

    ranks: tuple[int, ...]
    measured_ranks: tuple[int, ...]
    expected_ranks: int  # number of ranks of the run
    missing: Mapping[str, Sequence[int]]  # ranks by kind of missing data
    iteration: IterationTimes
    breakdown: Breakdown
    exposure: Mapping[str, Exposure]
    volume: Mapping[str, Volume]
    findings: Sequence[Finding]
    is_matched: bool  # whether collectives are matched across ranks
    iterations: pa.Table
    host_communication: HostCommunication | None  # beside a device's


def headline(run: RunSummary) -> str:
    """Return the first sentence of a report: the largest part of the step."""
    parts, step = run.breakdown.parts, run.iteration.mean_ns
    if parts is None or step is None:
        return f"The largest part of the step is n/a: {gaps.reason(run.missing)}."
    largest = max(parts, key=lambda part: parts[part])
    share = parts[largest]
    sentence = (
        f"{PARTS[largest]} the largest part of the step: {percent(share)} "
        f"({format_ns(share * step)} of {format_ns(step)})"
    )
    if largest == "exposed":
        sentence += _main_tag(run.breakdown, share)
        if len(run.measured_ranks) == run.expected_ranks:
            sentence += _divided(run.exposure, share * step, step)
    elif not run.volume:
        of_device = " of the device" if run.host_communication else ""
        sentence += f"; no communication{of_device} was recorded"
    return f"{sentence}."


def health(run: RunSummary) -> str | None:
    """Return the sentence that stands in for causes; None if the findings have a cause."""
    parts = run.breakdown.parts
    if parts is None or any(not finding.is_symptom for finding in run.findings):
        return None
    if uneven := _uneven(run):
        return f"{uneven} No cause is found; {_limit(parts)}."
    if run.is_matched:
        return f"{_apart(run)}; {_limit(parts)}."
    if run.findings:
        return None
    reason = (
        "only one rank was read"
        if len(run.ranks) == 1
        else "no collective is matched across ranks"
    )
    return (
        f"Nothing stands out: {_limit(parts)}. Stragglers and slow links cannot be seen, as "
        f"{reason}."
    )


def _apart(run: RunSummary) -> str:
    """Say that nothing stands apart; only a run whose ranks were all read is called healthy."""
    measured, expected = len(run.measured_ranks), run.expected_ranks
    if missing := expected - measured:
        verb = "measured" if measured < len(run.ranks) else "read"
        were = "was" if missing == 1 else "were"
        return (
            f"None of the {measured} ranks that were {verb} stands apart, and no link among "
            f"them; {missing} of {expected} ranks {were} not {verb}"
        )
    nothing = "o rank, stage or link stands apart"
    return f"N{nothing}" if run.findings else f"The run is healthy: n{nothing}"


def _limit(parts: Mapping[str, float]) -> str:
    """Name the part with the largest share of the step, and the second if it is large."""
    first, second = sorted(parts, key=lambda part: -parts[part])[:2]
    text = f"{NAMES[first]} limits the step ({percent(parts[first])})"
    return (
        f"{text}, then {NAMES[second]} ({percent(parts[second])})"
        if parts[second] >= _LARGE
        else text
    )


def _uneven(run: RunSummary) -> str | None:
    """Return a sentence on a rank that computes much longer than the median, or None."""
    grid = HeatArrays.of(run.iterations)
    means, step = grid.mean_by_rank("compute_ns"), run.iteration.mean_ns
    if len(means) < 2 or np.isnan(means).any() or not step:  # noqa: PLR2004 - nothing to compare
        return None
    above = float(means.max() - lower_median(means))
    if above < _UNEVEN * step:
        return None
    rank = grid.ranks[means.argmax()]
    return (
        f"Ranks compute for unequal times: rank {rank} {format_ns(above)} per step longer than "
        f"the median rank ({percent(above / step)} of the step)."
    )


def parallelism(tag: str) -> str:
    """Return a tag as sentences have it."""
    return "with unknown parallelism" if tag == "OTHER" else tag


def _main_tag(breakdown: Breakdown, total: float) -> str:
    """Return a clause on the most exposed parallelism; `total` is their exposed share."""
    tag = breakdown.largest_tag
    share = (breakdown.exact[f"exposed_{tag}"] or 0.0) / total
    amount = (
        "all"
        if share == 1
        else "nearly all"
        if share >= _NEARLY
        else "most"
        if share > 1 / 2
        else "the largest part"
    )
    return f", {amount} of it {parallelism(tag)}"


def _divided(exposure: Mapping[str, Exposure], total: float, step: float) -> str:
    """Return exposed time (ns) divided into wait and transfer, as a clause; "" if unknown."""
    parts = divided(exposure)
    if parts is None:
        return ""
    wait, transfer = parts
    undivided = (total - wait - transfer) / step
    other = f", {percent(undivided)} cannot be divided" if undivided >= LEAST_FINDING else ""
    return (
        f"; {percent(wait / step)} of the step waits for the last rank, "
        f"{percent(transfer / step)} is transfer{other}"
    )


_EXPOSED = tuple(name for name in EXACT if name.startswith("exposed_"))
_PARTS: dict[FindingKind, tuple[str, tuple[str, ...]]] = {
    "exposed_communication": ("exposed", _EXPOSED),
    "copies": ("memcpy", ("memcpy",)),
    "idle": ("idle", ("idle",)),
}
_TEXT = {
    "exposed_communication": "Exposed communication takes",
    "copies": "Memory copies that overlap nothing take",
    "idle": "The device is idle for",
}
_TEXT_HOST = {"idle": "No operator runs and nothing is communicated for"}
# Share of the step. The bubble of a healthy pipeline alone may be that long: a synthetic job of
# 512 ranks waits in receives for 19 %.
LEAST_PART = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The input of `symptoms`: means over the steps of a run."""

    iterations: pa.Table
    breakdown: Breakdown
    step_ns: float | None
    exposure: Mapping[str, Exposure]
    overlap: float | None  # share of the communication that overlaps compute
    is_matched: bool  # whether collectives are matched across ranks
    is_whole: bool  # whether all ranks of the run are measured
    is_host_run: bool = False  # whether ranks compute and communicate without a device
    idle: Mapping[str, float | None] = field(default_factory=dict)  # shares by cause
    idle_names: Sequence[IdleName] = ()


def symptoms(of: StepTimes) -> list[Finding]:
    """Return a finding per large part of the step other than compute."""
    parts = of.breakdown.parts
    if parts is None or of.step_ns is None:
        return []
    findings = []
    for kind, (part, _) in _PARTS.items():
        is_large = parts[part] >= LEAST_PART or parts[part] > parts["compute"]
        # Of a small part, the cause to name is one that can be avoided.
        causes = of.idle if is_large else _avoidable(of)
        if is_large or (kind == "idle" and causes):
            cause = idle.largest(causes)
            findings.append(_finding(of, kind, parts[part], parts["compute"], cause))
    return findings


def _avoidable(of: StepTimes) -> dict[str, float]:
    """Return the large causes of a device's idle time that programs usually avoid."""
    if of.is_host_run:
        return {}
    return {
        cause: share
        for cause, share in of.idle.items()
        if share is not None and share >= idle.BY_CAUSE[cause].least_share
    }


def _finding(
    of: StepTimes, kind: FindingKind, share: float, compute: float, cause: str | None
) -> Finding:
    """Return the finding on a part of the step; `share` and `compute` are fractions of it.

    `cause` is that of idle time, None if unknown.
    """
    step = of.step_ns or 0.0
    iterations = of.iterations.filter(of.iterations["exact_compute_ns"].is_valid())
    ranks = np.unique(iterations["rank"].to_numpy()).tolist()
    costs = _by_step(iterations, [f"exact_{name}_ns" for name in _PARTS[kind][1]])
    evidence = Evidence(
        compute_ns=compute * step,
        steps=len(costs),
        spread_ns=spread(costs),
        **_details(of, kind, share * step, cause),
    )
    subject = _TEXT_HOST.get(kind, _TEXT[kind]) if of.is_host_run else _TEXT[kind]
    text = (
        f"{subject} {format_ns(share * step)} per step ({percent(share)} of the step), "
        f"compute {percent(compute)}"
    )
    if kind == "idle" and cause is not None:
        text = _with_cause(of, text, cause)
    if evidence.exposed_wait_ns is not None and share:
        waiting = evidence.exposed_wait_ns / (share * step)
        text += f"; {percent(waiting)} of it is waiting for the last rank"
        if not of.is_whole:
            text += " that was measured, and waiting for the missing ranks is not known"
    if evidence.overlap is not None:
        text += f"; {percent(evidence.overlap)} of communication overlaps compute"
    if of.is_host_run:
        text += "; on the host, that includes time in which threads wait for a core"
    return Finding(
        kind=kind,
        text=f"{text}.",
        ranks=tuple(ranks),
        cost_ns=share * step,
        share=share,
        # How long threads wait for a core, no event says: a healthy run may have any such part.
        confidence="low"
        if of.is_host_run
        else confidence(
            share * step,
            evidence.spread_ns,
            ranks=len(ranks),
            is_matched=of.is_matched and of.is_whole,
        ),
        evidence=evidence,
    )


def _with_cause(of: StepTimes, text: str, cause: str) -> str:
    """Return the text on idle time with a cause, and what to try."""
    share, step = of.idle[cause] or 0.0, of.step_ns or 0.0
    mostly = idle.explained(cause, share * step, of.idle_names, "mostly in ")
    time = f"{format_ns(share * step)} per step ({percent(share)} of the step)"
    about = idle.BY_CAUSE[cause]
    if of.is_host_run:
        return f"{text}; {format_ns(share * step)} of it is {about.text}{mostly}"
    to_try = f"The device waits {time} {about.awaited}{mostly}; try {about.to_try}"
    return f"{to_try}. {text.replace('The device', 'In all, it')}"


def _details(
    of: StepTimes, kind: FindingKind, cost: float, cause: str | None
) -> dict[str, Any]:
    """Return the evidence of a kind; `cost` is in ns per step, `cause` that of idle time."""
    if kind == "idle":
        if cause is None:
            return {"idle_ns": cost}
        cause_ns = (of.idle[cause] or 0.0) * (of.step_ns or 0.0)
        return {"idle_ns": cost, "idle_cause": cause, "idle_cause_ns": cause_ns}
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
    """Return the sum of some columns in each step, as mean over ranks, in ns."""
    values = np.sum([iterations[name].to_numpy() for name in columns], axis=0)
    _, step = np.unique(iterations["iteration"].to_numpy(), return_inverse=True)
    return np.bincount(step, weights=values) / np.bincount(step)
