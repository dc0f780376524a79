"""One step of one rank, laid down from left to right, and what each stretch of time was.

Work is opened, time runs, work is closed: nothing is ever placed in the past, so the sums need
no look at the events, and they are what a metric has to find again in them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from fastcomm.synthetic.catalog import SyntheticCall


@dataclass(slots=True)
class PlannedWork:
    """One row of the device: a kernel, a collective, a copy."""

    kind: str  # "compute", "comm", "memcpy", "memset"
    name: str  # key of `catalog.KERNELS`; of a collective, its kernel
    stream: int
    start: int
    stop: int
    backward: bool = False  # launched by the thread that runs the backward pass
    call: SyntheticCall | None = None

    @property
    def ns(self) -> int:
        """How long it takes."""
        return self.stop - self.start


@dataclass(slots=True)
class Tally:
    """What the stretches of one step were, in ns; the first six are a partition of it."""

    compute: int = 0
    exposed: dict[str, int] = field(
        default_factory=dict
    )  # communication of one tag, and no compute
    mixed: int = 0  # communication of several tags, and no compute
    memcpy: int = 0  # copies and memsets, and nothing else
    idle: int = 0
    busy: dict[str, int] = field(default_factory=dict)  # communication of a tag, at all
    hidden: dict[str, int] = field(default_factory=dict)  # communication of a tag under compute
    any_busy: int = 0
    any_hidden: int = 0

    def add(self, ns: int, computes: bool, copies: bool, tags: list[str]) -> None:
        """A stretch of `ns` in which communication of just these tags went on."""
        if tags:
            self.any_busy += ns
            self.any_hidden += ns if computes else 0
        for tag in tags:
            self.busy[tag] = self.busy.get(tag, 0) + ns
            self.hidden[tag] = self.hidden.get(tag, 0) + (ns if computes else 0)
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
    """From the end of a run of one tag to the start of the next run; signed."""

    before: str
    after: str
    ns: int


class Tape:
    """The step from `start` on, with a position that only moves forward."""

    def __init__(self, start: int) -> None:
        self.start = self.now = start
        self.works: list[PlannedWork] = []  # in the order of their starts
        self.tally = Tally()
        self.phases: list[list[PlannedWork]] = []
        self.backward = False
        self._open: dict[str, int] = {}  # what goes on now: a kind or a tag, and how often
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def open(
        self, kind: str, name: str, stream: int, call: SyntheticCall | None = None
    ) -> PlannedWork:
        """Begin a piece of work here."""
        work = PlannedWork(kind, name, stream, self.now, self.now, self.backward, call)
        self.works.append(work)
        if call:
            phase = self.phases[-1] if self.phases else []
            if not phase or _tag(phase[0]) != _tag(work):
                self.phases.append(phase := [])
            phase.append(work)
        self._open[_tag(work)] = self._open.get(_tag(work), 0) + 1
        return work

    def close(self, work: PlannedWork) -> None:
        """End it here."""
        work.stop = self.now
        label = _tag(work)
        self._open[label] -= 1
        if not self._open[label]:
            del self._open[label]

    def at(self, moment: int, action: Callable[[], None]) -> None:
        """Do something when it is `moment`."""
        self._asked += 1
        heappush(self._later, (max(moment, self.now), self._asked, action))

    def to(self, moment: int) -> None:
        """Let time run until `moment`; what is to be done on the way is."""
        while self._later and self._later[0][0] <= moment:
            when, _, action = heappop(self._later)
            self._pass(when)
            action()
        self._pass(moment)

    def _pass(self, moment: int) -> None:
        if moment < self.now:
            raise ValueError(f"the layout wants {self.now - moment} ns that are over")
        live = self._open
        tags = [label for label in live if label.isupper()] if live else []
        copies = "memcpy" in live or "memset" in live
        self.tally.add(moment - self.now, "compute" in live, copies, tags)
        self.now = moment

    def run(self, ns: int) -> None:
        """Let `ns` pass."""
        self.to(self.now + ns)

    def windows(self) -> list[PhaseGap]:
        """The windows between the phases, once all is closed."""
        pairs = zip(self.phases, self.phases[1:], strict=False)
        return [
            PhaseGap(_tag(one[0]), _tag(two[0]), two[0].start - max(work.stop for work in one))
            for one, two in pairs
        ]


def _tag(work: PlannedWork) -> str:
    return work.call.group.tag if work.call else work.kind
