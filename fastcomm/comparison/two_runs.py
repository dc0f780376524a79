"""Two runs that are compared: the metrics of the ranks that both have, and their kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from fastcomm.comparison.analysis import compare
from fastcomm.comparison.kernel_changes import COMPARED
from fastcomm.comparison.metrics_documents import Object, expected_ranks_of
from fastcomm.comparison.result import Comparison
from fastcomm.device_work.analysis import answered, compile_kernels
from fastcomm.device_work.result import Kernels
from fastcomm.device_work.totals import WorkQuestion
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.executors.executor import OpenedRun
from fastcomm.metrics.result import Metrics
from fastcomm.units import enumeration

Measure = Callable[[OpenedRun], Metrics]


def kernels_of_two(
    before: OpenedRun, after: OpenedRun, steps: tuple[int, ...] | None = None
) -> list[tuple[Kernels, Kernels]]:
    """Return the device work of two runs, to be compared: a pair by each key of `COMPARED`.

    Parameters
    ----------
    before, after
        The ranks of the runs.
    steps
        Numbers of the steps that count; by default all.

    Raises
    ------
    FastcommError
        If a run has no kernels in its steps, or as of `sum_kernels`.

    """
    question = WorkQuestion(by=COMPARED, steps=steps)
    before.compile(compile_kernels)
    both = [answered(run, question) for run in (before, after)]
    if not all(run[0].steps and run[0].table.num_rows for run in both):
        raise ConfigError("a run has none in its steps")
    return list(zip(*both, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """The metrics of a run as in JSON; and its traces and result, unless it was saved."""

    document: Object
    traces: OpenedRun | None = None
    metrics: Metrics | None = None
    measure: Measure | None = None

    @classmethod
    def of_traces(cls, traces: OpenedRun, measure: Measure) -> Self:
        """Measure the traces of a run."""
        metrics = measure(traces)
        return cls(document=metrics.contents(), traces=traces, metrics=metrics, measure=measure)

    def only(self, ranks: Sequence[int]) -> Self:
        """Measure the run again with some of its ranks alone, if it has others and traces."""
        has_others = not set(self.document["ranks"]) <= set(ranks)
        if self.traces is None or self.measure is None or not has_others:
            return self
        return self.of_traces(self.traces.only(ranks), self.measure)


TwoRuns = tuple[ComparedRun, ComparedRun]


def with_common_ranks(before: ComparedRun, after: ComparedRun) -> TwoRuns:
    """Return two runs with the ranks that both have; with all ranks if they cannot be paired.

    That is so if they have no common rank, or if their world sizes differ, so that equal
    numbers are different ranks.
    """
    old, new = (set(run.document.get("ranks") or ()) for run in (before, after))
    is_alike = expected_ranks_of(before.document) == expected_ranks_of(after.document)
    common = sorted(old & new)
    if not (is_alike and common):
        return before, after
    return before.only(common), after.only(common)


def compare_runs(
    before: ComparedRun,
    after: ComparedRun,
    *,
    steps: tuple[int, ...] | None = None,
    kernels: "Sequence[tuple[Kernels, Kernels]] | None" = None,
) -> tuple[Comparison, TwoRuns]:
    """Compare two runs; return the comparison, and the runs with the ranks that both have.

    Parameters
    ----------
    before, after
        The runs with all their ranks.
    steps
        Numbers of the steps whose kernels count; by default all.
    kernels
        Their device work, a pair by each key; by default it is read.

    """
    same, note = with_common_ranks(before, after), None
    if kernels is None:
        kernels, note = _kernels_of(*same, steps)
    old, new = (run.document for run in same)
    comparison = compare(old, new, whole=(before.document, after.document), kernels=kernels)
    # Why kernels are not compared matters if the runs differ.
    if note is not None and not comparison.is_same:
        comparison = replace(comparison, notes=(*comparison.notes, note))
    return comparison, same


def _kernels_of(
    before: ComparedRun, after: ComparedRun, steps: tuple[int, ...] | None
) -> "tuple[list[tuple[Kernels, Kernels]], str | None]":
    """Return the device work of two runs, a pair by each key, or the reason why there is none.

    `steps` is as for `kernels_of_two`.
    """
    if before.traces is None or after.traces is None:
        both = {"BEFORE": before, "AFTER": after}
        saved = [name for name, run in both.items() if run.traces is None]
        why = f"{enumeration(saved)} {'has' if len(saved) == 1 else 'have'} saved metrics alone"
        return [], f"kernels are not compared: {why}"
    try:
        pairs = kernels_of_two(before.traces, after.traces, steps)
    except FastcommError as error:
        return [], f"kernels are not compared: {error}"
    return pairs, None
