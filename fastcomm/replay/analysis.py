"""Replay a step of a dPRO trial, or of a run by the constraints of its critical path.

Several ranks of a run are joined by their collectives, as for one critical path through all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fastcomm import preparation
from fastcomm.checks import check_path
from fastcomm.compat import dpro
from fastcomm.critical_path import what_if
from fastcomm.critical_path.analysis import PathsByRank, together
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.search import JoinError, RunEvents, analyze, joined
from fastcomm.errors import FastcommError
from fastcomm.executors.executor import OpenedRun, Task
from fastcomm.formats.dpro import trial as trials
from fastcomm.formats.dpro.trial import Trial
from fastcomm.graph.edits import Edit, plan
from fastcomm.option_fields import takes
from fastcomm.options import Window
from fastcomm.replay import predictions
from fastcomm.replay.options import ScenarioOptions, TrialOptions, TrialReplayOptions
from fastcomm.replay.replayed import RULES, Options, critical_path
from fastcomm.replay.result import Session, session
from fastcomm.replay.run_graph import StepConstraints, measured, replayer
from fastcomm.trace.run import ReadRanks, SkippedRank, Spread, warnings_of_ranks
from fastcomm.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step of a run: its constraints, and the path through them, which edits change."""

    constraints: StepConstraints
    path: CriticalPath
    notes: tuple[str, ...] = ()  # why the step is of one rank alone
    warnings: tuple[str, ...] = ()  # of the traces

    def edited(self, edits: Sequence[Edit]) -> StepConstraints:
        """Return the constraints after edits.

        Raises ConfigError if an edit selects nothing.
        """
        now = what_if.Replay(self.path).edited(edits)
        return replace(self.constraints, edited=(now.source, now.weight))


def step_of(run: OpenedRun, window: Window | None = None) -> RunStep:
    """Return the constraints between the events of a window of all ranks.

    If ranks share no communication that connects them, the step is that of the first rank, and
    `notes` say why.

    Parameters
    ----------
    run
        The traces.
    window
        Part of the traces; by default the second step, or the only one.

    Raises
    ------
    FastcommError
        If a rank cannot be read (of a run that goes on, if none can).

    """
    run.compile(preparation.compile_critical_path)
    part = partial(_part, window=window)
    task = Task(measure=part, merge=together, finish=_step, content="all")
    step, skipped = run.gather(task)
    constraints = step.constraints
    metas = [trace.meta for trace in constraints.traces]
    read = ReadRanks.of(run, [meta.rank for meta in metas], skipped)
    warnings = (*run.warnings, *warnings_of_ranks(metas))
    return replace(step, constraints=replace(constraints, read=read), warnings=warnings)


def _part(trace: Trace, window: Window | None) -> PathsByRank:
    """Return one rank and its window; the whole trace is kept to number operations."""
    return {trace.meta.rank: (trace, analyze(trace, window))}


def _step(
    parts: PathsByRank, skipped: Sequence[SkippedRank], _: Spread
) -> tuple[RunStep, Sequence[SkippedRank]]:
    return _joined(parts), skipped


def _joined(parts: PathsByRank) -> RunStep:
    """Join the windows of all ranks into one step; `parts` are by rank."""
    traces = {rank: parts[rank][0] for rank in sorted(parts)}
    paths = {rank: parts[rank][1] for rank in sorted(parts)}
    try:
        path = joined(traces, paths=paths) if len(traces) > 1 else paths[min(paths)]
    except JoinError as error:
        rank = min(traces)
        note = f"this is the step of rank {rank} alone: ranks cannot be joined ({error})"
        return replace(_joined({rank: parts[rank]}), notes=(note,))
    events = path.events
    constraints = StepConstraints(
        graph=path.graph,
        on_device=path.on_device,
        rank_of=path.across.rank_of.astype(np.int64),
        first=events.first[:-1] if isinstance(events, RunEvents) else np.zeros(1, np.int64),
        traces=tuple(traces.values()),
        number=path.step,
    )
    return RunStep(constraints=constraints, path=path)


_AS_MEASURED = ScenarioOptions()


def session_of(
    run_step: RunStep, options: ScenarioOptions = _AS_MEASURED, *, workers: int = 1
) -> Session:
    """Replay a step with the measured durations, and with edits if there are any.

    With `bottleneck`, names of the critical path are left out in turn, in `workers` threads.
    """
    step = run_step.constraints
    if not len(step.graph.time):
        raise FastcommError(f"{step.traces[0].meta.path}: the window holds no work")
    edits = plan(options).single("a replay")
    replayed = replayer(step).run()
    session = Session(
        edits=edits,
        changed=replayer(run_step.edited(edits)).run() if edits else None,
        measured=measured(step),
        replayed=replayed,
        path=critical_path(replayed),
        step=step.number,
        read=step.read,
        is_host_run=run_step.path.about.is_host_run,
        notes=(*run_step.notes, *run_step.path.about.notes),
        warnings=run_step.warnings,
    )
    return _with_bottlenecks(session, workers, by_name=True) if options.bottleneck else session


def _with_bottlenecks(session: Session, workers: int, *, by_name: bool) -> Session:
    """Return a replayed session with replays of the step without what costs it most.

    It is searched in `workers` threads, among names rather than operations with `by_name`.
    """
    removed = predictions.bottlenecks(
        session.replayed, session.path, workers=workers, by_name=by_name
    )
    return replace(session, removed=removed)


def read_trial(path: Path, options: TrialOptions) -> Trial:
    """Read a profiling directory of dPRO."""
    trial = trials.read(
        path,
        align=options.host_clocks,
        algorithm=options.nccl_algorithm,
        clip_updates=options.clip_updates,
    )
    return replace(trial, graph=trial.graph.with_barrier()) if options.barrier else trial


def session_of_trial(trial: Trial, options: TrialReplayOptions, *, workers: int = 1) -> Session:
    """Replay a step of a trial with its measured durations and with edits, and predict others.

    Operations of the critical path are left out in turn in `workers` threads.

    Raises `ConfigError` if an edit is invalid, selects nothing, or is a sweep (FROM:TO:STEP).
    """
    edits = plan(options).single("a replay")
    replayed = session(
        trial,
        Options(
            rules=RULES if options.compat is None else dpro.RULES,
            steps=options.repeat,
            unlimited_updates=options.unlimited_updates,
        ),
    )
    own = replayed.replayed.replayer
    result = replace(
        replayed,
        alone=own.only(options.tensors) if options.tensors else None,
        predictions=predictions.predictions(trial, own, options),
        warnings=tuple(trial.warnings),
        edits=edits,
        changed=own.run(predictions.durations(own, edits)) if edits else None,
    )
    return _with_bottlenecks(result, workers, by_name=False) if options.bottleneck else result


@takes(TrialReplayOptions)
def replay_trial(path: str | Path, options: TrialReplayOptions) -> Session:
    """Replay a step of a dPRO trial on its devices, as `fastcomm dpro replay` does.

    Parameters
    ----------
    path
        Directory of the trial.
    options
        Fields of `TrialReplayOptions`, passed by name. Edits are as for
        `CriticalPath.what_if`.

    Returns
    -------
    Session
        The measured and the replayed step, and its critical path. Times are ns.

    Raises
    ------
    ConfigError
        If an option is invalid, or an edit selects nothing.
    FastcommError
        If the directory is no trial, or its operations wait for each other.

    """
    check_path(path, "replay_trial: path", 'replay_trial("trial/")')
    return session_of_trial(read_trial(Path(path), options), options)
