"""All findings of a run: what looks for each kind, and in which order."""

from collections.abc import Sequence
from typing import Any

from fastcomm.metrics.findings import (
    copies,
    exposed_communication,
    hot_experts,
    idle,
    late_hosts,
    long_copies,
    pauses,
    stages,
    stragglers,
)
from fastcomm.metrics.findings.finding import LEAST_FINDING, Finding, in_order
from fastcomm.metrics.findings.late_rank import late_rank
from fastcomm.metrics.findings.suspects import (
    Measurements,
    awaited,
    joined_ties,
    limited_to_wait,
    sharing,
    without_slack,
)
from fastcomm.metrics.findings.symptoms import StepTimes
from fastcomm.metrics.outliers import LEAST_SHARE
from fastcomm.metrics.skew import RankWaits

SYMPTOMS = {
    exposed_communication.KIND: exposed_communication.exposed_communication,
    copies.KIND: copies.copies,
    idle.KIND: idle.idle_time,
}


def causes(
    measured: Measurements, slow_links: Sequence[Finding], rank_waits: Sequence[RankWaits]
) -> tuple[Finding, ...]:
    """Return the causes of lost time in order; without any, the rank that is late.

    `slow_links` are findings on links, `rank_waits` waits on aligned clocks, empty without
    these.
    """
    own, paused = own_work(measured), pauses.rotating_pauses(measured)
    findings = in_order([*pauses.unexplained(own, paused), *paused, *slow_links])
    return findings or in_order(late_rank(measured, rank_waits))


def own_work(measured: Measurements) -> list[Finding]:
    """Return findings on stragglers, hot experts, late hosts, copies and imbalanced stages."""
    # Idle time needs a larger difference, as it varies with waits between collectives.
    longer = awaited(measured, "compute_ns", LEAST_FINDING, stragglers.WORK)
    compute = [hot_experts.explained(measured, suspect) for suspect in longer]
    longer_idle = awaited(measured, "idle_ns", LEAST_SHARE, late_hosts.WORK)
    longer_copies = awaited(measured, "copies_ns", LEAST_SHARE, long_copies.WORK)
    caused = measured.common_wait_caused
    suspects = [
        *joined_ties(compute, caused),
        *joined_ties(longer_idle, caused),
        *joined_ties(longer_copies, caused),
        *stages.suspects(measured),
    ]
    findings = []
    for suspect in sharing(suspects, caused):
        limited = limited_to_wait(measured, suspect), without_slack(measured, suspect)
        least = min(limited, key=lambda one: one.share)
        findings.append(least.work.describe(measured, least))
    return findings


# Pauses visit any ranks, and others in each run.
_OF_ANY_RANKS = {pauses.KIND}


def identity(
    kind: str, ranks: Sequence[int], idle_cause: str | None = None
) -> tuple[Any, ...] | None:
    """Return by what a cause of one run is found in another one; None for a symptom.

    Idle time of a known cause is a cause of all ranks.
    """
    if kind == idle.KIND and idle_cause not in (None, "unknown"):
        return kind, idle_cause
    if kind in SYMPTOMS:
        return None
    return (kind,) if kind in _OF_ANY_RANKS else (kind, *ranks)


def symptoms(of: StepTimes) -> list[Finding]:
    """Return a finding per large part of the step other than compute."""
    if of.breakdown.parts is None:
        return []
    return [finding for find in SYMPTOMS.values() if (finding := find(of)) is not None]
