"""Lay out what one rank does in each step, from the plan, the lateness and its own drift.

`planned` is a time of the plan; the rank reaches it `late` ns later. Neither depends on other
ranks at run time, so all members of a group compute the same end of a collective.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fastcomm.synthetic import catalog, lateness, pipeline
from fastcomm.synthetic.catalog import OPERATIONS, SyntheticCall, groups
from fastcomm.synthetic.job import GAP, Job
from fastcomm.synthetic.lateness import Late, Timeline
from fastcomm.synthetic.pipeline import PhasePlan, PipelineGrid, PipelineMessage, Slot
from fastcomm.synthetic.tape import PhaseGap, PlannedWork, Tally, Tape

COMPUTE, COPY = 7, 14
STREAMS = {"tp": 20, "ep": 24, "dp": 28, "edp": 28, "Send": 32, "Recv": 36}
MARK_DRIFT = 25_000  # most drift in ns of the host's step marks


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank: the host's mark, the device's work, and the sums of its time."""

    number: int
    start: int
    stop: int
    works: list[PlannedWork]
    tally: Tally
    windows: list[PhaseGap]

    @property
    def ns(self) -> int:
        """Iteration time."""
        return self.stop - self.start


def steps(job: Job, rank: int) -> Iterator[RankStep]:
    """Yield the steps of a rank in order of time."""
    player = _Player(job, rank)
    start = pipeline.EPOCH_NS
    variations = np.random.default_rng((job.seed, 1)).integers(
        0, player.grid.step // 40, job.steps
    )
    for number, variation in enumerate(variations.tolist(), job.first_step):
        stop = start + player.grid.step + lateness.cost_ns(job, number) + variation
        yield player.step(number, start, stop)
        start = stop


