"""Rows of one rank as a process of a made-up report: communicators, host and device.

Device rows equal those of the job to the nanosecond. Launches have the same times as in Kineto
files.
"""

import itertools
from dataclasses import dataclass

from fastcomm.synthetic import pipeline, play
from fastcomm.synthetic.catalog import DESCRIPTIONS, KERNELS, SyntheticGroup, groups
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.kineto import DEVICES
from fastcomm.synthetic.nsys import payloads
from fastcomm.synthetic.nsys.payloads import NcclFunction, communicator, operations
from fastcomm.synthetic.nsys.tables import NsysVariant, ReportTables
from fastcomm.synthetic.pipeline import COMPUTE, SYNC_NS
from fastcomm.synthetic.play import HOST_RANGES, HostRange, PlannedWork, RankStep

MARK, THREAD, PUSH_POP, START_END, DOMAIN = 34, 39, 59, 60, 75
FIRST_CORRELATION = 2_610_000  # equal in all processes
MACHINE = 1 << 48
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
SETUP_NS = 3_141_592_653  # from the start of a capture to the first step
CUT = 2  # launches before a late capture, which records only their kernels
BACKWARD, LAUNCHER, WATCHDOG = 61, 300, 77  # threads, relative to the main thread
ODD_TEXT = 'ncclAllReduce "next",\n\u00e9\u2192'  # text of a mark, which is not a range
CAPTURE_GAP = 10_000_000  # between the capture of a graph and the first step
_COPIES = {
    "memcpy": ("aten::copy_", "cudaMemcpyAsync_v3020"),
    "memset": ("aten::zero_", "cudaMemsetAsync_v3020"),
}


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


def lead_ns(job: Job, variant: NsysVariant) -> int:
    """Return the time between the start of the captures and the first step."""
    lead = SETUP_NS if variant.init else CAPTURE_GAP + 1_000_000
    if variant.graph != "none":
        lead += 2 * play.schedule_of(job, job.first_step + 1).length
    return lead


