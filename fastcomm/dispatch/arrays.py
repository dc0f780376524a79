"""Arrays of whole numbers in .npy and .npz files, read once their headers say that they fit.

NumPy's own `load` takes the memory that a header asks for before it looks at the data.
"""

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fastcomm import inputs
from fastcomm.errors import TraceFileError

Numbers = NDArray[Any]

_DAMAGE = (OSError, ValueError, EOFError, KeyError, TypeError, RuntimeError, SyntaxError)
_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, TokenError, MemoryError, OverflowError)


def one(path: Path) -> Numbers:
    """The array of an .npy file."""
    with _errors(path), inputs.opened(path) as file:
        return _array(file, path.stat().st_size)


def several(path: Path, *wanted: tuple[str, ...]) -> tuple[Numbers, ...]:
    """Of an .npz file, for each of `wanted` the first of these arrays that it has."""
    with _errors(path), inputs.opened(path) as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        found = [next((n for n in names if n in members), None) for names in wanted]
        if None in found:
            raise TraceFileError(
                f"{path}: found {', '.join(members) or 'nothing'}, wanted "
                f"{' and '.join(' or '.join(names) for names in wanted)}"
            )
        return tuple(_member(archive, members, name, path) for name in found if name)


def _member(
    archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], name: str, path: Path
) -> Numbers:
    info = members[name]
    inputs.Limits.of_environment().check(info.file_size, info.compress_size, path)
    with archive.open(info) as stream:
        return _array(stream, info.file_size)


def _array(stream: IO[bytes], size: int) -> Numbers:
    """The array in a stream of so many bytes; ValueError where it is none of numbers."""
    version = npy.read_magic(stream)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"npy version {version}, wanted 1.0 or 2.0")
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_column, kind = header(stream)
    if kind.kind not in "iu":
        raise ValueError(
            f"found {kind} {shape}, wanted whole numbers; no Python object is loaded"
        )
    wanted, left = prod(shape) * kind.itemsize, size - stream.tell()
    if min(shape, default=0) < 0 or wanted > left:
        raise ValueError(f"its header says {shape} of {kind}, and {left} bytes follow")
    data = bytearray(stream.read(wanted))  # can be written to, as any array
    return np.frombuffer(data, kind).reshape(shape, order="F" if by_column else "C")


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (*_DAMAGE, *_ZIP_DAMAGE) as error:
        words = getattr(error, "strerror", None) or error
        raise TraceFileError(f"{path}: no {path.suffix} of plain arrays: {words}") from error
