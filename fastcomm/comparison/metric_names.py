"""Names of metrics, from the schema of `fastcomm metrics --json`."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from fastcomm.comparison.metrics_documents import NAMES_OF_ITEMS
from fastcomm.errors import ConfigError

_SCHEMA = Path(__file__).parents[1] / "schemas" / "metrics.json"
_NUMBERS = {"number", "integer", "null"}
_ANY = "*"  # a rank, a window, ...: which ones there are depends on the run


def check_names(names: Iterable[str]) -> None:
    """Raise `ConfigError`, with similar names, for a name that no run has."""
    for name in names:
        if not any(fnmatchcase(name, pattern) for pattern in _patterns()):
            raise unknown_metric(name, "no metric", _patterns())


def unknown_metric(name: str, problem: str, names: Sequence[str]) -> ConfigError:
    """Return the error of a name that is not among the names of metrics."""
    from difflib import get_close_matches

    near = get_close_matches(name, names, cutoff=0.4)
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else "expected a name such as iteration.mean_ns or breakdown.exact.idle; the JSON of a "
        "comparison lists all names"
    )
    return ConfigError(f"{name!r} is {problem}; {hint}")


@cache
def _patterns() -> list[str]:
    """Return the names of all metrics; a part that any run has others of is a star."""
    schema = orjson.loads(_SCHEMA.read_bytes())
    return [
        pattern
        for name, node in schema["properties"].items()
        for pattern in _below(node, name, schema["$defs"])
    ]


def _below(node: dict[str, Any], name: str, definitions: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the numbers in a part of the schema."""
    node = _resolved(node, definitions)
    last = name.rpartition(".")[2]
    parts = dict(node.get("properties", {}))
    if isinstance(others := node.get("additionalProperties"), dict):
        keys = _resolved(node.get("propertyNames", {}), definitions).get("enum", [_ANY])
        parts |= dict.fromkeys(keys, others)
    if "items" in node and last in NAMES_OF_ITEMS:
        parts[_ANY] = node["items"]
    for key, part in parts.items():
        yield from _below(part, f"{name}.{key}", definitions)
    for part in node.get("anyOf", ()):
        yield from _below(part, name, definitions)
    kinds = node.get("type", ())
    if _NUMBERS.intersection([kinds] if isinstance(kinds, str) else kinds):
        yield name


def _resolved(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a part of the schema with what it refers to."""
    reference = node.get("$ref")
    return node if reference is None else {**definitions[reference.rpartition("/")[2]], **node}
