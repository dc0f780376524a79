"""The device's rows of one process: kernels, copies, events, and what a graph hides."""

import itertools

from fastcomm.synthetic.catalog import KERNELS
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.host import Host, Launch
from fastcomm.synthetic.play import COMPUTE
from fastcomm.synthetic.tape import Work

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


class Device:
    """The one GPU of a process."""

    def __init__(self, job: Job, host: Host) -> None:
        self.job, self.host, self.tables = job, host, host.tables
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

    def work(self, work: Work, correlation: int, node: int | None = None) -> None:
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

    def _kernel(self, work: Work, row: dict[str, object]) -> None:
        self.grid += 1
        row |= self.names.get(work.name) or self._shape(work)
        self.tables.add("CUPTI_ACTIVITY_KIND_KERNEL", **row, gridId=self.grid)

    def _shape(self, work: Work) -> dict[str, object]:
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

    def graph(self, works: list[Work], correlation: int) -> None:
        """All work of a launch as one row, which is all that a capture without nodes has."""
        start, stop = works[0].start, max(work.stop for work in works)
        self.tables.add(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
            **self._span(start, stop),
            **self._where(COMPUTE, correlation),
            graphId=EXECUTABLE,
            graphExecId=1,
        )
