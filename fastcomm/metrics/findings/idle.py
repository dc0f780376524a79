"""Devices are idle for much of the step, or for a cause that programs can avoid."""

from fastcomm.idle import totals
from fastcomm.idle.causes import BY_CAUSE
from fastcomm.metrics.findings.finding import Evidence, Finding, Fix, Next, Sketch
from fastcomm.metrics.findings.late_hosts import PURPOSE_ON_HOST, cause_evidence
from fastcomm.metrics.findings.symptoms import StepTimes, finding_of_part, sentence
from fastcomm.options import EditOptions
from fastcomm.units import format_ns, percent

KIND = "idle"
_MOSTLY = 0.5  # share of the step from which on idle time of a known cause counts as a cause


def idle_time(of: StepTimes) -> Finding | None:
    """Return the finding on idle time, if it is large or can be avoided."""
    is_large = of.is_large("idle")
    # Of a small part, the cause to name is one that can be avoided.
    causes = of.idle if is_large else _avoidable(of)
    if not is_large and not causes:
        return None
    cause = totals.largest(causes)
    is_known = cause not in (None, "unknown")
    return finding_of_part(
        of,
        "idle",
        ("idle",),
        _evidence(of, cause),
        _text(of, cause),
        kind=KIND,
        counts_as_cause=is_known and of.share("idle") >= _MOSTLY,
        next=Next(
            command="critical-path",
            purpose=PURPOSE_ON_HOST
            if of.is_host_run
            else "what the device waits for: the host, other ranks, or the pipeline",
        ),
        fix=_fix(cause),
        moment=None,
        picture=Sketch(of="idle"),
    )


def _avoidable(of: StepTimes) -> dict[str, float]:
    """Return the large causes of a device's idle time that programs usually avoid."""
    if of.is_host_run:
        return {}
    return {
        cause: share
        for cause, share in of.idle.items()
        if share is not None and share >= BY_CAUSE[cause].least_share
    }


def _evidence(of: StepTimes, cause: str | None) -> list[Evidence]:
    own = Evidence(key="idle_ns", value=of.ns("idle"), label="idle per step", unit="ns")
    if cause is None:
        return [own]
    return [own, *cause_evidence(cause, (of.idle[cause] or 0.0) * of.step_ns)]


def _text(of: StepTimes, cause: str | None) -> str:
    """Return the sentence on idle time with its cause, if known, and what to try."""
    if of.is_host_run:
        text = sentence(of, "idle", "No operator runs and nothing is communicated for")
    else:
        text = sentence(of, "idle", "The device is idle for")
    if cause is None:
        return text
    share, about = of.idle[cause] or 0.0, BY_CAUSE[cause]
    ns = share * of.step_ns
    mostly = totals.explained(cause, ns, of.idle_names, "mostly in ")
    if of.is_host_run:
        return f"{text}; {format_ns(ns)} of it is {about.text}{mostly}"
    return (
        f"The device waits {format_ns(ns)} per step ({percent(share)} of the step) "
        f"{about.awaited}{mostly}; try {about.to_try}. "
        f"{text.replace('The device', 'In all, it')}"
    )


def _fix(cause: str | None) -> Fix | None:
    """Return the edit of a what-if that removes a cause; None if there is none."""
    removed = BY_CAUSE[cause].removed if cause else None
    if removed is None:
        return None
    return Fix(edit=EditOptions(remove=(removed.delays,)), text=removed.text)
