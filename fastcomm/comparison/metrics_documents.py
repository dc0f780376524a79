"""Metrics of a run as their JSON document: read, checked, flattened."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from fastcomm import files
from fastcomm.checks import invalid_value
from fastcomm.errors import TraceFileError
from fastcomm.result import Result
from fastcomm.trace.run_traces import SkippedRank, expected_ranks

if TYPE_CHECKING:
    from fastcomm.metrics.result import Metrics

Object = Mapping[str, Any]
_FILE = "metrics.json"
_NEEDED = ("iteration", "breakdown", "bandwidth", "volume", "overlap")
_MOST_BYTES = 1 << 28
# What an element of a list is called. Lists that are not here hold no values to compare.
NAMES_OF_ITEMS: dict[str, Callable[[Object], str]] = {
    "by_rank": lambda row: str(row["rank"]),
    "windows": lambda row: f"{row['from']}-{row['to']}",
    "collectives": lambda row: f"{row['op']}-{row['group_size']}-{row['size_from']}",
}


def saved_metrics(path: Path) -> dict[str, Any] | None:
    """Read the metrics in a JSON file, or in the `metrics.json` of a folder; None for others.

    Raises `TraceFileError` for a `metrics.json` without metrics.
    """
    path = path / _FILE if path.is_dir() else path
    if not path.is_file() or path.suffix != ".json" or path.stat().st_size > _MOST_BYTES:
        return None
    try:
        with files.opened(path) as file:
            metrics = orjson.loads(file.read())
        wrong = _wrong(metrics)
    except (OSError, orjson.JSONDecodeError) as error:
        metrics, wrong = None, str(error)
    if wrong and path.name == _FILE:
        # A trace may be any JSON; what is called so has to be metrics.
        raise TraceFileError(f"{path}: no metrics of fastcomm: {wrong}")
    return None if wrong else metrics


def _wrong(document: Any) -> str | None:
    """Return why a document cannot be metrics; None if it can."""
    if not isinstance(document, Mapping):
        return "it is no JSON object"
    lacking = [name for name in _NEEDED if not isinstance(document.get(name), Mapping)]
    return f"it has no {', '.join(lacking)}" if lacking else None


def metrics_document(metrics: "Metrics | Object", name: str) -> Object:
    """Return the metrics without the version of their schema, which is no metric.

    Raises ConfigError, which names the argument, for anything else than metrics.
    """
    document = metrics.contents() if isinstance(metrics, Result) else metrics
    iteration = document.get("iteration") if isinstance(document, Mapping) else None
    if not isinstance(iteration, Mapping) or "mean_ns" not in iteration:
        example = 'compare(open("monday/"), open("tuesday/"))'
        expected = f"a run or its metrics, as in {example}"
        raise invalid_value(f"compare: {name}", metrics, expected)
    return {key: value for key, value in document.items() if key != "schema_version"}


def scalars(value_or_object: Any, name: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of a JSON object by their dotted paths; None if unknown."""
    if isinstance(value_or_object, Mapping):
        for key, value in value_or_object.items():
            inner = _by_name(key, value) if isinstance(value, list) else value
            yield from scalars(inner, f"{name}.{key}" if name else key)
    elif value_or_object is None or (
        isinstance(value_or_object, int | float) and not isinstance(value_or_object, bool)
    ):
        yield name, value_or_object


def _by_name(key: str, values: Sequence[Object]) -> Object:
    called = NAMES_OF_ITEMS.get(key)
    return {called(item): item for item in values} if called else {}


def skipped_of(run: Object) -> list[SkippedRank]:
    """Return the skipped ranks in the JSON of a run."""
    return [
        SkippedRank(rank=record.get("rank"), path=record.get("path", ""), error=record["error"])
        for record in run.get("failed", ())
    ]


def warnings_of(run: Object) -> list[str]:
    """Return the warnings in the JSON document of a run."""
    return run.get("warnings") or []


def expected_ranks_of(run: Object) -> int:
    """Return the number of ranks that a run should have, from its JSON document."""
    return expected_ranks(run.get("ranks") or [], run.get("world_size"), skipped_of(run))
