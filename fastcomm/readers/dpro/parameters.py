"""Tensors of a model: name, shape and size by id, and which updates consume each.

The position of a tensor in the framework's list of gradients is its id.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

_BYTES = {
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("string", "int8", "uint8", "bool"), 1),
}
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor; what the trial does not say of it is None."""

    index: int
    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    @property
    def size(self) -> int | None:
        """Bytes of it; None where its shape or the width of its type is not known."""
        width = _BYTES.get(self.dtype or "")
        return None if self.shape is None or width is None else prod(self.shape) * width

    @classmethod
    def of(cls, index: int, said: Any) -> "Parameter":
        """One entry of a list of gradients: a name, `name;shape=(…);dtype=…`, or its parts."""
        name, *facts = said.split(";") if isinstance(said, str) else map(str, said)
        shape = dtype = None
        for fact in facts:
            word, _, value = fact.partition("=")
            if word.strip() == "shape":
                shape = tuple(map(int, _DIGITS.findall(value)))
            elif word.strip() == "dtype":
                dtype = value.strip().strip("<>'\"").removeprefix("class 'numpy.")
        return cls(index=index, name=name, shape=shape, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class ParameterDict:
    """Tensors by id; `update_of` has the standard names of the updates of each."""

    parameters: tuple[Parameter, ...] = ()
    update_of: Mapping[int, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, by id."""
        return tuple(each.name for each in self.parameters)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each name."""
        return {each.name: each.index for each in self.parameters}

    def name(self, tensor: int) -> str | None:
        """The name of a tensor; None of one that the trial does not list."""
        return self.parameters[tensor].name if 0 <= tensor < len(self.parameters) else None

    @property
    def bytes_of(self) -> dict[int, int]:
        """Bytes by id, of the tensors whose size is known."""
        sizes = ((each.index, each.size) for each in self.parameters)
        return {tensor: size for tensor, size in sizes if size is not None}

    def group_bytes(self, tensors: Iterable[int]) -> int | None:
        """Bytes of tensors that are sent together; None where one is unknown."""
        known, total = self.bytes_of, 0
        for tensor in tensors:
            if tensor not in known:
                return None
            total += known[tensor]
        return total


def listed(said: Sequence[Any] | str) -> tuple[Parameter, ...]:
    """All entries of a list of gradients; older writers join its names by ";"."""
    entries = said.split(";") if isinstance(said, str) else said
    return tuple(Parameter.of(i, each) for i, each in enumerate(entries))