class ProcessWriter:
    """Writes the rows of one rank into the tables of its report."""

    def __init__(self, host: Host) -> None:
        """Prepare to write; `cut` launches are missing from a capture that begins late."""
        self.host, self.device = host, DeviceWriter(host)
        self.job, self.rank, self.variant = host.job, host.rank, host.variant
        self.main = host.thread(0)
        self.groups = groups(host.job, host.rank)
        self.cut = 0 if host.variant.init else CUT

    def write(self) -> None:
        """Write all rows of the process."""
        begin = pipeline.EPOCH_NS - lead_ns(self.job, self.variant) + 600_000
        self._domains(begin)
        # This range is still open when the capture ends.
        self.host.range(self.main, "train_loop", begin + 20_000, None)
        if self.variant.init:
            self._communicators(begin + 400_000_000)
        stop = begin
        graph_step = min(1, self.job.steps - 1) if self.variant.graph != "none" else -1
        for number, step in enumerate(play.steps(self.job, self.rank)):
            self.host.range(self.main, f"iteration {step.number}", step.start, step.stop)
            (self._graph if number == graph_step else self._step)(step)
            stop = step.stop
        if self.variant.init:
            self._destroy(stop + 1_000_000)
        if self.variant.schema_rows:
            host = self.host
            payloads.add_schemas(host.tables, self.variant, host.domain, host.called)

    def _domains(self, begin: int) -> None:
        """Write other NVTX rows: domains, the name of a thread, a mark, a long range."""
        host = self.host
        names = ["CCCL", "cuBLAS"][: host.domain - 1]
        if self.variant.domain_rows:
            for number, name in enumerate([*names, "NCCL"], 1):
                # Some versions of nsys write the name, others its id.
                text: dict[str, object] = {"text": name}
                if self.rank % 2 == 0:
                    text = {"textId": host.tables.string(name)}
                host.event(DOMAIN, self.main, begin + number, domainId=number, **text)
        host.event(THREAD, self.main, begin + 50, text="rank main", domainId=0)
        host.event(MARK, self.main, begin + 60, text=ODD_TEXT, domainId=0)
        watched = {"text": "watchdog", "rangeId": 1, "domainId": 0, "endGlobalTid": self.main}
        end = host.clock(pipeline.EPOCH_NS + 5_000_000)
        host.event(START_END, host.thread(WATCHDOG), begin + 70, end=end, **watched)

    def _communicator_groups(self) -> list[tuple[str, SyntheticGroup]]:
        """Return the groups that have a communicator: the world, and those of several ranks."""
        by_kind = [(kind, self.groups[kind]) for kind in ("world", *DESCRIPTIONS)]
        return [(kind, group) for kind, group in by_kind if kind == "world" or group.size > 1]

    def _own(self, group: SyntheticGroup) -> dict[str, int]:
        """Return the payload of the rank's communicator of a group."""
        return {
            payloads.COMM: communicator(self.job, group),
            payloads.RANKS: group.size,
            payloads.RANK: group.ranks.index(self.rank),
            payloads.DEVICE: self.host.device,
        }

    def _communicators(self, begin: int) -> None:
        """Write the creation of the world's communicator and of one split for each group."""
        old = self.variant.nccl == "2.22"
        name = "ncclCommInitRank" if old else "ncclCommInitRankConfig"
        for number, (kind, group) in enumerate(self._communicator_groups()):
            values = self._own(group)
            start = begin + number * 60_000_000
            if kind == "world":
                self.host.nccl(self.main, name, start, start + 50_000_000, values)
                continue
            values[payloads.PARENT] = communicator(self.job, self.groups["world"])
            values |= {"Color": int(group.name), "Key": self.rank}
            self.host.nccl(self.main, "ncclCommSplit", start, start + 20_000_000, values)

    def _destroy(self, begin: int) -> None:
        """Write the destruction of all communicators."""
        for number, (_, group) in enumerate(reversed(self._communicator_groups())):
            start, values = begin + number * 100_000, self._own(group)
            self.host.nccl(self.main, "ncclCommDestroy", start, start + 90_000, values)

    def _step(self, step: RankStep) -> None:
        """Write the launches and the device work of a step."""
        for work in step.works:
            if self.cut:
                self.cut -= 1
                self.host.correlation += 1
                self.device.work(work, self.host.correlation)
            else:
                self.device.work(work, self._launch(work, work.launch).correlation)
        self._around(step)

    def _graph(self, step: RankStep) -> None:
        """Write a step that is captured before the first one and launched with one call."""
        shift = pipeline.EPOCH_NS - CAPTURE_GAP - step.stop
        captured = [self._launch(work, work.launch + shift) for work in step.works]
        self.device.captured(captured, pipeline.EPOCH_NS - CAPTURE_GAP + 100_000)
        start = step.works[0].launch
        self.host.range(self.main, "CUDAGraph.replay", start, start + 30_000)
        replay = self.host.cuda(self.main, "cudaGraphLaunch_v10000", start + 2_000, 25_000)
        if self.variant.graph == "graph":
            self.device.graph(step.works, replay.correlation)
        else:
            for number, work in enumerate(step.works):
                self.device.work(work, replay.correlation, node=number)
        self._synchronize(step)

    def _host(self, of: HostRange) -> None:
        """Write what the host does besides launching."""
        if of.kind != "read":
            self.host.range(self.main, HOST_RANGES[of.kind], of.start, of.stop)
            return
        thread = self.host.thread(BACKWARD) if of.backward else self.main
        self.host.operator_range(thread, HOST_RANGES[of.kind], of.start, of.stop)
        name, ns = "cudaStreamSynchronize_v3020", of.stop - of.start - 400
        call = self.host.cuda(thread, name, of.start + 200, ns)
        self.device.synchronization(call, COMPUTE, kind=3)

    def _around(self, step: RankStep) -> None:
        """Write the range of the optimizer's step, and the call that waits for the device."""
        adam = [work.launch for work in step.works if work.name == "adam"]
        name = "Optimizer.step#AdamW.step"
        self.host.operator_range(self.main, name, adam[0] - 100, adam[-1] + 3_700)
        self._synchronize(step)

    def _synchronize(self, step: RankStep) -> None:
        """Write the call with which the host waits for all streams after a step."""
        for one in step.host:
            self._host(one)
        begin = step.works[-1].launch + 20_000
        last = max(work.stop for work in step.works)
        ns = last + SYNC_NS - begin
        call = self.host.cuda(self.main, "cudaDeviceSynchronize_v3020", begin, ns)
        self.device.synchronization(call, None, kind=4)

    def _launch(self, work: PlannedWork, launch: int) -> Launch:
        """Write the host rows of a kernel, copy or collective."""
        thread = self.host.thread(BACKWARD) if work.backward else self.main
        if work.call:
            return self._collective(work, thread, launch)
        if work.kind == "compute":
            name, call = KERNELS[work.name].host, _launcher(work.name)
            name += f", seq = {self.host.operator % 4096}" if "::" in name else ""
        else:
            name, call = _COPIES[work.kind]
        self.host.operator_range(thread, name, launch, launch + 3_600)
        if work.stream == COMPUTE:
            self._join(work, thread, launch)
        if self.host.domain > 1 and work.name == "empty":
            self.host.library(thread, "cub::DeviceFor", launch + 500, launch + 3_400)
        return self.host.cuda(thread, call, launch + 1_000, 2_200)

    def _collective(self, work: PlannedWork, thread: int, launch: int) -> Launch:
        """Write the host rows of a collective, and return its launch."""
        call, host = work.call, self.host
        assert call is not None
        native = self.variant.nccl == "2.28"
        functions = operations(self.job, self.rank, call, native=native)
        is_single = call.peers is not None and not self.variant.groups
        host.operator_range(thread, call.operation.host, launch, launch + 7_600)
        host.operator_range(thread, "record_param_comms", launch + 700, launch + 7_200)
        for number, stream in enumerate(work.waits):
            self._wait((work.stream, stream), thread, (launch + 720 + 140 * number, 50))
        host.operator_range(thread, call.annotation, launch + 1_300, launch + 6_800)
        if functions[0].name in {"ncclSend", "ncclRecv"} and not is_single:
            host.nccl(thread, "ncclCommCount", launch + 1_310, launch + 1_330)
            depth = 2 if call.peers and call.seq % 2 else 1
            host.group(thread, functions, launch + 1_350, launch + 2_490, depth)
            name, values = "ncclGroupEnd", None
        else:
            name, values = functions[0].name, functions[0].values
        host.nccl(thread, name, launch + 2_500, launch + 5_900, values)
        launcher = host.thread(LAUNCHER) if self.variant.other_thread else thread
        return host.cuda(launcher, "cudaLaunchKernelExC_v11060", launch + 2_600, 3_200)

    def _join(self, work: PlannedWork, thread: int, launch: int) -> None:
        """Make compute wait for the streams with inputs of `work`."""
        for number, stream in enumerate(work.waits):
            self._wait((COMPUTE, stream), thread, (launch + 20 + 200 * number, 80))

    def _wait(self, streams: tuple[int, int], thread: int, span: tuple[int, int]) -> None:
        """Make the first stream wait for the second; `span` is start and duration of a call."""
        start, ns = span
        record = self.host.cuda(thread, "cudaEventRecord_v3020", start, ns)
        wait = self.host.cuda(thread, "cudaStreamWaitEvent_v3020", start + ns + ns // 4, ns)
        self.device.waits(*streams, record, wait)


def _launcher(name: str) -> str:
    """Return the call that launches a kernel: GEMM libraries use the driver API."""
    driver = KERNELS[name].name.startswith("nvjet")
    return "cuLaunchKernelEx" if driver else "cudaLaunchKernel_v7000"
