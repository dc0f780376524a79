"""Ranks whose exposed memory copies take longer than those of their peers, which wait."""

from fastcomm.metrics.findings.finding import (
    Evidence,
    Finding,
    Next,
    ShownEvents,
    Sketch,
    per_step,
)
from fastcomm.metrics.findings.suspects import (
    Measurements,
    OwnWork,
    Suspect,
    finding_of,
    stage_fact,
    step_evidence,
    wait_evidence,
)
from fastcomm.trace.run_traces import named_ranks


def describe(measured: Measurements, of: Suspect) -> Finding:
    """Return the finding on ranks whose copies take longer."""
    others = measured.ranks_of(of.others)
    cost = of.cost * of.share
    longer = per_step(cost, measured.step_ns, excess=of.cost, per_rank=of.longer)
    return finding_of(
        measured,
        of.ranks,
        cost,
        [
            stage_fact(measured, of),
            Evidence(key="copies_ns", value=of.mean, label="copies per step", unit="ns"),
            Evidence(
                key="peers_copies_ns", value=of.middle, label="copies of its peers", unit="ns"
            ),
            *wait_evidence(measured, of.rank, others),
            *step_evidence(measured, "copies_ns", of),
        ],
        kind=WORK.name,
        # Copies of equal length may overlap less, so it is not said that they are slower.
        text=f"Memory copies of {named_ranks(of.ranks)} that overlap nothing take longer than "
        f"those of {of.its} peers, which wait: +{longer}.",
        next=Next(command="critical-path", purpose="which copies delay the step", of="first"),
        moment=ShownEvents(events="copies"),
        picture=Sketch(of="ranks", measure="memcpy", noun="copies"),
    )


WORK = OwnWork(name="long_copies", describe=describe)
