"""Ranks that compute longer than their peers, with as many tokens, which wait for them."""

from fastcomm.metrics.findings.finding import Finding, Next, Sketch, per_step
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

COMPARED = Sketch(of="ranks", measure="compute", noun="compute")


def describe(measured: Measurements, of: Suspect) -> Finding:
    """Return the finding on a straggler, or on several."""
    others = measured.ranks_of(of.others)
    cost = of.cost * of.share
    work = per_step(cost, measured.step_ns, "compute", of.cost, of.longer)
    verb = "are stragglers" if of.tied else "is a straggler"
    peers = f"same work as {of.its} peers" if of.middle else f"{of.its} peers compute nothing"
    return finding_of(
        measured,
        of.ranks,
        cost,
        [
            stage_fact(measured, of),
            *compute_evidence(of),
            *wait_evidence(measured, of.rank, others),
            *expert_evidence(measured, of.rank, others),
            *step_evidence(measured, "compute_ns", of),
        ],
        kind=WORK.name,
        text=f"{named(of)} {verb}: {peers}, +{work}.",
        next=Next(command="critical-path", purpose="where the others wait for it"),
        picture=COMPARED,
    )


WORK = OwnWork(name="straggler", describe=describe)
