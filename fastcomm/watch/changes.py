"""What changed in a profiled window against the first windows of its run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastcomm.comparison.analysis import compare
from fastcomm.comparison.cause_changes import CauseChange, cause_changes, identity_of
from fastcomm.comparison.result import BreakdownChange, Comparison
from fastcomm.errors import FastcommError
from fastcomm.metrics.findings.finding import Finding
from fastcomm.metrics.findings.slow_links import KIND as SLOW_LINK
from fastcomm.metrics.headline import UNEVEN
from fastcomm.metrics.links import SLOW
from fastcomm.metrics.result import Metrics
from fastcomm.watch.windows import ProfiledWindow

MetricsDocument = dict[str, Any]  # metrics as in JSON

FIRST = 3  # windows whose median step stands for the beginning of a run
_LEAST = 0.02  # of the step: smaller changes of a part are chance
_MOST = 2  # changes of one window that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerLinks:
    """Groups of one parallelism whose transfers are slower than in the first windows.

    The rates are bus bandwidths, bytes per second, of the group that slowed down most.
    """

    tag: str
    groups: tuple[tuple[int, ...], ...]  # ranks of each; the group that slowed down most first
    of_groups: int  # groups whose rates are known in both windows
    before_bw: float
    after_bw: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """A window, its metrics, and their comparison with the beginning of the run."""

    window: ProfiledWindow
    metrics: Metrics
    comparison: Comparison | None  # None for the first window
    slower_links: tuple[SlowerLinks, ...] = ()  # one per parallelism
    other_sizes: tuple[int, ...] = ()  # ranks of the job in earlier windows, if never as many
    ended: tuple[CauseChange, ...] = ()  # causes that came after the first windows, and went

    @property
    def causes(self) -> tuple[CauseChange, ...]:
        """Causes that are new, gone or changed, the largest effect first."""
        changed = () if self.comparison is None else self.comparison.causes
        return (*changed[:_MOST], *self.ended[:_MOST])

    @property
    def first_causes(self) -> tuple[Finding, ...]:
        """Large causes of the window alone; idle time of a known cause is one."""
        return tuple(
            finding
            for finding in self.metrics.findings
            if finding.share >= UNEVEN
            and (
                not finding.is_symptom
                or (finding.confidence != "low" and identity_of(finding.to_dict()) is not None)
            )
        )

    @property
    def parts(self) -> tuple[BreakdownChange, ...]:
        """Parts of the step that take longer, the largest effect first."""
        if self.comparison is None:
            return ()
        return tuple(_longer_parts(self.comparison)[:_MOST])


def _longer_parts(comparison: Comparison) -> list[BreakdownChange]:
    """Return the parts of the step that take longer, the largest effect first."""
    step = comparison.step.before or 0.0
    return [part for part in comparison.parts if part.effect_ns > _LEAST * step > 0]


@dataclass(slots=True)
class RunHistory:
    """The first windows of one run, against which later ones are compared."""

    first: list[MetricsDocument] = field(default_factory=list)
    # Causes that are new since the first windows, by identity: their findings as in JSON.
    present: dict[tuple[Any, ...], MetricsDocument] = field(default_factory=dict)
    # Causes of the first windows that went, and were reported, by identity.
    gone: set[tuple[Any, ...] | None] = field(default_factory=set)

    def report(self, window: ProfiledWindow, metrics: Metrics) -> WindowReport:
        """Compare a window with the first ones; the first windows are compared in their order.

        Raises
        ------
        FastcommError
            If the metrics cannot be compared.

        """
        document = metrics.to_dict()
        if not self.first:
            self.first.append(document)
            return WindowReport(window=window, metrics=metrics, comparison=None)
        typical = _typical(self.first)
        comparison = self._without_gone(
            _with_large_causes(compare(typical, document)), document
        )
        if len(self.first) < FIRST:
            self.first.append(document)
        report = WindowReport(
            window=window,
            metrics=metrics,
            comparison=comparison,
            slower_links=tuple(_slower_links(comparison, typical, document)),
            ended=tuple(self._ended(comparison, document)),
        )
        self.gone |= {one.identity for one in report.causes if one.after_ns is None}
        return report

    def _without_gone(self, comparison: Comparison, document: MetricsDocument) -> Comparison:
        """Leave out causes that went in an earlier window; they can go again if they return."""
        self.gone -= set(map(identity_of, document["findings"]))
        causes = comparison.causes
        new = (
            one for one in causes if one.after_ns is not None or one.identity not in self.gone
        )
        return replace(comparison, causes=tuple(new))

    def _ended(
        self, comparison: Comparison, document: MetricsDocument
    ) -> Iterator[CauseChange]:
        """Yield causes that were new in an earlier window, and are gone; note new ones."""
        before = {**document, "findings": [*self.present.values()], "idle": {}}
        changed = {one.identity: one for one in comparison.causes}
        for cause in cause_changes(before, document):
            key = cause.identity
            if key is not None and key in self.present and cause.after_ns is None:
                del self.present[key]
                if key not in changed:
                    yield cause
        for finding in document["findings"]:
            key = identity_of(finding)
            if key is not None and key in changed and changed[key].before_ns is None:
                self.present[key] = finding


def _with_large_causes(comparison: Comparison) -> Comparison:
    """Leave out causes that cost less than by what ranks of healthy jobs differ."""
    least = UNEVEN * max(comparison.step.before or 0.0, comparison.step.after or 0.0)
    large = tuple(one for one in comparison.causes if abs(one.effect_ns) >= least)
    return replace(comparison, causes=large)


def _slower_links(
    comparison: Comparison, before: MetricsDocument, after: MetricsDocument
) -> Iterator[SlowerLinks]:
    """Yield the parallelisms whose exposed transfers take longer, as their links are slower.

    Groups that are slower than other groups of their window are causes of it.
    """
    least = _LEAST * (comparison.step.before or 0.0)
    named = [set(one.ranks) for one in comparison.causes if one.kind == SLOW_LINK]
    old, new = _rates(before), _rates(after)
    for part in _longer_parts(comparison):
        tag = part.name.removeprefix("exposed_")
        name = f"exposure.{tag}.transfer_ns"
        growth = next((one.difference for one in comparison.values if one.name == name), None)
        ratios = {key: new[key] / old[key] for key in new if key[0] == tag and key in old}
        slower = sorted((ratio, key) for key, ratio in ratios.items() if ratio < SLOW)
        slower = [
            (ratio, key)
            for ratio, key in slower
            if not any(ranks <= set(key[1]) for ranks in named)
        ]
        if (growth or 0.0) > least and slower:
            worst = slower[0][1]
            yield SlowerLinks(
                tag=tag,
                groups=tuple(dict.fromkeys(key[1] for _, key in slower)),
                of_groups=len({key[1] for key in ratios}),
                before_bw=old[worst],
                after_bw=new[worst],
            )


def _rates(metrics: MetricsDocument) -> dict[tuple[str, tuple[int, ...], str, int], float]:
    """Return the bus bandwidth of each group by parallelism, ranks, operation and size.

    Of the sizes of a group only that counts in which it moves the most bytes, as latency limits
    small transfers.
    """
    largest: dict[tuple[str, tuple[int, ...]], MetricsDocument] = {}
    for row in metrics.get("links") or ():
        key = row["tag"], tuple(row["ranks"])
        if row["bus_bw"] and _moved(row) > _moved(largest.get(key)):
            largest[key] = row
    return {(*key, row["op"], row["size_from"]): row["bus_bw"] for key, row in largest.items()}


def _moved(row: MetricsDocument | None) -> int:
    """Return about how many bytes the transfers of a row move; 0 without one."""
    return 0 if row is None else int(row["count"] * row["size_from"])


def _typical(documents: Sequence[MetricsDocument]) -> MetricsDocument:
    """Return the metrics whose mean step is the lower median."""
    timed = [one for one in documents if one["iteration"]["mean_ns"] is not None]
    if not timed:
        return documents[0]
    in_order = sorted(timed, key=lambda one: one["iteration"]["mean_ns"])
    return in_order[(len(in_order) - 1) // 2]


@dataclass(slots=True)
class Watch:
    """Reports of the windows of all runs in a directory, each once, as they arrive.

    Windows of one run with other numbers of ranks have histories of their own: their steps and
    parts are no changes of each other.
    """

    histories: dict[str, dict[int, RunHistory]] = field(default_factory=dict)
    reported: set[Path] = field(default_factory=set)  # directories of windows
    waiting: set[Path] = field(default_factory=set)  # of windows that lacked ranks at the end

    def report(self, window: ProfiledWindow, metrics: Metrics) -> WindowReport:
        """Report a window; see `RunHistory.report`."""
        self.reported.add(window.folder)
        sizes = self.histories.setdefault(str(window.folder.parent), {})
        size = metrics.expected_ranks
        other_sizes = () if size in sizes else tuple(sizes)
        report = sizes.setdefault(size, RunHistory()).report(window, metrics)
        return replace(report, other_sizes=other_sizes)

    def give_up(self, window: ProfiledWindow, error: FastcommError) -> str:
        """Report a window that cannot be measured; return the sentence."""
        self.reported.add(window.folder)
        return f"{window.folder}: not measured: {error}"
