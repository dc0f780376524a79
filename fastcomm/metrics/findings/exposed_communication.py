"""Communication that no compute hides takes much of the step."""

from fastcomm.metrics.breakdown import EXACT
from fastcomm.metrics.findings.finding import Evidence, Finding, Fix, Next, ShownEvents, Sketch
from fastcomm.metrics.findings.symptoms import StepTimes, finding_of_part, sentence
from fastcomm.metrics.traffic import divided
from fastcomm.options import EditOptions
from fastcomm.units import percent

KIND = "exposed_communication"
_COLUMNS = tuple(name for name in EXACT if name.startswith("exposed_"))


def exposed_communication(of: StepTimes) -> Finding | None:
    """Return the finding on exposed communication, if it is large."""
    if not of.is_large("exposed"):
        return None
    tag = of.breakdown.largest_tag
    wait, transfer = divided(of.exposure) or (None, None)
    return finding_of_part(
        of,
        "exposed",
        _COLUMNS,
        [
            Evidence(key="tag", value=tag),
            Evidence(
                key="exposed_wait_ns", value=wait, label="waiting for the last rank", unit="ns"
            ),
            Evidence(key="exposed_transfer_ns", value=transfer, label="transfer", unit="ns"),
            Evidence(
                key="overlap",
                value=of.overlap,
                label="of communication overlaps compute",
                unit="share",
            ),
        ],
        f"{sentence(of, 'exposed', 'Exposed communication takes')}{_clauses(of, wait)}",
        kind=KIND,
        next=None if tag is None else _next(tag),
        fix=None if tag is None else _fix(tag),
        moment=ShownEvents(events="communication"),
        picture=Sketch(of="step"),
    )


def _clauses(of: StepTimes, wait: float | None) -> str:
    """Return what is known of the exposed time: `wait` ns per step for the last rank."""
    text = ""
    if wait is not None and of.share("exposed"):
        text = f"; {percent(wait / of.ns('exposed'))} of it is waiting for the last rank"
        if not of.is_whole:
            text += " that was measured, and waiting for the missing ranks is not known"
    if of.overlap is not None:
        text += f"; {percent(of.overlap)} of communication overlaps compute"
    return text


def _next(tag: str) -> Next:
    name = "communication of unknown parallelism" if tag == "OTHER" else tag
    return Next(
        command="what-if",
        options=("--scale", f"comm:{tag}=0.5"),
        purpose=f"how much shorter the step is if {name} takes half its time",
        of=None,
        tag=tag,
    )


def _fix(tag: str) -> Fix:
    edit = EditOptions(scale=(f"comm:{tag}=0.5",))
    return Fix(edit=edit, text=f"{tag} communication in half the time")
