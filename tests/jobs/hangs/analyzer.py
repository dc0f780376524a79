"""Run PyTorch's own analyzer of flight-recorder dumps on recorded jobs.

    python tests/jobs/hangs/analyzer.py FOLDER

Needs PyTorch. Writes `FOLDER/analyzer.json`: of each job the ranks that the first finding of
the analyzer names, or the error that it fails with; once with dumps as they were written, and
once with the members of groups filled in, which gloo leaves out of its dumps. What it says of
missing dumps counts as a finding.
"""

import json
import logging
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.flight_recorder.components import builder
from torch.distributed.flight_recorder.components.config_manager import JobConfig

_RANK = "rank_"
# Lines with which the analyzer names ranks.
_FINDING = re.compile(
    r"missing ranks: \{[^}]*\}|error msg: Culprit.*|We cannot decide .*? ranks \(\{[^}]*\}",
    re.S,
)


class _Finding(logging.Handler):
    """Keeps the ranks that the first finding of the analyzer names."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[int] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Read a line that the analyzer prints."""
        match = _FINDING.match(record.getMessage())
        if match and self.ranks is None:
            number = r"Culprit rank (\d+)" if "Culprit" in match[0] else r"(\d+)"
            self.ranks = sorted(map(int, re.findall(number, match[0])))


def analyze(dumps: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ranks that the analyzer's first finding names, or its error."""
    finding = _Finding()
    logger = logging.getLogger("Flight Recorder")
    logger.handlers = [finding]
    details = {f"{_RANK}{rank}": {**dump, "rank": rank} for rank, dump in dumps.items()}
    version = next(iter(dumps.values()))["version"]
    arguments = JobConfig().parse_args(["folder", "--allow-incomplete-ranks"])
    try:
        builder.build_db(details, arguments, version)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"culprits": finding.ranks or []}


def _with_members(dump: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    config = {
        name: {"name": name, "desc": desc, "ranks": str(ranks)}
        for name, (desc, ranks) in groups.items()
    }
    return {**dump, "pg_config": config}


def main() -> None:
    """Analyze all jobs of a folder."""
    folder = Path(sys.argv[1])
    results = {}
    for path in sorted(folder.glob("*/truth.json")):
        groups = json.loads(path.read_text())["groups"]
        files = sorted((path.parent / "pickles").glob(f"{_RANK}*"))
        dumps = {int(file.name.removeprefix(_RANK)): _load(file) for file in files}
        filled = {
            rank: _with_members(dump, groups.get(str(rank), {})) for rank, dump in dumps.items()
        }
        results[path.parent.name] = {
            "as_written": analyze(dumps),
            "with_members": analyze(filled),
        }
    (folder / "analyzer.json").write_text(json.dumps(results, indent=1) + "\n")


def _load(path: Path) -> dict[str, Any]:
    """Return a dump that this machine has written; others must never be unpickled."""
    return pickle.loads(path.read_bytes())


if __name__ == "__main__":
    main()
