"""What changed in a profiled window against the first windows of its run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastcomm.comparison.result import BreakdownChange, CauseChange, Comparison, compare
from fastcomm.errors import FastcommError
from fastcomm.metrics.result import Metrics
from fastcomm.watch.windows import ProfiledWindow

FIRST = 3  # windows whose median step stands for the beginning of a run
_LEAST = 0.02  # of the step: smaller changes of a part are chance
_MOST = 2  # changes of one window that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """A window, its metrics, and their comparison with the beginning of the run."""

    window: ProfiledWindow
    metrics: Metrics
    comparison: Comparison | None  # None for the first window

    @property
    def causes(self) -> tuple[CauseChange, ...]:
        """Causes that are new, gone or changed, the largest effect first."""
        return () if self.comparison is None else self.comparison.causes[:_MOST]

    @property
    def parts(self) -> tuple[BreakdownChange, ...]:
        """Parts of the step that take longer, the largest effect first."""
        if self.comparison is None:
            return ()
        step = self.comparison.step.before or 0.0
        longer = [part for part in self.comparison.parts if part.effect_ns > _LEAST * step > 0]
        return tuple(longer[:_MOST])


@dataclass(slots=True)
class RunHistory:
    """The first windows of one run, against which later ones are compared."""

    first: list[dict[str, Any]] = field(default_factory=list)

    def report(self, window: ProfiledWindow, metrics: Metrics) -> WindowReport:
        """Compare a window with the first ones; the first windows are compared in their order.

        Raises
        ------
        FastcommError
            If the metrics cannot be compared.

        """
        document = metrics.to_dict()
        comparison = compare(_typical(self.first), document) if self.first else None
        if len(self.first) < FIRST:
            self.first.append(document)
        return WindowReport(window=window, metrics=metrics, comparison=comparison)


def _typical(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics whose mean step is the lower median."""
    timed = [one for one in documents if one["iteration"]["mean_ns"] is not None]
    if not timed:
        return documents[0]
    in_order = sorted(timed, key=lambda one: one["iteration"]["mean_ns"])
    return in_order[(len(in_order) - 1) // 2]


@dataclass(slots=True)
class Watch:
    """Reports of the windows of all runs in a directory, each once, as they arrive."""

    histories: dict[str, RunHistory] = field(default_factory=dict)
    reported: set[Path] = field(default_factory=set)  # directories of windows

    def report(self, window: ProfiledWindow, metrics: Metrics) -> WindowReport:
        """Report a window; see `RunHistory.report`."""
        self.reported.add(window.folder)
        history = self.histories.setdefault(str(window.folder.parent), RunHistory())
        return history.report(window, metrics)

    def give_up(self, window: ProfiledWindow, error: FastcommError) -> str:
        """Report a window that cannot be measured; return the sentence."""
        self.reported.add(window.folder)
        return f"{window.folder}: not measured: {error}"
