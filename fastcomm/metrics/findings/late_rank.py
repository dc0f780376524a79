"""A rank that others wait for, without more compute or idle time. It needs aligned clocks."""

from collections.abc import Sequence

from fastcomm.metrics.findings.finding import Evidence, Finding, Next, Sketch, per_step
from fastcomm.metrics.findings.suspects import Measurements, finding_of, wait_evidence
from fastcomm.metrics.outliers import LEAST_SHARE
from fastcomm.metrics.skew import RankWaits
from fastcomm.units import percent

KIND = "late_rank"


def late_rank(measured: Measurements, rank_waits: Sequence[RankWaits]) -> list[Finding]:
    """Return a finding on the rank that others wait for without more compute or idle time.

    The rank has to cause more than half of all waits, and twice as much as any other rank: in a
    group of two, each is last half of the time by chance.

    Parameters
    ----------
    measured
        Measurements of all ranks, on aligned clocks.
    rank_waits
        `skew.over_tags` of all waits.

    """
    if not rank_waits or not measured.step_ns:
        return []
    worst, *others = rank_waits
    others_ns = [row.caused_ns for row in others]
    least = max(LEAST_SHARE * measured.step_ns, sum(others_ns), 2 * max(others_ns, default=0))
    if worst.caused_ns <= least:
        return []
    finding = finding_of(
        measured,
        (worst.rank,),
        worst.caused_ns,
        [
            Evidence(key="stage", value=measured.stage.get(worst.rank)),
            *wait_evidence(measured, worst.rank, [row.rank for row in others]),
            Evidence(key="steps", value=len(measured.grid.iterations)),
        ],
        kind=KIND,
        text=f"Rank {worst.rank} is late: it is the last to arrive at "
        f"{percent(worst.last_share)} of its collectives, and others wait for it "
        f"for {per_step(worst.caused_ns, measured.step_ns)}.",
        next=Next(
            command="critical-path", purpose="what the rank does before it arrives", of="first"
        ),
        picture=Sketch(of="ranks", measure="wait_caused", noun="wait caused"),
    )
    return [finding]
