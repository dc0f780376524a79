"""Nsight Systems exports: SQLite files, parquetdir and arrowdir; each process is a rank.

What the parts of the file mean, and how they differ from version to version, stands in the
modules: `layout` names tables and columns, `export` reads them from any kind of file. They are
loaded when there is an export: most runs have none.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastcomm import files
from fastcomm.readers.nsys.layout import EXPORT, MAGIC, NVTX, STRINGS, SUFFIXES

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcomm.readers import OpenOptions, RankSources

__all__ = ["claims", "find", "project"]

_FILES = (".sqlite", ".sqlite3", ".db")


def claims(path: Path) -> bool:
    """Whether this is an export, or calls itself one: reading it then says what is wrong."""
    if path.is_dir():
        tables = (EXPORT, STRINGS, NVTX)
        return any((path / (table + end)).is_file() for table in tables for end in SUFFIXES)
    return path.suffix.lower() in _FILES or (path.suffix == "" and _has_magic(path))


def _has_magic(path: Path) -> bool:
    try:
        with files.opened(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def is_damaged(_: Path) -> bool:
    """Return False: a damaged export is claimed by its name."""
    return False


def find(paths: Sequence[Path], options: "OpenOptions") -> "RankSources":
    """The ranks of the reports, with the communicators that each is in."""
    from fastcomm.readers.nsys import ranks

    return ranks.find(paths, options)


def project(path: Path, process: int | None = None) -> "pa.Table":
    """Every push/pop range that launched device work, as `nsys stats` projects it.

    One row a range: process, thread, name, start and stop on the host, first and last time of
    its device work (ns of the file), how many rows of device work that is. Of one `process`
    (its number in the operating system) or of all.
    """
    from fastcomm.readers.nsys import ranks

    return ranks.project(path, process)
