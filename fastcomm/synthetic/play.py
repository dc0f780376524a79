"""The steps of a job: when all ranks work, and the work of one rank with its calls.

Every time follows from durations and dependencies. Steps begin together: the hosts meet once
all work has ended. Times of a `StepSchedule` are in ns since the step began, those of a
`RankStep` since the epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fastcomm.synthetic import catalog, pipeline
from fastcomm.synthetic.catalog import OPERATIONS, SyntheticCall, groups
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.pipeline import (
    SYNC_NS,
    PipelineMessage,
    StageRun,
    StageSchedule,
    Transfer,
    WorkPlan,
)
from fastcomm_kernels.arrays import Ints


@dataclass(slots=True)
class PlannedWork:
    """A device row: a kernel, a collective or a copy."""

    kind: str  # "compute", "comm", "memcpy", "memset"
    name: str  # key of `catalog.KERNELS`; for a collective the name of its kernel
    stream: int
    start: int
    stop: int
    launch: int  # start of the operator that launches it
    backward: bool = False  # whether the thread of the backward pass launches it
    call: SyntheticCall | None = None
    waits: tuple[int, ...] = ()  # streams whose work launched before has to end first

    @property
    def ns(self) -> int:
        """Duration."""
        return self.stop - self.start


class HostRange(NamedTuple):
    """What a host does besides launching, a key of `HOST_RANGES`."""

    kind: str
    start: int
    stop: int
    backward: bool = False


# The names of ranges in a trace; "read" is an operator, in which the host waits for the device.
HOST_RANGES = {
    "collect": "gc.collect",
    "load": "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
    "read": "aten::item",
    "barrier": "barrier",
    "log": "training_log",
}


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
def schedule_of(job: Job, number: int) -> StepSchedule:
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
    running = [stage.execute() for stage in stages]
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


_PAUSE_NS = 1_000  # between two ranges of the host
_MARGIN_NS = 1_000  # from the end of the host's mark to the start of the next step


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank: the host's mark, and the work of both."""

    number: int
    start: int
    stop: int
    works: list[PlannedWork]  # in the order of their launches
    host: list[HostRange]  # sorted by start

    @property
    def ns(self) -> int:
        """Iteration time."""
        return self.stop - self.start


def steps(job: Job, rank: int) -> Iterator[RankStep]:
    """Yield the steps of a rank in order of time."""
    player = _Player(job, rank)
    start = pipeline.EPOCH_NS
    for number in range(job.first_step, job.first_step + job.steps):
        yield player.step(number, start)
        start += schedule_of(job, number).length


class _Player:
    """Plays the work of one rank, step by step."""

    def __init__(self, job: Job, rank: int) -> None:
        """Find the rank's place in its stage."""
        self.job, self.rank = job, rank
        self.groups = groups(job, rank)
        tp, dp, self.stage = job.place(rank)
        self.place = tp + job.tp * dp  # place in the stage
        self.seqs: dict[object, int] = {}

    def step(self, number: int, begin: int) -> RankStep:
        """Return a step of the job that begins at `begin` ns."""
        step = schedule_of(self.job, number)
        late, early = step.marks[self.rank].tolist()
        start, stop = begin + late, begin + step.length - early - _MARGIN_NS
        times = step.stages[self.stage]
        columns = (times.launch, times.start, times.stop)
        rows = ((column[:, self.place] + begin).tolist() for column in columns)
        works = list(map(self._work, times.works, *rows))
        host = self._host(step, works, begin, (start, stop))
        return RankStep(number, start, stop, works, host)

    def _host(
        self, step: StepSchedule, works: list[PlannedWork], begin: int, mark: tuple[int, int]
    ) -> list[HostRange]:
        """Return what the host does besides launching; `mark` is its mark of the step.

        It fetches a batch before the first launch, maybe after it collected garbage, waits for
        the other hosts after its last work, and then logs the step. All times are in ns.
        """
        last, met = max(work.stop for work in works) + SYNC_NS, begin + step.end
        place = self.place
        reads = [
            HostRange(
                "read",
                begin + int(one.start[place]),
                begin + int(one.stop[place]),
                one.backward,
            )
            for one in step.stages[self.stage].reads
        ]
        loading = mark[0] + garbage_ns(self.job) + _PAUSE_NS
        ranges = [
            HostRange("collect", mark[0] + _PAUSE_NS, loading - _PAUSE_NS),
            HostRange("load", loading, works[0].launch - _PAUSE_NS),
            *reads,
            HostRange("barrier", last + _PAUSE_NS, met),
            HostRange("log", max(last, met) + _PAUSE_NS, mark[1] - _PAUSE_NS),
        ]
        return [one for one in ranges if one.start < one.stop]

    def _work(self, plan: WorkPlan, launch: int, start: int, stop: int) -> PlannedWork:
        """Return a piece of work with its times in ns."""
        call = None
        if plan.message:
            call = self._message(plan.message, plan.name)
        elif plan.group:
            call = self._collective(plan.group, plan.name)
        return PlannedWork(
            kind=plan.kind,
            name=call.kernel if call else plan.name,
            stream=plan.stream,
            start=start,
            stop=stop,
            launch=launch,
            backward=plan.backward,
            call=call,
            waits=plan.waits,
        )

    def _seq(self, key: object) -> int:
        self.seqs[key] = self.seqs.get(key, 0) + 1
        return self.seqs[key]

    def _collective(self, kind: str, operation: str) -> SyntheticCall:
        """Return the next collective of a kind of group."""
        group = self.groups[kind]
        dtype, elements = pipeline.counts(self.job, kind, operation)
        part = -(-elements // group.size)
        seq = self._seq(kind)
        sides = {
            "AllGather": (part, part * group.size),
            "ReduceScatter": (part * group.size, part),
        }
        sent, received = sides.get(operation, (elements, elements))
        splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        if operation == "AllToAll":
            place = self.job.place(self.rank)[1] % self.job.ep
            splits = catalog.splits(self.job, group, place, seq)
            sent, received = (sum(rows) * self.job.hidden for rows in splits)
        return SyntheticCall(OPERATIONS[operation], group, dtype, sent, received, seq, *splits)

    def _message(self, message: PipelineMessage, operation: str) -> SyntheticCall:
        """Return a message between two stages; `operation` is "Send" or "Recv"."""
        dtype, elements = pipeline.counts(self.job, "pp", operation)
        group = self.groups["pp"]
        peers = group.ranks[message.source], group.ranks[message.target]
        seq = self._seq(peers)
        return SyntheticCall(
            OPERATIONS[operation], group, dtype, elements, elements, seq, peers=peers
        )
