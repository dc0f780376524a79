"""The findings of a run on its page: as on the terminal, with evidence and a next command."""

from collections.abc import Callable
from typing import Any

from fastcomm.metrics import findings as findings_
from fastcomm.report.commands import Suggestions
from fastcomm.report.html import words
from fastcomm.report.html.page import Finding
from fastcomm.report.html.words import Fact

MOST = 8

# Evidence worth a number on the page: its label, and how it is written.
_EVIDENCE: dict[str, tuple[str, Callable[[Any], str]]] = {
    "compute_ns": ("compute per step", words.ns),
    "peers_compute_ns": ("compute of its peers", words.ns),
    "idle_ns": ("idle per step", words.ns),
    "peers_idle_ns": ("idle time of its peers", words.ns),
    "wait_ns": ("waits for others", words.ns),
    "peers_wait_ns": ("its peers wait", words.ns),
    "bus_bw": ("bus bandwidth", words.rate),
    "peers_bus_bw": ("bus bandwidth of its peers", words.rate),
    "expert_bytes": ("expert traffic per step", words.size),
    "peers_expert_bytes": ("expert traffic of its peers", words.size),
    "exposed_wait_ns": ("waiting for the last rank", words.ns),
    "exposed_transfer_ns": ("transfer", words.ns),
    "overlap": ("of communication overlaps compute", words.percent),
    "spread_ns": ("spread between steps", words.ns),
}


def findings(suggestions: Suggestions) -> tuple[Finding, ...]:
    """Return the findings of a run in the order in which the terminal prints them."""
    return tuple(_finding(each, suggestions) for each in suggestions.metrics.findings[:MOST])


def _finding(found: findings_.Finding, suggestions: Suggestions) -> Finding:
    command = suggestions.next(found)
    return Finding(
        title=(found.text,),
        evidence=(
            words.fact("findings.cost_ns", found.cost_ns, words.ns, label="per step"),
            words.fact("findings.share", found.share, words.percent, label="of the step"),
            Fact(key="findings.confidence", text=found.confidence, label="confidence"),
            *_evidence(found),
        ),
        command=command.line if command else "",
        then=command.purpose if command else "",
        cost_ns=found.cost_ns,
    )


def _evidence(found: findings_.Finding) -> list[Fact]:
    return [
        words.fact("findings.evidence", getattr(found.evidence, name), form, label=label)
        for name, (label, form) in _EVIDENCE.items()
        if getattr(found.evidence, name) is not None
    ]
