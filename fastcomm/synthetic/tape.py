"""One step of one rank, laid out in order of time, and what each interval of it was.

Work is opened, time passes, work is closed. Nothing is placed in the past, so the sums do not
depend on comparing events: metrics have to reproduce them from the events. Times are in ns.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from fastcomm.synthetic.catalog import SyntheticCall


@dataclass(slots=True)
class PlannedWork:
    """A device row: a kernel, a collective or a copy."""

    kind: str  # "compute", "comm", "memcpy", "memset"
    name: str  # key of `catalog.KERNELS`; for a collective the name of its kernel
    stream: int
    start: int
    stop: int
    backward: bool = False  # whether the thread of the backward pass launches it
    call: SyntheticCall | None = None

    @property
    def ns(self) -> int:
        """Duration."""
        return self.stop - self.start


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


class Tape:
    """A step that starts at `start`, with a position that only moves forward."""

    def __init__(self, start: int) -> None:
        """Start an empty tape at `start` ns."""
        self.start = self.now = start
        self.works: list[PlannedWork] = []  # in the order of their starts
        self.tally = Tally()
        self.phases: list[list[PlannedWork]] = []
        self.backward = False
        self._open: dict[str, int] = {}  # open work: its number by kind or tag
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0

    def open(
        self, kind: str, name: str, stream: int, call: SyntheticCall | None = None
    ) -> PlannedWork:
        """Begin work at the current position."""
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
        """End work at the current position."""
        work.stop = self.now
        label = _tag(work)
        self._open[label] -= 1
        if not self._open[label]:
            del self._open[label]

    def at(self, moment: int, action: Callable[[], None]) -> None:
        """Schedule an action for `moment`, or for now if that is later."""
        self._order += 1
        heappush(self._later, (max(moment, self.now), self._order, action))

    def to(self, moment: int) -> None:
        """Move to `moment`, and run the actions scheduled until then."""
        while self._later and self._later[0][0] <= moment:
            when, _, action = heappop(self._later)
            self._advance(when)
            action()
        self._advance(moment)

    def _advance(self, moment: int) -> None:
        """Move to `moment` and add the interval to the tally."""
        if moment < self.now:
            raise ValueError(f"cannot move back by {self.now - moment} ns")
        live = self._open
        tags = [label for label in live if label.isupper()] if live else []
        copies = "memcpy" in live or "memset" in live
        self.tally.add(moment - self.now, "compute" in live, copies, tags)
        self.now = moment

    def run(self, ns: int) -> None:
        """Move forward by `ns`."""
        self.to(self.now + ns)

    def windows(self) -> list[PhaseGap]:
        """Return the windows between phases; all work has to be closed."""
        pairs = zip(self.phases, self.phases[1:], strict=False)
        return [
            PhaseGap(_tag(one[0]), _tag(two[0]), two[0].start - max(work.stop for work in one))
            for one, two in pairs
        ]


def _tag(work: PlannedWork) -> str:
    """Return the tag of a collective, or the kind of other work."""
    return work.call.group.tag if work.call else work.kind
