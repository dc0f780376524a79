"""Causes of lost time that are new, gone or changed between two runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastcomm.metrics.findings import SYMPTOMS

Object = Mapping[str, Any]

# Minimum change as a share of the longer step.
_LEAST = 0.01
_SURE = ("high", "medium")


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseChange:
    """A cause of lost time in either run; costs are ns per step, null where it is not found."""

    kind: str
    ranks: tuple[int, ...]
    text: str  # of the finding after, or before if it is gone
    confidence: str
    before_ns: float | None
    after_ns: float | None

    @property
    def effect_ns(self) -> float:
        """Return by how much more it costs after."""
        return (self.after_ns or 0.0) - (self.before_ns or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the cause as in JSON."""
        return {**asdict(self), "ranks": list(self.ranks), "effect_ns": self.effect_ns}


def cause_changes(before: Object, after: Object) -> tuple[CauseChange, ...]:
    """Return the causes that cost more or less than before, the largest effect first.

    `before` and `after` are metrics as in JSON. Causes of low confidence are left out, unless
    the other run has them with a higher one.
    """
    old, new = _causes(before), _causes(after)
    step = max(_mean_step(before), _mean_step(after))
    changes = []
    for key in dict.fromkeys([*new, *old]):
        was, is_ = old.get(key), new.get(key)
        shown = is_ or was or {}
        costs = [finding["cost_ns"] if finding else None for finding in (was, is_)]
        change = CauseChange(
            kind=shown["kind"],
            ranks=tuple(shown["ranks"]),
            text=shown["text"],
            confidence=shown["confidence"],
            before_ns=costs[0],
            after_ns=costs[1],
        )
        is_sure = any(finding and finding["confidence"] in _SURE for finding in (was, is_))
        if is_sure and abs(change.effect_ns) >= _LEAST * step:
            changes.append(change)
    return tuple(sorted(changes, key=lambda change: -abs(change.effect_ns)))


def _causes(metrics: Object) -> dict[tuple[Any, ...], Object]:
    """Return the findings that name causes, by what identifies them in another run."""
    findings = metrics.get("findings") or ()
    causes = [finding for finding in findings if finding["kind"] not in SYMPTOMS]
    # Pauses visit any ranks, and others in each run.
    return {
        (cause["kind"], *(() if cause["kind"] == "pauses" else cause["ranks"])): cause
        for cause in causes
    }


def _mean_step(metrics: Object) -> float:
    """Return the mean step in ns; 0 if unknown."""
    return float(metrics["iteration"]["mean_ns"] or 0)
