"""The steps of one rank: its work with times, process groups and numbers of calls."""

from collections.abc import Iterator
from dataclasses import dataclass

from fastcomm.synthetic import catalog, pipeline, timeline
from fastcomm.synthetic.catalog import OPERATIONS, SyntheticCall, groups
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.pipeline import PipelineMessage
from fastcomm.synthetic.stage import SYNC_NS, WorkPlan
from fastcomm.synthetic.tape import HostRange, PhaseGap, PlannedWork, Tally, tally, windows
from fastcomm.synthetic.timeline import StepSchedule

_PAUSE_NS = 1_000  # between two ranges of the host
_MARGIN_NS = 1_000  # from the end of the host's mark to the start of the next step


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank: the host's mark, the device's work, and the sums of its time."""

    number: int
    start: int
    stop: int
    works: list[PlannedWork]  # in the order of their launches
    tally: Tally
    windows: list[PhaseGap]
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
        start += timeline.length(job, number)


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
        step = timeline.step(self.job, number)
        late, early = step.marks[self.rank].tolist()
        start, stop = begin + late, begin + step.length - early - _MARGIN_NS
        times = step.stages[self.stage]
        columns = (times.launch, times.start, times.stop)
        rows = zip(
            *((column[:, self.place] + begin).tolist() for column in columns), strict=True
        )
        works = [self._work(plan, *row) for plan, row in zip(times.works, rows, strict=True)]
        times_of = tally(works, start, stop)
        host = self._host(step, works, begin, (start, stop))
        return RankStep(number, start, stop, works, times_of, windows(works), host)

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
        loading = mark[0] + timeline.garbage_ns(self.job) + _PAUSE_NS
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
            splits = catalog.splits(
                self.job, group, self.job.place(self.rank)[1] % self.job.ep, seq
            )
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
