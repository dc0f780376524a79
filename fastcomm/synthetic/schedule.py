"""When which stage works on which micro-batch: 1F1B on a grid of slots, the same for all ranks.

A slot has room for a stage's layers and for the messages to the neighbours. Every end that
several ranks share follows from the grid and from `lateness`, never from a rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fastcomm.synthetic import layers
from fastcomm.synthetic.job import GAP, Job

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
    message = layers.transfer(job, "pp", "Send") + job.skew_ns if job.pp > 1 else 0
    zone = message + 4 * GAP
    slots = {
        direction: sum(
            plan.length + plan.tail
            for layer in range(job.layers)
            for plan in layers.plans(job, direction, layer)
        )
        for direction in ("forward", "backward")
    }
    frames = [
        sum(plan.length + plan.tail for plan in layers.frame(job, script))
        for script in (layers.SETUP, layers.OPTIMIZER)
    ]
    return PipelineGrid(
        job=job,
        forward=slots["forward"] + zone,
        backward=slots["backward"] + zone,
        zone=zone,
        tail=layers.transfer(job, "dp", "ReduceScatter") if job.dp > 1 else 0,
        setup=SETUP_NS + frames[0],
        optimizer=frames[1],
    )
