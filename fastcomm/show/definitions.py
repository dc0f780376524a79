"""Definitions of the numbers on HTML pages: the texts of the JSON Schemas.

A key is the path of the number in the JSON of its command, after the name of the schema:
"kernels.rows.share". Numbers that only pages show are in `schemas/pages.json`. A property has
its name as `title`, its meaning as `description`, and may have a `formula`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

_Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """Name, meaning and formula of a number."""

    name: str
    meaning: str
    formula: str = ""


@cache
def definition(key: str) -> Definition:
    """Return the definition of a number. Raises KeyError if its schema has none."""
    document, *path = key.split(".")
    schema = node = _read(document)
    for name in path:
        node = next((own[name] for own in _properties(schema, node) if name in own), {})
    if "title" not in node:
        raise KeyError(key)
    return Definition(
        name=node["title"], meaning=node["description"], formula=node.get("formula", "")
    )


@cache
def _read(document: str) -> _Schema:
    """Return the schema of a document."""
    text = (files("fastcomm") / "schemas" / f"{document}.json").read_text("utf-8")
    schema: _Schema = json.loads(text)
    return schema


def _properties(schema: _Schema, node: _Schema) -> Iterator[_Schema]:
    """Yield the properties of a node of a schema: of an object, or of all in a list or map."""
    yield node.get("properties", {})
    if "$ref" in node:
        yield from _properties(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    for inner in (
        *node.get("anyOf", ()),
        *node.get("oneOf", ()),
        *(node[name] for name in ("items", "additionalProperties") if name in node),
    ):
        if isinstance(inner, dict):
            yield from _properties(schema, inner)
