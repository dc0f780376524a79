"""The program of a stage in one step, run with times: what starts when, and why.

All ranks of a stage run it together, as arrays indexed by their place in the stage, ``tp + TP
* dp``. The host launches work in the order of the program and waits for nothing, unless a
fault makes it read values of the device. Work starts when it is launched, its stream is free,
and its inputs are there. A collective ends when its last member has arrived and the transfer
is done, a message when both sides are there. Times are in ns since the step began.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fastcomm.synthetic import pipeline
from fastcomm.synthetic.catalog import OPERATIONS, TAGS, CallKind
from fastcomm.synthetic.job import GAP, Job
from fastcomm.synthetic.pipeline import PhasePlan, PipelineMessage, Slot
from fastcomm_kernels.arrays import Ints

COMPUTE, COPY = 7, 14
STREAMS = {"tp": 20, "ep": 24, "dp": 28, "edp": 28, "Send": 32, "Recv": 36}
LAUNCH_NS = {"comm": 8_000}  # host time of one launch, by kind of work
OTHER_LAUNCH_NS = 3_800
START_NS = 8_000  # least time from a launch to the start of its work
SYNC_NS = 4_000  # from the end of work to the return of the call that waits for it

# From the end of its inputs to the start of work, by stream: no two streams start at once.
_WAKE_NS = {COMPUTE: GAP, COPY: 700, 20: GAP, 24: 1_300, 28: 1_700, 32: 2_100, 36: 2_500}
# A jittery host is late before one in this many phases, by a uniform time with the right mean.
_JITTER = 4
_LINK_KINDS = frozenset({"ep", "dp", "edp"})  # groups between nodes
_COPY_NS, _TOKENS_NS = 20_000, 18_000  # copy of the tokens, and the kernel beside it


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """A piece of device work of all ranks of a stage."""

    kind: str  # "compute", "comm", "memcpy", "memset"
    name: str  # key of `catalog.KERNELS`; of a collective its operation
    stream: int
    backward: bool
    group: str = ""  # kind of the group of a collective
    message: PipelineMessage | None = None
    waits: tuple[int, ...] = ()  # other streams whose work before is an input


class ValueRead(NamedTuple):
    """A call in which all hosts of a stage wait for a value of the device."""

    backward: bool
    start: Ints  # by place
    stop: Ints


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """The work of a stage in the order of launches; times have the shape (works, places)."""

    works: tuple[WorkPlan, ...]
    launch: Ints
    start: Ints
    stop: Ints
    reads: tuple[ValueRead, ...] = ()


@dataclass(eq=False, slots=True)
class Transfer:
    """A message, once for both sides."""

    ns: int
    ready: dict[str, Ints] = field(default_factory=dict)  # by "Send" or "Recv"
    before: "dict[str, Transfer | None]" = field(default_factory=dict)  # on the same stream
    stop: Ints | None = None

    def start(self, side: str) -> Ints | None:
        """Return when a side is there; None while that is unknown."""
        ready = self.ready.get(side)
        before = self.before.get(side)
        if ready is None or before is None:
            return ready
        stop = before.end()
        return None if stop is None else np.maximum(ready, stop + GAP)

    def end(self) -> Ints | None:
        """Return when it has arrived, in ns by place; None while a side's start is unknown."""
        if self.stop is None:
            sent, received = self.start("Send"), self.start("Recv")
            if sent is not None and received is not None:
                self.stop = np.maximum(sent, received) + self.ns
        return self.stop


class _Row(NamedTuple):
    plan: WorkPlan
    launch: Ints
    start: Ints | None = None
    stop: Ints | None = None
    transfer: Transfer | None = None

    def times(self) -> tuple[Ints, Ints, Ints]:
        """Return launch, start and stop in ns, each with a value per place of the stage."""
        start, stop = self.start, self.stop
        if self.transfer:
            start, stop = self.transfer.start(self.plan.name), self.transfer.end()
        assert start is not None
        assert stop is not None
        return self.launch, start, stop


