"""Host and device rows of one process of a made-up nsys report."""

import itertools
from dataclasses import dataclass

from fastcomm.synthetic.catalog import KERNELS
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import DEVICES
from fastcomm.synthetic.nsys import payloads
from fastcomm.synthetic.nsys.payloads import NcclFunction
from fastcomm.synthetic.nsys.tables import NsysVariant, ReportTables
from fastcomm.synthetic.play import COMPUTE
from fastcomm.synthetic.tape import PlannedWork

MARK, THREAD, PUSH_POP, START_END, DOMAIN = 34, 39, 59, 60, 75
FIRST_CORRELATION = 2_610_000  # the same in every process
MACHINE = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When the file's time is 0, and what the file says of when that was."""

    origin: int
    start: int  # of the capture
    utc: int  # the same, as the machine believed

    def __call__(self, moment: int) -> int:
        """A time of the job as the file has it."""
        return moment - self.origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A call of CUDA, and whom to look for at the other end."""

    correlation: int
    start: int
    stop: int
    thread: int


class Host:
    """One process: its ids, and the rows of its threads."""

    def __init__(
        self,
        job: Job,
        rank: int,
        place: int,
        variant: NsysVariant,
        tables: ReportTables,
        clock: Clock,
    ) -> None:
        self.job, self.rank, self.variant = job, rank, variant
        self.tables, self.clock = tables, clock
        # As in Kineto's files, but that no two processes of a report are called the same.
        self.process = 41_000 + 97 * (rank % DEVICES if place < DEVICES else place)
        self.device = 0 if variant.one_device else rank % DEVICES
        self.global_pid = MACHINE | self.process << 24
        self.domain = 1 + rank % 3  # of NCCL; other libraries were faster
        self.called: set[str] = set()
        self.correlation, self.operator = FIRST_CORRELATION, 990_000

    def thread(self, number: int) -> int:
        """The id of a thread: 0 the main one, 61 that of the backward pass."""
        return self.global_pid | self.process + number

    def range(self, thread: int, text: str, start: int, stop: int | None) -> None:
        """A range of the application, in the default domain; open without an end."""
        name: dict[str, object] = {"text": text}
        if self.variant.registered_names:
            name = {"textId": self.tables.string(text)}
        end = None if stop is None else self.clock(stop)
        self.event(PUSH_POP, thread, start, end=end, domainId=0, **name)

    def operator_range(self, thread: int, name: str, start: int, stop: int) -> None:
        """A range of PyTorch, whose number makes its name unique."""
        self.operator += 1
        self.range(thread, f"{name}, op_id = {self.operator}", start, stop)

    def library(self, thread: int, name: str, start: int, stop: int) -> None:
        """A range of another library, in the domain that was made first."""
        identity = self.tables.string(name)
        end = self.clock(stop)
        self.event(PUSH_POP, thread, start, end=end, textId=identity, domainId=1)

    def nccl(
        self,
        thread: int,
        name: str,
        start: int,
        stop: int,
        values: dict[str, int] | None = None,
    ) -> None:
        """A range of NCCL, with its payload if the export has any."""
        more = self._payload(name, values) if values else {}
        more |= {"end": self.clock(stop), "textId": self.tables.string(name)}
        self.event(PUSH_POP, thread, start, domainId=self.domain, **more)

    def _payload(self, name: str, values: dict[str, int]) -> dict[str, object]:
        variant = self.variant
        layout = payloads.layout(name, variant.nccl)
        if layout is None:
            return {}
        self.called.add(name)
        if variant.has_blobs:
            total = variant.payload == "blob-total"
            return {"binaryData": payloads.blob(layout, self.domain, values, total=total)}
        if not variant.has_json:
            return {}
        text = payloads.text(layout, values, strings=variant.payload == "json-strings")
        if variant.payload == "json-ids":
            return {"jsonTextId": self.tables.string(text)}
        return {"jsonText": text}

    def group(
        self, thread: int, operations: list[NcclFunction], start: int, end: int, depth: int
    ) -> None:
        """GroupStart, the operations, and the inner GroupEnd of a nested group: up to `end`."""
        names = ["ncclGroupStart"] * depth
        calls: list[tuple[str, dict[str, int] | None]] = [(name, None) for name in names]
        calls += [(operation.name, operation.values) for operation in operations]
        calls += [("ncclGroupEnd", None)] * (depth - 1)
        each = max(1, (end - start) // len(calls))
        for number, (name, values) in enumerate(calls):
            begin = start + number * each
            self.nccl(thread, name, begin, begin + max(0, each - 8), values)

    def cuda(self, thread: int, name: str, start: int, ns: int) -> Launch:
        """A call of the CUDA runtime."""
        self.correlation += 1
        self.tables.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=self.clock(start),
            end=self.clock(start + ns),
            eventClass=0,
            globalTid=thread,
            correlationId=self.correlation,
            nameId=self.tables.string(name),
            returnValue=0,
        )
        return Launch(correlation=self.correlation, start=start, stop=start + ns, thread=thread)

    def event(self, kind: int, thread: int, start: int, **more: object) -> None:
        """A row of NVTX of any type."""
        begin = self.clock(start)
        self.tables.add("NVTX_EVENTS", start=begin, eventType=kind, globalTid=thread, **more)


ALL_STREAMS = NO_EVENT = 0xFFFFFFFF
GRAPH, CLONE, EXECUTABLE = 21, 22, 23  # what was captured, a copy, what is launched
HOST_TO_DEVICE = 1

_SAME = {
    "blockX": 128,
    "blockY": 1,
    "blockZ": 1,
    "staticSharedMemory": 0,
    "dynamicSharedMemory": 0,
    "localMemoryPerThread": 0,
    "localMemoryTotal": 250_871_808,
    "sharedMemoryExecuted": 32_768,
    "sharedMemoryLimitConfig": 0,
    "clusterX": 0,
    "clusterY": 0,
    "clusterZ": 0,
}


def short_name(name: str) -> str:
    """The name of a kernel without its space, its template arguments and its parameters."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return bare.split("<")[0].split("(")[0].rpartition("::")[2]


class DeviceWriter:
    """The one GPU of a process."""

    def __init__(self, host: Host) -> None:
        self.job, self.host, self.tables = host.job, host, host.tables
        self.names: dict[str, dict[str, object]] = {}
        self.events = 6_800
        self.grid = 0

    def _where(self, stream: int, correlation: int) -> dict[str, object]:
        return {
            "deviceId": self.host.device,
            "contextId": 1 + self.host.device,
            "streamId": stream,
            "correlationId": correlation,
            "globalPid": self.host.global_pid,
        }

    def _span(self, start: int, stop: int) -> dict[str, object]:
        return {"start": self.host.clock(start), "end": self.host.clock(stop)}

    def work(self, work: PlannedWork, correlation: int, node: int | None = None) -> None:
        """One piece of work; `node` is its number in a graph."""
        row = self._span(work.start, work.stop) | self._where(work.stream, correlation)
        if node is not None:
            row["graphNodeId"] = EXECUTABLE << 32 | node
        if work.kind == "memcpy":
            more: dict[str, object] = {
                "bytes": self.job.tokens * 8,
                "copyKind": HOST_TO_DEVICE,
                "srcKind": 1,
                "dstKind": 2,
                "copyCount": 1,
            }
            self.tables.add("CUPTI_ACTIVITY_KIND_MEMCPY", **row, **more)
        elif work.kind == "memset":
            row |= {"value": 0, "bytes": 4, "memKind": 2}
            self.tables.add("CUPTI_ACTIVITY_KIND_MEMSET", **row)
        else:
            row["graphId"] = None if node is None else EXECUTABLE
            self._kernel(work, row)

    def _kernel(self, work: PlannedWork, row: dict[str, object]) -> None:
        self.grid += 1
        row |= self.names.get(work.name) or self._shape(work)
        self.tables.add("CUPTI_ACTIVITY_KIND_KERNEL", **row, gridId=self.grid)

    def _shape(self, work: PlannedWork) -> dict[str, object]:
        """What all kernels of a name have in common."""
        kernel = KERNELS.get(work.name)
        name = kernel.name if kernel else work.name
        grid = kernel.grid if kernel else (24, 1, 1)
        found: dict[str, object] = {
            "demangledName": self.tables.string(name),
            "shortName": self.tables.string(short_name(name)),
            "launchType": 1,
            "registersPerThread": kernel.registers if kernel else 96,
            **dict(zip(("gridX", "gridY", "gridZ"), grid, strict=True)),
            **_SAME,
            "tensorSizeMinusOneElements": "[]",
        }
        self.names[work.name] = found
        return found

    def waits(self, stream: int, other: int, record: Launch, wait: Launch) -> None:
        """An event is recorded on the other stream, and the first one waits for it."""
        self.events += 1
        self.tables.add(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
            timestamp=0,
            **self._where(other, record.correlation),
            eventId=self.events % 64,
            eventSyncId=self.events,
        )
        self.synchronization(wait, stream, kind=2)

    def synchronization(self, call: Launch, stream: int | None, kind: int) -> None:
        """A call waits: for all streams, or as the given stream does for the last event."""
        self.tables.add(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
            **self._span(call.start, call.stop),
            **self._where(ALL_STREAMS if stream is None else stream, call.correlation),
            syncType=kind,
            eventId=NO_EVENT if stream is None else self.events % 64,
            eventSyncId=0 if stream is None else self.events,
        )

    def captured(self, calls: list[Launch], begin: int) -> None:
        """The rows of a graph's making: captured, then made ready to run."""
        thread = self.host.thread(0)
        ready = self.host.cuda(thread, "cudaGraphInstantiate_v12000", begin, 900_000)
        row = self._made(ready.start + 100, ready.stop - 100, thread, "cudaGraphInstantiate")
        self.tables.add(
            "CUDA_GRAPH_EVENTS", **row, graphId=EXECUTABLE, originalGraphId=GRAPH, graphExecId=1
        )
        if self.host.variant.graph != "node":
            return
        inside = self._made(ready.start + 200, ready.stop - 200, thread, "cudaGraphAddNode")
        for number, call in enumerate(calls):
            row = self._made(call.start + 50, call.stop - 50, call.thread, "cudaGraphAddNode")
            self._node(row, GRAPH << 32 | number, None)
            # Some nodes are copied on the way, as by a graph inside another.
            path = (GRAPH, CLONE, EXECUTABLE) if number % 2 else (GRAPH, EXECUTABLE)
            for before, after in itertools.pairwise(path):
                self._node(inside, after << 32 | number, before << 32 | number)

    def _node(self, row: dict[str, object], node: int, original: int | None) -> None:
        self.tables.add(
            "CUDA_GRAPH_NODE_EVENTS", **row, graphNodeId=node, originalGraphNodeId=original
        )

    def _made(self, start: int, stop: int, thread: int, name: str) -> dict[str, object]:
        more = {"eventClass": 0, "globalTid": thread, "nameId": self.tables.string(name)}
        return self._span(start, stop) | more

    def graph(self, works: list[PlannedWork], correlation: int) -> None:
        """All work of a launch as one row, which is all that a capture without nodes has."""
        start, stop = works[0].start, max(work.stop for work in works)
        self.tables.add(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
            **self._span(start, stop),
            **self._where(COMPUTE, correlation),
            graphId=EXECUTABLE,
            graphExecId=1,
        )
