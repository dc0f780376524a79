"""Read a dPRO trial, a uniform trace or a run as a uniform trace."""

from dataclasses import dataclass, replace
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro import detection, run_trace, trial, uniform, uniform_scan
from fastcomm.readers.dpro.nccl import Topology
from fastcomm.readers.dpro.steps import with_steps
from fastcomm.readers.dpro.trial import Trial
from fastcomm.readers.dpro.uniform import UniformTrace
from fastcomm.readers.kineto import head
from fastcomm.readers.runs import OpenOptions, open_run
from fastcomm.trace.run import ReadRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A uniform trace, the trial that it was read from, if any, or the ranks of a run."""

    trace: UniformTrace
    trial: Trial | None = None
    warnings: tuple[str, ...] = ()
    read: ReadRanks | None = None  # null where PATH is no run

    @property
    def topology(self) -> Topology | None:
        """Rings of NCCL, where the trial has them."""
        return None if self.trial is None else self.trial.topology


def read(
    path: Path,
    *,
    rule: str = "update",
    align: str = "auto",
    whole: bool = True,
    options: OpenOptions | None = None,
) -> Input:
    """Read PATH, whatever it is; not `whole` is what statistics need of a file, and fast.

    `rule` and `align` are for trials and uniform traces, `options` for runs.
    """
    if is_run(path):
        options = replace(options or OpenOptions(), whole=True)
        run = open_run(path, options=options)
        found = run_trace.converted(run, keep_going=options.keep_going)
        return Input(trace=found.trace, warnings=found.warnings, read=found.read)
    if path.is_dir():
        read_trial = trial.read(path, rule=rule, align=align)
        return Input(trace=read_trial.trace, trial=read_trial, warnings=read_trial.warnings)
    trace = uniform.read(path) if whole else uniform_scan.read(path)
    if not len(trace):
        raise TraceFileError(f"{path}: no events")
    return Input(trace=with_steps(trace, rule))


def is_run(path: Path) -> bool:
    """Whether PATH is a run of a profiler's traces; else it is a trial or a uniform trace."""
    if not path.exists():
        raise TraceFileError(f"{path}: no such file or folder")
    if path.is_dir():
        return not detection.claims(path) and any(path.iterdir())
    if not path.name.lower().endswith(head.SUFFIXES):
        return True
    found = head.peek(path)
    # A JSON file without a mark of the profiler: reading it as a uniform trace says what it is.
    return found.kind == "profiler" or (
        found.kind == "damaged" and head.is_rank_name(path.name)
    )
