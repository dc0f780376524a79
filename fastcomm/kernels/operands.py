"""Inputs of an operator as the profiler records them, and their sizes.

The texts are JSON lists from strangers: they are parsed within limits, and what does not fit is
an `UnknownCostError` with the reason.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

Shape = tuple[int, ...]

_LONGEST = 1 << 16  # letters of a list
_MOST_INPUTS = 256
_MOST_TENSORS = 4096  # in one list of tensors
_MOST_DIMENSIONS = 16
_LARGEST = 1 << 40  # of one dimension
# More FLOPs or bytes than this, of one operator, are damage.
MOST = 1 << 62

# Precision and bytes of an element by the name of the type, as PyTorch records it.
_TYPES = {
    "double": ("fp64", 8),
    "float": ("fp32", 4),
    "c10::Half": ("fp16", 2),
    "c10::BFloat16": ("bf16", 2),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "short": ("int16", 2),
    "short int": ("int16", 2),
    "int": ("int32", 4),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    **dict.fromkeys(
        [f"c10::Float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")],
        ("fp8", 1),
    ),
}


class UnknownCostError(Exception):
    """The FLOPs of an operator do not follow from what was recorded; the text says why."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and type of a tensor."""

    shape: Shape
    precision: str
    element_bytes: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of all elements."""
        return self.elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one operator: shapes, types, and values of those that are no tensors."""

    shapes: tuple[Any, ...]  # of a tensor: lengths; of a list of tensors: their shapes
    types: tuple[str, ...]
    values: tuple[str, ...] | None  # None: not recorded

    @classmethod
    def of(cls, shapes: str, types: str | None, values: str | None) -> Self:
        """Parse the recorded lists. Raises `UnknownCostError` if they are damaged."""
        dims, names = _list(shapes), _list(types or "")
        if dims is None or names is None or len(dims) != len(names):
            raise UnknownCostError("the recorded shapes are damaged")
        texts = None if values is None else _list(values)
        return cls(
            shapes=tuple(map(_shape, dims)),
            types=tuple(map(str, names)),
            values=None if texts is None else tuple(map(str, texts)),
        )

    def has_tensor(self, place: int) -> bool:
        """Return whether an input is a tensor of known type."""
        return place < len(self.types) and self.types[place] in _TYPES

    def tensor(self, place: int) -> Tensor:
        """Return an input that is a tensor; UnknownCostError if it is none."""
        shape = self.shapes[place] if place < len(self.shapes) else None
        if shape is None or not self.has_tensor(place) or not _is_flat(shape):
            raise UnknownCostError("an input is no tensor of known shape and type")
        return Tensor(shape, *_TYPES[self.types[place]])

    def optional(self, place: int | None) -> Tensor | None:
        """Return an input that may be a tensor; None if it is none."""
        return None if place is None or not self.has_tensor(place) else self.tensor(place)

    def tensors(self) -> list[Tensor]:
        """Return all inputs that are tensors; UnknownCostError without any."""
        tensors = [
            self.tensor(place) for place in range(len(self.types)) if self.has_tensor(place)
        ]
        if not tensors:
            raise UnknownCostError("no input is a tensor of known type")
        return tensors

    def value(self, place: int) -> str:
        """Return the text of a value; UnknownCostError if values were not recorded."""
        if self.values is None:
            raise UnknownCostError(NO_VALUES)
        if place >= len(self.values):
            raise UnknownCostError("fewer values are recorded than the operator has")
        return self.values[place]

    def flag(self, place: int) -> bool:
        """Return a value that is true or false."""
        text = self.value(place).lower()
        if text not in ("true", "false", "0", "1", ""):
            raise UnknownCostError("a value is neither true nor false")
        return text in ("true", "1")

    def numbers(self, place: int | None, count: int, default: int) -> Shape:
        """Return `count` whole numbers; a single one stands for all, none for `default`."""
        text = "" if place is None else self.value(place)
        if text in ("", "[]"):
            return (default,) * count
        numbers = _shape(_parsed(text if text.startswith("[") else f"[{text}]"))
        if numbers is None or not _is_flat(numbers) or len(numbers) not in (1, count):
            raise UnknownCostError("a value is no list of whole numbers")
        return tuple(numbers) * count if len(numbers) == 1 else tuple(numbers)


NO_VALUES = (
    "values of arguments, such as strides and whether attention is causal, are not recorded "
    "(PyTorch records them from 2.1 on)"
)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of an element-wise result; UnknownCostError if the shapes do not fit."""
    size = max(map(len, shapes), default=0)
    columns = zip(*((1,) * (size - len(shape)) + shape for shape in shapes), strict=True)
    result = []
    for lengths in columns:
        others = {length for length in lengths if length != 1}
        if len(others) > 1:
            raise UnknownCostError("the shapes do not fit each other")
        result.append(others.pop() if others else 1)
    return tuple(result)


def _is_flat(shape: Sequence[Any]) -> bool:
    return all(isinstance(length, int) for length in shape)


def _shape(value: object) -> Any:
    """Return a shape, or the shapes of a list of tensors; None if it is damaged."""
    if not isinstance(value, list):
        return None
    if all(type(length) is int and 0 <= length <= _LARGEST for length in value):
        return tuple(value) if len(value) <= _MOST_DIMENSIONS else None
    if len(value) > _MOST_TENSORS or not all(isinstance(entry, list) for entry in value):
        return None
    shapes = tuple(map(_shape, value))
    is_valid = all(shape is not None and _is_flat(shape) for shape in shapes)
    return shapes if is_valid else None


def _list(text: str) -> list[Any] | None:
    """Parse a JSON list of at most `_MOST_INPUTS` entries; None if it is none."""
    value = _parsed(text)
    return value if isinstance(value, list) and len(value) <= _MOST_INPUTS else None


def _parsed(text: str) -> Any:
    """Parse a JSON text; None if it is none, or too long."""
    if len(text) > _LONGEST:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
