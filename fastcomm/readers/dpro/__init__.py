"""dPRO trials and uniform traces: recognize them here, read them by the modules."""

import os
from collections.abc import Sequence
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.inert import shell_joined
from fastcomm.readers.formats import OpenOptions, RankSources
from fastcomm.remote import is_local

# A trial is <trial>/<host>/<gpu>/<one of these>.
TRACES = ("trace.json.gz", "temp.json")
_DEPTH = 2


def claims(path: Path) -> bool:
    """Whether this is a trial, a host or GPU of one, or a uniform trace."""
    from fastcomm.readers.kineto import head  # most runs have neither

    if path.name.lower().endswith(head.SUFFIXES) and path.is_file():
        return head.peek(path).kind == "uniform"
    traces = _traces(path)
    return bool(traces) and all(head.peek(each).kind != "profiler" for each in traces)


def is_damaged(_: Path) -> bool:
    """Return False: a file that cannot be read is no uniform trace."""
    return False


def _traces(path: Path) -> list[Path]:
    """The traces of ranks that lie where a trial has them."""
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
    """The directories in a directory, but for hidden ones; none where it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return [
                path / entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir()
            ]
    except OSError:
        return []


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """Raise `TraceFileError`: these are no traces of a profiler."""
    del options
    raise trial_error(paths[0], "stats")


def trial_error(path: Path, command: str) -> TraceFileError:
    """Return the error for a trial or a uniform trace where the traces of a run are needed.

    It names the command of `fastcomm dpro` that reads the path.
    """
    what = "dPRO trial" if path.is_dir() else "uniform trace"
    if what == "uniform trace" and command == "replay":
        command = "stats"  # it has no dependencies to replay
    line = shell_joined(["fastcomm", "dpro", command, str(path)])
    return TraceFileError(f"{path} is a {what}: {line}")
