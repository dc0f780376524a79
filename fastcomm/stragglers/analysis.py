"""Find the stragglers of a job from a table of operations, on the workers of an executor.

One process reads the table and makes its model; the scenarios of the analysis, each rank, stage
and type as measured, are replayed by all. The table itself stays there.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from fastcomm.checks import check_path
from fastcomm.executors.executor import Executor, Local
from fastcomm.files import place
from fastcomm.graph.edits import Edit, Interval, parse_edits
from fastcomm.option_fields import takes
from fastcomm.result import Result
from fastcomm.stragglers import operations
from fastcomm.stragglers.model import JobModel, JobTimes, changed_times, chosen, job_trace
from fastcomm.stragglers.options import StragglerOptions
from fastcomm.stragglers.result import JobDescription, Stragglers, analysis
from fastcomm.units import format_ns, percent, plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StragglerResult(Result):
    """Stragglers of a job, with the replay of changes and the drawn trace if requested."""

    stragglers: Stragglers
    edits: tuple[Edit, ...] = ()
    changed: JobTimes | None = None
    trace: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None  # of the job, by the file that was named

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        stragglers = self.stragglers
        blocking, workers = stragglers.blocking, stragglers.workers
        return {
            "headline": headline(stragglers),
            **self._what_if(),
            "slowdown": stragglers.slowdown,
            "launch_slowdown": stragglers.launch_slowdown,
            "step_time_mean_ns": {
                "base": float(stragglers.base.mean()),
                "nodelay": stragglers.step_ns,
                "ideal": stragglers.ideal_step_ns,
            },
            **{
                f"slowdown_by_{kind}": None if blocking is None else dict(blocking[kind].mean)
                for kind in KINDS
            },
            "m_w": None if stragglers.worst is None else stragglers.worst.rem,
            "m_s": stragglers.last_stage.rem,
            "worst_ranks": list(stragglers.worst_ranks),
            "worker_slowdown": None if workers is None else workers.tolist(),
            "ideal_ns": dict(stragglers.ideal_ns),
            "steps": list(stragglers.chosen),
            "left_out_steps": list(stragglers.left_out),
        }

    def _what_if(self) -> dict[str, Any]:
        """Return the part of the JSON document about the changed steps."""
        if self.changed is None:
            return {}
        mean = float(self.changed.whole.mean())
        before = self.stragglers.step_ns
        interval = self.interval
        steps = map(str, self.stragglers.chosen)
        what_if = {
            "edits": [edit.text for edit in self.edits],
            "interval": None if interval is None else interval.to_dict(),
            "step_time_mean_ns": mean,
            "speedup": before / mean if mean else None,
            "step_time_ns": dict(zip(steps, self.changed.whole.tolist(), strict=True)),
        }
        return {"what_if": what_if}

    @property
    def interval(self) -> Interval | None:
        """Interval of the mean step time after the edits; None without edits."""
        if self.changed is None:
            return None
        # The replay leaves out launch delays: that is its error.
        error = abs(float(self.stragglers.base.mean()) - self.stragglers.step_ns)
        reason = "the validated steps are those of traces, and this is a table of operations"
        return Interval.of(float(self.changed.whole.mean()), error, self.edits, reason)

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the tables `steps` (times in ns) and `slowdowns`.

        The latter has the slowdown that each rank, stage and type of operation brings, as a
        factor.
        """
        stragglers, blocking = self.stragglers, self.stragglers.blocking
        steps = {
            "step": stragglers.chosen,
            "base_ns": stragglers.base,
            "nodelay_ns": stragglers.nodelay.whole,
            "ideal_ns": stragglers.ideal.whole,
        }
        slowdowns = [
            {"kind": kind, "key": key, "slowdown": slowdown}
            for kind in KINDS
            for key, slowdown in (blocking[kind].mean if blocking else {}).items()
        ]
        return {
            "steps": pa.table(steps),
            "slowdowns": pa.Table.from_pylist(slowdowns, schema=_SLOWDOWNS),
        }

    def figures(self) -> dict[str, str]:
        """Return the slowdown, the step times, and the worst ranks."""
        stragglers = self.stragglers
        return {
            "slowdown": f"{stragglers.slowdown:.4f}",
            "step": format_ns(float(stragglers.nodelay.whole.mean())),
            "ideal": format_ns(float(stragglers.ideal.whole.mean())),
            "worst ranks": ", ".join(map(str, stragglers.worst_ranks)) or "none",
        }


