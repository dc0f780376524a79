"""The plan of a step, the same for all ranks: what a layer does, and when which stage works.

A layer is data: phases, each some compute and then calls that all wait for. Stages follow 1F1B
on a grid of slots; a slot has room for a stage's layers and for the messages to the neighbors.
A rank may be ahead of the plan, and behind it only by a fault (`lateness`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fastcomm.synthetic.catalog import OPERATIONS, CallKind, transfer_ns
from fastcomm.synthetic.job import GAP, Job

LEAD = 5_000  # a gradient bucket starts so long after the kernel that hides it


@dataclass(frozen=True, slots=True)
class Phase:
    """Kernels (name, thousandths of a layer), the calls after them, a kernel over the calls."""

    kernels: tuple[tuple[str, int], ...]
    calls: tuple[tuple[str, str], ...] = ()  # (kind of group, operation)
    cover: tuple[str, int] | None = None
    slow: bool = False  # a slow GPU or a jittery host is late here
    bucket: bool = False  # the first kernel can hide a bucket of data parallelism


_ATTENTION = (("qkv", 90), ("rope", 20), ("flash", 170), ("proj", 80))
_ATTENTION_BACK = (
    ("proj_dgrad", 70),
    ("flash_back", 160),
    ("rope_back", 20),
    ("qkv_dgrad", 70),
)
_GATHER, _SCATTER = ("tp", "AllGather"), ("tp", "ReduceScatter")
_DISPATCH = ("ep", "AllToAll")

_FORWARD = (
    Phase((("norm", 30),), (_GATHER,)),
    Phase(_ATTENTION, (_SCATTER,), slow=True),
)
_BACKWARD = (
    Phase((("norm_back", 30),), (_GATHER,)),
    Phase(_ATTENTION_BACK, (_SCATTER,), cover=("qkv_wgrad", 60), slow=True),
)
DENSE = {
    "forward": (
        *_FORWARD,
        Phase((("norm", 30),), (_GATHER,)),
        Phase((("fc1", 290), ("swiglu", 40), ("fc2", 250)), (_SCATTER,), bucket=True),
    ),
    "backward": (
        Phase((("norm_back", 20),), (_GATHER,)),
        Phase((("fc2_dgrad", 150), ("swiglu", 40), ("fc1_dgrad", 140)), (_SCATTER,)),
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
            (("experts1", 200), ("swiglu", 40), ("experts2", 150)),
            (_DISPATCH, _SCATTER),  # the combine, beside the sum of the shared expert
            bucket=True,
        ),
        Phase((("unpermute", 30),)),
    ),
    "backward": (
        Phase((("unpermute", 30),), (_DISPATCH,), cover=("shared_dgrad", 70)),
        Phase(
            (("experts_wgrad", 190), ("experts_dgrad", 160), ("swiglu", 20)),
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
    """A phase in ns: the same on all ranks."""

    phase: Phase
    kernels: tuple[tuple[str, int], ...]
    calls: tuple[tuple[str, CallKind, int], ...]  # kind of group, operation, transfer
    cover: tuple[str, int] | None
    length: int  # from the start of the kernels to their ends, the skew included
    tail: int  # from there to the start of the next phase
    transfer: int  # of the bucket; 0: this phase has none


def counts(job: Job, kind: str, operation: str) -> tuple[str, int]:
    """Type and number of elements of a call: all members together, where each has its part."""
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
    """Ranks in one group of a kind."""
    sizes = {"tp": job.tp, "dp": job.dp, "ep": job.ep, "pp": job.pp, "edp": job.expert_data}
    return sizes[kind]


def transfer(job: Job, kind: str, operation: str) -> int:
    """How long a call takes once all are there, at most."""
    dtype, elements = counts(job, kind, operation)
    if operation == "AllToAll":
        elements += job.ep * spread(job)
    size = group_size(job, kind)
    whole = -(-elements // size) * size * {"BFloat16": 2, "Float": 4, "Long": 8}[dtype]
    return transfer_ns(job, OPERATIONS[operation], whole, size)


def spread(job: Job) -> int:
    """Elements by which a pair's part of an all-to-all differs from the even part, at most."""
    return max(1, job.tokens // job.ep // 8) * job.hidden


def bucket_kind(job: Job, layer: int) -> str:
    """The group over which a layer's gradients are summed."""
    return "edp" if layer % 2 and job.expert_data > 1 else "dp"


@lru_cache(maxsize=64)
def plans(job: Job, direction: str, layer: int) -> tuple[PhasePlan, ...]:
    """The phases of one layer, of `direction` forward or backward."""
    script = (EXPERTS if layer % 2 else DENSE)[direction]
    operation = "AllGather" if direction == "forward" else "ReduceScatter"
    kind = bucket_kind(job, layer)
    bucket = transfer(job, kind, operation) if group_size(job, kind) > 1 else 0
    scale = 1 if direction == "forward" else 2
    room = bucket + 2 * LEAD if bucket else 0
    return tuple(_plan(job, phase, scale, bucket, room) for phase in script)


@lru_cache(maxsize=16)
def frame(job: Job, script: tuple[Phase, ...]) -> tuple[PhasePlan, ...]:
    """The phases before the first layer of a step, or after the last."""
    return tuple(_plan(job, phase, 1, 0, 0) for phase in script)


def slack(job: Job, direction: str) -> int:
    """What a slow GPU needs more in all layers of a stage, in one direction."""
    attention, scale = (_ATTENTION, 1) if direction == "forward" else (_ATTENTION_BACK, 2)
    one = sum(slower(job, scaled(job, share, scale)) for _, share in attention)
    return one * job.layers


def scaled(job: Job, share: int, scale: int) -> int:
    """A kernel's length in ns; `scale` is 2 in the backward pass."""
    return job.layer_ns * scale * share // 1000


def slower(job: Job, ns: int) -> int:
    """What the fault makes longer by."""
    return ns * job.slowdown // 100


def slowed(job: Job, phase: Phase) -> frozenset[str]:
    """The kernels of a phase that the fault is about; empty: it has none."""
    if job.straggler is None or job.fault == "slow_link":
        return frozenset()
    names = frozenset(name for name, _ in phase.kernels)
    if job.fault == "hot_expert":
        return frozenset(name for name in names if name.startswith("experts"))
    return names if phase.slow else frozenset()


def _plan(job: Job, phase: Phase, scale: int, bucket: int, room: int) -> PhasePlan:
    kernels = [(name, scaled(job, share, scale)) for name, share in phase.kernels]
    if phase.bucket:
        kernels[0] = (kernels[0][0], max(kernels[0][1], room))
    calls = tuple(
        (kind, OPERATIONS[operation], transfer(job, kind, operation))
        for kind, operation in phase.calls
        if group_size(job, kind) > 1
    )
    cover = (phase.cover[0], scaled(job, phase.cover[1], scale)) if phase.cover else None
    ends = [number * GAP + ns for number, (_, _, ns) in enumerate(calls)]
    ends += [len(calls) * GAP + cover[1]] if cover else []
    return PhasePlan(
        phase=phase,
        kernels=tuple(kernels),
        calls=calls,
        cover=cover,
        length=sum(ns + GAP for _, ns in kernels) + job.skew_ns,
        tail=max(ends, default=0) + GAP,
        transfer=bucket if phase.bucket else 0,
    )


BASE_NS = 227 * 7_889_238 * 10**9  # Kineto counts from multiples of about three months
EPOCH_NS = BASE_NS + 4_360_049_298_149_000  # here the first step begins
HOST_LEAD = 500_000  # the host is ahead of its device
SETUP_NS = 34_000  # zeroing, tokens to the device
REST_NS = 300_000  # the host waits for its device, reads the loss, fetches data


@dataclass(frozen=True, slots=True)
class Slot:
    """One stage works on one micro-batch."""

    start: int
    stop: int
    direction: str
    micro_batch: int


@dataclass(frozen=True, slots=True)
class PipelineMessage:
    """Activations or gradients that arrive at `stop`."""

    stop: int
    source: int  # stage
    target: int


@dataclass(frozen=True, slots=True)
class PipelineGrid:
    """The lengths of a step's parts, and a stage's slots, from the start of the pipeline on."""

    job: Job
    forward: int
    backward: int
    zone: int  # the end of a slot, for messages
    tail: int  # the last bucket of gradients, after the last slot
    setup: int
    optimizer: int

    @property
    def pipeline(self) -> int:
        """Until the last stage to end has ended."""
        return (self.job.micro_batches + self.job.pp - 1) * (self.forward + self.backward)

    @property
    def step(self) -> int:
        """The whole of it, from the host's first row to its last."""
        device = self.setup + self.pipeline + self.tail + self.optimizer + GAP
        return HOST_LEAD + device + REST_NS

    def slots(self, stage: int) -> Iterator[Slot]:
        """What a stage does, in no order."""
        pair, depth = self.forward + self.backward, self.job.pp
        for batch in range(self.job.micro_batches):
            warm = batch < depth - stage
            start = stage * self.forward + batch * (self.forward if warm else pair)
            yield Slot(start, start + self.forward, "forward", batch)
            start = depth * self.forward + batch * pair + (depth - 1 - stage) * self.backward
            yield Slot(start, start + self.backward, "backward", batch)

    def messages(self, stage: int) -> Iterator[PipelineMessage]:
        """What a stage sends and receives, in no order."""
        for source in range(max(0, stage - 1), min(self.job.pp, stage + 2)):
            for slot in self.slots(source):
                target = source + (1 if slot.direction == "forward" else -1)
                if 0 <= target < self.job.pp and stage in {source, target}:
                    yield PipelineMessage(slot.stop, source, target)


@lru_cache(maxsize=16)
def grid(job: Job) -> PipelineGrid:
    """The grid that holds every rank of the job."""
    message = transfer(job, "pp", "Send") + job.skew_ns if job.pp > 1 else 0
    zone = message + 4 * GAP
    slots = {
        direction: sum(
            plan.length + plan.tail
            for layer in range(job.layers)
            for plan in plans(job, direction, layer)
        )
        for direction in ("forward", "backward")
    }
    frames = [
        sum(plan.length + plan.tail for plan in frame(job, script))
        for script in (SETUP, OPTIMIZER)
    ]
    return PipelineGrid(
        job=job,
        forward=slots["forward"] + zone,
        backward=slots["backward"] + zone,
        zone=zone,
        tail=transfer(job, "dp", "ReduceScatter") if job.dp > 1 else 0,
        setup=SETUP_NS + frames[0],
        optimizer=frames[1],
    )
