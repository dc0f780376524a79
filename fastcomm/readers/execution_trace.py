"""Read PyTorch's host execution traces: operators, and the storages they read and write.

Two schemas exist: 1.1 (`inputs.values`, `attrs`, `ctrl_deps`) and 1.0 (`inputs`, `rf_id`,
`parent`). A tensor is ``[id, storage id, offset, elements, element size, device]``; views share
its storage.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from fastcomm.errors import TraceFileError
from fastcomm.files import place
from fastcomm.readers.stream import CutShortError, blocks, document
from fastcomm.trace.trace import Trace

_NAMES = ("torch_et_{rank}.json", "pytorch_et_{rank}.json")
_TENSOR = 6  # items of a tensor

Storage = tuple[int, str]  # id and device


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperator:
    """One node of an execution trace."""

    id: int
    parent: int
    name: str
    order: int  # number of the call, which Kineto names `Record function id`
    thread: int
    reads: frozenset[Storage]
    writes: frozenset[Storage]


def find(trace: Trace) -> Path | None:
    """Return the execution trace in the folder of a trace, or None."""
    folder = place(trace.meta.path).parent
    for name in _NAMES:
        for suffix in ("", ".gz"):
            path = folder / f"{name.format(rank=trace.meta.rank)}{suffix}"
            if path.is_file():
                return path
    return None


def is_one(path: Path) -> bool:
    """Return whether a file begins like an execution trace of PyTorch."""
    if not path.is_file() or not path.name.endswith((".json", ".json.gz")):
        return False
    head = next(iter(blocks(path, 1 << 12)), b"")
    return (
        re.match(rb'\s*\{\s*"schema"\s*:\s*"\d+\.\d+\.\d+[^"]*"\s*,\s*"pid"', head) is not None
    )


def read(path: Path) -> list[TracedOperator]:
    """Read the operators of an execution trace, in the order of their calls.

    Raises `TraceFileError` if the file is not an execution trace, or is truncated.
    """
    try:
        operators = [_operator(node) for node in orjson.loads(document(path))["nodes"]]
    except (ValueError, KeyError, TypeError, AttributeError, CutShortError) as error:
        raise TraceFileError(
            f"{path}: not an execution trace of PyTorch, or a truncated one ({error!r}); "
            "expected a JSON object with a list of nodes"
        ) from error
    return sorted(operators, key=lambda operator: (operator.order, operator.id))


def _operator(node: Mapping[str, Any]) -> TracedOperator:
    """Return the operator of a JSON node, with the storages it reads and writes."""
    attributes = {entry["name"]: entry["value"] for entry in node.get("attrs", ())} or node
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
    """Yield the storages of all tensors in a value, including lists of tensors."""
    if not isinstance(values, list):
        return
    if (
        len(values) == _TENSOR
        and isinstance(values[-1], str)
        and all(type(number) is int for number in values[:5])
    ):
        yield values[1], values[-1]
        return
    for value in values:
        yield from _storages(value)


def _written(name: str, schema: str, inputs: list[Any]) -> frozenset[Storage]:
    """Return the storages that an operator writes: its schema marks the inputs with ``!``."""
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
    """Split the schema of an operator, as in "aten::add(Tensor a, *, Scalar b) -> Tensor".

    Returns the arguments with their types, in order, without the star: ["Tensor a", "Scalar
    b"].
    """
    depth, parts = 0, [""]
    for letter in schema.partition("(")[2].rpartition(" -> ")[0].strip().removesuffix(")"):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in map(str.strip, parts) if part != "*"]
