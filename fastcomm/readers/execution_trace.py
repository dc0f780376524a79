"""PyTorch's host execution traces: operators, and the storages that they read and write.

Two schemas: 1.1 (`inputs.values`, `attrs`, `ctrl_deps`) and 1.0 (`inputs`, `rf_id`, `parent`).
A tensor is ``[id, storage id, offset, elements, element size, device]``; views share its
storage.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from fastcomm.errors import TraceFileError
from fastcomm.files import place
from fastcomm.readers.kineto.stream import CutShortError, document
from fastcomm.trace.trace import Trace

_NAMES = ("torch_et_{rank}.json", "pytorch_et_{rank}.json")
_TENSOR = 6

Storage = tuple[int, str]  # its id, and its device


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperator:
    """A node of an execution trace."""

    id: int
    parent: int
    name: str
    order: int  # the number of its call; Kineto calls it `Record function id`
    thread: int
    reads: frozenset[Storage]
    writes: frozenset[Storage]


def find(trace: Trace) -> Path | None:
    """The execution trace that lies beside a trace."""
    folder = place(trace.meta.path).parent
    for name in _NAMES:
        for suffix in ("", ".gz"):
            path = folder / f"{name.format(rank=trace.meta.rank)}{suffix}"
            if path.is_file():
                return path
    return None


def read(path: Path) -> list[TracedOperator]:
    """The operators of an execution trace, in order of their calls."""
    try:
        found = [_operator(node) for node in orjson.loads(document(path))["nodes"]]
    except (ValueError, KeyError, TypeError, AttributeError, CutShortError) as error:
        raise TraceFileError(
            f"{path}: no execution trace of PyTorch, or a cut one ({error!r}); wanted a JSON "
            "object with a list of nodes"
        ) from error
    return sorted(found, key=lambda each: (each.order, each.id))


def _operator(node: Mapping[str, Any]) -> TracedOperator:
    attributes = {each["name"]: each["value"] for each in node.get("attrs", ())} or node
    sides = [node["inputs"], node["outputs"]]
    inputs, outputs = (side["values"] if isinstance(side, dict) else side for side in sides)
    name, schema = str(node["name"]), str(attributes.get("op_schema", ""))
    reads = frozenset(_storages(inputs))
    fresh = frozenset(_storages(outputs)) - reads
    return TracedOperator(
        id=int(node["id"]),
        parent=int(node.get("ctrl_deps", node.get("parent", 0)) or 0),
        name=name,
        order=int(attributes["rf_id"]),
        thread=int(attributes.get("tid", 0)),
        reads=reads,
        writes=fresh | _written(name, schema, inputs),
    )


def _storages(values: Any) -> Iterator[Storage]:
    """The storages of all tensors in a value, lists of tensors included."""
    if not isinstance(values, list):
        return
    if (
        len(values) == _TENSOR
        and isinstance(values[-1], str)
        and all(type(each) is int for each in values[:5])
    ):
        yield values[1], values[-1]
        return
    for value in values:
        yield from _storages(value)


def _written(name: str, schema: str, inputs: list[Any]) -> frozenset[Storage]:
    """The storages of the inputs that an operator writes: its schema marks them with ``!``."""
    if schema:
        arguments = _arguments(schema)
        marked = [
            place for place, text in enumerate(arguments) if re.search(r"\([^)]*!\)", text)
        ]
    else:
        marked = [0] if name.endswith("_") else []
    return frozenset(
        storage
        for place in marked
        if place < len(inputs)
        for storage in _storages(inputs[place])
    )


def _arguments(schema: str) -> list[str]:
    """The arguments of an operator's schema, in order, without the star between them."""
    depth, parts = 0, [""]
    for letter in schema.partition("(")[2].rpartition(" -> ")[0].strip().removesuffix(")"):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in map(str.strip, parts) if part != "*"]
