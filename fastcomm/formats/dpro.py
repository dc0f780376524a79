"""Recognize dPRO trials and uniform traces, which are no runs: `fastcomm dpro` reads them."""

import os
from collections.abc import Sequence
from pathlib import Path

from fastcomm.errors import TraceFileError, shell_joined
from fastcomm.files import is_local
from fastcomm.formats.config import Config
from fastcomm.formats.sources import RankSources

# A trial is <trial>/<host>/<gpu>/<one of these>.
TRACES = ("trace.json.gz", "temp.json")
_DEPTH = 2


def claims(path: Path) -> bool:
    """Return whether a path is a trial, a host or GPU of one, or a uniform trace."""
    from fastcomm.formats.kineto import ranks  # most runs have neither

    if path.name.lower().endswith(ranks.SUFFIXES) and path.is_file():
        return ranks.peek(path).kind == "uniform"
    traces = _traces(path)
    return bool(traces) and all(ranks.peek(file).kind != "profiler" for file in traces)


def is_damaged(_: Path) -> bool:
    """Return False: files that cannot be read are not claimed as uniform traces."""
    return False


def _traces(path: Path) -> list[Path]:
    """Return the traces of ranks in the directories where a trial has them."""
    if not is_local(path) or not path.is_dir():
        return []
    folders = [path]
    for depth in range(_DEPTH + 1):
        files = [folder / name for folder in folders for name in TRACES]
        if traces := [file for file in files if os.path.lexists(file)]:
            return traces
        if depth < _DEPTH:
            folders = [inner for folder in folders for inner in _folders(folder)]
    return []


def _folders(path: Path) -> list[Path]:
    """Return the directories in a directory that are not hidden; none if it is unreadable."""
    try:
        with os.scandir(path) as entries:
            return [
                path / entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir()
            ]
    except OSError:
        return []


def find(paths: Sequence[Path], config: Config) -> RankSources:
    """Raise TraceFileError: trials and uniform traces are no traces of a profiler."""
    del config
    raise trial_error(paths[0], "stats")


def trial_error(path: Path, command: str) -> TraceFileError:
    """Return the error for a trial or a uniform trace where the traces of a run are needed.

    It names the command of `fastcomm dpro` that reads the path: `command`, but "stats" instead
    of "replay" for a uniform trace, which has no dependencies.
    """
    is_trial = path.is_dir()
    command = "stats" if command == "replay" and not is_trial else command
    line = shell_joined(["fastcomm", "dpro", command, str(path)])
    kind = "dPRO trial" if is_trial else "uniform trace"
    return TraceFileError(f"{path} is a {kind}: {line}")
