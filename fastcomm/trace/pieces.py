"""Join pieces of a file that several processes write, without reading them again.

A *piece* is a file with the bytes of some events, maybe deflated.
"""

import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

from fastcomm.files import aside

_zlib: Any
try:
    from isal import isal_zlib as _zlib
except ImportError:  # no wheel for this platform
    import zlib as _zlib

# Of a gzip file: deflate, no name, no time, unknown system; and its empty last block.
_GZIP_HEAD, _DEFLATE_END = b"\x1f\x8b\x08\0\0\0\0\0\0\xff", b"\x03\0"
_CRC = 0xEDB88320  # polynomial of gzip's checksum, reversed
_CRC_BITS = 32


def is_compressed(target: Path) -> bool:
    """Return whether a file is gzipped, which its name says."""
    return target.name.endswith(".gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A file with the bytes of some events."""

    path: Path
    length: int  # bytes, inflated
    crc: int  # of the inflated bytes, for gzip

    @classmethod
    def write(cls, path: Path, texts: Iterable[bytes], *, compressed: bool) -> "Piece":
        """Write bytes to a new file, deflated if the joined file is `compressed`."""
        length = crc = 0
        deflate = _zlib.compressobj(1, _zlib.DEFLATED, -15)
        with path.open("wb") as file:
            for text in texts:
                length += len(text)
                if compressed:
                    crc = _zlib.crc32(text, crc)
                    file.write(deflate.compress(text))
                else:
                    file.write(text)
            if compressed:
                file.write(deflate.flush(_zlib.Z_SYNC_FLUSH))
        return cls(path=path, length=length, crc=crc)


def join(begin: bytes, pieces: Iterable[Piece], end: bytes, target: Path, folder: Path) -> None:
    """Write a file of pieces, which are removed; gzipped if its name ends in ``.gz``.

    Parameters
    ----------
    begin, end
        What stands before and behind the pieces.
    pieces
        In the order in which they are written.
    target
        File to write.
    folder
        Directory for the begin and the end.

    Raises
    ------
    FastcommError
        If the file cannot be written.

    """
    is_gzip = is_compressed(target)
    head = Piece.write(folder / "head", [begin], compressed=is_gzip)
    tail = Piece.write(folder / "tail", [end], compressed=is_gzip)
    length = crc = 0
    with aside(target) as unfinished, unfinished.open("wb") as file:
        file.write(_GZIP_HEAD if is_gzip else b"")
        for piece in (head, *pieces, tail):
            with piece.path.open("rb") as part:
                shutil.copyfileobj(part, file, 1 << 20)
            piece.path.unlink()
            crc = _joined_crc(crc, piece.crc, piece.length) if is_gzip else 0
            length += piece.length
        if is_gzip:
            file.write(_DEFLATE_END + struct.pack("<II", crc, length & 0xFFFFFFFF))


def _joined_crc(first: int, second: int, length: int) -> int:
    """Return the checksum of two texts from theirs; `length` is the second's, in bytes."""
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            first = _applied(_zeros(bit), first)
    return first ^ second


@cache
def _zeros(power: int) -> list[int]:
    """Return what 2^power zero bytes do to a checksum: a linear map of 32 bits."""
    if power:
        half = _zeros(power - 1)
        return [_applied(half, column) for column in half]
    matrix = [_CRC, *(1 << bit for bit in range(_CRC_BITS - 1))]  # of a zero bit
    for _ in range(3):
        matrix = [_applied(matrix, column) for column in matrix]
    return matrix


def _applied(matrix: Sequence[int], bits: int) -> int:
    """Return a matrix times a vector, modulo 2; `matrix` has columns."""
    chosen = (column for place, column in enumerate(matrix) if bits >> place & 1)
    return reduce(int.__xor__, chosen, 0)
