"""Rows of one rank as a process of a report: its communicators, then step after step.

Device rows equal those of the job to the nanosecond. Launches have the same times as in Kineto
files.
"""

from fastcomm.synthetic import pipeline, play
from fastcomm.synthetic.catalog import DESCRIPTIONS, KERNELS, SyntheticGroup, groups
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys import payloads
from fastcomm.synthetic.nsys.payloads import communicator, operations
from fastcomm.synthetic.nsys.rows import (
    DOMAIN,
    MARK,
    START_END,
    THREAD,
    DeviceWriter,
    Host,
    Launch,
)
from fastcomm.synthetic.nsys.tables import NsysVariant
from fastcomm.synthetic.play import HOST_RANGES, HostRange, PlannedWork, RankStep
from fastcomm.synthetic.stage import COMPUTE, SYNC_NS

SETUP_NS = 3_141_592_653  # from the start of a capture to the first step
CUT = 2  # launches before a late capture, which records only their kernels
BACKWARD, LAUNCHER, WATCHDOG = 61, 300, 77  # threads, relative to the main thread
ODD_TEXT = 'ncclAllReduce "next",\n\u00e9\u2192'  # text of a mark, which is not a range
CAPTURE_GAP = 10_000_000  # between the capture of a graph and the first step

_COPIES = {
    "memcpy": ("aten::copy_", "cudaMemcpyAsync_v3020"),
    "memset": ("aten::zero_", "cudaMemsetAsync_v3020"),
}


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
