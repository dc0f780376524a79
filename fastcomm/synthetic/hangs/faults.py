"""Plant one fault in a made-up job, and say which answers are right.

Where dumps cannot tell answers apart, all of them are accepted: a call that is left out, or
made early, looks like one with other arguments.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from fastcomm.synthetic.hangs.beside import slow_rounds, with_checkpoints
from fastcomm.synthetic.hangs.play import NEVER, HungPlay, PlayedTurn
from fastcomm.synthetic.hangs.program import HungLayout, StepProgram, Turn

HANG_FAULTS = (
    *("missing_rank", "not_arrived", "not_started", "stalled"),
    *("left_out", "extra", "swapped"),
    *("mismatch_op", "mismatch_size", "mismatch_dtype", "mismatch_root"),
    *("p2p_unmatched", "p2p_order", "group_creation"),
)
MESSAGE_FAULTS = ("p2p_size", "p2p_extra")  # apart: agents were measured on the others
THREAD_FAULTS = ("beside_stuck", "beside_missing")  # while threads write checkpoints
HEALTHY = ("running", "finished", "straggler")
HEALTHY_BESIDE = ("checkpoint", "slow_outer")
_STEPS = 4
_ORDER = ("order", "mismatch_op", "mismatch_size", "mismatch_dtype")
_TRIES = 200
_LATER_NS = 60 * 1_000_000_000  # so that calls are open for longer than slow steps are apart
_COMPUTE_NS, _SLOW_NS = 2_000_000, 40_000_000  # of a layer
_LEAST = 8  # ranks
_SECOND = 1_000_000_000
_BEGIN = 1_795_000_000 * _SECOND
_BESIDE = {
    **dict.fromkeys((*THREAD_FAULTS, "checkpoint"), ("checkpoint",)),
    "slow_outer": ("outer",),
}
_OTHER_OP = {
    "all_reduce": "broadcast",
    "_all_gather_base": "broadcast",
    "broadcast": "all_reduce",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedHang:
    """A job with its fault: what its ranks called, and what has to come out."""

    fault: str
    layout: HungLayout
    turns: dict[int, list[PlayedTurn]]
    kind: str
    culprits: tuple[int, ...]
    accept: tuple[tuple[str, tuple[int, ...]], ...]
    moment: int  # of the dumps, ns
    missing: tuple[int, ...] = ()  # ranks without a dump
    has_timing: bool = False
    stacks: dict[int, str] = field(default_factory=dict)  # function that a rank stands in


class _NoFaultError(Exception):
    """The fault cannot be planted in the drawn place, or does not make the job hang."""


def planted(fault: str, seed: int, most_ranks: int = 64) -> PlantedHang:
    """Return a job with a fault, all the rest drawn from a seed.

    Raises ValueError for an unknown fault.
    """
    random = Random(f"{fault} {seed}")
    for _ in range(_TRIES):
        try:
            return _Planter(fault, random, most_ranks).planted()
        except _NoFaultError:
            continue
    raise ValueError(f"{fault}: no job hangs by it")


class _Planter:
    """One drawn job, with its fault."""

    def __init__(self, fault: str, random: Random, most_ranks: int) -> None:
        """Draw layout, program and habits of the job."""
        self.fault, self.random = fault, random
        self.layout = _drawn_layout(fault, random, most_ranks)
        program = StepProgram(
            layout=self.layout,
            layers=random.choice((1, 2, 3)),
            micro_batches=random.choice((4, 6, 8)),
            is_batched=fault != "p2p_order" and random.choice((True, False)),
            overlaps=random.choice((True, False, False)),
            gathers=fault == "mismatch_root",
            compute_ns=_SLOW_NS if self.layout.beside == ("checkpoint",) else _COMPUTE_NS,
        )
        self.has_timing = fault == "not_started" or random.choice((True, False))
        step = {rank: program.turns(rank) for rank in range(self.layout.world)}
        self.last = {rank: list(turns) for rank, turns in step.items()}
        self.play = HungPlay(
            steps=[step] * (_STEPS - 1) + [self.last],
            runs_ahead=random.choice((True, False)),
            begin=_BEGIN,
        )
        self.rank = random.randrange(self.layout.world)

    def planted(self) -> PlantedHang:
        """Return the job with its fault."""
        plant: dict[str, Callable[[], PlantedHang]] = {
            "missing_rank": self._stuck,
            "not_arrived": self._stuck,
            "not_started": self._frozen,
            "stalled": self._stalled,
            "left_out": self._left_out,
            "extra": self._extra,
            "swapped": self._swapped,
            "mismatch_op": self._mismatch,
            "mismatch_size": self._mismatch,
            "mismatch_dtype": self._mismatch,
            "mismatch_root": self._mismatch_root,
            "p2p_unmatched": self._message_left_out,
            "p2p_order": self._both_send,
            "p2p_size": self._message_size,
            "p2p_extra": self._extra_message,
            "group_creation": self._group_creation,
            "running": self._healthy,
            "finished": self._healthy,
            "straggler": self._healthy,
            "beside_stuck": self._beside,
            "beside_missing": self._beside,
            "checkpoint": self._checkpoint,
            "slow_outer": self._slow_outer,
        }
        if self.fault not in plant:
            raise ValueError(f"{self.fault}: expected one of {', '.join(plant)}")
        return plant[self.fault]()

    # Places

    def _place(self, allows: Callable[[Turn], bool]) -> int:
        """Return the place of a drawn turn of the last step of the rank."""
        places = [k for k, turn in enumerate(self.last[self.rank]) if allows(turn)]
        if not places:
            raise _NoFaultError
        return self.random.choice(places)

    def _number(self, place: int) -> int:
        """Return the number of a turn of the last step through all steps."""
        return (_STEPS - 1) * len(self.play.steps[0][self.rank]) + place

    def _result(
        self,
        play: HungPlay,
        kind: str,
        culprits: Sequence[int],
        others: Sequence[tuple[str, Sequence[int]]] = (),
        **changes: object,
    ) -> PlantedHang:
        turns = play.played
        if self.fault not in (*HEALTHY, *HEALTHY_BESIDE) and not play.hangs:
            raise _NoFaultError
        latest = max(
            max(call.created, call.begun if call.begun < NEVER else 0)
            for own in turns.values()
            for turn in own
            for call in turn.calls
        )
        hang = PlantedHang(
            fault=self.fault,
            layout=self.layout,
            turns=turns,
            kind=kind,
            culprits=tuple(culprits),
            accept=tuple((name, tuple(ranks)) for name, ranks in ((kind, culprits), *others)),
            moment=latest + self.random.choice((20, 60, 600)) * _SECOND,
            has_timing=self.has_timing,
        )
        return replace(hang, **changes)  # type: ignore[arg-type]

    # Faults

    def _stuck(self) -> PlantedHang:
        """The host of a rank, or of all of a node, does not come to a collective."""
        place = self._place(lambda turn: len(turn.calls) == 1)
        ranks = [self.rank]
        is_missing = self.fault.endswith("missing") or self.fault == "missing_rank"
        if self.fault == "missing_rank" and self.random.choice((True, False, False)):
            first = self.rank // 8 * 8
            ranks = [*range(first, min(first + 8, self.layout.world))]
        if len(ranks) == self.layout.world:
            raise _NoFaultError
        stuck = {}
        for rank in ranks:
            length = len(self.play.steps[0][rank])
            stuck[rank] = (_STEPS - 1) * length + min(place, length - 1)
        missing = tuple(ranks) if is_missing else ()
        kind = "missing_rank" if is_missing else "not_arrived"
        return self._result(replace(self.play, stuck=stuck), kind, ranks, missing=missing)

    def _beside(self) -> PlantedHang:
        """A rank is stuck, or dead, while threads write checkpoints."""
        hang = self._stuck()
        group = self.layout.groups["checkpoint"][0]
        moment = hang.moment + _LATER_NS
        turns = with_checkpoints(hang.turns, group, moment, self.random)
        return replace(hang, turns=turns, moment=moment)

    def _checkpoint(self) -> PlantedHang:
        """Nothing is wrong: threads write checkpoints beside the steps."""
        hang = self._healthy()
        group = self.layout.groups["checkpoint"][0]
        turns = with_checkpoints(hang.turns, group, hang.moment, self.random)
        return replace(hang, turns=turns)

    def _slow_outer(self) -> PlantedHang:
        """Nothing is wrong: an exchange beside the steps takes as long as every time."""
        step = {rank: own[: len(self.last[rank])] for rank, own in self.play.played.items()}
        rounds = slow_rounds(step, self.layout.groups["outer"][0], self.random)
        moment = rounds.begin + int(rounds.length * (0.3 + 0.65 * self.random.random()))
        return self._result(self.play, "none", [], turns=rounds.turns, moment=moment)

    def _frozen(self) -> PlantedHang:
        """The device of a rank does not begin a collective."""
        place = self._place(lambda turn: not turn.calls[0].is_message and turn.waits)
        return self._result(
            replace(self.play, frozen={self.rank: self._number(place)}),
            "not_started",
            [self.rank],
        )

    def _stalled(self) -> PlantedHang:
        """A collective that all members have begun does not end."""
        place = self._place(lambda turn: not turn.calls[0].is_message and turn.waits)
        ranks = self.last[self.rank][place].calls[0].group.ranks
        return self._result(
            replace(self.play, stalled={self.rank: self._number(place)}), "stalled", ranks
        )

    def _changed(self, turns: list[Turn]) -> HungPlay:
        """Return the job with other turns of the rank in the last step."""
        last = {**self.last, self.rank: turns}
        return replace(self.play, steps=[*self.play.steps[:-1], last])

    def _left_out(self) -> PlantedHang:
        """A rank leaves a collective out."""
        place = self._place(_is_collective)
        own = self.last[self.rank]
        if place + 1 < len(own) and own[place] == own[place + 1]:
            raise _NoFaultError  # which of two equal ones is absent, nobody can tell
        play = self._changed([*own[:place], *own[place + 1 :]])
        return self._of_order(play, place)

    def _extra(self) -> PlantedHang:
        """A rank makes a collective that the others do not make."""
        place = self._place(_is_collective)
        own = self.last[self.rank]
        more = self.random.choice([turn for turn in own if _is_collective(turn)])
        if more in (own[place], own[place - 1]):
            raise _NoFaultError
        return self._of_order(self._changed([*own[:place], more, *own[place:]]), place)

    def _swapped(self) -> PlantedHang:
        """A rank makes two neighboring collectives in the other order."""
        own = self.last[self.rank]
        place = self._place(_is_collective)
        if place + 1 == len(own) or not _is_collective(own[place + 1]):
            raise _NoFaultError
        one, two = own[place], own[place + 1]
        if one == two:
            raise _NoFaultError
        return self._of_order(self._changed([*own[:place], two, one, *own[place + 2 :]]), place)

    def _of_order(self, play: HungPlay, place: int) -> PlantedHang:
        """Return a job of which a rank leaves the order, if it hangs within two turns."""
        turns = play.played[self.rank]
        stands = next((k for k, turn in enumerate(turns) if turn.ended == NEVER), None)
        if stands is None or not -1 <= stands - self._number(place) <= 1:
            raise _NoFaultError  # calls shift, and it hangs somewhere else
        return self._result(
            play, "order", [self.rank], [(kind, [self.rank]) for kind in _ORDER[1:]]
        )

    def _mismatch(self) -> PlantedHang:
        """A rank calls another operation, or with another size or type."""
        place = self._place(
            lambda turn: (
                _is_collective(turn)
                and (self.fault == "mismatch_op" or turn.calls[0].op != "all_to_all")
                and (self.fault != "mismatch_op" or turn.calls[0].op in _OTHER_OP)
            )
        )
        own = self.last[self.rank]
        call = own[place].calls[0]
        longer = tuple((shape[0] + 8, *shape[1:]) for shape in call.inputs)
        changes: dict[str, object] = {
            "mismatch_op": {"op": _OTHER_OP.get(call.op, call.op)},
            "mismatch_size": {"inputs": longer},
            "mismatch_dtype": {"dtype": "Half"},
        }[self.fault]  # type: ignore[assignment]
        if self.fault == "mismatch_size" and call.op in ("all_reduce", "broadcast"):
            changes["outputs"] = longer
        turns = [*own[:place], own[place].like(**changes), *own[place + 1 :]]
        return self._result(
            self._changed(turns), self.fault, [self.rank], [("order", [self.rank])]
        )

    def _mismatch_root(self) -> PlantedHang:
        """A second rank takes the root's side of a gather."""
        self.rank = self.random.randrange(1, self.layout.world)
        place = self._place(lambda turn: turn.calls[0].op == "gather")
        own = self.last[self.rank]
        outputs = self.last[0][-2].calls[0].outputs
        turns = [*own[:place], own[place].like(outputs=outputs), *own[place + 1 :]]
        return self._result(self._changed(turns), "mismatch_root", [self.rank])

    def _message_left_out(self) -> PlantedHang:
        """A rank leaves out a message, alone or of a batch."""
        own = self.last[self.rank]
        place = self._place(lambda turn: turn.calls[0].is_message)
        turn = own[place]
        absent = self.random.choice(turn.calls)
        rest = tuple(call for call in turn.calls if call != absent)
        turns = [
            *own[:place],
            *([replace(turn, calls=rest)] if rest else []),
            *own[place + 1 :],
        ]
        pair = sorted((self.rank, absent.peer))
        return self._result(
            self._changed(turns),
            "p2p_unmatched",
            [self.rank],
            [("p2p_unmatched", pair), ("order", [self.rank]), ("p2p_order", pair)],
        )

    def _extra_message(self) -> PlantedHang:
        """A rank makes a message that nobody takes or gives, in a batch or behind it."""
        own = self.last[self.rank]
        place = self._place(lambda turn: turn.calls[0].is_message)
        turn = own[place]
        more = self.random.choice(turn.calls)
        is_inside = len(turn.calls) > 1 and self.random.choice((True, False))
        turns = (
            [replace(turn, calls=(*turn.calls, more))]
            if is_inside
            else [turn, replace(turn, calls=(more,))]
        )
        pair = sorted((self.rank, more.peer))
        return self._result(
            self._changed([*own[:place], *turns, *own[place + 1 :]]),
            "p2p_unmatched",
            [self.rank],
            [("p2p_unmatched", pair), ("order", [self.rank]), ("p2p_order", pair)],
        )

    def _message_size(self) -> PlantedHang:
        """A rank sends or receives more than the other side of the message."""
        own = self.last[self.rank]
        place = self._place(lambda turn: turn.calls[0].is_message)
        turn = own[place]
        odd = self.random.choice(turn.calls)
        longer = tuple((shape[0] + 8, *shape[1:]) for shape in odd.inputs)
        calls = tuple(
            replace(call, inputs=longer, outputs=longer) if call is odd else call
            for call in turn.calls
        )
        pair = sorted((self.rank, odd.peer))
        return self._result(
            self._changed([*own[:place], replace(turn, calls=calls), *own[place + 1 :]]),
            "mismatch_size",
            pair,
            [("p2p_unmatched", pair)],  # where the ring is too short to count messages
        )

    def _both_send(self) -> PlantedHang:
        """Two neighbors send to each other first, without a batch."""
        own = self.last[self.rank]
        place = self._place(lambda turn: turn.calls[0].op == "recv")
        if place + 1 == len(own) or own[place + 1].calls[0].op != "send":
            raise _NoFaultError
        peer = own[place].calls[0].peer
        if own[place + 1].calls[0].peer != peer:
            raise _NoFaultError
        turns = [*own[:place], own[place + 1], own[place], *own[place + 2 :]]
        pair = sorted((self.rank, peer))
        return self._result(
            self._changed(turns),
            "p2p_order",
            pair,
            [("p2p_order", [rank]) for rank in pair]
            + [("p2p_unmatched", pair), ("order", [self.rank])],
        )

    def _group_creation(self) -> PlantedHang:
        """All ranks but one make a group after a step; only stacks tell."""
        turns = {rank: own[:-1] for rank, own in self.play.played.items()}
        stacks = dict.fromkeys(turns, "new_group")
        stacks[self.rank] = "load_checkpoint"
        standing = [rank for rank in turns if rank != self.rank]
        latest = max(own[-1].ended for own in turns.values())
        return PlantedHang(
            fault=self.fault, layout=self.layout, turns=turns, kind="group_creation",
            culprits=(self.rank,), moment=latest + 60 * _SECOND, stacks=stacks,
            accept=(("group_creation", (self.rank,)), ("group_creation", tuple(standing))),
        )  # fmt: skip

    def _healthy(self) -> PlantedHang:
        """Nothing is wrong, or one rank is slow in every step."""
        play = self.play
        if self.fault == "straggler":
            play = replace(play, speed={self.rank: 1 + 4 * self.random.random()})
        turns = play.played
        end = max(own[-1].ended for own in turns.values())
        begin = min(own[len(own) * 3 // 4].calls[0].created for own in turns.values())
        moment = (
            end + _SECOND // 2 if self.fault == "finished" else self.random.randint(begin, end)
        )
        return self._result(play, "none", [], moment=moment)


def _is_collective(turn: Turn) -> bool:
    return not turn.calls[0].is_message and turn.waits


def _drawn_layout(fault: str, random: Random, most: int) -> HungLayout:
    """Return the layout of a job of at least 8 ranks."""
    sizes = [*_layouts(most, needs_pp=fault.startswith("p2p"))]
    tp, dp, pp = random.choice(sizes)
    ep = random.choice([size for size in (1, 2, 4, 8) if dp % size == 0])
    return HungLayout(
        tp=tp, dp=dp, pp=pp, ep=ep, style=random.choice(("megatron", "mesh")),
        has_hashes=random.choice((True, False, False)),
        beside=_BESIDE.get(fault, ()),
    )  # fmt: skip


def _layouts(most: int, *, needs_pp: bool) -> Iterator[tuple[int, int, int]]:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    for tp in sizes[:4]:
        for pp in sizes[:4]:
            for dp in sizes:
                if _LEAST <= tp * pp * dp <= most and (pp > 1 or not needs_pp):
                    yield tp, dp, pp
