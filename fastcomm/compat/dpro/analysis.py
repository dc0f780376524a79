"""Replay a step of a dPRO trial."""

from dataclasses import replace
from pathlib import Path

from fastcomm.checks import check_path
from fastcomm.compat.dpro import predictions, rules
from fastcomm.compat.dpro import trial as trials
from fastcomm.compat.dpro.options import TrialOptions, TrialReplayOptions
from fastcomm.compat.dpro.replayed import RULES, Options
from fastcomm.compat.dpro.result import Session, session
from fastcomm.compat.dpro.trial import Trial
from fastcomm.graph.edits import parse_edits
from fastcomm.option_fields import takes


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
    edits = parse_edits(options).single("a replay")
    replayed = session(
        trial,
        Options(
            rules=RULES if options.compat is None else rules.RULES,
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
        changed=own.replay(predictions.durations(own, edits)) if edits else None,
    )
    if not options.bottleneck:
        return result
    removed = predictions.bottlenecks(result.replayed, result.path, workers=workers)
    return replace(result, removed=removed)


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
