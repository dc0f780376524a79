"""By what a source is known again, without reading all of it."""

import hashlib
import os
from pathlib import Path

from fastcomm import inputs
from fastcomm.errors import TraceFileError
from fastcomm.readers.store_layout import Fingerprint
from fastcomm.remote import is_local

_ENDS = 1 << 16  # bytes


def fingerprint(path: Path) -> Fingerprint:
    """The fingerprint of a file, or of a directory by the files in it."""
    try:
        if path.is_dir():
            return _of_directory(path)
        status = path.stat()
        with inputs.opened(path) as file:
            text = file.read(_ENDS)
            file.seek(max(len(text), status.st_size - _ENDS))
            text += file.read(_ENDS)
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error
    return Fingerprint(
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        sha256=hashlib.sha256(text).hexdigest(),
    )


def _of_directory(path: Path) -> Fingerprint:
    if is_local(path):
        below = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    else:
        below = [file for file in path.rglob("*") if file.is_file()]
    files = sorted(below)
    seen = [(str(file.relative_to(path)), file.stat()) for file in files]
    text = repr([(name, status.st_size, status.st_mtime_ns) for name, status in seen])
    return Fingerprint(
        size=sum(status.st_size for _, status in seen),
        mtime_ns=max((status.st_mtime_ns for _, status in seen), default=0),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
