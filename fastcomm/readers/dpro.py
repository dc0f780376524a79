"""dPRO trials and uniform traces: recognized here, read by `stats`, `replay` and `convert`."""

from collections.abc import Sequence
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.readers.formats import Found, OpenOptions
from fastcomm.remote import is_local

# A trial is <trial>/<host>/<gpu>/<one of these>.
TRACES = ("trace.json.gz", "temp.json")
_DEPTHS = ("", "*/", "*/*/")


def claims(path: Path) -> bool:
    """Whether this is a trial, a host or GPU of one, or a uniform trace."""
    from fastcomm.readers import json_head  # most runs have neither

    if path.name.endswith(json_head.SUFFIXES) and path.is_file():
        return json_head.peek(path).kind == "uniform"
    traces = _traces(path)
    return bool(traces) and all(json_head.peek(each).kind != "profiler" for each in traces)


def is_damaged(_: Path) -> bool:
    """Return False: a file that cannot be read is no uniform trace."""
    return False


def _traces(path: Path) -> list[Path]:
    """The traces of ranks that lie where a trial has them."""
    if not is_local(path) or not path.is_dir():
        return []
    for depth in _DEPTHS:
        found = [each for name in TRACES for each in path.glob(f"{depth}{name}")]
        if found := [each for each in found if not _is_hidden(each, path)]:
            return found
    return []


def _is_hidden(path: Path, above: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(above).parts)


def find(paths: Sequence[Path], options: OpenOptions) -> Found:
    """Raise `TraceFileError`: these are no traces of a profiler."""
    del options
    if paths[0].is_dir():
        what = "a dPRO trial, which `fastcomm stats`, `replay` and `convert` read"
    else:
        what = "a uniform trace, which `fastcomm stats` and `convert` read"
    raise TraceFileError(f"{paths[0]}: {what}; other commands need the traces of a profiler")
