"""What one rank does, step by step, out of the plan and its own drift alone.

`planned` is where the plan is; the rank is there `delay` later, which is 0 unless its layer has
waited for the straggler. Who waits for whom follows from the coordinates, so that all members
of a group give a collective the same end without hearing of each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastcomm.synthetic import layers, schedule
from fastcomm.synthetic.calls import OPERATIONS, Call
from fastcomm.synthetic.groups import groups
from fastcomm.synthetic.job import GAP, Job
from fastcomm.synthetic.layers import Plan
from fastcomm.synthetic.schedule import Grid, Message, Slot
from fastcomm.synthetic.tape import Tally, Tape, Window, Work

COMPUTE, COPY = 7, 14
STREAMS = {"tp": 20, "ep": 24, "dp": 28, "edp": 28, "Send": 32, "Recv": 36}
MARK_DRIFT = 25_000  # of the host's marks of a step


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank: the host's mark, the device's work, and what it adds up to."""

    number: int
    start: int
    stop: int
    works: list[Work]
    tally: Tally
    windows: list[Window]

    @property
    def ns(self) -> int:
        """The iteration time."""
        return self.stop - self.start


def steps(job: Job, rank: int) -> Iterator[Step]:
    """All steps of a rank, in order of time."""
    player = _Player(job, rank)
    start = schedule.EPOCH_NS
    longer = np.random.default_rng((job.seed, 1)).integers(0, player.grid.step // 40, job.steps)
    for number, more in enumerate(longer.tolist(), job.first_step):
        stop = start + player.grid.step + more
        yield player.step(number, start, stop)
        start = stop


class _Player:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.grid: Grid = schedule.grid(job)
        self.groups = groups(job, rank)
        self.stage = job.place(rank)[2]
        self.waits = _waits_for(job, rank)
        self.drift = _drift(job, rank)
        self.marks = _marks(job, rank)
        self.seqs: dict[object, int] = {}
        self.tape = Tape(0)
        self.planned = self.delay = self.extra = 0

    def step(self, number: int, start: int, stop: int) -> Step:
        """The step that the grid has from `start` to `stop`."""
        late, early = next(self.marks)
        mark, end = start + late, stop - early - 1_000
        tape = self.tape = Tape(mark)
        self._setup(start + schedule.HOST_LEAD)
        pipeline = start + schedule.HOST_LEAD + self.grid.setup
        self._pipeline(pipeline)
        tape.backward = False
        self._frame(layers.OPTIMIZER, pipeline + self.grid.pipeline + self.grid.tail + GAP)
        tape.to(end)
        return Step(number, mark, end, tape.works, tape.tally, tape.windows())

    def _setup(self, start: int) -> None:
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
        self._frame(layers.SETUP, start + schedule.SETUP_NS)

    def _frame(self, script: tuple[layers.Phase, ...], start: int) -> None:
        self._begin(start)
        for plan in layers.frame(self.job, script):
            self._phase(plan, None)

    def _begin(self, start: int) -> None:
        self.tape.to(start)
        self.planned, self.delay, self.extra = start, 0, 0

    def _pipeline(self, start: int) -> None:
        """All slots and messages of the stage; a message may come while the stage is idle."""
        slots = {slot.stop: slot for slot in self.grid.slots(self.stage)}
        arrivals: dict[int, list[Message]] = {}
        for message in self.grid.messages(self.stage):
            arrivals.setdefault(message.stop, []).append(message)
        for moment in sorted({*slots, *arrivals}):
            slot = slots.get(moment)
            if slot:
                self._slot(slot, start)
            else:
                self.tape.to(start + moment - self.grid.zone + next(self.drift))
            self._boundary(slot, arrivals.get(moment, []), start + moment)

    def _slot(self, slot: Slot, start: int) -> None:
        self._begin(start + slot.start)
        self.tape.backward = slot.direction == "backward"
        order = range(self.job.layers)
        for layer in order if slot.direction == "forward" else reversed(order):
            bucket = self._bucket(slot, layer)
            for plan in layers.plans(self.job, slot.direction, layer):
                self._phase(plan, bucket)

    def _bucket(self, slot: Slot, layer: int) -> tuple[str, str] | None:
        """What data parallelism does under this layer: parameters first, gradients last."""
        kind = layers.bucket_kind(self.job, layer)
        if slot.direction == "forward":
            return (kind, "AllGather") if slot.micro_batch == 0 else None
        last = slot.micro_batch == self.job.micro_batches - 1
        return (kind, "ReduceScatter") if last and layer else None

    def _phase(self, plan: Plan, bucket: tuple[str, str] | None) -> None:
        self._kernels(plan, bucket)
        self.extra += plan.extra
        self.planned += plan.length
        if plan.phase.calls and plan.phase.calls[0][0] in self.waits:
            self.delay = self.extra
        self._calls(plan, self.planned + self.delay)
        self.planned += plan.tail
        self.tape.to(self.planned + self.delay)

    def _kernels(self, plan: Plan, bucket: tuple[str, str] | None) -> None:
        tape = self.tape
        last = len(plan.kernels) - 1
        for number, (name, planned) in enumerate(plan.kernels):
            ns = planned
            if plan.extra and self.rank == self.job.straggler:
                ns += layers.slower(self.job, planned)
            if number == last:
                ns += next(self.drift)
            stop = tape.now + ns
            kernel = tape.open("compute", name, COMPUTE)
            if bucket and plan.transfer and number == 0:
                self._hidden(bucket, plan.transfer)
            tape.to(stop)
            tape.close(kernel)
            tape.run(GAP)

    def _hidden(self, bucket: tuple[str, str], transfer: int) -> None:
        """A bucket under the kernel that has just begun, with one end for the whole stage."""
        tape = self.tape
        tape.run(layers.LEAD)
        work = self._open(*bucket)
        shared = self.extra if "dp" in self.waits else 0
        tape.to(self.planned + shared + layers.LEAD + transfer)
        tape.close(work)

    def _calls(self, plan: Plan, ready: int) -> None:
        """The calls of a phase: all members are there at `ready` at the latest."""
        tape = self.tape
        ends: list[tuple[int, Work]] = []
        for kind, operation, transfer in plan.calls:
            ready_here = ready + len(ends) * GAP
            ends.append((ready_here + transfer, self._open(kind, operation.op)))
            tape.run(GAP)
        if plan.cover:
            name, ns = plan.cover
            ends.append((tape.now + ns, tape.open("compute", name, COMPUTE)))
        self._close(ends)

    def _boundary(self, slot: Slot | None, messages: list[Message], stop: int) -> None:
        """The end of a slot, or a moment of a bubble: messages that end at `stop`."""
        tape = self.tape
        ends = []
        tape.run(GAP if messages or slot else 0)
        if slot and slot.direction == "backward" and self._is_last(slot) and self.job.dp > 1:
            ends.append((stop + self.grid.tail, self._open("dp", "ReduceScatter")))
            tape.run(GAP)
        for message in sorted(messages, key=lambda message: message.source != self.stage):
            ends.append((stop, self._message(message)))
            tape.run(GAP)
        if slot and self.job.pp > 1 and self._is_edge(slot):
            name = "logits" if slot.direction == "forward" else "embed_back"
            ends.append((tape.now + self.grid.zone // 2, tape.open("compute", name, COMPUTE)))
        self._close(ends)

    def _close(self, ends: list[tuple[int, Work]]) -> None:
        for stop, work in sorted(ends, key=lambda end: end[0]):
            self.tape.to(stop)
            self.tape.close(work)

    def _is_last(self, slot: Slot) -> bool:
        return slot.micro_batch == self.job.micro_batches - 1

    def _is_edge(self, slot: Slot) -> bool:
        """Whether the stage has the head in this slot, or the embedding."""
        return self.stage == (self.job.pp - 1 if slot.direction == "forward" else 0)

    def _seq(self, key: object) -> int:
        self.seqs[key] = self.seqs.get(key, 0) + 1
        return self.seqs[key]

    def _open(self, kind: str, operation: str) -> Work:
        group = self.groups[kind]
        dtype, elements = layers.counts(self.job, kind, operation)
        part = -(-elements // group.size)
        seq = self._seq(kind)
        sides = {
            "AllGather": (part, part * group.size),
            "ReduceScatter": (part * group.size, part),
        }
        sent, received = sides.get(operation, (elements, elements))
        splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        if operation == "AllToAll":
            splits = _splits(self.job, self.job.place(self.rank)[1] % self.job.ep, seq)
            sent, received = (sum(rows) * self.job.hidden for rows in splits)
        call = Call(OPERATIONS[operation], group, dtype, sent, received, seq, *splits)
        return self.tape.open("comm", call.kernel, STREAMS[kind], call)

    def _message(self, message: Message) -> Work:
        operation = "Send" if message.source == self.stage else "Recv"
        dtype, elements = layers.counts(self.job, "pp", operation)
        members = self.groups["pp"].ranks
        peers = members[message.source], members[message.target]
        seq = self._seq(peers)
        call = Call(
            OPERATIONS[operation],
            self.groups["pp"],
            dtype,
            elements,
            elements,
            seq,
            peers=peers,
        )
        return self.tape.open("comm", call.kernel, STREAMS[operation], call)


def _waits_for(job: Job, rank: int) -> frozenset[str]:
    """The kinds of group in which a rank waits for the straggler, or for who waits for it."""
    if job.straggler is None:
        return frozenset()
    mine, other = job.place(rank), job.place(job.straggler)
    same_stage = mine[2] == other[2]
    same_block = same_stage and mine[1] // job.ep == other[1] // job.ep
    same_line = same_stage and mine[1] == other[1]
    kinds = {"dp": same_stage, "ep": same_block, "tp": same_line}
    return frozenset(kind for kind, waits in kinds.items() if waits)


def _drift(job: Job, rank: int) -> Iterator[int]:
    """How much longer than planned a rank's compute takes, time after time: 0 to the skew."""
    numbers = np.random.default_rng((job.seed, 2, rank))
    while True:
        yield from numbers.integers(0, job.skew_ns + 1, 4096).tolist()


def _marks(job: Job, rank: int) -> Iterator[tuple[int, int]]:
    """How much later than the grid a rank's mark begins, and how much earlier it ends."""
    numbers = np.random.default_rng((job.seed, 3, rank))
    while True:
        late, early = numbers.integers(0, MARK_DRIFT, 2).tolist()
        # The straggler is the first to begin and the last to end: its step is the longest.
        yield (0, 0) if rank == job.straggler else (late, early)


def _splits(job: Job, place: int, seq: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows that a member sends to each and receives from each: some experts are liked."""
    rows, limit = -(-job.tokens // job.ep), max(1, job.tokens // job.ep // 8)

    def pair(source: int, target: int) -> int:
        if source == target:
            return rows
        unequal = (source * 7 + target * 13 + source * target * 5 + seq * 11) % (2 * limit + 1)
        return rows + unequal - limit

    peers = range(job.ep)
    return tuple(pair(place, peer) for peer in peers), tuple(
        pair(peer, place) for peer in peers
    )
