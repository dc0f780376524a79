"""The program of a step: what a layer does, and in which order stages work.

A layer is data: phases, each with kernels and then calls that all members wait for. Stages
follow 1F1B. When all of it happens follows in `timeline`. Times are in ns.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fastcomm.synthetic.catalog import OPERATIONS, CallKind, transfer_ns
from fastcomm.synthetic.job import IDLE_FAULTS, IdleFault, Job

EDGE = 70  # head and embedding of a pipeline, in thousandths of a layer


@dataclass(frozen=True, slots=True)
class Phase:
    """Kernels, the calls after them, and a kernel that overlaps the calls."""

    kernels: tuple[tuple[str, int], ...]  # (name, thousandths of a layer)
    calls: tuple[tuple[str, str], ...] = ()  # (kind of group, operation)
    cover: tuple[str, int] | None = None  # kernel that overlaps the calls
    slow: bool = False  # a slow GPU or a jittery host is late in this phase
    bucket: bool = False  # the first kernel can overlap a data-parallel bucket


_ATTENTION = (("qkv", 86), ("rope", 20), ("flash", 185), ("proj", 69))
_ATTENTION_BACK = (
    ("proj_dgrad", 36),
    ("flash_back", 219),
    ("rope_back", 20),
    ("qkv_dgrad", 45),
)
_GATHER, _SCATTER = ("tp", "AllGather"), ("tp", "ReduceScatter")
_DISPATCH = ("ep", "AllToAll")

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


def slowed(job: Job, phase: Phase) -> frozenset[str]:
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


BASE_NS = 227 * 7_889_238 * 10**9  # Kineto's base times are multiples of about three months
EPOCH_NS = BASE_NS + 4_360_049_298_149_000  # start of the first step


class Slot(NamedTuple):
    """The work of one stage on one micro-batch."""

    direction: str  # "forward" or "backward"
    micro_batch: int


class PipelineMessage(NamedTuple):
    """Activations or gradients of a micro-batch."""

    source: int  # stage
    target: int
    micro_batch: int


def slots(job: Job, stage: int) -> list[Slot]:
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
    sent = [output_of(job, stage, slot) for slot in slots(job, stage)]
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
