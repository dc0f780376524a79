"""Ranks whose device is idle longer than those of their peers, mostly as hosts launch late."""

from fastcomm.idle import totals
from fastcomm.idle.causes import BY_CAUSE
from fastcomm.metrics.findings.finding import Evidence, Finding, Next, Sketch, per_step
from fastcomm.metrics.findings.suspects import (
    Measurements,
    OwnWork,
    Suspect,
    finding_of,
    named,
    stage_fact,
    step_evidence,
    wait_evidence,
)
from fastcomm.trace.run_traces import named_ranks

PURPOSE_ON_HOST = "what runs before and after the time in which nothing does"
COMPARED = Sketch(of="ranks", measure="idle", noun="idle time")


def describe(measured: Measurements, of: Suspect) -> Finding:
    """Return the finding on ranks that are idle longer."""
    peers = measured.ranks_of(of.others)
    cause, cause_ns = totals.cause_of_longer(measured.idle, of.rank, peers, of.longer)
    cost = of.cost * of.share
    longer = per_step(cost, measured.step_ns, excess=of.cost, per_rank=of.longer)
    purpose = "what the host does while the device waits"
    return finding_of(
        measured,
        of.ranks,
        cost,
        [
            stage_fact(measured, of),
            *idle_evidence(of.mean, of.middle),
            *cause_evidence(cause, cause_ns),
            *wait_evidence(measured, of.rank, peers),
            *step_evidence(measured, "idle_ns", of),
        ],
        kind=WORK.name,
        text=f"{_reason(measured, of, cause)}+{longer}.",
        next=Next(
            command="critical-path",
            purpose=PURPOSE_ON_HOST if measured.is_host_run else purpose,
            of="first",
        ),
        picture=COMPARED,
    )


def idle_evidence(own: float, peers: float) -> tuple[Evidence, ...]:
    """Return the idle time of ranks and of their peers, ns per step, as evidence."""
    return (
        Evidence(key="idle_ns", value=own, label="idle per step", unit="ns"),
        Evidence(key="peers_idle_ns", value=peers, label="idle time of its peers", unit="ns"),
    )


def cause_evidence(cause: str | None, ns: float | None) -> tuple[Evidence, ...]:
    """Return the largest cause of idle time, and its ns per step, as evidence."""
    label = "idle per step for its largest cause"
    return (
        Evidence(key="idle_cause", value=cause),
        Evidence(key="idle_cause_ns", value=ns, label=label, unit="ns"),
    )


def _reason(measured: Measurements, of: Suspect, cause: str | None) -> str:
    """Return who is idle, and why: the beginning of a sentence."""
    about = BY_CAUSE[cause or "unknown"]
    if measured.is_host_run:
        return _idle_longer(of, about.on_host or BY_CAUSE["unknown"].on_host)
    if not about.blames_host:
        return _idle_longer(of, about.text)
    ranks = named_ranks(of.ranks)
    hosts = f"The hosts of {ranks} launch" if of.tied else f"The host of {ranks} launches"
    is_known = cause not in (None, "unknown")
    why = f" ({BY_CAUSE[cause].text})" if cause is not None and is_known else ""
    return f"{hosts} late{why}: the device is idle longer than {of.its} peers, "


def _idle_longer(of: Suspect, why: str | None) -> str:
    verb = "are" if of.tied else "is"
    return f"{named(of)} {verb} idle longer than {of.its} peers ({why}): "


WORK = OwnWork(name="jittery_host", describe=describe)
