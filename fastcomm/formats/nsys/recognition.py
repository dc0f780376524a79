"""Read Nsight Systems exports: SQLite files, parquetdir and arrowdir. Each process is a rank.

`schema` has the tables and columns. The other modules of this package are imported only when a
run has an export.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastcomm import files
from fastcomm.formats.nsys.schema import EXPORT, MAGIC, NVTX, STRINGS, SUFFIXES

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcomm.formats.config import Config
    from fastcomm.formats.sources import RankSources

# Names of SQLite exports.
_FILES = (".sqlite", ".sqlite3", ".db")


def claims(path: Path) -> bool:
    """Return whether a path is an Nsight Systems export, or has the name of one.

    A file with the name of an export is claimed unread: reading it then reports what is wrong.
    """
    if path.is_dir():
        tables = (EXPORT, STRINGS, NVTX)
        return any((path / (table + end)).is_file() for table in tables for end in SUFFIXES)
    return path.suffix.lower() in _FILES or (path.suffix == "" and _has_magic(path))


def _has_magic(path: Path) -> bool:
    """Return whether a file begins with SQLite's magic bytes; False if unreadable."""
    try:
        with files.opened(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def is_damaged(_: Path) -> bool:
    """Return False: a damaged export is claimed by its name."""
    return False


def find(paths: Sequence[Path], config: "Config") -> "RankSources":
    """Find the ranks of the exports, with the communicators of each rank.

    Parameters
    ----------
    paths
        Exports of one run; an export may hold several ranks, one per process.
    config
        What the user states about the run, such as the ranks of files.

    Returns
    -------
    RankSources
        Ranks in ascending order, with functions that read them.

    Raises
    ------
    TraceFileError
        If a path is not an export, has no process with work, or two processes have one rank.

    """
    from fastcomm.formats.nsys import ranks

    return ranks.find(paths, config)


def project(path: Path, process: int | None = None) -> "pa.Table":
    """Project every push/pop range that launched device work, as `nsys stats` does.

    Parameters
    ----------
    path
        An export.
    process
        Operating-system id of the process to project; None projects all.

    Returns
    -------
    pyarrow.Table
        One row per range: process, thread, name, start and stop on the host, start of its first
        and end of its last device work (ns of the file), number of rows of device work.

    """
    from fastcomm.formats.nsys import ranks

    return ranks.project(path, process)
