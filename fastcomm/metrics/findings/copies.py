"""Memory copies that overlap neither compute nor communication take much of the step."""

from fastcomm.metrics.findings.finding import Evidence, Finding, Next, ShownEvents
from fastcomm.metrics.findings.symptoms import StepTimes, finding_of_part, sentence

KIND = "copies"


def copies(of: StepTimes) -> Finding | None:
    """Return the finding on copies, if they are large."""
    if not of.is_large("memcpy"):
        return None
    return finding_of_part(
        of,
        "memcpy",
        ("memcpy",),
        [Evidence(key="copies_ns", value=of.ns("memcpy"))],
        sentence(of, "memcpy", "Memory copies that overlap nothing take"),
        kind=KIND,
        next=Next(
            command="critical-path",
            purpose="which copies are on the path that sets the step",
            of="first",
        ),
        moment=ShownEvents(events="copies"),
    )
