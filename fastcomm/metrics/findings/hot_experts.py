"""Ranks that compute longer than their peers since they have more tokens of experts."""

from dataclasses import replace

from fastcomm.metrics.findings.finding import Evidence, Finding, Next, median, per_step
from fastcomm.metrics.findings.stragglers import COMPARED
from fastcomm.metrics.findings.suspects import (
    Measurements,
    OwnWork,
    Suspect,
    compute_evidence,
    expert_evidence,
    finding_of,
    named,
    stage_fact,
    step_evidence,
    wait_evidence,
)
from fastcomm.units import plural

# Minimum share of additional compute that tokens explain, and of tokens.
_HOT = 1 / 3
_LEAST_HOT = 0.05


def explained(measured: Measurements, of: Suspect) -> Suspect:
    """Return a suspect that computes longer as one with hot experts, if tokens explain it."""
    more = _more_tokens(measured, of)
    # Peers may compute nothing: then no share of tokens explains the compute.
    is_hot = more > _LEAST_HOT and more * of.middle > _HOT * of.cost
    return replace(of, work=WORK) if is_hot else of


def _more_tokens(measured: Measurements, of: Suspect) -> float:
    """Return by which share a rank has more expert tokens than the median of its peers.

    0.1 is 10 % more; negative for fewer; 0 if unknown.
    """
    tokens = measured.received.get(of.rank)
    peers = median(measured.received, measured.ranks_of(of.others))
    return tokens / peers - 1 if tokens is not None and peers else 0.0


def describe(measured: Measurements, of: Suspect) -> Finding:
    """Return the finding on ranks with hot experts."""
    others = measured.ranks_of(of.others)
    exchange = measured.longer(of.rank)
    excess = of.cost + (exchange or 0.0)
    cost = excess * of.share
    work = per_step(cost, measured.step_ns, "compute and all-to-all", excess)
    return finding_of(
        measured,
        of.ranks,
        cost,
        [
            stage_fact(measured, of),
            Evidence(key="tag", value="EP"),
            *compute_evidence(of),
            *wait_evidence(measured, of.rank, others),
            *expert_evidence(measured, of.rank, others),
            Evidence(key="longer_exchange_ns", value=exchange),
            *step_evidence(measured, "compute_ns", of),
        ],
        kind=WORK.name,
        text=f"{named(of)} {plural(len(of.ranks), 'has')} hot experts: "
        f"{100 * _more_tokens(measured, of):.0f} % more expert tokens than {of.its} peers, "
        f"+{work}.",
        next=Next(command="critical-path", purpose="what waits for the hot expert"),
        picture=COMPARED,
    )


WORK = OwnWork(name="hot_expert", describe=describe, is_limited_to_wait=False)