class StageRun:
    """Runs the program of a stage in one step."""

    def __init__(
        self,
        job: Job,
        number: int,
        stage: int,
        begin: Ints,
        transfers: Mapping[PipelineMessage, Transfer],
    ) -> None:
        """Start with idle streams; the hosts launch from `begin` on."""
        self.job, self.stage, self.transfers = job, stage, transfers
        self.host = begin
        self.ends: dict[int, Ints] = {}  # of the last work, by stream
        self.pending: dict[int, None] = {}  # streams that the next kernel waits for
        self.last: dict[str, Transfer] = {}  # by side
        self.rows: list[_Row] = []
        self.reads: list[ValueRead] = []
        self.backward = False
        self.shape = (job.dp // job.ep, job.ep, job.tp)
        self.random = np.random.default_rng((job.seed, 2, number, stage))
        self.jitter = np.random.default_rng((job.seed, 4, number))
        self.factor = job.factor("compute")
        self.slow = self._slow_places()

    def _slow_places(self) -> Ints | None:
        """Return 1 for places with the fault; None if the stage has none."""
        job = self.job
        if job.straggler is None or job.place(job.straggler)[2] != self.stage:
            return None
        tp, dp, _ = job.place(job.straggler)
        slow: Ints = np.zeros(job.dp * job.tp, np.int64)
        slow[slice(None) if job.fault == "imbalanced_stage" else tp + job.tp * dp] = 1
        return slow

    def times(self) -> StageSchedule:
        """Return the times of all work; all messages have to be there."""
        columns = zip(*(row.times() for row in self.rows), strict=True)
        launch, start, stop = (np.stack(column) for column in columns)
        plans = tuple(row.plan for row in self.rows)
        return StageSchedule(plans, launch, start, stop, tuple(self.reads))

    def run(self) -> Iterator[None]:
        """Run the program; yield while a message is not there."""
        self._setup()
        slots = pipeline.slots(self.job, self.stage)
        self._receive(slots[0])
        for slot, following in zip(slots, [*slots[1:], None], strict=True):
            yield from self._arrival(slot)
            self._slot(slot)
            self._boundary(slot, following)
        self.backward = False
        for plan in pipeline.frame(self.job, pipeline.OPTIMIZER):
            self._phase(plan)
        while any(transfer.end() is None for transfer in self.last.values()):
            yield

    def _arrival(self, slot: Slot) -> Iterator[None]:
        """Make compute wait for a slot's input; yield while that is not there."""
        message = pipeline.input_of(self.job, self.stage, slot)
        if message is None:
            return
        while (stop := self.transfers[message].end()) is None:
            yield
        self.ends[STREAMS["Recv"]] = stop
        self.pending[STREAMS["Recv"]] = None

    def _setup(self) -> None:
        """Add the work before the first layer of a step: copy the tokens, and embed them."""
        self._run(WorkPlan("memset", "memset", COMPUTE, False), 1)
        self._kernel("empty", 0)  # a row of length 0
        self._run(WorkPlan("memcpy", "memcpy", COPY, False), _COPY_NS)
        self._kernel("arange", _TOKENS_NS)
        self.pending[COPY] = None
        for plan in pipeline.frame(self.job, pipeline.SETUP):
            self._phase(plan)

    def _slot(self, slot: Slot) -> None:
        """Run a forward or backward pass of all layers."""
        self.backward = slot.direction == "backward"
        for layer in pipeline.order(self.job, slot.direction):
            bucket = pipeline.bucket_of(self.job, slot, layer)
            for plan in pipeline.plans(self.job, slot.direction, layer):
                self._phase(plan, bucket)
            if bucket and slot.direction == "forward" and STREAMS["dp"] in self.ends:
                self.pending[STREAMS["dp"]] = None  # the parameters of the next layer

    def _boundary(self, slot: Slot, following: Slot | None) -> None:
        """Launch what follows a slot: gradients, messages, and the head or the embedding."""
        job = self.job
        if following is None and job.dp > 1:
            ns = pipeline.transfer(job, "dp", "ReduceScatter")
            self._collective("dp", OPERATIONS["ReduceScatter"], ns)
        sent = pipeline.output_of(job, self.stage, slot)
        if sent:
            self._message(sent, "Send")
        if following:
            self._receive(following)
        if job.pp > 1 and pipeline.is_edge(job, self.stage, slot):
            name = "logits" if slot.direction == "forward" else "embed_back"
            self._kernel(name, pipeline.scaled(job, pipeline.EDGE, 1))
        if following is None and job.dp > 1:
            self.pending[STREAMS["dp"]] = None

    def _receive(self, slot: Slot) -> None:
        """Post the receive of a slot's input, if it comes from another stage."""
        message = pipeline.input_of(self.job, self.stage, slot)
        if message:
            self._message(message, "Recv")

    def _phase(self, plan: PhasePlan, bucket: tuple[str, str] | None = None) -> None:
        """Run kernels and calls of a phase, and the bucket that overlaps it, if any."""
        self._read()
        slowed = pipeline.slowed(self.job, plan.phase) if self.slow is not None else ()
        if slowed and self.job.fault == "jittery_host":
            self._pause(plan)
            slowed = ()
        if bucket and plan.transfer:
            self._collective(bucket[0], OPERATIONS[bucket[1]], plan.transfer)
        for number, (name, ns) in enumerate(plan.kernels, 1):
            longer = self._longer(ns) if name in slowed else 0
            drift = self._drift() if number == len(plan.kernels) else 0
            self._kernel(name, ns + longer + drift)
        for kind, operation, transfer in plan.calls:
            self._collective(kind, operation, transfer)
        if plan.cover:
            self._kernel(*plan.cover)
        self.pending |= {STREAMS[kind]: None for kind, _, _ in plan.calls}

    def _drift(self) -> Ints:
        """Return how much longer the kernels of a phase take: 0 to the skew, by place."""
        drift: Ints = self.random.integers(0, self.job.skew_ns + 1, len(self.host))
        return drift

    def _longer(self, ns: int) -> Ints:
        """Return by how much the fault makes a kernel longer, by place."""
        assert self.slow is not None
        return self.slow * pipeline.slower(self.job, ns)

    def _pause(self, plan: PhasePlan) -> None:
        """Let the host with the fault wait for the device, and then be late, at random."""
        assert self.slow is not None
        extra = sum(pipeline.slower(self.job, ns) for _, ns in plan.kernels)
        is_late = int(self.jitter.integers(0, _JITTER)) == 0
        ns = int(self.jitter.integers(0, 2 * _JITTER * extra + 1))
        if is_late and ns:
            late = np.maximum(self.host, self._ready() + GAP + ns - START_NS)
            self.host = np.where(self.slow, late, self.host)

    def _read(self) -> None:
        """Let all hosts with this fault read a value of the device, and then launch anew."""
        ns = pipeline.added(self.job, "synchronization", OTHER_LAUNCH_NS)
        if ns:
            stop = np.maximum(self.host, self._ready()) + SYNC_NS
            self.reads.append(ValueRead(self.backward, self.host, stop))
            self.host = stop + ns

    def _kernel(self, name: str, ns: Ints | int) -> None:
        """Run a compute kernel, after all that the compute stream waits for."""
        waits = tuple(self.pending)
        if self.factor != 1:
            ns = np.rint(ns * self.factor).astype(np.int64)
        self._run(WorkPlan("compute", name, COMPUTE, self.backward, waits=waits), ns)
        self.pending = {}

    def _run(self, plan: WorkPlan, ns: Ints | int) -> None:
        """Run work that waits for no other rank."""
        launch, start = self._begin(plan)
        stop = start + ns
        self.ends[plan.stream] = stop
        self.rows.append(_Row(plan, launch, start, stop))

    def _begin(self, plan: WorkPlan) -> tuple[Ints, Ints]:
        """Launch work; return when, and when it is launched, its stream and inputs there."""
        launch = self.host
        late = pipeline.added(self.job, "launch_bound", OTHER_LAUNCH_NS)
        self.host = launch + LAUNCH_NS.get(plan.kind, OTHER_LAUNCH_NS) + late
        start = launch + START_NS
        if plan.stream != COPY:
            is_compute = plan.stream == COMPUTE
            gap = pipeline.added(self.job, "kernel_gaps", GAP) if is_compute else 0
            start = np.maximum(start, self._ready() + _WAKE_NS[plan.stream] + gap)
        if plan.stream in self.ends:
            start = np.maximum(start, self.ends[plan.stream] + GAP)
        return launch, start

    def _ready(self) -> Ints:
        """Return when the compute stream is there, with all that it waits for."""
        ready = self.ends.get(COMPUTE, self.host - self.host)
        for stream in self.pending:
            ready = np.maximum(ready, self.ends[stream])
        return ready

    def _collective(self, kind: str, operation: CallKind, transfer: int) -> None:
        """Run a collective; all members share its end."""
        stream, waits = STREAMS[kind], (COMPUTE, *self.pending)
        plan = WorkPlan("comm", operation.op, stream, self.backward, kind, waits=waits)
        launch, start = self._begin(plan)
        extra = self._extra_transfer(kind, operation, transfer)
        factor = self.job.factor(f"comm:{TAGS[kind]}")
        ns = np.rint((transfer + extra) * factor).astype(np.int64)
        stop = self._together(kind, start) + ns
        self.ends[plan.stream] = stop
        self.rows.append(_Row(plan, launch, start, stop))

    def _message(self, message: PipelineMessage, side: str) -> None:
        """Begin one side of a message."""
        stream, waits = STREAMS[side], (COMPUTE, *self.pending)
        plan = WorkPlan("comm", side, stream, self.backward, "pp", message, waits)
        transfer = self.transfers[message]
        launch, transfer.ready[side] = self._begin(plan)
        if side in self.last:
            transfer.before[side] = self.last[side]
        self.last[side] = transfer
        self.rows.append(_Row(plan, launch, transfer=transfer))

    def _extra_transfer(self, kind: str, operation: CallKind, transfer: int) -> Ints | int:
        """Return the extra transfer time in the straggler's group."""
        job = self.job
        link = job.fault == "slow_link" and kind in _LINK_KINDS
        hot = job.fault == "hot_expert" and operation.op == "AllToAll"
        if self.slow is None or not (link or hot):
            return 0
        return self._together(kind, self.slow) * pipeline.slower(job, transfer - job.latency_ns)

    def _together(self, kind: str, values: Ints) -> Ints:
        """Return the largest value in each rank's group of a kind; `values` are by place."""
        shaped = values.reshape(self.shape)
        axes = {"tp": (2,), "ep": (1,), "edp": (0,), "dp": (0, 1)}[kind]
        largest = shaped.max(axis=axes, keepdims=True)
        by_place: Ints = np.broadcast_to(largest, self.shape).reshape(-1)
        return by_place
