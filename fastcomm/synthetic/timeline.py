"""Steps of a job: when all ranks work. Every time follows from durations and dependencies.

Steps begin together: the hosts meet once all work has ended. Times are in ns since the step
began.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fastcomm.synthetic import pipeline
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.stage import SYNC_NS, StageRun, StageSchedule, Transfer
from fastcomm_kernels.arrays import Ints

PREPARE_NS = 492_000  # from the host's mark to the first launch: it fetches data
REST_NS = 300_000  # the host reads the loss, all hosts meet
_REST_PER_LAYER = 100_000  # most additional rest, for each layer and micro-batch
MARK_DRIFT = 25_000  # most drift of the host's step marks


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A step of all ranks."""

    marks: Ints  # by rank: how much later the host's mark begins, and how much earlier it ends
    stages: tuple[StageSchedule, ...]
    end: int  # when all hosts have seen the end of their work
    length: int  # until the next step begins


@lru_cache(maxsize=16)
def step(job: Job, number: int) -> StepSchedule:
    """Return the times of all ranks in a step."""
    return _simulated(job, number)


def length(job: Job, number: int) -> int:
    """Return the time from the start of a step to the start of the next one."""
    return step(job, number).length


def cost_ns(job: Job, number: int) -> int:
    """Return the time by which the fault makes a step longer."""
    if job.straggler is None:
        return 0
    return length(job, number) - _simulated(replace(job, slowdown=0), number).length


def _simulated(job: Job, number: int) -> StepSchedule:
    """Run the programs of all stages, each as far as its messages have arrived."""
    marks = _marks(job, number)
    size = job.dp * job.tp
    transfers = {
        message: Transfer(round(pipeline.transfer(job, "pp", "Send") * job.factor("comm:PP")))
        for stage in range(job.pp)
        for message in pipeline.messages(job, stage)
    }
    begin = marks[:, 0] + PREPARE_NS + pipeline.added(job, "data_loading", PREPARE_NS)
    begin += garbage_ns(job)
    stages = [
        StageRun(job, number, stage, begin[stage * size : (stage + 1) * size], transfers)
        for stage in range(job.pp)
    ]
    running = [stage.run() for stage in stages]
    while running:
        running = [program for program in running if next(program, "ended") != "ended"]
    times = tuple(stage.times() for stage in stages)
    end = max(int(stage.stop.max()) for stage in times) + SYNC_NS
    return StepSchedule(marks, times, end, end + _rest(job, number))


def garbage_ns(job: Job) -> int:
    """Return the time for which the fault lets each host collect garbage before a step."""
    return pipeline.added(job, "garbage_collection", PREPARE_NS)


def _marks(job: Job, number: int) -> Ints:
    """Return how much later each rank's mark begins, and how much earlier it ends."""
    random = np.random.default_rng((job.seed, 3, number))
    marks: Ints = random.integers(0, MARK_DRIFT, (job.ranks, 2))
    if job.straggler is not None:
        # The straggler is the first to begin and the last to end: its step is the longest.
        marks[job.straggler] = 0
    return marks


def _rest(job: Job, number: int) -> int:
    """Return the time between the end of all work and the next step."""
    random = np.random.default_rng((job.seed, 1, number))
    layers = job.layers * (job.micro_batches + job.pp - 1)
    return REST_NS + int(random.integers(0, layers * _REST_PER_LAYER))
