"""The plan of a step, equal for all ranks: what a layer does, and when each stage works.

A layer is data: phases, each with kernels and then calls that all members wait for. Stages
follow 1F1B on a grid of slots; a slot has room for the layers of a stage and the messages to
its neighbors. A rank may be ahead of the plan; only a fault makes it late (see `lateness`).
Times are in ns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fastcomm.synthetic.catalog import OPERATIONS, CallKind, transfer_ns
from fastcomm.synthetic.job import GAP, Job

LEAD = 5_000  # from the start of a kernel to that of the bucket that overlaps it


@dataclass(frozen=True, slots=True)
class Phase:
    """Kernels, the calls after them, and a kernel that overlaps the calls."""

    kernels: tuple[tuple[str, int], ...]  # (name, thousandths of a layer)
    calls: tuple[tuple[str, str], ...] = ()  # (kind of group, operation)
    cover: tuple[str, int] | None = None  # kernel that overlaps the calls
    slow: bool = False  # a slow GPU or a jittery host is late in this phase
    bucket: bool = False  # the first kernel can overlap a data-parallel bucket


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
            (_DISPATCH, _SCATTER),  # combine, overlapped with the shared expert's sum
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
    """A phase with times, equal for all ranks."""

    phase: Phase
    kernels: tuple[tuple[str, int], ...]
    calls: tuple[tuple[str, CallKind, int], ...]  # kind of group, operation, transfer
    cover: tuple[str, int] | None
    length: int  # duration of the kernels and the skew
    tail: int  # from the end of the kernels to the start of the next phase
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
    room = bucket + 2 * LEAD if bucket else 0
    return tuple(_plan(job, phase, scale, bucket, room) for phase in script)


@lru_cache(maxsize=16)
def frame(job: Job, script: tuple[Phase, ...]) -> tuple[PhasePlan, ...]:
    """Return the phases before the first layer of a step, or after the last."""
    return tuple(_plan(job, phase, 1, 0, 0) for phase in script)


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


def slowed(job: Job, phase: Phase) -> frozenset[str]:
    """Return the kernels of a phase that the fault makes slower."""
    if job.straggler is None or job.fault == "slow_link":
        return frozenset()
    names = frozenset(name for name, _ in phase.kernels)
    if job.fault == "hot_expert":
        return frozenset(name for name in names if name.startswith("experts"))
    return names if phase.slow else frozenset()


def _plan(job: Job, phase: Phase, scale: int, bucket: int, room: int) -> PhasePlan:
    """Return the plan of a phase; `room` is the least duration of a kernel over a bucket."""
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


BASE_NS = 227 * 7_889_238 * 10**9  # Kineto's base times are multiples of about three months
EPOCH_NS = BASE_NS + 4_360_049_298_149_000  # start of the first step
HOST_LEAD = 500_000  # by which the host is ahead of the device
SETUP_NS = 34_000  # zero buffers, copy tokens to the device
REST_NS = 300_000  # the host waits for the device, reads the loss, fetches data


@dataclass(frozen=True, slots=True)
class Slot:
    """The work of one stage on one micro-batch."""

    start: int
    stop: int
    direction: str
    micro_batch: int


@dataclass(frozen=True, slots=True)
class PipelineMessage:
    """Activations or gradients that arrive at the stage `target` at `stop`."""

    stop: int
    source: int  # stage
    target: int


@dataclass(frozen=True, slots=True)
class PipelineGrid:
    """Durations of the parts of a step, and slots relative to the start of the pipeline."""

    job: Job
    forward: int
    backward: int
    zone: int  # time for messages at the end of a slot
    tail: int  # last gradient bucket, after the last slot
    setup: int
    optimizer: int

    @property
    def pipeline(self) -> int:
        """Duration of the pipeline, until the last stage ends."""
        return (self.job.micro_batches + self.job.pp - 1) * (self.forward + self.backward)

    @property
    def step(self) -> int:
        """Duration of a step, from the host's first row to its last."""
        device = self.setup + self.pipeline + self.tail + self.optimizer + GAP
        return HOST_LEAD + device + REST_NS

    def slots(self, stage: int) -> Iterator[Slot]:
        """Yield the slots of a stage, in no order."""
        pair, depth = self.forward + self.backward, self.job.pp
        for batch in range(self.job.micro_batches):
            warm = batch < depth - stage
            start = stage * self.forward + batch * (self.forward if warm else pair)
            yield Slot(start, start + self.forward, "forward", batch)
            start = depth * self.forward + batch * pair + (depth - 1 - stage) * self.backward
            yield Slot(start, start + self.backward, "backward", batch)

    def messages(self, stage: int) -> Iterator[PipelineMessage]:
        """Yield the messages that a stage sends and receives, in no order."""
        for source in range(max(0, stage - 1), min(self.job.pp, stage + 2)):
            for slot in self.slots(source):
                target = source + (1 if slot.direction == "forward" else -1)
                if 0 <= target < self.job.pp and stage in {source, target}:
                    yield PipelineMessage(slot.stop, source, target)


@lru_cache(maxsize=16)
def grid(job: Job) -> PipelineGrid:
    """Return the grid of a job, equal for all ranks."""
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
