"""Causes of lost time that are new, gone or changed between two runs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fastcomm.comparison.metrics_documents import Object
from fastcomm.metrics.findings.detection import identity
from fastcomm.metrics.findings.idle import KIND as IDLE

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
    idle_cause: str | None = None  # of idle time

    @property
    def identity(self) -> tuple[Any, ...] | None:
        """By what the cause is found in another run."""
        return identity(self.kind, self.ranks, self.idle_cause)

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
        costs = [_cost(finding) if finding else None for finding in (was, is_)]
        cause = _idle_cause(shown)
        change = CauseChange(
            kind=shown["kind"],
            ranks=tuple(shown["ranks"]),
            text=shown["text"],
            confidence=shown["confidence"],
            before_ns=costs[0],
            after_ns=costs[1],
            idle_cause=cause,
        )
        is_sure = any(finding and finding["confidence"] in _SURE for finding in (was, is_))
        # Of idle time that is no finding in one of the runs, the metrics have the causes too.
        effects = [change.effect_ns, *_idle_growth(cause, before, after)]
        if is_sure and min(map(abs, effects)) >= _LEAST * step:
            changes.append(change)
    return tuple(sorted(changes, key=lambda change: -abs(change.effect_ns)))


def _causes(metrics: Object) -> dict[tuple[Any, ...], Object]:
    """Return the findings that name causes, by what identifies them in another run."""
    named = ((identity_of(finding), finding) for finding in metrics.get("findings") or ())
    return {key: finding for key, finding in named if key is not None}


def identity_of(finding: Object) -> tuple[Any, ...] | None:
    """Return by what a finding as in JSON is found in another run; None for a symptom."""
    return identity(finding["kind"], finding["ranks"], _idle_cause(finding))


def _idle_cause(finding: Object) -> str | None:
    """Return the cause that a finding on idle time of all ranks names; None for others."""
    cause = (finding.get("evidence") or {}).get("idle_cause")
    return cause if finding["kind"] == IDLE else None


def _cost(finding: Object) -> float:
    """Return the cost of a cause in ns; of idle time that of its largest cause."""
    cause = _idle_cause(finding)
    cost = finding["evidence"]["idle_cause_ns"] if cause else None
    return float(finding["cost_ns"] if cost is None else cost)


def _idle_growth(cause: str | None, *runs: Object) -> Iterator[float]:
    """Yield by how much idle time of a cause grew between two runs, in ns, if known."""
    own = [((run.get("idle") or {}).get(cause), _mean_step(run)) for run in runs if cause]
    times = [share * step for share, step in own if share is not None]
    if own and len(times) == len(own):
        old, new = times
        yield new - old


def _mean_step(metrics: Object) -> float:
    """Return the mean step in ns; 0 if unknown."""
    return float(metrics["iteration"]["mean_ns"] or 0)
