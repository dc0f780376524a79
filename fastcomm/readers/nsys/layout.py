"""The tables and columns of an Nsight Systems export that fastcomm reads, as data.

Nothing else is ever read: the tables of the environment, of captured output and of the host
stay where they are. A table that is absent has no rows; a column that is absent is all null.
The types are ours: those of the file differ by kind of export and by version.
"""

INTEGER, TEXT, BLOB = "integer", "text", "blob"

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
CUDA_EVENT = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NODES = "CUDA_GRAPH_NODE_EVENTS"
OLD_NODES = "CUDA_GRAPH_EVENTS"  # creations of nodes until nodes got a table of their own
NVTX = "NVTX_EVENTS"
STRINGS = "StringIds"
SCHEMAS = "NVTX_PAYLOAD_SCHEMAS"
ENTRIES = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
EXPORT = "META_DATA_EXPORT"
SESSION = "TARGET_INFO_SESSION_START_TIME"
ANALYSIS = "ANALYSIS_DETAILS"
MPI_RANKS = "MPI_RANKS"

TABLES = frozenset(
    [
        *(KERNEL, MEMCPY, MEMSET, RUNTIME, SYNC, CUDA_EVENT, GRAPH, NODES, OLD_NODES, NVTX),
        *(STRINGS, SCHEMAS, ENTRIES, EXPORT, SESSION, ANALYSIS, MPI_RANKS),
    ]
)

# The first bytes of an SQLite file, and the files of a directory, one a table.
MAGIC = b"SQLite format 3\x00"
SUFFIXES = (".parquet", ".arrow")

# Which process a row is of: the column that tells, and whether it tells the thread as well.
PROCESS_COLUMN = {
    KERNEL: "globalPid",
    MEMCPY: "globalPid",
    MEMSET: "globalPid",
    SYNC: "globalPid",
    CUDA_EVENT: "globalPid",
    GRAPH: "globalPid",
    RUNTIME: "globalTid",
    NODES: "globalTid",
    OLD_NODES: "globalTid",
    NVTX: "globalTid",
    MPI_RANKS: "globalTid",
}

# Tables whose rows are device work: a process with one of them is a rank.
DEVICE_WORK = (KERNEL, MEMCPY, MEMSET, GRAPH)

# Columns without which a row means nothing; a table that lacks one is an error.
REQUIRED = {
    KERNEL: ("start", "end", "deviceId", "streamId", "globalPid"),
    MEMCPY: ("start", "end", "deviceId", "streamId", "globalPid"),
    MEMSET: ("start", "end", "deviceId", "streamId", "globalPid"),
    GRAPH: ("start", "end", "deviceId", "streamId", "globalPid"),
    RUNTIME: ("start", "end", "globalTid", "nameId"),
    SYNC: ("start", "end", "streamId", "syncType"),
    NVTX: ("start", "end", "eventType", "globalTid"),
    STRINGS: ("id", "value"),
}

# Tables of which every row has a start and an end.
SPANS = (*DEVICE_WORK, RUNTIME, SYNC)

# Columns that are no integers.
TYPES = {
    "value": TEXT,
    "text": TEXT,
    "name": TEXT,
    "jsonText": TEXT,
    "binaryData": BLOB,
}

# `NVTX_EVENTS.eventType`.
PUSH_POP, START_END, DOMAIN = 59, 60, 75

# The threads of one process have equal values above these bits, which are the thread's.
THREAD_BITS = 24
_PROCESS_BITS = (1 << 24) - 1


def process_of(thread: int) -> int:
    """The number that the operating system gave a process, from `g >> THREAD_BITS`."""
    return thread & _PROCESS_BITS


# `copyKind`, in the words of Kineto.
COPIES = {
    1: "Memcpy HtoD",
    2: "Memcpy DtoH",
    3: "Memcpy HtoA",
    4: "Memcpy AtoH",
    5: "Memcpy AtoA",
    6: "Memcpy AtoD",
    7: "Memcpy DtoA",
    8: "Memcpy DtoD",
    9: "Memcpy HtoH",
    10: "Memcpy PtoP",
    11: "Memcpy HtoD (unified memory)",
    12: "Memcpy DtoH (unified memory)",
    13: "Memcpy DtoD (unified memory)",
}

# `syncType`, in the words of Kineto.
SYNCS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
ALL_STREAMS = 0xFFFFFFFF
WAITS_FOR_EVENT = (1, 2)
# What an event is known by, and which of its recordings.
EVENT_IDS = ("eventId", "eventSyncId")
