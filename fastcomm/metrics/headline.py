"""The first sentences of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.metrics import missing_data
from fastcomm.metrics.breakdown import Breakdown, IterationTimes
from fastcomm.metrics.findings.finding import LEAST_FINDING, Finding
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
# healthy synthetic jobs differ by at most 0.1 %, of two busy processes on a host by 1 %.
UNEVEN = 0.015
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
        return f"The largest part of the step is n/a: {missing_data.reason(run.missing)}."
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
    """Return a sentence on a rank that computes much longer than the median, or None.

    Ranks are compared in the steps that all of them have.
    """
    grid = HeatArrays.of(run.iterations).common("compute_ns")
    means, step = grid.mean_by_rank("compute_ns"), run.iteration.mean_ns
    if len(means) < 2 or np.isnan(means).any() or not step:  # noqa: PLR2004 - nothing to compare
        return None
    above = float(means.max() - lower_median(means))
    if above < UNEVEN * step:
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
