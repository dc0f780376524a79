"""What ranks of a made-up job call beside their steps: checkpoints of threads, slow exchanges.

Threads write a checkpoint with a group of gloo: each rank writes for a time of its own, and
then waits for the others. Replicas that train apart exchange their parameters now and then
while their steps go on, and wait for the exchange, which is slow every time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from fastcomm.synthetic.hangs.play import NEVER, PlayedCall, PlayedTurn
from fastcomm.synthetic.hangs.program import CallShape, HungCall, HungGroup, Turn

_SECOND = 1_000_000_000
_ROUND_TRIP_NS = 1_000_000
_LEAST_WRITE_NS, _MOST_WRITE_NS = _SECOND, 22 * _SECOND
_ROUNDS = 4
_LEAST_EXCHANGE_NS, _MOST_EXCHANGE_NS = 15 * _SECOND, 40 * _SECOND

Turns = dict[int, list[PlayedTurn]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRounds:
    """Rounds of steps beside an exchange; the last one began at `begin`, and ends after it."""

    turns: Turns
    begin: int
    length: int


def with_checkpoints(
    turns: Mapping[int, Sequence[PlayedTurn]], group: HungGroup, until: int, random: Random
) -> Turns:
    """Return the turns of all ranks and of their threads, until a moment.

    The first checkpoint begins in the first half of the steps; one rank writes for longest.
    """
    lists = {rank: [*own] for rank, own in turns.items()}
    created = [own[0].calls[0].created for own in turns.values()]
    latest = max(own[-1].calls[0].created for own in turns.values())
    moment = random.randint(max(created), (max(created) + latest) // 2)
    number = 0
    while moment < until:
        slowest = random.choice([*lists])
        begun = {rank: moment + random.randint(0, 2 * _SECOND) for rank in lists}
        gathered = _together(lists, group, "all_gather", number + 1, begun)
        written = {
            rank: gathered + (_MOST_WRITE_NS if rank == slowest else _write_ns(random))
            for rank in lists
        }
        moment = _together(lists, group, "all_reduce", number + 2, written)
        number += 2
    return {rank: sorted(own, key=_created) for rank, own in lists.items()}


def _write_ns(random: Random) -> int:
    return random.randint(_LEAST_WRITE_NS, _MOST_WRITE_NS // 2)


def _created(turn: PlayedTurn) -> int:
    return turn.calls[0].created


def _together(
    lists: Turns, group: HungGroup, op: str, number: int, created: Mapping[int, int]
) -> int:
    """Add a call of the threads of all ranks; return when it ended."""
    one: tuple[CallShape, ...] = ((1,),)
    outputs = one * len(group.ranks) if op == "all_gather" else one
    call = HungCall(
        group=group, op=op, inputs=one, outputs=outputs, dtype="Float",
        place="write_checkpoint", library="gloo", thread=1,
    )  # fmt: skip
    ended = max(created.values()) + _ROUND_TRIP_NS
    for rank, moment in created.items():
        _add(lists[rank], call, rank, number, moment, ended)
    return ended


def _add(
    own: list[PlayedTurn], call: HungCall, rank: int, number: int, created: int, ended: int
) -> None:
    played = PlayedCall(
        rank=rank, call=call, number=number, created=created, begun=created, ended=ended
    )
    own.append(PlayedTurn(turn=Turn(calls=(call,), waits=False), calls=(played,)))


def slow_rounds(
    turns: Mapping[int, Sequence[PlayedTurn]], group: HungGroup, random: Random
) -> SlowRounds:
    """Return some rounds of the steps, each beside an exchange that takes longer than they."""
    begin = min(own[0].calls[0].created for own in turns.values())
    end = max(own[-1].ended for own in turns.values())
    length = end - begin + random.randint(_LEAST_EXCHANGE_NS, _MOST_EXCHANGE_NS)
    shape = ((1 << 24,),)
    call = HungCall(
        group=group, op="all_reduce", inputs=shape, outputs=shape, dtype="Float",
        place="outer_step",
    )  # fmt: skip
    lists: Turns = {rank: [] for rank in turns}
    for number in range(_ROUNDS):
        later = number * length
        for rank, own in turns.items():
            moment = begin + later
            _add(lists[rank], call, rank, number + 1, moment, moment + length)
            lists[rank] += [_shifted(turn, later) for turn in own]
    return SlowRounds(turns=lists, begin=begin + (_ROUNDS - 1) * length, length=length)


def _shifted(turn: PlayedTurn, later: int) -> PlayedTurn:
    """Return a turn that is played some ns later."""
    calls = tuple(
        replace(
            call,
            created=call.created + later,
            begun=min(call.begun + later, NEVER),
            ended=min(call.ended + later, NEVER),
        )
        for call in turn.calls
    )
    return replace(turn, calls=calls)
