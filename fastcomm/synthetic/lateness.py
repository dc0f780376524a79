"""How much later than the plan each rank is because of a fault, and who waits for whom.

A rank that waits for a late rank is equally late afterwards. All ranks of a stage go through a
phase together, as arrays indexed by their place in the stage, ``tp + TP * dp``. So events of a
rank follow from those of all others, and members of a group agree on the end of a collective.
All times are in ns; without a fault they are 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from fastcomm.synthetic import pipeline
from fastcomm.synthetic.catalog import CallKind
from fastcomm.synthetic.job import GAP, Job
from fastcomm.synthetic.pipeline import PhasePlan, PipelineMessage, Slot
from fastcomm_kernels.arrays import Ints

Place = tuple[int, str, int]  # stage, direction, micro-batch

# A jittery host is late before one in this many phases, by a uniform time with the right mean.
_JITTER = 4
_LINK_KINDS = frozenset({"ep", "dp", "edp"})  # groups between nodes


@dataclass(frozen=True, slots=True)
class Late:
    """Lateness of the ranks of a stage in one phase, by place."""

    idle: Ints  # idle time before the first kernel
    calls: tuple[Ints, ...]  # of the end of each call
    after: Ints  # of the start of the next phase
    bucket: Ints | None = None  # of the end of the bucket that overlaps the first kernel


@dataclass(slots=True)
class Timeline:
    """Lateness of all ranks in one step."""

    phases: dict[Place, list[Late]] = field(default_factory=dict)  # in order of time
    messages: dict[tuple[int, int, int], Ints] = field(default_factory=dict)
    last_bucket: dict[int, Ints] = field(default_factory=dict)  # by stage
    optimizer: dict[int, list[Late]] = field(default_factory=dict)
    total: int = 0  # by which the step is longer


def bucket_of(job: Job, slot: Slot, layer: int) -> tuple[str, str] | None:
    """Return group kind and operation of the bucket that overlaps a layer, or None.

    Parameters are gathered in the first forward pass, gradients are reduced in the last
    backward pass.
    """
    kind = pipeline.bucket_kind(job, layer)
    if slot.direction == "forward":
        return (kind, "AllGather") if slot.micro_batch == 0 else None
    last = slot.micro_batch == job.micro_batches - 1
    return (kind, "ReduceScatter") if last and layer else None


def order(job: Job, direction: str) -> range:
    """Return the layers of a stage in the order of execution."""
    return range(job.layers) if direction == "forward" else range(job.layers)[::-1]


@lru_cache(maxsize=16)
def on_time(job: Job, calls: int) -> Late:
    """Return a phase without any lateness."""
    nothing = np.zeros(job.dp * job.tp, np.int64)
    return Late(nothing, (nothing,) * calls, nothing)


def timeline(job: Job, number: int) -> Timeline:
    """Return the lateness of a step. All steps are equal unless the host is jittery."""
    return _timeline(job, number if job.fault == "jittery_host" else 0)


def cost_ns(job: Job, number: int) -> int:
    """Return the time by which the fault makes a step longer."""
    return timeline(job, number).total if job.straggler is not None else 0


@lru_cache(maxsize=8)
def _timeline(job: Job, number: int) -> Timeline:
    return _Simulation(job, number).run()


class _Simulation:
    """Propagates delays through the stages of one step."""

    def __init__(self, job: Job, number: int) -> None:
        """Start step `number` with all ranks on time; mark the places with the fault."""
        self.job = job
        self.shape = (job.dp // job.ep, job.ep, job.tp)
        nothing = np.zeros(job.dp * job.tp, np.int64)
        self.late = [nothing] * job.pp  # current lateness by stage
        self.free = [nothing] * job.pp  # when the bucket stream of each stage is free
        self.nothing = nothing
        self.random = np.random.default_rng((job.seed, 4, number))
        self.slow = nothing.copy()  # 1 for places with the fault
        if job.straggler is not None:
            tp, dp, self.stage = job.place(job.straggler)
            chosen = slice(None) if job.fault == "imbalanced_stage" else tp + job.tp * dp
            self.slow[chosen] = 1

    def run(self) -> Timeline:
        """Simulate the step."""
        timeline = Timeline()
        for moment, slots, messages in self._moments():
            for stage, slot in slots:
                timeline.phases[stage, slot.direction, slot.micro_batch] = self._slot(
                    stage, slot
                )
                if _is_last(self.job, slot):
                    timeline.last_bucket[stage] = self._last_bucket(stage, moment)
            timeline.messages |= self._messages(messages)
        for stage in range(self.job.pp):
            last = timeline.last_bucket[stage]
            self.late[stage] = np.maximum(self.late[stage], last)
            plans = pipeline.frame(self.job, pipeline.OPTIMIZER)
            timeline.optimizer[stage] = [self._phase(stage, plan) for plan in plans]
        timeline.total = max(int(late.max()) for late in self.late)
        return timeline

    def _moments(self) -> Iterator[tuple[int, list[tuple[int, Slot]], list[PipelineMessage]]]:
        """Yield the times at which slots or messages end, with both."""
        grid = pipeline.grid(self.job)
        slots: dict[int, list[tuple[int, Slot]]] = {}
        messages: dict[int, set[PipelineMessage]] = {}
        for stage in range(self.job.pp):
            for slot in grid.slots(stage):
                slots.setdefault(slot.stop, []).append((stage, slot))
            for message in grid.messages(stage):
                messages.setdefault(message.stop, set()).add(message)
        for moment in sorted({*slots, *messages}):
            ending = sorted(messages.get(moment, ()), key=lambda message: message.source)
            yield moment, slots.get(moment, []), ending

    def _slot(self, stage: int, slot: Slot) -> list[Late]:
        """Return the lateness of each phase of a slot."""
        phases, planned = [], slot.start
        for layer in order(self.job, slot.direction):
            kind = bucket_of(self.job, slot, layer)
            for plan in pipeline.plans(self.job, slot.direction, layer):
                bucket = None
                if kind and plan.transfer:
                    bucket = self._bucket(
                        stage, kind[0], planned + pipeline.LEAD, plan.transfer
                    )
                phases.append(self._phase(stage, plan, bucket))
                planned += plan.length + plan.tail
        return phases

    def _phase(self, stage: int, plan: PhasePlan, bucket: Ints | None = None) -> Late:
        """Return the lateness of a phase, and make its ranks late by it."""
        idle, extra = self._own(stage, plan)
        arrival = self.late[stage]
        if idle is not self.nothing or extra is not self.nothing:
            arrival = arrival + idle + extra
        calls, ends = [], []
        for number, (kind, operation, transfer) in enumerate(plan.calls):
            end = self._together(kind, arrival)
            extra_transfer = self._extra_transfer(stage, kind, operation, transfer)
            end = end + extra_transfer if extra_transfer is not None else end
            calls.append(end)
            ends.append((end, number * GAP + transfer))
        if plan.cover:
            ends.append((arrival, len(plan.calls) * GAP + plan.cover[1]))
        after = _latest(ends, arrival)
        self.late[stage] = after
        return Late(idle, tuple(calls), after, bucket)

    def _bucket(self, stage: int, kind: str, begin: int, transfer: int) -> Ints:
        """Return how late a bucket ends that is planned for `begin` and `transfer` ns."""
        ready = np.maximum(self.late[stage], self.free[stage] - begin)
        late = self._together(kind, ready)
        extra = self._extra_transfer(stage, kind, None, transfer)
        late = late if extra is None else late + extra
        self.free[stage] = begin + late + transfer
        return late

    def _last_bucket(self, stage: int, moment: int) -> Ints:
        if self.job.dp == 1:
            return self.nothing
        return self._bucket(stage, "dp", moment, pipeline.grid(self.job).tail)

    def _messages(self, messages: list[PipelineMessage]) -> dict[tuple[int, int, int], Ints]:
        """Make sender and receiver of each message equally late."""
        by_message, late = {}, list(self.late)
        for message in messages:
            meeting = np.maximum(late[message.source], late[message.target])
            by_message[message.stop, message.source, message.target] = meeting
            for stage in (message.source, message.target):
                self.late[stage] = np.maximum(self.late[stage], meeting)
        return by_message

    def _own(self, stage: int, plan: PhasePlan) -> tuple[Ints, Ints]:
        """Return the idle time and the extra compute time of a stage's ranks in a phase."""
        job = self.job
        names = pipeline.slowed(job, plan.phase)
        if job.straggler is None or stage != self.stage or not names:
            return self.nothing, self.nothing
        extra = sum(pipeline.slower(job, ns) for name, ns in plan.kernels if name in names)
        if job.fault != "jittery_host":
            return self.nothing, self.slow * extra
        is_late = int(self.random.integers(0, _JITTER)) == 0
        ns = int(self.random.integers(0, 2 * _JITTER * extra + 1))
        return (self.slow * ns if is_late else self.nothing), self.nothing

    def _extra_transfer(
        self, stage: int, kind: str, operation: CallKind | None, transfer: int
    ) -> Ints | None:
        """Return the extra transfer time in the straggler's group, or None."""
        job = self.job
        if job.straggler is None or stage != self.stage:
            return None
        link = job.fault == "slow_link" and kind in _LINK_KINDS
        hot = job.fault == "hot_expert" and operation is not None and operation.op == "AllToAll"
        if not (link or hot):
            return None
        return self._together(kind, self.slow) * pipeline.slower(job, transfer - job.latency_ns)

    def _together(self, kind: str, values: Ints) -> Ints:
        """Return the largest value in each rank's group of a kind; `values` are by place."""
        if values.min() == values.max():
            return values
        shaped = values.reshape(self.shape)
        axes = {"tp": (2,), "ep": (1,), "edp": (0,), "dp": (0, 1)}[kind]
        largest = shaped.max(axis=axes, keepdims=True)
        by_place: Ints = np.broadcast_to(largest, self.shape).reshape(-1)
        return by_place


def _latest(ends: list[tuple[Ints, int]], arrival: Ints) -> Ints:
    """Return the lateness of the latest end; `ends` are (lateness, planned time), in ns."""
    if not ends or all(late is arrival for late, _ in ends):
        return arrival
    planned = max(moment for _, moment in ends)
    latest: Ints = np.max([late + (moment - planned) for late, moment in ends], axis=0)
    return latest


def _is_last(job: Job, slot: Slot) -> bool:
    return slot.direction == "backward" and slot.micro_batch == job.micro_batches - 1
