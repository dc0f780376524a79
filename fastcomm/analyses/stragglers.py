"""Who holds a job up, by a table of operations that is read and replayed where an engine says.

One process reads the table and makes its model; the scenarios of the analysis, each rank, stage
and type as measured, are replayed by all. The table itself never comes here.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastcomm.executors.executor import Executor
from fastcomm.executors.local import Local
from fastcomm.graph import edits
from fastcomm.graph.edits import DurationChange
from fastcomm.option_checks import takes
from fastcomm.options import StragglerOptions
from fastcomm.remote import place
from fastcomm.stragglers import changes as stragglers_changes
from fastcomm.stragglers import operations
from fastcomm.stragglers.model import JobModel, JobTimes, chosen
from fastcomm.stragglers.stragglers import JobDescription, Stragglers, analysis


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerResult:
    """The analysis of a table, and what was asked besides: with changes, and as a trace."""

    stragglers: Stragglers
    changed: JobTimes | None
    trace: dict[str, Any] | None
    meta: dict[str, Any] | None


def analyse_stragglers(
    table: str | Path,
    options: StragglerOptions,
    *,
    trace: bool = False,
    executor: Executor | None = None,
) -> StragglerResult:
    """Analyse a table of operations, a path or a URL that the workers understand.

    With `trace`, what is replayed last is drawn for Perfetto. `executor` is by default this
    process.
    """
    meta = None if options.meta is None else operations.meta(place(options.meta))
    shards = (meta or {}).get("dsp_size", 1)
    changes = (
        None
        if options.what_if is None
        else edits.read_changes(place(options.what_if), has_ideal=True)
    )
    model = partial(_model, str(table), shards, options.steps)
    with closing((executor or Local()).hold(model)) as held:
        (about,) = held.ask([JobDescription.of])
        changed = () if changes is None else held.ask([partial(_changed, changes=changes)])
        found = analysis(about, held.ask, options.threshold)
        drawn = held.ask([partial(_drawn, changes=changes)]) if trace else ()
    return StragglerResult(
        stragglers=found,
        changed=next(iter(changed), None),
        trace=next(iter(drawn), None),
        meta=meta,
    )


@takes(StragglerOptions)
def find_stragglers(table: str | Path, options: StragglerOptions) -> StragglerResult:
    """Find what holds up a job, by the path of its table of operations.

    Raises
    ------
    FastcommError
        If a file cannot be read, or a step is not in the table.

    """
    return analyse_stragglers(table, options)


def _model(table: str, shards: int, steps: Sequence[int] | None) -> JobModel:
    """Where the table can be seen: its model, of the chosen steps."""
    whole = JobModel.of(operations.read(place(table)), shards=shards)
    return whole if steps is None else chosen(whole, list(steps))


def _changed(model: JobModel, changes: Mapping[str, DurationChange]) -> JobTimes:
    return model.replay(stragglers_changes.times(model, changes))


def _drawn(model: JobModel, changes: Mapping[str, DurationChange] | None) -> dict[str, Any]:
    times = model.measured if changes is None else stragglers_changes.times(model, changes)
    return stragglers_changes.trace(model, times)
