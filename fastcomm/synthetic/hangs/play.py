"""Execute the programs of all ranks until nothing can go on: who called, began and ended what.

The device of a rank executes its turns in order, and a collective ends once all members have
begun it with equal arguments, a message once both sides have. Times are ns of a common clock.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fastcomm.synthetic.hangs.program import HungCall, Turn

NEVER = 1 << 62
_LAUNCH_NS = 20_000
_COLLECTIVE_NS, _MESSAGE_NS = 800_000, 300_000
_MOST_ROOTS = 1


@dataclass(slots=True, kw_only=True)
class PlayedCall:
    """When a rank called, began and ended a call; NEVER where it did not."""

    rank: int
    call: HungCall
    number: int  # among the collectives, or the messages, of the rank in the group
    created: int = NEVER
    begun: int = NEVER
    ended: int = NEVER


@dataclass(slots=True, kw_only=True)
class PlayedTurn:
    """A turn of a rank, with its calls."""

    turn: Turn
    calls: tuple[PlayedCall, ...]
    batch: int = 0  # number of the batch in the group

    @property
    def ended(self) -> int:
        """When the last of its calls ended."""
        return max(call.ended for call in self.calls)


@dataclass(frozen=True, kw_only=True)
class HungPlay:
    """A job that is executed.

    `steps` has the turns of each step by rank. The host of a rank runs ahead of its device to
    the end of the step, or calls one turn at a time; it never comes to the turn of `stuck`. The
    device of a rank never begins the turn of `frozen`; a collective with a turn of `stalled`
    never ends. Turns are numbered through all steps.
    """

    steps: Sequence[Mapping[int, Sequence[Turn]]]
    runs_ahead: bool = False
    speed: Mapping[int, float] = field(default_factory=dict)  # of compute, by rank; 1 if absent
    stuck: Mapping[int, int] = field(default_factory=dict)
    frozen: Mapping[int, int] = field(default_factory=dict)
    stalled: Mapping[int, int] = field(default_factory=dict)
    begin: int = 0

    @cached_property
    def played(self) -> dict[int, list[PlayedTurn]]:
        """The turns of each rank that its host called."""
        return _Devices(self).play_all()

    @property
    def hangs(self) -> bool:
        """Whether a rank has not ended all of its turns."""
        return any(
            len(own) < sum(len(step[rank]) for step in self.steps) or own[-1].ended == NEVER
            for rank, own in self.played.items()
        )


@dataclass
class _Devices:
    """Where the devices are; a queue has the ranks that may go on."""

    play: HungPlay

    def __post_init__(self) -> None:
        ranks = sorted(self.play.steps[0])
        self.turns = {rank: [*self._numbered(rank)] for rank in ranks}
        self.ends = {rank: self._ends(rank) for rank in ranks}  # of the step of each turn
        self.place = dict.fromkeys(ranks, 0)
        self.clock = dict.fromkeys(ranks, self.play.begin)
        self.step_begin = dict.fromkeys(ranks, self.play.begin)
        self.beside: dict[int, list[PlayedTurn]] = {rank: [] for rank in ranks}
        self.calls: dict[tuple[object, ...], list[PlayedCall]] = {}
        self.stalled = {
            self._key(call)
            for rank, at in self.play.stalled.items()
            for call in self.turns[rank][at].calls
        }
        self.queue = deque(ranks)

    def _numbered(self, rank: int) -> Iterator[PlayedTurn]:
        count: dict[tuple[str, object], int] = {}

        def number(*key: object) -> int:
            count[key] = count.get(key, 0) + 1  # type: ignore[index,arg-type]
            return count[key]  # type: ignore[index]

        for step in self.play.steps:
            for turn in step[rank]:
                calls = [
                    PlayedCall(
                        rank=rank,
                        call=call,
                        number=number(call.group.name, (call.op, call.peer))
                        if call.is_message
                        else number(call.group.name, ""),
                    )
                    for call in turn.calls
                ]
                group = turn.calls[0].group.name
                batch = number(group, "batch") if turn.calls[0].is_message else 0
                yield PlayedTurn(turn=turn, calls=tuple(calls), batch=batch)

    def _ends(self, rank: int) -> list[int]:
        ends: list[int] = []
        for step in self.play.steps:
            ends += [len(ends) + len(step[rank])] * len(step[rank])
        return ends

    def play_all(self) -> dict[int, list[PlayedTurn]]:
        """Let all devices go on until none can."""
        while self.queue:
            self._go_on(self.queue.popleft())
        return {rank: self.turns[rank][: self._called(rank)] for rank in self.turns}

    def _called(self, rank: int) -> int:
        """Return how many turns the host of a rank has called."""
        at, stuck = self.place[rank], self.play.stuck.get(rank, NEVER)
        if at == len(self.turns[rank]):
            return at
        return min(stuck, self.ends[rank][at] if self.play.runs_ahead else at + 1)

    def _go_on(self, rank: int) -> None:
        while self.place[rank] < len(self.turns[rank]):
            at = self.place[rank]
            turn = self.turns[rank][at]
            if at >= self.play.stuck.get(rank, NEVER):
                return
            if turn.calls[0].begun == NEVER and not self._begins(rank, at, turn):
                return
            if turn.turn.waits:
                if turn.ended == NEVER:
                    return
                self.clock[rank] = max(self.clock[rank], turn.ended)
            else:
                self.beside[rank].append(turn)
            self.place[rank] += 1

    def _begins(self, rank: int, at: int, turn: PlayedTurn) -> bool:
        """Begin a turn unless the stream of its group has another; return whether it did."""
        if at == 0 or self.ends[rank][at - 1] != self.ends[rank][at]:
            self.step_begin[rank] = self.clock[rank]
            self._create_step(rank, at)
        self._create(rank, at, turn)
        group = turn.calls[0].call.group
        for other in self.beside[rank]:
            if other.calls[0].call.group is group and other.ended == NEVER:
                return False
        if at == self.play.frozen.get(rank):
            return False
        self.clock[rank] += int(turn.turn.compute_ns * self.play.speed.get(rank, 1.0))
        for call in turn.calls:
            call.begun = max(self.clock[rank], call.created)
            self._meet(call)
        return True

    def _create_step(self, rank: int, at: int) -> None:
        """Let a host that runs ahead call all turns of a step."""
        if self.play.runs_ahead:
            for k in range(at, min(self.ends[rank][at], self.play.stuck.get(rank, NEVER))):
                for call in self.turns[rank][k].calls:
                    call.created = self.step_begin[rank] + (k - at) * _LAUNCH_NS

    def _create(self, rank: int, at: int, turn: PlayedTurn) -> None:
        if not self.play.runs_ahead:
            compute = int(turn.turn.compute_ns * self.play.speed.get(rank, 1.0))
            for call in turn.calls:
                call.created = min(call.created, self.clock[rank] + compute)

    def _key(self, call: PlayedCall) -> tuple[object, ...]:
        one = call.call
        if not one.is_message:
            return one.group.name, call.number
        pair = (call.rank, one.peer) if one.op == "send" else (one.peer, call.rank)
        return one.group.name, "message", *pair, call.number

    def _meet(self, call: PlayedCall) -> None:
        """Add a call to its collective or message, and end it if it can."""
        key = self._key(call)
        together = self.calls.setdefault(key, [])
        together.append(call)
        members = 2 if call.call.is_message else len(call.call.group.ranks)
        if len(together) < members or key in self.stalled or not _agree(together):
            return
        length = _MESSAGE_NS if call.call.is_message else _COLLECTIVE_NS
        ended = max(one.begun for one in together) + length
        for one in together:
            one.ended = ended
            if one.rank != call.rank:
                self.queue.append(one.rank)


def _agree(calls: Sequence[PlayedCall]) -> bool:
    """Return whether a collective can end: equal operation, types and sizes, one root."""
    first = calls[0].call
    if first.is_message:
        return len({call.call.inputs for call in calls}) == 1
    if len({(call.call.op, call.call.dtype) for call in calls}) > 1:
        return False
    if first.op == "gather":
        return sum(bool(call.call.outputs) for call in calls) <= _MOST_ROOTS
    return len({(call.call.inputs, call.call.outputs) for call in calls}) == 1
