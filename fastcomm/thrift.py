"""Thrift's compact encoding, of which a Parquet footer is made: values by field number.

For text that Arrow has parsed already. What it parsed it does not hand out safely: a column
whose statistics contradict each other ends the process that asks for it.
"""

from typing import Any

_TRUE, _FALSE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 7, 8, 9, 10, 11, 12
_LONG = 15  # of a list: its length follows


def struct(text: bytes) -> dict[int, Any]:
    """The fields of a struct: numbers, bytes, lists, and structs as dictionaries.

    Raises `IndexError` or `ValueError` where the text is none. Doubles and maps are not known.
    """
    return _Text(text).struct()


class _Text:
    """A text, and how much of it is read."""

    def __init__(self, text: bytes) -> None:
        self.text, self.at = text, 0

    def byte(self) -> int:
        self.at += 1
        return self.text[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:  # noqa: PLR2004
                return value

    def signed(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self.signed()
            found[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self.value(kind)
        return found

    def value(self, kind: int) -> Any:
        if kind <= 6:  # noqa: PLR2004 - a byte or a number; a truth in a list is a byte
            return self.byte() if kind <= 3 else self.signed()  # noqa: PLR2004
        if kind == _STRUCT:
            return self.struct()
        if kind in (_LIST, _SET):
            return self.items()
        if kind == _BINARY:
            size = self.varint()
            self.at += size
            return self.text[self.at - size : self.at]
        raise ValueError(f"type {kind}")

    def items(self) -> list[Any]:
        head = self.byte()
        size = head >> 4
        size = self.varint() if size == _LONG else size
        return [self.value(head & 15) for _ in range(size)]
