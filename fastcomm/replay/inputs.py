"""What `fastcomm stats` and `replay` take: a dPRO trial, or a uniform trace in a file."""

from dataclasses import dataclass
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.replay import trial, uniform, uniform_scan
from fastcomm.replay.nccl import Topology
from fastcomm.replay.steps import with_steps
from fastcomm.replay.trial import Trial
from fastcomm.replay.uniform import UniformTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A uniform trace, and the trial that it was read from, if it was."""

    trace: UniformTrace
    trial: Trial | None

    @property
    def topology(self) -> Topology | None:
        """Rings of NCCL, where the trial has them."""
        return None if self.trial is None else self.trial.topology

    @property
    def warnings(self) -> tuple[str, ...]:
        """What reading had to leave open."""
        return () if self.trial is None else self.trial.warnings


def read(path: Path, *, rule: str = "update", align: bool = True, whole: bool = True) -> Input:
    """Read PATH, whichever of the two it is; not `whole` is what statistics need, and fast."""
    if path.is_dir():
        found = trial.read(path, rule=rule, align=align)
        return Input(trace=found.trace, trial=found)
    if not path.exists():
        raise TraceFileError(f"{path}: no such file or folder")
    trace = uniform.read(path) if whole else uniform_scan.read(path)
    if not len(trace):
        raise TraceFileError(f"{path}: no events")
    return Input(trace=with_steps(trace, rule), trial=None)
