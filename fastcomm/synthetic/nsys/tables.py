"""Tables of an nsys export as data, and how versions and options change them."""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import pyarrow as pa

ExportKind = Literal["sqlite", "parquetdir", "arrowdir"]
Payload = Literal["blob", "blob-total", "json", "json-strings", "json-ids", "none"]
Release = Literal["2.22", "2.24", "2.27", "2.28"]
GraphMode = Literal["none", "graph", "node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NsysVariant:
    """How a report was captured and exported; the default has all data that metrics use."""

    payload: Payload = "blob"  # "blob": the header's last field is 32; "blob-total": 32 + size
    nccl: Release = "2.27"
    init: bool = True  # False: the capture starts after the communicators are created
    schema_rows: bool = True
    session_start: bool = True
    normalized: bool = False  # times are UTC, not relative to the start of the capture
    clock_skew_ns: Mapping[int, int] = field(default_factory=dict)  # by number of report
    mpi_ranks: bool = False
    domain_rows: bool = True  # False: no rows of type 75, as in a filtered file
    graph: GraphMode = "none"  # how the launches of the second step are recorded
    groups: bool = True  # False: a single send or receive launches inside its own range
    other_thread: bool = False  # non-blocking communicators launch from a thread of their own
    registered_names: bool = False  # names of ranges are in StringIds
    one_device: bool = False  # a process sees only its own GPU, as device 0

    @property
    def has_blobs(self) -> bool:
        """Whether payloads were exported as binary data."""
        return self.payload in {"blob", "blob-total"}

    @property
    def has_json(self) -> bool:
        """Whether payloads were exported as JSON."""
        return self.payload.startswith("json")


Row = dict[str, object]

_EVENT = "start:t! end:t!"
_PLACE = "deviceId:u! contextId:u! greenContextId:u streamId:u! correlationId:u globalPid:g"
_GRAPH = f"{_EVENT} eventClass:u! globalTid:g nameId:u!"

TABLES = {
    "StringIds": "id:i! value:s!",
    "ANALYSIS_FILE": "id:u! filename:s contentId:u globalPid:g!",
    "ProcessStreams": "globalPid:g! filenameId:u! contentId:u!",
    "NVTX_PAYLOAD_SCHEMAS": (
        "domainId:g schemaId:g name:s type:u flags:u numEntries:u payloadSize:u alignTo:u"
    ),
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": (
        "domainId:g! schemaId:g! idx:u! flags:u type:g name:s description:s "
        "arrayOrUnionDetail:g offset:g"
    ),
    "NVTX_PAYLOAD_ENUMS": "domainId:g schemaId:g name:s numEntries:u size:u",
    "NVTX_PAYLOAD_ENUM_ENTRIES": "domainId:g! schemaId:g! idx:u! name:s value:g isFlag:u",
    "TARGET_INFO_SYSTEM_ENV": "globalVid:g devStateName:s! name:s! nameEnum:u! value:s!",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs:g utcTime:s localTime:s systemClockNs:g",
    "ANALYSIS_DETAILS": "globalVid:g! duration:g! startTime:g! stopTime:g!",
    "TARGET_INFO_GPU": (
        "vmId:g! id:u! name:s busLocation:s isDiscrete:u l2CacheSize:g totalMemory:g "
        "memoryBandwidth:g clockRate:g smCount:u pwGpuId:u uuid:s luid:g chipName:s cuDevice:u"
    ),
    "TARGET_INFO_CUDA_STREAM": (
        "streamId:u! hwId:u! vmId:u! processId:u! contextId:u! priority:i! flag:u!"
    ),
    "DIAGNOSTIC_EVENT": (
        "timestamp:t! timestampType:u! source:u! severity:u! text:s! globalPid:g"
    ),
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": f"timestamp:t {_PLACE} eventId:u! eventSyncId:g",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        f"{_EVENT} {_PLACE} deprecatedSyncType:u syncType:u! eventId:u! eventSyncId:g"
    ),
    "PROFILER_OVERHEAD": f"{_EVENT} globalTid:g nameId:u! overheadType:u!",
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        f"{_EVENT} {_PLACE} value:u! bytes:g! graphNodeId:g memKind:u"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        f"{_EVENT} {_PLACE} bytes:g! copyKind:u! deprecatedSrcId:u srcKind:u dstKind:u "
        "srcDeviceId:u srcContextId:u dstDeviceId:u dstContextId:u migrationCause:u "
        "graphNodeId:g virtualAddress:g copyCount:g"
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        f"{_EVENT} {_PLACE} demangledName:u! shortName:u! mangledName:u launchType:u "
        "cacheConfig:u registersPerThread:u! gridX:u! gridY:u! gridZ:u! blockX:u! blockY:u! "
        "blockZ:u! staticSharedMemory:u! dynamicSharedMemory:u! localMemoryPerThread:u! "
        "localMemoryTotal:u! gridId:t! sharedMemoryExecuted:u graphNodeId:g "
        "sharedMemoryLimitConfig:u qmdBulkReleaseDone:g qmdPreexitDone:g qmdLastCtaDone:g "
        "graphId:u clusterX:u clusterY:u clusterZ:u clusterSchedulingPolicy:u "
        "maxPotentialClusterSize:u maxActiveClusters:u sharedMemoryRequestedPercentage:u "
        "tensorSizeMinusOneElements:s!"
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        f"{_EVENT} deviceId:u! contextId:u! greenContextId:u streamId:u! correlationId:u! "
        "globalPid:g! graphId:u! graphExecId:u!"
    ),
    "CUDA_GRAPH_EVENTS": f"{_GRAPH} graphId:u originalGraphId:u graphExecId:u",
    "CUDA_GRAPH_NODE_EVENTS": f"{_GRAPH} graphNodeId:g! originalGraphNodeId:g",
    "PROCESSES": "globalPid:g pid:u name:s",
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        f"{_EVENT} eventClass:u! globalTid:g correlationId:u nameId:u! returnValue:i! "
        "callchainId:u"
    ),
    "NVTX_EVENTS": (
        "start:t! end:t eventType:u! rangeId:g category:g color:u text:s globalTid:g "
        "endGlobalTid:g textId:u domainId:g uint64Value:g int64Value:t doubleValue:d "
        "uint32Value:u int32Value:i floatValue:f jsonTextId:u jsonText:s binaryData:b "
        "eventId:g"
    ),
    "MPI_RANKS": "globalTid:g! rank:i!",
    "ThreadNames": "nameId:u! priority:i globalTid:g",
    "ENUM_NSYS_EVENT_TYPE": "id:t! name:s label:s",
    "ENUM_CUDA_MEMCPY_OPER": "id:t! name:s label:s",
    "ENUM_CUPTI_SYNC_TYPE": "id:t! name:s label:s",
    "META_DATA_CAPTURE": "name:s! value:s",
    "META_DATA_EXPORT": "name:s! value:s",
}
_KEYS = {"StringIds", "ANALYSIS_FILE"}  # the tables whose `id` is a primary key
_SQL = {"d": "REAL", "f": "REAL", "s": "TEXT", "b": "TEXT"}
_ARROW = {
    "t": pa.int64(),
    "g": pa.uint64(),
    "u": pa.uint32(),
    "i": pa.int32(),
    "d": pa.float64(),
    "f": pa.float32(),
    "s": pa.string(),
    "b": pa.string(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportColumn:
    """A column of a table."""

    name: str
    kind: str  # key of `_ARROW`
    nullable: bool

    @property
    def sql(self) -> str:
        """Definition of the column in `CREATE TABLE`."""
        declared = f'"{self.name}" {_SQL.get(self.kind, "INTEGER")}'
        return declared if self.nullable else f"{declared} NOT NULL"

    @property
    def arrow(self) -> pa.Field:
        """Arrow field of the column."""
        return pa.field(self.name, _ARROW[self.kind], nullable=self.nullable)


@cache
def columns(table: str) -> tuple[ExportColumn, ...]:
    """Return the columns of a table of an Nsight Systems export, by the table's name."""
    result = []
    for text in TABLES[table].split():
        name, _, kind = text.partition(":")
        result.append(ExportColumn(name=name, kind=kind[0], nullable=not kind.endswith("!")))
    return tuple(result)


def create(table: str) -> str:
    """Return the statement that creates a table, with a key only where nsys has one."""
    definitions = [column.sql for column in columns(table)]
    if table in _KEYS:
        definitions[0] += " PRIMARY KEY"
    return f'CREATE TABLE "{table}" ({", ".join(definitions)})'


@contextmanager
def new_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Create a SQLite file, and yield it to be filled in one transaction without a journal."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        yield database
        database.execute("COMMIT")


class ReportTables:
    """Rows of a report; tables without rows are absent."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        self._strings: dict[str, int] = {}

    def add(self, table: str, **values: object) -> None:
        """Add a row; columns without a value are null."""
        self.rows.setdefault(table, []).append(values)

    def string(self, value: str) -> int:
        """Return the id of a text. Ids have gaps, because exports omit some texts."""
        identity = self._strings.get(value)
        if identity is None:
            identity = self._strings[value] = 17 + len(self._strings) * 7
            self.add("StringIds", id=identity, value=value)
        return identity
