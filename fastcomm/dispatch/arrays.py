"""Read arrays of integers from NumPy files, which are not trusted."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fastcomm import files
from fastcomm.errors import TraceFileError

Numbers = NDArray[Any]
_MOST_NAMED = 8
_DAMAGE = (OSError, ValueError, EOFError, KeyError, TypeError, RuntimeError, SyntaxError)
_ZIP_DAMAGE = (zipfile.BadZipFile, zlib.error, TokenError, MemoryError, OverflowError)


def read_npy(path: Path) -> Numbers:
    """Return the array of an .npy file; TraceFileError unless it has plain integers."""
    with _trace_file_errors(path), files.opened(path) as file:
        return _array(file, path.stat().st_size)


def read_npz(path: Path, *aliases: tuple[str, ...]) -> tuple[Numbers, ...]:
    """Return arrays of an .npz file, each by the first of its names that the file has.

    Raises
    ------
    TraceFileError
        If the file has no array of some names, or an array has other values than integers.

    """
    with (
        _trace_file_errors(path),
        files.opened(path) as file,
        zipfile.ZipFile(file) as archive,
    ):
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        present = [next((n for n in names if n in members), None) for names in aliases]
        if None in present:
            raise TraceFileError(
                f"{path}: expected arrays {' and '.join(' or '.join(n) for n in aliases)}; "
                f"found {_names(list(members))}"
            )
        return tuple(_member(archive, members, name, path) for name in present if name)


def _names(arrays: Sequence[str]) -> str:
    """Return the first names of the arrays of a file, and how many more there are."""
    more = f" and {len(arrays) - _MOST_NAMED} more" if len(arrays) > _MOST_NAMED else ""
    return f"{', '.join(arrays[:_MOST_NAMED]) or 'none'}{more}"


def _member(
    archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], name: str, path: Path
) -> Numbers:
    """Read the array of a member of an .npz file; refuse sizes above the limits."""
    info = members[name]
    files.Limits.of_environment().check(info.file_size, info.compress_size, path)
    with archive.open(info) as stream:
        return _array(stream, info.file_size)


def _array(stream: IO[bytes], size: int) -> Numbers:
    """Return the array in a stream of `size` bytes; ValueError unless it has integers."""
    version = npy.read_magic(stream)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"npy version {version} is not supported; expected 1.0 or 2.0")
    header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, kind = header(stream)
    if kind.kind not in "iu":
        raise ValueError(
            f"expected whole numbers, not {kind} {shape}; Python objects are not loaded"
        )
    needed, remaining = prod(shape) * kind.itemsize, size - stream.tell()
    if min(shape, default=0) < 0 or needed > remaining:
        raise ValueError(f"its header declares {shape} of {kind}, but {remaining} bytes follow")
    data = bytearray(stream.read(needed))  # a bytearray, so that the array is writable
    return np.frombuffer(data, kind).reshape(shape, order="F" if is_fortran else "C")


@contextmanager
def _trace_file_errors(path: Path) -> Iterator[None]:
    """Convert errors of damaged files to TraceFileError."""
    try:
        yield
    except (*_DAMAGE, *_ZIP_DAMAGE) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceFileError(
            f"{path}: cannot read a plain array from {path.suffix}: {reason}"
        ) from error
