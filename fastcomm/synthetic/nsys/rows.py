"""Host and device rows of one process of a synthetic nsys report."""

import itertools
from dataclasses import dataclass

from fastcomm.synthetic.catalog import KERNELS
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import DEVICES
from fastcomm.synthetic.nsys import payloads
from fastcomm.synthetic.nsys.payloads import NcclFunction
from fastcomm.synthetic.nsys.tables import NsysVariant, ReportTables
from fastcomm.synthetic.play import PlannedWork
from fastcomm.synthetic.stage import COMPUTE

MARK, THREAD, PUSH_POP, START_END, DOMAIN = 34, 39, 59, 60, 75
FIRST_CORRELATION = 2_610_000  # equal in all processes
MACHINE = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Time base of a report; times are ns since the Unix epoch."""

    origin: int  # time that is 0 in the file
    start: int  # start of the capture
    utc: int  # start of the capture by the machine's clock, which may be wrong

    def __call__(self, moment: int) -> int:
        """Return a time of the job as a time of the file."""
        return moment - self.origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A CUDA call, with the correlation id of its device row."""

    correlation: int
    start: int
    stop: int
    thread: int


class Host:
    """Ids of one process, and the rows of its threads."""

    def __init__(
        self,
        job: Job,
        rank: int,
        place: int,
        variant: NsysVariant,
        tables: ReportTables,
        clock: Clock,
    ) -> None:
        """Choose the ids of a process; `place` is its number within the report."""
        self.job, self.rank, self.variant = job, rank, variant
        self.tables, self.clock = tables, clock
        # As in Kineto files, but unique among the processes of a report.
        self.process = 41_000 + 97 * (rank % DEVICES if place < DEVICES else place)
        self.device = 0 if variant.one_device else rank % DEVICES
        self.global_pid = MACHINE | self.process << 24
        self.domain = 1 + rank % 3  # of NCCL, behind those of other libraries
        self.called: set[str] = set()
        self.correlation, self.operator = FIRST_CORRELATION, 990_000

    def thread(self, number: int) -> int:
        """Return the id of a thread: 0 is the main thread, 61 that of the backward pass."""
        return self.global_pid | self.process + number

    def range(self, thread: int, text: str, start: int, stop: int | None) -> None:
        """Add an NVTX range with a text, as the application pushes it in the default domain.

        `start` and `stop` are ns of the job's clock; the range stays open if `stop` is None.
        """
        name: dict[str, object] = {"text": text}
        if self.variant.registered_names:
            name = {"textId": self.tables.string(text)}
        end = None if stop is None else self.clock(stop)
        self.event(PUSH_POP, thread, start, end=end, domainId=0, **name)

    def operator_range(self, thread: int, name: str, start: int, stop: int) -> None:
        """Add a range of PyTorch, whose operator number makes its name unique."""
        self.operator += 1
        self.range(thread, f"{name}, op_id = {self.operator}", start, stop)

    def library(self, thread: int, name: str, start: int, stop: int) -> None:
        """Add an NVTX range that another library than NCCL pushed on a thread.

        `start` and `stop` are ns of the host's clock.
        """
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
        """Add a range of NCCL, with its payload if the export has payloads."""
        columns = self._payload(name, values) if values else {}
        columns |= {"end": self.clock(stop), "textId": self.tables.string(name)}
        self.event(PUSH_POP, thread, start, domainId=self.domain, **columns)

    def _payload(self, name: str, values: dict[str, int]) -> dict[str, object]:
        """Return the payload columns of a range of NCCL, as the variant exports them."""
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
        """Add GroupStart, operations, and GroupEnd of nested groups, from `start` to `end`."""
        calls: list[tuple[str, dict[str, int] | None]] = [("ncclGroupStart", None)] * depth
        calls += [(operation.name, operation.values) for operation in operations]
        calls += [("ncclGroupEnd", None)] * (depth - 1)
        duration = max(1, (end - start) // len(calls))
        for number, (name, values) in enumerate(calls):
            begin = start + number * duration
            self.nccl(thread, name, begin, begin + max(0, duration - 8), values)

    def cuda(self, thread: int, name: str, start: int, ns: int) -> Launch:
        """Add a call of the CUDA runtime, and return it with a new correlation.

        `name` is that of the function; `start` is in ns of the job's clock, and `ns` the
        duration.
        """
        self.correlation += 1
        row = {"start": self.clock(start), "end": self.clock(start + ns), "globalTid": thread}
        row |= {"correlationId": self.correlation, "nameId": self.tables.string(name)}
        self.tables.add("CUPTI_ACTIVITY_KIND_RUNTIME", eventClass=0, returnValue=0, **row)
        return Launch(correlation=self.correlation, start=start, stop=start + ns, thread=thread)

    def event(self, kind: int, thread: int, start: int, **more: object) -> None:
        """Add a row of NVTX of any type."""
        begin = self.clock(start)
        self.tables.add("NVTX_EVENTS", start=begin, eventType=kind, globalTid=thread, **more)


ALL_STREAMS = NO_EVENT = 0xFFFFFFFF
GRAPH, CLONE, EXECUTABLE = 21, 22, 23  # ids of a captured graph, a copy, and what is launched
HOST_TO_DEVICE = 1

_CONSTANTS = {
    "blockX": 128,
    **dict.fromkeys(("blockY", "blockZ"), 1),
    **dict.fromkeys(("staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread"), 0),
    "localMemoryTotal": 250_871_808,
    "sharedMemoryExecuted": 32_768,
    **dict.fromkeys(("sharedMemoryLimitConfig", "clusterX", "clusterY", "clusterZ"), 0),
    "launchType": 1,
    "tensorSizeMinusOneElements": "[]",
}
_COPY = {"copyKind": HOST_TO_DEVICE, "srcKind": 1, "dstKind": 2, "copyCount": 1}


def short_name(name: str) -> str:
    """Return the name of a kernel without namespace, template arguments and parameters."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return bare.split("<")[0].split("(")[0].rpartition("::")[2]


class DeviceWriter:
    """Writes the rows of the GPU of a process."""

    def __init__(self, host: Host) -> None:
        """Start without rows, with the first numbers of events and grids."""
        self.job, self.host, self.tables = host.job, host, host.tables
        self.names: dict[str, dict[str, object]] = {}
        self.events = 6_800
        self.grid = 0

    def _where(self, stream: int, correlation: int) -> dict[str, object]:
        """Return the columns of device, stream and correlation."""
        host = self.host
        context = {"deviceId": host.device, "contextId": 1 + host.device}
        work = {"streamId": stream, "correlationId": correlation}
        return {**context, **work, "globalPid": host.global_pid}

    def _span(self, start: int, stop: int) -> dict[str, object]:
        return {"start": self.host.clock(start), "end": self.host.clock(stop)}

    def work(self, work: PlannedWork, correlation: int, node: int | None = None) -> None:
        """Add a kernel, collective or copy; `node` is its number in a graph."""
        row = self._span(work.start, work.stop) | self._where(work.stream, correlation)
        if node is not None:
            row["graphNodeId"] = EXECUTABLE << 32 | node
        if work.kind == "memcpy":
            row |= {"bytes": self.job.tokens * 8, **_COPY}
            self.tables.add("CUPTI_ACTIVITY_KIND_MEMCPY", **row)
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
        """Return the columns that all kernels of a name share."""
        kernel = KERNELS.get(work.name)
        name = kernel.name if kernel else work.name
        grid = kernel.grid if kernel else (24, 1, 1)
        columns: dict[str, object] = {
            "demangledName": self.tables.string(name),
            "shortName": self.tables.string(short_name(name)),
            "registersPerThread": kernel.registers if kernel else 96,
            **dict(zip(("gridX", "gridY", "gridZ"), grid, strict=True)),
            **_CONSTANTS,
        }
        self.names[work.name] = columns
        return columns

    def waits(self, stream: int, other: int, record: Launch, wait: Launch) -> None:
        """Add an event that is recorded on `other`, and for which `stream` waits."""
        self.events += 1
        row = self._where(other, record.correlation) | self._event()
        self.tables.add("CUPTI_ACTIVITY_KIND_CUDA_EVENT", timestamp=0, **row)
        self.synchronization(wait, stream, kind=2)

    def synchronization(self, call: Launch, stream: int | None, kind: int) -> None:
        """Add a wait of the host for all streams, or of a stream for the last event."""
        row = self._span(call.start, call.stop)
        row |= self._where(ALL_STREAMS if stream is None else stream, call.correlation)
        row |= {"eventId": NO_EVENT, "eventSyncId": 0} if stream is None else self._event()
        self.tables.add("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", syncType=kind, **row)

    def _event(self) -> dict[str, object]:
        """Return the columns of the last event."""
        return {"eventId": self.events % 64, "eventSyncId": self.events}

    def captured(self, calls: list[Launch], begin: int) -> None:
        """Add the rows on the capture and the instantiation of a CUDA graph.

        `calls` are the calls that were captured; the instantiation starts at `begin`, ns.
        """
        thread = self.host.thread(0)
        call = self.host.cuda(thread, "cudaGraphInstantiate_v12000", begin, 900_000)
        graph = {"graphId": EXECUTABLE, "originalGraphId": GRAPH, "graphExecId": 1}
        row = self._graph_row(call, 100, "cudaGraphInstantiate")
        self.tables.add("CUDA_GRAPH_EVENTS", **row, **graph)
        if self.host.variant.graph != "node":
            return
        inner_row = self._graph_row(call, 200, "cudaGraphAddNode")
        for number, launch in enumerate(calls):
            self._node(
                self._graph_row(launch, 50, "cudaGraphAddNode"), GRAPH << 32 | number, None
            )
            # Every other node is copied once more, as for a child graph.
            path = (GRAPH, CLONE, EXECUTABLE) if number % 2 else (GRAPH, EXECUTABLE)
            for before, after in itertools.pairwise(path):
                self._node(inner_row, after << 32 | number, before << 32 | number)

    def _node(self, row: dict[str, object], node: int, original: int | None) -> None:
        nodes = {"graphNodeId": node, "originalGraphNodeId": original}
        self.tables.add("CUDA_GRAPH_NODE_EVENTS", **row, **nodes)

    def _graph_row(self, call: Launch, margin: int, name: str) -> dict[str, object]:
        """Return a row of graphs inside a call, `margin` ns from its start and end."""
        more = {"eventClass": 0, "globalTid": call.thread, "nameId": self.tables.string(name)}
        return self._span(call.start + margin, call.stop - margin) | more

    def graph(self, works: list[PlannedWork], correlation: int) -> None:
        """Add all work of a launch as one row, as a capture without graph nodes has it."""
        start, stop = works[0].start, max(work.stop for work in works)
        row = self._span(start, stop) | self._where(COMPUTE, correlation)
        row |= {"graphId": EXECUTABLE, "graphExecId": 1}
        self.tables.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **row)
