"""The work of one step of one rank, and what each interval of the step was. Times are in ns."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from fastcomm.synthetic.catalog import SyntheticCall


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


@dataclass(slots=True)
class Tally:
    """Sums of the intervals of a step by kind, in ns; the first five partition the step."""

    compute: int = 0
    # By tag: exposed communication of this tag alone.
    exposed: dict[str, int] = field(default_factory=dict)
    mixed: int = 0  # exposed communication of several tags
    memcpy: int = 0  # only copies and memsets
    idle: int = 0
    busy: dict[str, int] = field(default_factory=dict)  # communication by tag
    overlapped: dict[str, int] = field(default_factory=dict)  # overlapped communication by tag
    any_busy: int = 0  # communication of any tag
    any_overlapped: int = 0

    def add(self, ns: int, computes: bool, copies: bool, tags: list[str]) -> None:
        """Add an interval of `ns` with communication of these tags."""
        if tags:
            self.any_busy += ns
            self.any_overlapped += ns if computes else 0
        for tag in tags:
            self.busy[tag] = self.busy.get(tag, 0) + ns
            self.overlapped[tag] = self.overlapped.get(tag, 0) + (ns if computes else 0)
        if computes:
            self.compute += ns
        elif len(tags) > 1:
            self.mixed += ns
        elif tags:
            self.exposed[tags[0]] = self.exposed.get(tags[0], 0) + ns
        elif copies:
            self.memcpy += ns
        else:
            self.idle += ns


@dataclass(frozen=True, slots=True)
class PhaseGap:
    """Signed time from the end of a run of one tag to the start of the next run."""

    before: str
    after: str
    ns: int


def tally(works: list[PlannedWork], start: int, stop: int) -> Tally:
    """Return how long each combination of compute, copies and communication runs.

    `works` is the work of a rank; only the time from `start` to `stop` (ns) counts.
    """
    total, open_ = Tally(), dict[str, int]()  # open work: its number by kind or tag
    now = start
    for moment, change, label in _changes(works, stop):
        tags = [name for name in open_ if name.isupper()]
        copies = "memcpy" in open_ or "memset" in open_
        total.add(moment - now, "compute" in open_, copies, tags)
        now = moment
        open_[label] = open_.get(label, 0) + change
        if not open_[label]:
            del open_[label]
    return total


def _changes(works: list[PlannedWork], stop: int) -> list[tuple[int, int, str]]:
    """Return (moment, 1 or -1, label) where work starts or stops, and the end of the step."""
    changes = [
        change
        for work in works
        for change in ((work.start, 1, _tag(work)), (work.stop, -1, _tag(work)))
    ]
    # Starts before stops: work may have no length.
    return sorted([*changes, (stop, 0, "")], key=lambda change: (change[0], -change[1]))


def windows(works: list[PlannedWork]) -> list[PhaseGap]:
    """Return the windows between runs of communication of one tag, in the order of starts."""
    phases: list[list[PlannedWork]] = []
    calls = [work for work in works if work.call]
    for work in sorted(calls, key=lambda work: work.start):
        if not phases or _tag(phases[-1][0]) != _tag(work):
            phases.append([])
        phases[-1].append(work)
    return [
        PhaseGap(_tag(one[0]), _tag(two[0]), two[0].start - max(work.stop for work in one))
        for one, two in pairwise(phases)
    ]


def _tag(work: PlannedWork) -> str:
    """Return the tag of a collective, or the kind of other work."""
    return work.call.group.tag if work.call else work.kind
