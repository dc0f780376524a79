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

from fastcomm.engine.engine import Engine
from fastcomm.engine.local import Local
from fastcomm.remote import place
from fastcomm.replay import operations, straggler_changes, straggler_trace
from fastcomm.replay.model import Model, Replayed, chosen
from fastcomm.replay.straggler_changes import Change
from fastcomm.replay.stragglers import THRESHOLD, About, Stragglers, analysis


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The analysis of a table, and what was asked besides: with changes, and as a trace."""

    stragglers: Stragglers
    changed: Replayed | None
    trace: dict[str, Any] | None


def find_stragglers(
    table: str | Path,
    *,
    shards: int = 1,
    steps: Sequence[int] | None = None,
    threshold: float = THRESHOLD,
    changes: Mapping[str, Change] | None = None,
    trace: bool = False,
    engine: Engine | None = None,
) -> Found:
    """Analyse a table of operations, a path or a URL that the workers understand.

    `shards` is `dsp_size` of the job. With `changes` the steps are replayed with them, too, and
    with `trace` what is replayed last is drawn for Perfetto. `engine` is by default this
    process.
    """
    model = partial(_model, str(table), shards, None if steps is None else tuple(steps))
    with closing((engine or Local()).hold(model)) as held:
        (about,) = held.ask([About.of])
        changed = () if changes is None else held.ask([partial(_changed, changes=changes)])
        found = analysis(about, held.ask, threshold)
        drawn = held.ask([partial(_drawn, changes=changes)]) if trace else ()
    return Found(
        stragglers=found, changed=next(iter(changed), None), trace=next(iter(drawn), None)
    )


def _model(table: str, shards: int, steps: Sequence[int] | None) -> Model:
    """Where the table can be seen: its model, of the chosen steps."""
    whole = Model.of(operations.read(place(table)), shards=shards)
    return whole if steps is None else chosen(whole, list(steps))


def _changed(model: Model, changes: Mapping[str, Change]) -> Replayed:
    return model.replay(straggler_changes.times(model, changes))


def _drawn(model: Model, changes: Mapping[str, Change] | None) -> dict[str, Any]:
    times = model.measured if changes is None else straggler_changes.times(model, changes)
    return straggler_trace.trace(model, times)
