"""How much later than the plan every rank is because of a fault, and who waits for whom.

A rank that waits for a late one is as late from there on. All ranks of a stage go through a
phase together, as arrays by their place in the stage, ``tp + TP * dp``: so each rank's events
follow from what all others do, and any two that meet agree when. Without a fault all is 0.
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

# A jittery host is late before one phase of so many, by up to twice what makes the mean right.
_JITTER = 4
_LINK_KINDS = frozenset({"ep", "dp", "edp"})  # what leaves the node


@dataclass(frozen=True, slots=True)
class Late:
    """One phase of a stage: ns later than planned, by place."""

    idle: Ints  # before the first kernel
    calls: tuple[Ints, ...]  # the end of each call
    after: Ints  # the start of the next phase
    bucket: Ints | None = None  # the end of the bucket under the first kernel


@dataclass(slots=True)
class Timeline:
    """One step."""

    phases: dict[Place, list[Late]] = field(default_factory=dict)  # as they are played
    messages: dict[tuple[int, int, int], Ints] = field(default_factory=dict)
    last_bucket: dict[int, Ints] = field(default_factory=dict)  # by stage
    optimizer: dict[int, list[Late]] = field(default_factory=dict)
    total: int = 0  # ns that the step is longer


def bucket_of(job: Job, slot: Slot, layer: int) -> tuple[str, str] | None:
    """What data parallelism does under a layer: parameters first, gradients last."""
    kind = pipeline.bucket_kind(job, layer)
    if slot.direction == "forward":
        return (kind, "AllGather") if slot.micro_batch == 0 else None
    last = slot.micro_batch == job.micro_batches - 1
    return (kind, "ReduceScatter") if last and layer else None


def order(job: Job, direction: str) -> range:
    """The layers of a stage as they are played."""
    return range(job.layers) if direction == "forward" else range(job.layers)[::-1]


@lru_cache(maxsize=16)
def on_time(job: Job, calls: int) -> Late:
    """A phase before which nothing can have gone wrong."""
    nothing = np.zeros(job.dp * job.tp, np.int64)
    return Late(nothing, (nothing,) * calls, nothing)


def timeline(job: Job, number: int) -> Timeline:
    """The step of this number. But for a jittery host all steps are alike."""
    return _timeline(job, number if job.fault == "jittery_host" else 0)


def cost_ns(job: Job, number: int) -> int:
    """What the fault makes the step longer by."""
    return timeline(job, number).total if job.straggler is not None else 0


@lru_cache(maxsize=8)
def _timeline(job: Job, number: int) -> Timeline:
    return _Simulation(job, number).run()


class _Simulation:
    def __init__(self, job: Job, number: int) -> None:
        self.job = job
        self.shape = (job.dp // job.ep, job.ep, job.tp)
        nothing = np.zeros(job.dp * job.tp, np.int64)
        self.late = [nothing] * job.pp  # by stage: now
        self.free = [nothing] * job.pp  # when the stream of the buckets is free
        self.nothing = nothing
        self.random = np.random.default_rng((job.seed, 4, number))
        self.slow = nothing.copy()  # 1: this place does what the fault says
        if job.straggler is not None:
            tp, dp, self.stage = job.place(job.straggler)
            chosen = slice(None) if job.fault == "imbalanced_stage" else tp + job.tp * dp
            self.slow[chosen] = 1

    def run(self) -> Timeline:
        found = Timeline()
        for moment, slots, messages in self._moments():
            for stage, slot in slots:
                found.phases[stage, slot.direction, slot.micro_batch] = self._slot(stage, slot)
                if _is_last(self.job, slot):
                    found.last_bucket[stage] = self._last_bucket(stage, moment)
            found.messages |= self._messages(messages)
        for stage in range(self.job.pp):
            last = found.last_bucket[stage]
            self.late[stage] = np.maximum(self.late[stage], last)
            plans = pipeline.frame(self.job, pipeline.OPTIMIZER)
            found.optimizer[stage] = [self._phase(stage, plan) for plan in plans]
        found.total = max(int(late.max()) for late in self.late)
        return found

    def _moments(self) -> Iterator[tuple[int, list[tuple[int, Slot]], list[PipelineMessage]]]:
        """What ends together: slots, and the messages behind them."""
        grid = pipeline.grid(self.job)
        slots: dict[int, list[tuple[int, Slot]]] = {}
        messages: dict[int, set[PipelineMessage]] = {}
        for stage in range(self.job.pp):
            for slot in grid.slots(stage):
                slots.setdefault(slot.stop, []).append((stage, slot))
            for message in grid.messages(stage):
                messages.setdefault(message.stop, set()).add(message)
        for moment in sorted({*slots, *messages}):
            found = sorted(messages.get(moment, ()), key=lambda each: each.source)
            yield moment, slots.get(moment, []), found

    def _slot(self, stage: int, slot: Slot) -> list[Late]:
        found, planned = [], slot.start
        for layer in order(self.job, slot.direction):
            kind = bucket_of(self.job, slot, layer)
            for plan in pipeline.plans(self.job, slot.direction, layer):
                under = None
                if kind and plan.transfer:
                    under = self._bucket(stage, kind[0], planned + pipeline.LEAD, plan.transfer)
                found.append(self._phase(stage, plan, under))
                planned += plan.length + plan.tail
        return found

    def _phase(self, stage: int, plan: PhasePlan, bucket: Ints | None = None) -> Late:
        idle, more = self._own(stage, plan)
        come = self.late[stage]
        if idle is not self.nothing or more is not self.nothing:
            come = come + idle + more
        calls, ends = [], []
        for number, (kind, operation, transfer) in enumerate(plan.calls):
            end = self._together(kind, come)
            longer = self._longer(stage, kind, operation, transfer)
            end = end + longer if longer is not None else end
            calls.append(end)
            ends.append((end, number * GAP + transfer))
        if plan.cover:
            ends.append((come, len(plan.calls) * GAP + plan.cover[1]))
        after = _latest(ends, come)
        self.late[stage] = after
        return Late(idle, tuple(calls), after, bucket)

    def _bucket(self, stage: int, kind: str, begin: int, transfer: int) -> Ints:
        """By how much the end of a bucket is late that is planned from `begin` on."""
        ready = np.maximum(self.late[stage], self.free[stage] - begin)
        late = self._together(kind, ready)
        longer = self._longer(stage, kind, None, transfer)
        late = late if longer is None else late + longer
        self.free[stage] = begin + late + transfer
        return late

    def _last_bucket(self, stage: int, moment: int) -> Ints:
        if self.job.dp == 1:
            return self.nothing
        return self._bucket(stage, "dp", moment, pipeline.grid(self.job).tail)

    def _messages(self, messages: list[PipelineMessage]) -> dict[tuple[int, int, int], Ints]:
        """Sender and receiver go on together."""
        found, late = {}, list(self.late)
        for each in messages:
            met = np.maximum(late[each.source], late[each.target])
            found[each.stop, each.source, each.target] = met
            for stage in (each.source, each.target):
                self.late[stage] = np.maximum(self.late[stage], met)
        return found

    def _own(self, stage: int, plan: PhasePlan) -> tuple[Ints, Ints]:
        """What the stage's ranks idle before a phase, and what they compute longer in it."""
        job = self.job
        names = pipeline.slowed(job, plan.phase)
        if job.straggler is None or stage != self.stage or not names:
            return self.nothing, self.nothing
        more = sum(pipeline.slower(job, ns) for name, ns in plan.kernels if name in names)
        if job.fault != "jittery_host":
            return self.nothing, self.slow * more
        hit = int(self.random.integers(0, _JITTER)) == 0
        ns = int(self.random.integers(0, 2 * _JITTER * more + 1))
        return (self.slow * ns if hit else self.nothing), self.nothing

    def _longer(
        self, stage: int, kind: str, operation: CallKind | None, transfer: int
    ) -> Ints | None:
        """What the transfers in the straggler's group of a kind take longer."""
        job = self.job
        if job.straggler is None or stage != self.stage:
            return None
        link = job.fault == "slow_link" and kind in _LINK_KINDS
        hot = job.fault == "hot_expert" and operation is not None and operation.op == "AllToAll"
        if not (link or hot):
            return None
        return self._together(kind, self.slow) * pipeline.slower(job, transfer - job.latency_ns)

    def _together(self, kind: str, values: Ints) -> Ints:
        """The largest value of each rank's group."""
        if values.min() == values.max():
            return values
        shaped = values.reshape(self.shape)
        axes = {"tp": (2,), "ep": (1,), "edp": (0,), "dp": (0, 1)}[kind]
        largest = shaped.max(axis=axes, keepdims=True)
        whole: Ints = np.broadcast_to(largest, self.shape).reshape(-1)
        return whole


def _latest(ends: list[tuple[Ints, int]], come: Ints) -> Ints:
    """How late the last end is, where (late, planned) are those of all."""
    if not ends or all(late is come for late, _ in ends):
        return come
    planned = max(moment for _, moment in ends)
    latest: Ints = np.max([late + (moment - planned) for late, moment in ends], axis=0)
    return latest


def _is_last(job: Job, slot: Slot) -> bool:
    return slot.direction == "backward" and slot.micro_batch == job.micro_batches - 1
