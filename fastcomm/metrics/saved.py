"""Metrics that were kept as JSON: what `fastcomm metrics --json` and `--output` wrote."""

from pathlib import Path
from typing import Any

import orjson

from fastcomm import inputs
from fastcomm.errors import TraceFileError

_FILE = "metrics.json"
_NEEDED = ("iteration", "breakdown", "bandwidth", "volume", "overlap")
_MOST_BYTES = 1 << 28


def read(path: Path) -> dict[str, Any] | None:
    """The metrics that a file, or a folder with `metrics.json`, keeps; None: they are no such.

    Raises `TraceFileError` where a `metrics.json` is no JSON object with what metrics have.
    """
    path = path / _FILE if path.is_dir() else path
    if not path.is_file() or path.suffix != ".json" or path.stat().st_size > _MOST_BYTES:
        return None
    try:
        with inputs.opened(path) as file:
            found = orjson.loads(file.read())
        wrong = _wrong(found)
    except (OSError, orjson.JSONDecodeError) as error:
        found, wrong = None, str(error)
    if wrong and path.name == _FILE:
        # A trace may be any JSON; what is called so has to be metrics.
        raise TraceFileError(f"{path}: no metrics of fastcomm: {wrong}")
    return None if wrong else found


def _wrong(found: Any) -> str | None:
    """What the object lacks; nothing if it may be metrics."""
    if not isinstance(found, dict):
        return "it is no object"
    lacking = [name for name in _NEEDED if not isinstance(found.get(name), dict)]
    return f"no {', '.join(lacking)} in it" if lacking else None
