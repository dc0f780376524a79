"""What `stats`, `convert` and `replay` take: a dPRO trial, a uniform trace, or a run."""

from dataclasses import dataclass, replace
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.readers.blocks import blocks
from fastcomm.readers.runs import OpenOptions, open_run
from fastcomm.replay import trial, uniform, uniform_run, uniform_scan
from fastcomm.replay.nccl import Topology
from fastcomm.replay.steps import with_steps
from fastcomm.replay.trial import Trial
from fastcomm.replay.uniform import UniformTrace

_JSON = (".json", ".json.gz")
# What the PyTorch profiler writes before its events, and nobody into a uniform trace.
_PROFILER = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
_HEAD = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A uniform trace, the trial that it was read from, if it was, and what was left open."""

    trace: UniformTrace
    trial: Trial | None = None
    warnings: tuple[str, ...] = ()

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
        run = open_run(path, options=replace(options or OpenOptions(), whole=True))
        found_run = uniform_run.converted(run)
        return Input(trace=found_run.trace, warnings=found_run.warnings)
    if path.is_dir():
        found = trial.read(path, rule=rule, align=align)
        return Input(trace=found.trace, trial=found, warnings=found.warnings)
    trace = uniform.read(path) if whole else uniform_scan.read(path)
    if not len(trace):
        raise TraceFileError(f"{path}: no events")
    return Input(trace=with_steps(trace, rule))


def is_run(path: Path) -> bool:
    """Whether PATH is a run of traces: no trial, no uniform trace."""
    if not path.exists():
        raise TraceFileError(f"{path}: no such file or folder")
    if path.is_dir():
        return not trial.claims(path) and any(path.iterdir())
    if not path.name.endswith(_JSON):
        return True
    head = next(blocks(path), b"")[:_HEAD]
    return any(word in head for word in _PROFILER)
