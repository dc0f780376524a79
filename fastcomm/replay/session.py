"""A trial replayed as it was: what the commands of replay begin with."""

from dataclasses import dataclass
from pathlib import Path

from fastcomm.replay.critical import CriticalPath, critical_path
from fastcomm.replay.dependency import dependencies
from fastcomm.replay.gaps import measured
from fastcomm.replay.replayer import Options, Replayed, Replayer
from fastcomm.replay.statistics import statistics
from fastcomm.replay.step_time import StepTime, step_time
from fastcomm.replay.trial import Trial, read
from fastcomm.trace.run import ReadRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The measured step time, the replayed step, and its critical path."""

    measured: StepTime
    replayed: Replayed
    path: CriticalPath
    read: ReadRanks | None = None  # of a run; null for a trial

    @property
    def error(self) -> float:
        """The replayed step time beside the measured, as a share of that."""
        return self.replayed.mean_ns / self.measured.time_ns - 1

    def error_of(self, pid: str) -> float | None:
        """The same of one rank; None where it was not measured."""
        rank = self.measured.ranks.get(pid)
        if rank is None or not rank.time:
            return None
        mean = sum(rank.time) / len(rank.time)
        return self.replayed.by_pid()[pid] / mean - 1


def replay_trial(path: str | Path, options: Options | None = None) -> Session:
    """Replay a step of a dPRO trial on its devices, beside what was measured."""
    return session(read(Path(path)), options)


def session(trial: Trial, options: Options | None = None) -> Session:
    """Measure, build the graph, replay."""
    options = options or Options()
    found = statistics(trial.trace, trial.topology, compat=options.compat)
    time = step_time(trial.trace, compat=options.compat)
    graph = dependencies(trial, time.opt_step, compat=options.compat)
    known = measured(graph, found, trial.trace, time.opt_step, compat=options.compat)
    replayed = Replayer.of(graph, known, options).run()
    return Session(measured=time, replayed=replayed, path=critical_path(replayed))
