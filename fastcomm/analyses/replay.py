"""Replay a step of a dPRO trial, or of a run by the constraints of its critical path.

Several ranks of a run are joined by their collectives, as for one critical path through all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fastcomm.analyses.critical_path import PathsByRank, together
from fastcomm.checks import check_path, takes
from fastcomm.compat import dpro
from fastcomm.critical_path import CriticalPath, what_if
from fastcomm.critical_path.analysis import JoinError, RunEvents, analyze, joined
from fastcomm.errors import FastcommError
from fastcomm.executors import Executor, Progress, Task, executor_of
from fastcomm.graph.edits import Edit, plan
from fastcomm.options import EditOptions, PredictionOptions, ReplayOptions, Window
from fastcomm.readers.dpro import trial as trials
from fastcomm.readers.dpro.trial import Trial
from fastcomm.replay import RULES, Options, critical_path, predictions
from fastcomm.replay.result import Session, session
from fastcomm.replay.run_graph import StepConstraints, measured, replayer
from fastcomm.trace.run import ReadRanks, RunTraces, SkippedRank, Spread
from fastcomm.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step of a run: its constraints, and the path through them, which edits change."""

    constraints: StepConstraints
    path: CriticalPath
    notes: tuple[str, ...] = ()  # why the step is of one rank alone

    def edited(self, edits: Sequence[Edit]) -> StepConstraints:
        """Return the constraints after edits.

        Raises ConfigError if an edit selects nothing.
        """
        now = what_if.Replay(self.path).edited(edits)
        return replace(self.constraints, edited=(now.source, now.weight))


def step_of(
    run: RunTraces,
    window: Window | None = None,
    *,
    workers: int | Executor = 1,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> RunStep:
    """Return the constraints between the events of a window of all ranks.

    If ranks share no communication that connects them, the step is that of the first rank, and
    `notes` say why.

    Parameters
    ----------
    run
        The traces.
    window
        Part of the traces; by default the second step, or the only one.
    workers
        Number of processes, or an executor.
    keep_going
        Whether to leave out ranks that cannot be read.
    progress
        Called with the source of each finished rank, also of one that was skipped.

    Raises
    ------
    FastcommError
        If a rank cannot be read (with `keep_going`, if none can).

    """
    part = partial(_part, window=window)
    task = Task(measure=part, merge=together, finish=_step, content="all")
    step, skipped = executor_of(workers).gather(
        run, task, keep_going=keep_going, progress=progress
    )
    constraints = step.constraints
    ranks = [trace.meta.rank for trace in constraints.traces]
    read = ReadRanks.of(run, ranks, skipped)
    return replace(step, constraints=replace(constraints, read=read))


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


def session_of(run_step: RunStep, options: EditOptions | None = None) -> Session:
    """Replay a step with the measured durations, and with edits if there are any."""
    step = run_step.constraints
    if not len(step.graph.time):
        raise FastcommError(f"{step.traces[0].meta.path}: the window holds no work")
    edits = plan(options or EditOptions()).single("a replay")
    replayed = replayer(step).run()
    return Session(
        edits=edits,
        changed=replayer(run_step.edited(edits)).run() if edits else None,
        measured=measured(step),
        replayed=replayed,
        path=critical_path(replayed),
        step=step.number,
        read=step.read,
        is_host_run=run_step.path.about.is_host_run,
        notes=(*run_step.notes, *run_step.path.about.notes),
    )


def with_bottlenecks(session: Session, *, workers: int = 1, by_name: bool = False) -> Session:
    """Return a replayed session with replays of the step without what costs it most.

    Parameters
    ----------
    session
        A replayed step.
    workers
        Number of threads for the search.
    by_name
        Whether to search among names rather than operations.

    """
    removed = predictions.bottlenecks(
        session.replayed, session.path, workers=workers, by_name=by_name
    )
    return replace(session, removed=removed)


def with_edits(session: Session, options: EditOptions) -> Session:
    """Return a replayed session of a trial with a replay of its edits; itself without edits.

    Raises `ConfigError` if an edit is invalid, selects nothing, or is a sweep (FROM:TO:STEP).
    """
    edits = plan(options).single("a replay")
    if not edits:
        return session
    own = session.replayed.replayer
    return replace(session, edits=edits, changed=own.run(predictions.durations(own, edits)))


def session_of_trial(
    trial: Trial, options: ReplayOptions, predicted: PredictionOptions | None = None
) -> Session:
    """Replay a step of a trial with its measured durations, and make predictions.

    Parameters
    ----------
    trial
        A profiling directory of dPRO.
    options
        Rules and number of steps.
    predicted
        Which predictions to make; by default none.

    """
    replayed = session(
        trial,
        Options(
            rules=RULES if options.compat is None else dpro.RULES,
            steps=options.repeat,
            unlimited_updates=options.unlimited_updates,
        ),
    )
    replayer = replayed.replayed.replayer
    alone = replayer.only(options.tensors) if options.tensors else None
    others = predictions.predictions(trial, replayer, predicted or PredictionOptions())
    return replace(replayed, alone=alone, predictions=others)


@takes(ReplayOptions)
def replay_trial(path: str | Path, options: ReplayOptions) -> Session:
    """Replay a step of a dPRO trial on its devices, as `fastcomm dpro replay` does.

    Parameters
    ----------
    path
        Directory of the trial.
    options
        Fields of `ReplayOptions`, passed by name: `compat` ("dpro": dPRO's own rules);
        `repeat`, the number of replayed steps; `unlimited_updates`, whether all updates of a
        rank run at once; `tensors` whose communication is also replayed alone.

    Returns
    -------
    Session
        The measured and the replayed step, and its critical path. Times are ns.

    Raises
    ------
    ConfigError
        If an option is invalid.
    FastcommError
        If the directory is no trial, or its operations wait for each other.

    """
    check_path(path, "replay_trial: path", 'replay_trial("trial/")')
    return session_of_trial(trials.read(Path(path)), options)
