"""The program of a step: what a layer does, and when all of it happens on a stage.

A layer is data: phases, each with kernels and then calls that all members wait for. Stages
follow 1F1B.

All ranks of a stage run it together, as arrays indexed by their place in the stage, ``tp + TP
* dp``. The host launches work in the order of the program and waits for nothing, unless a
fault makes it read values of the device. Work starts when it is launched, its stream is free,
and its inputs are there. A collective ends when its last member has arrived and the transfer
is done, a message when both sides are there. Times are in ns since the step began.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fastcomm.synthetic.catalog import OPERATIONS, TAGS, CallKind, transfer_ns
from fastcomm.synthetic.job import GAP, IDLE_FAULTS, IdleFault, Job
from fastcomm_kernels.arrays import Ints

EDGE = 70  # head and embedding of a pipeline, in thousandths of a layer
_ATTENTION = (("qkv", 86), ("rope", 20), ("flash", 185), ("proj", 69))
_ATTENTION_BACK = (
    ("proj_dgrad", 36),
    ("flash_back", 219),
    ("rope_back", 20),
    ("qkv_dgrad", 45),
)
_GATHER, _SCATTER = ("tp", "AllGather"), ("tp", "ReduceScatter")
_DISPATCH = ("ep", "AllToAll")
BASE_NS = 227 * 7_889_238 * 10**9  # Kineto's base times are multiples of about three months
EPOCH_NS = BASE_NS + 4_360_049_298_149_000  # start of the first step
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
class Phase:
    """Kernels, the calls after them, and a kernel that overlaps the calls."""

    kernels: tuple[tuple[str, int], ...]  # (name, thousandths of a layer)
    calls: tuple[tuple[str, str], ...] = ()  # (kind of group, operation)
    cover: tuple[str, int] | None = None  # kernel that overlaps the calls
    slow: bool = False  # a slow GPU or a jittery host is late in this phase
    bucket: bool = False  # the first kernel can overlap a data-parallel bucket


_FORWARD = Phase((("norm", 30),), (_GATHER,)), Phase(_ATTENTION, (_SCATTER,), slow=True)
_BACKWARD = (
    Phase((("norm_back", 30),), (_GATHER,)),
    Phase(_ATTENTION_BACK, (_SCATTER,), cover=("qkv_wgrad", 60), slow=True),
)
DENSE = {
    "forward": (
        *_FORWARD,
        Phase((("norm", 30),), (_GATHER,)),
        Phase((("fc1", 360), ("swiglu", 40), ("fc2", 180)), (_SCATTER,), bucket=True),
    ),
    "backward": (
        Phase((("norm_back", 20),), (_GATHER,)),
        Phase((("fc2_dgrad", 97), ("swiglu", 40), ("fc1_dgrad", 193)), (_SCATTER,)),
        Phase((("fc_wgrad", 220), ("norm_back", 20)), bucket=True),
        *_BACKWARD,
    ),
}
EXPERTS = {
    "forward": (
        *_FORWARD,
        Phase(
            (("norm", 30), ("router", 25), ("topk", 15), ("permute", 30)),
            (_DISPATCH,),
            cover=("shared", 90),
        ),
        Phase(
            (("experts1", 233), ("swiglu", 40), ("experts2", 117)),
            (_DISPATCH, _SCATTER),  # combine, overlapped with the shared expert's sum
            bucket=True,
        ),
        Phase((("unpermute", 30),)),
    ),
    "backward": (
        Phase((("unpermute", 30),), (_DISPATCH,), cover=("shared_dgrad", 70)),
        Phase(
            (("experts_wgrad", 175), ("experts_dgrad", 175), ("swiglu", 20)),
            (_DISPATCH,),
            cover=("shared_wgrad", 70),
            bucket=True,
        ),
        Phase((("permute", 20), ("router_back", 15), ("norm_back", 15))),
        *_BACKWARD,
    ),
}
SETUP = (Phase((("embed", 30),), (("tp", "Broadcast"),)),)
OPTIMIZER = (
    Phase((("unscale", 60),), (("tp", "AllReduce"),)),
    Phase((("adam", 400), ("adam", 400), ("adam", 300)), (("dp", "AllReduce"),)),
)


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """A phase with durations, equal for all ranks."""

    phase: Phase
    kernels: tuple[tuple[str, int], ...]
    calls: tuple[tuple[str, CallKind, int], ...]  # kind of group, operation, transfer
    cover: tuple[str, int] | None
    transfer: int  # duration of the bucket; 0 without one


def counts(job: Job, kind: str, operation: str) -> tuple[str, int]:
    """Return data type and number of elements of a call, the sum over members with parts."""
    activations = job.tokens * job.hidden
    if operation in {"Send", "Recv"}:
        return "BFloat16", -(-activations // job.tp)
    if operation == "AllReduce":
        return ("Float", 1) if kind == "dp" else ("BFloat16", 2 * job.layers * job.hidden)
    if operation == "Broadcast":
        return "Long", job.tokens
    if kind in {"dp", "edp"}:
        return "Float" if operation == "ReduceScatter" else "BFloat16", job.bucket
    return "BFloat16", activations


def group_size(job: Job, kind: str) -> int:
    """Return the number of ranks in a group of a kind."""
    sizes = {"tp": job.tp, "dp": job.dp, "ep": job.ep, "pp": job.pp, "edp": job.expert_data}
    return sizes[kind]


def transfer(job: Job, kind: str, operation: str) -> int:
    """Return the longest duration of a call after its last member's arrival, in ns."""
    dtype, elements = counts(job, kind, operation)
    if operation == "AllToAll":
        elements += job.ep * spread(job)
    size = group_size(job, kind)
    total = -(-elements // size) * size * {"BFloat16": 2, "Float": 4, "Long": 8}[dtype]
    return transfer_ns(job, OPERATIONS[operation], total, size)


def spread(job: Job) -> int:
    """Return the most elements by which a pair's part of an all-to-all differs from average."""
    return max(1, job.tokens // job.ep // 8) * job.hidden


def bucket_kind(job: Job, layer: int) -> str:
    """Return the kind of group over which a layer's gradients are reduced."""
    return "edp" if layer % 2 and job.expert_data > 1 else "dp"


@lru_cache(maxsize=64)
def plans(job: Job, direction: str, layer: int) -> tuple[PhasePlan, ...]:
    """Return the phases of a layer; `direction` is "forward" or "backward"."""
    script = (EXPERTS if layer % 2 else DENSE)[direction]
    operation = "AllGather" if direction == "forward" else "ReduceScatter"
    kind = bucket_kind(job, layer)
    bucket = transfer(job, kind, operation) if group_size(job, kind) > 1 else 0
    scale = 1 if direction == "forward" else 2
    return tuple(_plan(job, phase, scale, bucket) for phase in script)


@lru_cache(maxsize=16)
def frame(job: Job, script: tuple[Phase, ...]) -> tuple[PhasePlan, ...]:
    """Return the phases before the first layer of a step, or after the last."""
    return tuple(_plan(job, phase, 1, 0) for phase in script)


def slack(job: Job, direction: str) -> int:
    """Return the extra ns that a slow GPU needs for all layers of a stage, in a direction."""
    attention, scale = (_ATTENTION, 1) if direction == "forward" else (_ATTENTION_BACK, 2)
    one = sum(slower(job, scaled(job, share, scale)) for _, share in attention)
    return one * job.layers


def scaled(job: Job, share: int, scale: int) -> int:
    """Return a kernel's ns: `share` thousandths of a layer; `scale` is 2 in backward passes."""
    return job.layer_ns * scale * share // 1000


def slower(job: Job, ns: int) -> int:
    """Return the time that the fault adds to a duration."""
    return ns * job.slowdown // 100


def added(job: Job, fault: IdleFault, ns: int) -> int:
    """Return the time that a fault of all ranks adds to a duration; 0 without this fault."""
    return slower(job, ns) if job.straggler is not None and job.fault == fault else 0


def slowed_kernels(job: Job, phase: Phase) -> frozenset[str]:
    """Return the kernels of a phase that the fault makes slower."""
    if job.straggler is None or job.fault in ("slow_link", *IDLE_FAULTS):
        return frozenset()
    names = frozenset(name for name, _ in phase.kernels)
    if job.fault == "hot_expert":
        return frozenset(name for name in names if name.startswith("experts"))
    return names if phase.slow else frozenset()


def _plan(job: Job, phase: Phase, scale: int, bucket: int) -> PhasePlan:
    """Return the plan of a phase; `bucket` is the transfer time of a layer's bucket."""
    calls = tuple(
        (kind, OPERATIONS[operation], transfer(job, kind, operation))
        for kind, operation in phase.calls
        if group_size(job, kind) > 1
    )
    return PhasePlan(
        phase=phase,
        kernels=tuple((name, scaled(job, share, scale)) for name, share in phase.kernels),
        calls=calls,
        cover=(phase.cover[0], scaled(job, phase.cover[1], scale)) if phase.cover else None,
        transfer=bucket if phase.bucket else 0,
    )


class Slot(NamedTuple):
    """The work of one stage on one micro-batch."""

    direction: str  # "forward" or "backward"
    micro_batch: int


class PipelineMessage(NamedTuple):
    """Activations or gradients of a micro-batch."""

    source: int  # stage
    target: int
    micro_batch: int


def slots_of_stage(job: Job, stage: int) -> list[Slot]:
    """Return the slots of a stage in the order of 1F1B."""
    warm = min(job.micro_batches, job.pp - stage)
    order = [Slot("forward", batch) for batch in range(warm)]
    for batch in range(job.micro_batches):
        order.append(Slot("backward", batch))
        if batch + warm < job.micro_batches:
            order.append(Slot("forward", batch + warm))
    return order


def output_of(job: Job, stage: int, slot: Slot) -> PipelineMessage | None:
    """Return the message that a stage sends after a slot, or None."""
    target = stage + (1 if slot.direction == "forward" else -1)
    return PipelineMessage(stage, target, slot.micro_batch) if 0 <= target < job.pp else None


def input_of(job: Job, stage: int, slot: Slot) -> PipelineMessage | None:
    """Return the message that a stage needs before a slot, or None."""
    source = stage - (1 if slot.direction == "forward" else -1)
    return PipelineMessage(source, stage, slot.micro_batch) if 0 <= source < job.pp else None


def messages(job: Job, stage: int) -> list[PipelineMessage]:
    """Return the messages that a stage sends."""
    sent = [output_of(job, stage, slot) for slot in slots_of_stage(job, stage)]
    return [message for message in sent if message]


def is_edge(job: Job, stage: int, slot: Slot) -> bool:
    """Return whether a stage computes the head or the embedding after a slot."""
    return stage == (job.pp - 1 if slot.direction == "forward" else 0)


def order(job: Job, direction: str) -> range:
    """Return the layers of a stage in the order of execution."""
    return range(job.layers) if direction == "forward" else range(job.layers)[::-1]


def bucket_of(job: Job, slot: Slot, layer: int) -> tuple[str, str] | None:
    """Return group kind and operation of the bucket that overlaps a layer, or None.

    Parameters are gathered in the first forward pass, gradients are reduced in the last
    backward pass.
    """
    kind = bucket_kind(job, layer)
    if slot.direction == "forward":
        return (kind, "AllGather") if slot.micro_batch == 0 else None
    last = slot.micro_batch == job.micro_batches - 1
    return (kind, "ReduceScatter") if last and layer else None


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

    def execute(self) -> Iterator[None]:
        """Execute the program; yield while a message is not there."""
        self._setup()
        slots = slots_of_stage(self.job, self.stage)
        self._receive(slots[0])
        for slot, following in zip(slots, [*slots[1:], None], strict=True):
            yield from self._arrival(slot)
            self._slot(slot)
            self._boundary(slot, following)
        self.backward = False
        for plan in frame(self.job, OPTIMIZER):
            self._phase(plan)
        while any(transfer.end() is None for transfer in self.last.values()):
            yield

    def _arrival(self, slot: Slot) -> Iterator[None]:
        """Make compute wait for a slot's input; yield while that is not there."""
        message = input_of(self.job, self.stage, slot)
        if message is None:
            return
        while (stop := self.transfers[message].end()) is None:
            yield
        self.ends[STREAMS["Recv"]] = stop
        self.pending[STREAMS["Recv"]] = None

    def _setup(self) -> None:
        """Add the work before the first layer of a step: copy the tokens, and embed them."""
        self._execute_alone(WorkPlan("memset", "memset", COMPUTE, False), 1)
        self._kernel("empty", 0)  # a row of length 0
        self._execute_alone(WorkPlan("memcpy", "memcpy", COPY, False), _COPY_NS)
        self._kernel("arange", _TOKENS_NS)
        self.pending[COPY] = None
        for plan in frame(self.job, SETUP):
            self._phase(plan)

    def _slot(self, slot: Slot) -> None:
        """Run a forward or backward pass of all layers."""
        self.backward = slot.direction == "backward"
        for layer in order(self.job, slot.direction):
            bucket = bucket_of(self.job, slot, layer)
            for plan in plans(self.job, slot.direction, layer):
                self._phase(plan, bucket)
            if bucket and slot.direction == "forward" and STREAMS["dp"] in self.ends:
                self.pending[STREAMS["dp"]] = None  # the parameters of the next layer

    def _boundary(self, slot: Slot, following: Slot | None) -> None:
        """Launch what follows a slot: gradients, messages, and the head or the embedding."""
        job = self.job
        if following is None and job.dp > 1:
            ns = transfer(job, "dp", "ReduceScatter")
            self._collective("dp", OPERATIONS["ReduceScatter"], ns)
        sent = output_of(job, self.stage, slot)
        if sent:
            self._message(sent, "Send")
        if following:
            self._receive(following)
        if job.pp > 1 and is_edge(job, self.stage, slot):
            name = "logits" if slot.direction == "forward" else "embed_back"
            self._kernel(name, scaled(job, EDGE, 1))
        if following is None and job.dp > 1:
            self.pending[STREAMS["dp"]] = None

    def _receive(self, slot: Slot) -> None:
        """Post the receive of a slot's input, if it comes from another stage."""
        message = input_of(self.job, self.stage, slot)
        if message:
            self._message(message, "Recv")

    def _phase(self, plan: PhasePlan, bucket: tuple[str, str] | None = None) -> None:
        """Run kernels and calls of a phase, and the bucket that overlaps it, if any."""
        self._read()
        slowed = slowed_kernels(self.job, plan.phase) if self.slow is not None else ()
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
        return self.slow * slower(self.job, ns)

    def _pause(self, plan: PhasePlan) -> None:
        """Let the host with the fault wait for the device, and then be late, at random."""
        assert self.slow is not None
        extra = sum(slower(self.job, ns) for _, ns in plan.kernels)
        is_late = int(self.jitter.integers(0, _JITTER)) == 0
        ns = int(self.jitter.integers(0, 2 * _JITTER * extra + 1))
        if is_late and ns:
            late = np.maximum(self.host, self._ready() + GAP + ns - START_NS)
            self.host = np.where(self.slow, late, self.host)

    def _read(self) -> None:
        """Let all hosts with this fault read a value of the device, and then launch anew."""
        ns = added(self.job, "synchronization", OTHER_LAUNCH_NS)
        if ns:
            stop = np.maximum(self.host, self._ready()) + SYNC_NS
            self.reads.append(ValueRead(self.backward, self.host, stop))
            self.host = stop + ns

    def _kernel(self, name: str, ns: Ints | int) -> None:
        """Run a compute kernel, after all that the compute stream waits for."""
        waits = tuple(self.pending)
        if self.factor != 1:
            ns = np.rint(ns * self.factor).astype(np.int64)
        self._execute_alone(WorkPlan("compute", name, COMPUTE, self.backward, waits=waits), ns)
        self.pending = {}

    def _execute_alone(self, plan: WorkPlan, ns: Ints | int) -> None:
        """Execute work that waits for no other rank."""
        launch, start = self._begin(plan)
        stop = start + ns
        self.ends[plan.stream] = stop
        self.rows.append(_Row(plan, launch, start, stop))

    def _begin(self, plan: WorkPlan) -> tuple[Ints, Ints]:
        """Launch work; return when, and when it is launched, its stream and inputs there."""
        launch = self.host
        late = added(self.job, "launch_bound", OTHER_LAUNCH_NS)
        self.host = launch + LAUNCH_NS.get(plan.kind, OTHER_LAUNCH_NS) + late
        start = launch + START_NS
        if plan.stream != COPY:
            is_compute = plan.stream == COMPUTE
            gap = added(self.job, "kernel_gaps", GAP) if is_compute else 0
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
        return self._together(kind, self.slow) * slower(job, transfer - job.latency_ns)

    def _together(self, kind: str, values: Ints) -> Ints:
        """Return the largest value in each rank's group of a kind; `values` are by place."""
        shaped = values.reshape(self.shape)
        axes = {"tp": (2,), "ep": (1,), "edp": (0,), "dp": (0, 1)}[kind]
        largest = shaped.max(axis=axes, keepdims=True)
        by_place: Ints = np.broadcast_to(largest, self.shape).reshape(-1)
        return by_place
