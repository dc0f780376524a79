"""Tensors of a model: names and sizes by id, and which update consumes which tensor."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDict:
    """Tensors by id; `bytes_of` knows those whose size the trial tells."""

    names: tuple[str, ...]
    bytes_of: Mapping[int, int]
    aggregate: int = 0

    def name(self, tensor: int) -> str:
        """The name of a tensor."""
        return self.names[tensor]

    def tensor(self, name: str) -> int:
        """The id of a name."""
        return self.names.index(name)

    @property
    def tensor2update(self) -> dict[int, int]:
        """MXNet: tensors are updated from the last to the first, `aggregate` at once."""
        last = len(self.names) - 1
        return {last - i: i // self.aggregate if self.aggregate else i for i in range(last + 1)}

    def group_bytes(self, tensors: tuple[int, ...]) -> int | None:
        """Bytes of tensors that are sent together; None where one is unknown."""
        sizes = [self.bytes_of.get(each) for each in tensors]
        known = [each for each in sizes if each is not None]
        return sum(known) if len(known) == len(sizes) else None
