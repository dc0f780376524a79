"""Read Nsight Systems exports: SQLite files, parquetdir and arrowdir. Each process is a rank.

The names below are those of all tables and columns that are read; of `SYSTEM` only the name of
the host, and of `GPUS` the names. An absent table has no rows; an absent column is null. Types
are those that readers get: the types in files differ by kind of export and version. The modules
of this package are imported only when a run has an export.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastcomm import files

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcomm.readers import OpenOptions, RankSources

INTEGER, TEXT, BLOB = "integer", "text", "blob"

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
CUDA_EVENT = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NODES = "CUDA_GRAPH_NODE_EVENTS"
OLD_NODES = "CUDA_GRAPH_EVENTS"  # has the creations of nodes in older exports
NVTX = "NVTX_EVENTS"
STRINGS = "StringIds"
SCHEMAS = "NVTX_PAYLOAD_SCHEMAS"
ENTRIES = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
EXPORT = "META_DATA_EXPORT"
SESSION = "TARGET_INFO_SESSION_START_TIME"
ANALYSIS = "ANALYSIS_DETAILS"
MPI_RANKS = "MPI_RANKS"
GPUS = "TARGET_INFO_GPU"
SYSTEM = "TARGET_INFO_SYSTEM_ENV"  # has the environment, too
HOST_NAME = "Hostname"  # the row of SYSTEM with the name of the host

TABLES = frozenset(
    [
        *(KERNEL, MEMCPY, MEMSET, RUNTIME, SYNC, CUDA_EVENT, GRAPH, NODES, OLD_NODES, NVTX),
        *(STRINGS, SCHEMAS, ENTRIES, EXPORT, SESSION, ANALYSIS, MPI_RANKS, GPUS, SYSTEM),
    ]
)

# Names of SQLite exports.
_FILES = (".sqlite", ".sqlite3", ".db")
# The first bytes of an SQLite file, and the suffixes of the files of a directory.
MAGIC = b"SQLite format 3\x00"
SUFFIXES = (".parquet", ".arrow")

# Tables whose rows are device work: a process with one of them is a rank.
DEVICE_WORK = (KERNEL, MEMCPY, MEMSET, GRAPH)

# The column that names the process of a row, or (globalTid) its process and thread.
PROCESS_COLUMN = {
    **dict.fromkeys((*DEVICE_WORK, SYNC, CUDA_EVENT), "globalPid"),
    **dict.fromkeys((RUNTIME, NODES, OLD_NODES, NVTX, MPI_RANKS), "globalTid"),
}

# Columns that a table must have.
REQUIRED = {
    **dict.fromkeys(DEVICE_WORK, ("start", "end", "deviceId", "streamId", "globalPid")),
    RUNTIME: ("start", "end", "globalTid", "nameId"),
    SYNC: ("start", "end", "streamId", "syncType"),
    NVTX: ("start", "end", "eventType", "globalTid"),
    STRINGS: ("id", "value"),
}

# Tables whose rows all have a start and an end.
SPANS = (*DEVICE_WORK, RUNTIME, SYNC)

# Columns that are not integers.
TYPES = {**dict.fromkeys(("value", "text", "name", "jsonText"), TEXT), "binaryData": BLOB}

# `NVTX_EVENTS.eventType`.
PUSH_POP, START_END, DOMAIN = 59, 60, 75

# globalTid has the thread in these low bits, and the process above.
THREAD_BITS = 24
# globalPid has the machine in its bits from this one on.
MACHINE_BIT = 48
_PROCESS_BITS = (1 << 24) - 1

# `copyKind`, with the names of Kineto.
_DIRECTIONS = (
    *("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("HtoD (unified memory)", "DtoH (unified memory)", "DtoD (unified memory)"),
)
COPIES = {number: f"Memcpy {direction}" for number, direction in enumerate(_DIRECTIONS, 1)}

# `syncType`, with the names of Kineto.
SYNCS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
ALL_STREAMS = 0xFFFFFFFF
WAITS_FOR_EVENT = (1, 2)
# Columns that identify a CUDA event and its recording.
EVENT_IDS = ("eventId", "eventSyncId")


def process_of(thread: int) -> int:
    """Return the operating-system id of a process from its number `globalPid >> 24`."""
    return thread & _PROCESS_BITS


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


def find(paths: Sequence[Path], options: "OpenOptions") -> "RankSources":
    """Find the ranks of the exports, with the communicators of each rank.

    Parameters
    ----------
    paths
        Exports of one run; an export may hold several ranks, one per process.
    options
        What the caller stated about the run, such as the ranks of files.

    Returns
    -------
    RankSources
        Ranks in ascending order, with functions that read them.

    Raises
    ------
    TraceFileError
        If a path is not an export, has no process with work, or two processes have one rank.

    """
    from fastcomm.readers.nsys import ranks

    return ranks.find(paths, options)


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
    from fastcomm.readers.nsys import ranks

    return ranks.project(path, process)
