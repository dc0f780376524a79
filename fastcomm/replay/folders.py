"""Where the files of a trial lie: `<trial>/<host>/<gpu>/<files>`.

Hosts and GPUs are taken in the order of their names as text, as dPRO does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcomm.readers.dpro import TRACES
from fastcomm.replay.uniform import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFolder:
    """Where the files of one rank lie."""

    host: str
    pid: str
    folder: Path
    trace: Path


def ranks(path: Path) -> list[RankFolder]:
    """The folders of ranks, below a trial, a host, or a GPU; [] where there are none."""
    for pattern in ("", "*", "*/*"):
        folders = sorted(path.glob(pattern)) if pattern else [path]
        found = [
            RankFolder(
                host=folder.resolve().parent.name,
                pid=f"{folder.resolve().parent.name}.rank{folder.resolve().name}",
                folder=folder,
                trace=trace,
            )
            for folder in folders
            if not any(part.startswith(".") for part in folder.relative_to(path).parts)
            for trace in [next((folder / t for t in TRACES if (folder / t).exists()), None)]
            if trace is not None
        ]
        if found:
            return found
    return []


def first(found: Sequence[RankFolder], name: str) -> Path | None:
    """The first file of a name, in the order of hosts, then GPUs."""
    return next((r.folder / name for r in found if (r.folder / name).exists()), None)


def content(found: Sequence[RankFolder], name: str) -> dict[str, Any]:
    """The object in the first file of a name; empty where no rank has it."""
    path = first(found, name)
    said = None if path is None else read_json(path)
    return said if isinstance(said, dict) else {}
