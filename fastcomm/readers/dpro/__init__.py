"""Recognize dPRO trials and uniform traces; the modules of this package read them."""

import os
from collections.abc import Sequence
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.readers.formats import OpenOptions, RankSources
from fastcomm.remote import is_local

# A trial is <trial>/<host>/<gpu>/<one of these>.
TRACES = ("trace.json.gz", "temp.json")
_DEPTH = 2


def claims(path: Path) -> bool:
    """Return whether a path is a trial, a host or GPU of one, or a uniform trace."""
    from fastcomm.readers.kineto import head  # most runs have neither

    if path.name.lower().endswith(head.SUFFIXES) and path.is_file():
        return head.peek(path).kind == "uniform"
    traces = _traces(path)
    return bool(traces) and all(head.peek(file).kind != "profiler" for file in traces)


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


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """Raise TraceFileError: trials and uniform traces are no traces of a profiler."""
    del options
    if paths[0].is_dir():
        kind = "a dPRO trial, which `fastcomm stats`, `replay` and `convert` read"
    else:
        kind = "a uniform trace, which `fastcomm stats` and `convert` read"
    raise TraceFileError(f"{paths[0]}: {kind}; other commands need the traces of a profiler")