def headline(job: Stragglers) -> str:
    """Name the ranks or the stage that cause at least half of the slowdown, if any do."""
    if job.blocking is None or job.worst is None:
        return f"No stragglers: a step takes {job.slowdown:.2f} times as long as an ideal one."
    last, worst = job.last_stage.rem or 0.0, job.worst.rem or 0.0
    if max(last, worst) >= _MOST_OF_IT:
        ranks = f"{plural(len(job.worst_ranks), 'Rank')} {', '.join(map(str, job.worst_ranks))}"
        name = ranks if worst >= last else "The last stage"
        removed = (job.worst if worst >= last else job.last_stage).removed
        would = (
            f"if ideal, a step takes {format_ns(removed)} instead of {format_ns(job.step_ns)}"
        )
        return f"{name} slowed the job: {would} ({percent(max(last, worst))} of the slowdown)."
    (stage, alone), *others = job.blocking["stage"].mean.items()
    second = max((slowdown for _, slowdown in others), default=1.0)
    if alone - 1 >= _MOST_OF_IT * (job.slowdown - 1) and second - 1 < _MOST_OF_IT * (alone - 1):
        return (
            f"Stage {stage} is slow: alone, it makes a step take {alone:.2f} times the ideal."
        )
    kind, alone = next(iter(job.blocking["optype"].mean.items()))
    return (
        f"No rank and no stage causes half of the slowdown; {kind} causes the most of all "
        f"operations: alone, it makes a step take {alone:.2f} times the ideal."
    )


_MOST_OF_IT = 0.5
KINDS: tuple[Literal["dp_rank", "stage", "optype"], ...] = ("dp_rank", "stage", "optype")
_SLOWDOWNS = pa.schema(
    [("kind", pa.string()), ("key", pa.string()), ("slowdown", pa.float64())]
)


def analyse_stragglers(
    table: str | Path,
    options: StragglerOptions,
    *,
    trace: bool = False,
    executor: Executor | None = None,
) -> StragglerResult:
    """Find the stragglers of a job from its table of operations.

    Parameters
    ----------
    table
        Path or URL of the table, as the workers see it.
    options
        Steps, threshold, sizes of the job, and edits.
    trace
        Whether the result has a Chrome trace of the last replay.
    executor
        Holds and replays the table; by default this process.

    """
    meta = None if options.meta is None else operations.meta(place(options.meta))
    shards = (meta or {}).get("dsp_size", 1)
    edits = parse_edits(options).single("a table of operations")
    model = partial(_model, str(table), shards, options.steps)
    with closing((executor or Local()).hold(model)) as shared:
        (about,) = shared.apply([JobDescription.of])
        changed = shared.apply([partial(_changed, edits=edits)]) if edits else ()
        result = analysis(about, shared.apply, options.threshold)
        drawn = shared.apply([partial(_drawn, edits=edits)]) if trace else ()
    return StragglerResult(
        stragglers=result,
        edits=edits,
        changed=next(iter(changed), None),
        trace=next(iter(drawn), None),
        meta=meta,
    )


@takes(StragglerOptions)
def find_stragglers(table: str | Path, options: StragglerOptions) -> StragglerResult:
    """Find the straggling ranks, stages and operations of a job, as `fastcomm stragglers` does.

    Parameters
    ----------
    table
        Path or URL of a Parquet or CSV file with a row per operation, as published by
        ByteDance's StragglerAnalysis.
    options
        Fields of `StragglerOptions`, passed by name. With edits, the job is replayed with
        them, too: lists such as `scale=["op:gc=0"]`, `set=["stage:3=ideal"]`.

    Returns
    -------
    StragglerResult
        Slowdowns, as ratios of step times, and what causes them. Times are ns.

    Raises
    ------
    ConfigError
        If an option is invalid.
    FastcommError
        If a file cannot be read, or a step is not in the table.

    """
    check_path(table, "find_stragglers: table", 'find_stragglers("operations.parquet")')
    return analyse_stragglers(table, options)


def _model(table: str, shards: int, steps: Sequence[int] | None) -> JobModel:
    """Read a table on a worker, and return the model of the chosen steps."""
    whole = JobModel.of(operations.read(place(table)), shards=shards)
    return whole if steps is None else chosen(whole, list(steps))


def _changed(model: JobModel, edits: Sequence[Edit]) -> JobTimes:
    return model.replay(changed_times(model, edits))


def _drawn(model: JobModel, edits: Sequence[Edit]) -> dict[str, Any]:
    return job_trace(model, changed_times(model, edits))
