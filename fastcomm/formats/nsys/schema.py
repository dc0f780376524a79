"""Name the tables and columns of Nsight Systems exports that are read.

Names of tables may end in a version (`CUPTI_ACTIVITY_KIND_KERNEL_V3`), see `table_of`.
Of `SYSTEM` only the name of the host is read, and of `GPUS` the names. An absent table has no
rows; an absent column is null. Types are those that readers get: the types in files differ by
kind of export and version.
"""

import re

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
_VERSION = re.compile(r"_v?[0-9]+$", re.IGNORECASE)


def table_of(name: str) -> str | None:
    """Return the table that a name means, which may end in a version; None for other names."""
    table = name if name in TABLES else _VERSION.sub("", name)
    return table if table in TABLES else None


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
ON_DEVICE, BETWEEN_DEVICES = (_DIRECTIONS.index(name) + 1 for name in ("DtoD", "PtoP"))
# A copy between devices is also recorded as one on a device, with different numbers here.
COPY_ENDS = ("srcDeviceId", "dstDeviceId")
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