class _Player:
    """Plays the phases of one rank on its tape, step by step."""

    def __init__(self, job: Job, rank: int) -> None:
        """Find the rank's place in its stage, and whether the fault affects it."""
        self.job, self.rank = job, rank
        self.grid: PipelineGrid = pipeline.grid(job)
        self.groups = groups(job, rank)
        tp, dp, self.stage = job.place(rank)
        self.place = tp + job.tp * dp  # place in the stage
        afflicted = rank == job.straggler or (
            job.fault == "imbalanced_stage"
            and job.straggler is not None
            and self.stage == job.place(job.straggler)[2]
        )
        self.computes_longer = afflicted and job.fault != "jittery_host"
        self.drift = _drift(job, rank)
        self.marks = _marks(job, rank)
        self.seqs: dict[object, int] = {}
        self.tape = Tape(0)
        self.timeline = Timeline()
        self.planned = self.late = self.free = 0

    def step(self, number: int, start: int, stop: int) -> RankStep:
        """Return the step that the plan has from `start` to `stop`."""
        late, early = next(self.marks)
        mark, end = start + late, stop - early - 1_000
        tape = self.tape = Tape(mark)
        self.timeline = lateness.timeline(self.job, number)
        self.late = self.free = 0
        self._setup(start + pipeline.HOST_LEAD)
        begin = start + pipeline.HOST_LEAD + self.grid.setup
        self._pipeline(begin)
        tape.backward = False
        self.late = max(self.late, int(self.timeline.last_bucket[self.stage][self.place]))
        optimizer = begin + self.grid.pipeline + self.grid.tail + GAP
        self._frame(pipeline.OPTIMIZER, optimizer, self.timeline.optimizer[self.stage])
        tape.to(end)
        return RankStep(number, mark, end, tape.works, tape.tally, tape.windows())

    def _setup(self, start: int) -> None:
        """Play the work that sets up a step, from `start` ns on."""
        tape = self.tape
        tape.to(start)
        memset = tape.open("memset", "memset", COMPUTE)
        tape.run(1)
        tape.close(memset)
        tape.close(tape.open("compute", "empty", COMPUTE))  # a row of length 0
        tape.run(GAP)
        copy = tape.open("memcpy", "memcpy", COPY)
        tape.run(12_000)
        kernel = tape.open("compute", "arange", COMPUTE)
        tape.run(8_000)
        tape.close(copy)
        tape.run(10_000)
        tape.close(kernel)
        script = pipeline.frame(self.job, pipeline.SETUP)
        on_time = [lateness.on_time(self.job, len(plan.calls)) for plan in script]
        self._frame(pipeline.SETUP, start + pipeline.SETUP_NS, on_time)

    def _frame(
        self, script: tuple[pipeline.Phase, ...], start: int, late: Sequence[Late]
    ) -> None:
        """Play phases outside the pipeline; `start` is in ns, `late` has an entry per phase."""
        self._begin(start)
        for plan, phase_late in zip(pipeline.frame(self.job, script), late, strict=True):
            self._phase(plan, phase_late, None)

    def _begin(self, start: int) -> None:
        self.tape.to(start + self.late)
        self.planned = start

    def _pipeline(self, start: int) -> None:
        """Play all slots and messages of the stage; messages may arrive while it is idle."""
        slots = {slot.stop: slot for slot in self.grid.slots(self.stage)}
        arrivals: dict[int, list[PipelineMessage]] = {}
        for message in self.grid.messages(self.stage):
            arrivals.setdefault(message.stop, []).append(message)
        for moment in sorted({*slots, *arrivals}):
            slot = slots.get(moment)
            if slot:
                self._slot(slot, start)
            else:
                early = moment - self.grid.zone + next(self.drift)
                self.tape.to(start + early + self.late)
            self._boundary(slot, arrivals.get(moment, []), start, moment)

    def _slot(self, slot: Slot, start: int) -> None:
        """Play a forward or backward pass; the step begins at `start` ns."""
        self._begin(start + slot.start)
        self.tape.backward = slot.direction == "backward"
        phases = iter(self.timeline.phases[self.stage, slot.direction, slot.micro_batch])
        for layer in lateness.order(self.job, slot.direction):
            bucket = lateness.bucket_of(self.job, slot, layer)
            for plan in pipeline.plans(self.job, slot.direction, layer):
                self._phase(plan, next(phases), bucket)

    def _phase(self, plan: PhasePlan, late: Late, bucket: tuple[str, str] | None) -> None:
        """Play idle time, kernels and calls of a phase, late by the times in `late`.

        `bucket` is the group kind and operation of the bucket that overlaps the phase,
        or None.
        """
        self.tape.run(int(late.idle[self.place]))
        if bucket and late.bucket is not None:
            begin = self.planned + pipeline.LEAD
            end = begin + plan.transfer + int(late.bucket[self.place])
            self._run_bucket(bucket, self.tape.now + pipeline.LEAD, end)
        self._kernels(plan)
        self.planned += plan.length
        self._calls(plan, late)
        self.planned += plan.tail
        self.late = int(late.after[self.place])
        self.tape.to(self.planned + self.late)

    def _kernels(self, plan: PhasePlan) -> None:
        """Play the compute kernels of a phase, longer ones on a slow rank."""
        tape = self.tape
        last = len(plan.kernels) - 1
        slowed = pipeline.slowed(self.job, plan.phase) if self.computes_longer else ()
        for number, (name, planned) in enumerate(plan.kernels):
            ns = planned
            if name in slowed:
                ns += pipeline.slower(self.job, planned)
            if number == last:
                ns += next(self.drift)
            kernel = tape.open("compute", name, COMPUTE)
            tape.run(ns)
            tape.close(kernel)
            tape.run(GAP)

    def _run_bucket(self, bucket: tuple[str, str], begin: int, end: int) -> None:
        """Run a bucket on its stream once that is free; all members share its end."""
        tape = self.tape

        def open_() -> None:
            work = self._open(*bucket)
            tape.at(end, partial(tape.close, work))

        tape.at(max(begin, self.free), open_)
        self.free = end

    def _calls(self, plan: PhasePlan, late: Late) -> None:
        """Run the calls of a phase; all members share the end of each."""
        tape = self.tape
        ends: list[tuple[int, PlannedWork]] = []
        for (kind, operation, transfer), shared in zip(plan.calls, late.calls, strict=True):
            end = self.planned + int(shared[self.place]) + len(ends) * GAP + transfer
            ends.append((end, self._open(kind, operation.op)))
            tape.run(GAP)
        if plan.cover:
            name, ns = plan.cover
            ends.append((tape.now + ns, tape.open("compute", name, COMPUTE)))
        self._close(ends)

    def _boundary(
        self, slot: Slot | None, messages: list[PipelineMessage], start: int, moment: int
    ) -> None:
        """Run the messages that end at `moment`, the end of a slot or inside a bubble."""
        tape, ends, stop = self.tape, [], start + moment
        tape.run(GAP if messages or slot else 0)
        if slot and slot.direction == "backward" and self._is_last(slot) and self.job.dp > 1:
            late = int(self.timeline.last_bucket[self.stage][self.place])
            self._run_bucket(("dp", "ReduceScatter"), tape.now, stop + late + self.grid.tail)
            tape.run(GAP)
        for message in sorted(messages, key=lambda message: message.source != self.stage):
            meeting = self.timeline.messages[moment, message.source, message.target][self.place]
            self.late = max(self.late, int(meeting))
            ends.append((stop + int(meeting), self._message(message)))
            tape.run(GAP)
        if slot and self.job.pp > 1 and self._is_edge(slot):
            name = "logits" if slot.direction == "forward" else "embed_back"
            ends.append((tape.now + self.grid.zone // 2, tape.open("compute", name, COMPUTE)))
        self._close(ends)

    def _close(self, ends: list[tuple[int, PlannedWork]]) -> None:
        for stop, work in sorted(ends, key=lambda end: end[0]):
            self.tape.to(stop)
            self.tape.close(work)

    def _is_last(self, slot: Slot) -> bool:
        return slot.micro_batch == self.job.micro_batches - 1

    def _is_edge(self, slot: Slot) -> bool:
        """Whether the stage computes the head or the embedding in this slot."""
        return self.stage == (self.job.pp - 1 if slot.direction == "forward" else 0)

    def _seq(self, key: object) -> int:
        self.seqs[key] = self.seqs.get(key, 0) + 1
        return self.seqs[key]

    def _open(self, kind: str, operation: str) -> PlannedWork:
        """Begin a collective of a kind of group."""
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
            splits = catalog.splits(
                self.job, group, self.job.place(self.rank)[1] % self.job.ep, seq
            )
            sent, received = (sum(rows) * self.job.hidden for rows in splits)
        call = SyntheticCall(OPERATIONS[operation], group, dtype, sent, received, seq, *splits)
        return self.tape.open("comm", call.kernel, STREAMS[kind], call)

    def _message(self, message: PipelineMessage) -> PlannedWork:
        """Begin a message between two stages."""
        operation = "Send" if message.source == self.stage else "Recv"
        dtype, elements = pipeline.counts(self.job, "pp", operation)
        members = self.groups["pp"].ranks
        peers = members[message.source], members[message.target]
        seq = self._seq(peers)
        call = SyntheticCall(
            OPERATIONS[operation],
            self.groups["pp"],
            dtype,
            elements,
            elements,
            seq,
            peers=peers,
        )
        return self.tape.open("comm", call.kernel, STREAMS[operation], call)


def _drift(job: Job, rank: int) -> Iterator[int]:
    """Yield how much longer than planned a rank's compute takes: 0 to the skew."""
    numbers = np.random.default_rng((job.seed, 2, rank))
    while True:
        yield from numbers.integers(0, job.skew_ns + 1, 4096).tolist()


def _marks(job: Job, rank: int) -> Iterator[tuple[int, int]]:
    """Yield how much later than the plan a rank's mark begins, and how much earlier it ends."""
    numbers = np.random.default_rng((job.seed, 3, rank))
    while True:
        late, early = numbers.integers(0, MARK_DRIFT, 2).tolist()
        # The straggler is the first to begin and the last to end: its step is the longest.
        yield (0, 0) if rank == job.straggler else (late, early)
