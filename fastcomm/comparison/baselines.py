"""Named baselines: saved metrics of a run, beside the runs that are compared with them.

They lie in `fastcomm-baselines`, in the directory that contains the run or its store, a JSON
file each. Runs of one job usually lie beside each other, and so find the same baselines.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from fastcomm.comparison.metrics_documents import Object, saved_metrics
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.files import aside, is_local, place
from fastcomm.result import json_text

if TYPE_CHECKING:
    from fastcomm.metrics.result import Metrics

FOLDER = "fastcomm-baselines"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def baseline_path(name: str, run: str | Path) -> Path:
    """Return the file of a baseline beside a run.

    Raises `ConfigError` for a name that is not safe as that of a file, or a run at a URL.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"baseline {name!r}: expected letters, digits, dots, dashes and underscores, the "
            "first a letter or digit"
        )
    where = place(run)
    if not is_local(where):
        raise ConfigError(f"baseline {name}: {run} is a URL; baselines lie beside local runs")
    return where.absolute().parent / FOLDER / f"{name}.json"


def save_baseline(name: str, run: str | Path, metrics: "Metrics") -> Path:
    """Write the metrics of a run as a baseline, whole or not at all; return its file.

    A baseline of this name is replaced. Raises `FastcommError` if it cannot be written.
    """
    path = baseline_path(name, run)
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise FastcommError(f"{path.parent}: {error.strerror or error}") from error
    with aside(path) as unfinished:
        unfinished.write_text(json_text(metrics), "utf-8")
    return path


def load_baseline(name: str, run: str | Path) -> Object:
    """Return the metrics of a baseline beside a run, as in JSON.

    Raises `FastcommError` if there is none of this name, or it has no metrics.
    """
    path = baseline_path(name, run)
    if not path.is_file():
        names = ", ".join(sorted(own.stem for own in path.parent.glob("*.json"))) or "none"
        raise FastcommError(
            f"{path}: no such baseline; there are: {names}. "
            "`fastcomm baseline save NAME RUN` saves one"
        )
    document = saved_metrics(path)
    if document is None:
        raise FastcommError(f"{path}: no metrics of fastcomm; save the baseline again")
    return document
