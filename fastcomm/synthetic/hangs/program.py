"""What each rank of a made-up job calls in a step: collectives and messages, in order.

Ranks are laid out as in Megatron, tensor parallelism first: ``tp + TP * (dp + DP * pp)``.
Expert parallelism takes blocks of neighbors from the data dimension.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

_WIDTH = 4096
_TOKENS = 2048
_PARAMETERS = 1 << 20
_DESCS = {
    "megatron": {
        "tp": "TENSOR_MODEL_PARALLEL_GROUP",
        "dp": "DATA_PARALLEL_GROUP",
        "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
        "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    },
    "mesh": {kind: f"mesh_{kind}" for kind in ("tp", "dp", "pp", "ep")},
}
CallShape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HungGroup:
    """A process group of the job."""

    kind: str  # world, tp, dp, pp, ep, checkpoint, outer
    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HungCall:
    """One collective, or one message, as a rank calls it."""

    group: HungGroup
    op: str
    inputs: tuple[CallShape, ...]
    outputs: tuple[CallShape, ...]
    dtype: str = "BFloat16"
    peer: int = -1  # of a message
    place: str = "train_step"  # function that makes the call
    library: str = "nccl"
    thread: int = 0  # of the rank that makes the call: 0 trains

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.peer >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Calls that a rank makes at once: one, or a batch of messages.

    The device goes on behind it when all have ended; without `waits`, at once.
    """

    calls: tuple[HungCall, ...]
    compute_ns: int = 0  # before it
    is_batch: bool = False
    waits: bool = True

    def like(self, **changes: object) -> "Turn":
        """Return it with a changed call, which has to be its only one."""
        (call,) = self.calls
        return replace(self, calls=(replace(call, **changes),))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class HungLayout:
    """CallShape of the dimensions of parallelism, and how groups are named."""

    tp: int
    dp: int
    pp: int
    ep: int = 1
    style: str = "megatron"
    has_hashes: bool = False  # names of groups are hashes, not numbers
    beside: tuple[str, ...] = ()  # kinds of groups of all ranks, besides the world

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.pp

    def at(self, rank: int) -> tuple[int, int, int]:
        """Return the place of a rank in each dimension: tp, dp, pp."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    @cached_property
    def groups(self) -> dict[str, dict[int, HungGroup]]:
        """The group of each rank, by kind; kinds of one rank are left out."""
        by_kind: dict[str, dict[tuple[int, ...], list[int]]] = {}
        for rank in range(self.world):
            tp, dp, pp = self.at(rank)
            keys = {
                "world": (),
                "dp": (tp, pp),
                "pp": (tp, dp),
                "tp": (dp, pp),
                "ep": (tp, pp, dp // self.ep),
                **dict.fromkeys(self.beside, ()),
            }
            for kind, key in keys.items():
                by_kind.setdefault(kind, {}).setdefault(key, []).append(rank)
        return {kind: dict(self._named(kind, own, by_kind)) for kind, own in by_kind.items()}

    def _named(
        self,
        kind: str,
        own: dict[tuple[int, ...], list[int]],
        by_kind: dict[str, dict[tuple[int, ...], list[int]]],
    ) -> Iterator[tuple[int, HungGroup]]:
        begin = sum(len(by_kind[other]) for other in list(by_kind)[: [*by_kind].index(kind)])
        for number, ranks in enumerate(own.values(), begin):
            if len(ranks) == 1:
                continue
            name = str(number)
            if self.has_hashes and kind != "world":
                name = hashlib.sha1(f"{kind}{ranks}".encode()).hexdigest()
            desc = "default_pg" if kind == "world" else _DESCS[self.style].get(kind, kind)
            group = HungGroup(kind=kind, name=name, desc=desc, ranks=tuple(ranks))
            yield from ((rank, group) for rank in ranks)


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """The calls of a training step: 1F1B, then gradients, the norm and the log."""

    layout: HungLayout
    layers: int = 2
    micro_batches: int = 4
    compute_ns: int = 2_000_000  # of a layer
    is_batched: bool = True  # a send and a receive in turn are one batch
    overlaps: bool = False  # gradients are reduced beside the backward pass
    gathers: bool = False  # the log is gathered on the first rank

    def turns(self, rank: int) -> list[Turn]:
        """Return what a rank calls in a step."""
        return [*self._passes(rank), *self._update(rank)]

    def _passes(self, rank: int) -> Iterator[Turn]:
        """Yield the micro-batches: some forward, then in turn, then the rest backward."""
        pp, many = self.layout.pp, self.micro_batches
        stage = self.layout.at(rank)[2]
        warm = min(pp - stage - 1, many)
        for _ in range(warm):
            yield from self._receive(rank, -1)
            yield from self._layers(rank, "forward")
            yield from self._send(rank, 1)
        if many > warm:
            yield from self._receive(rank, -1)
        for k in range(many - warm):
            is_last = k == many - warm - 1
            yield from self._layers(rank, "forward")
            yield from self._exchange(rank, 1)
            yield from self._backward(rank, is_last=is_last and warm == 0)
            yield from self._send(rank, -1) if is_last else self._exchange(rank, -1)
        for k in range(warm):
            yield from self._receive(rank, 1)
            yield from self._backward(rank, is_last=k == warm - 1)
            yield from self._send(rank, -1)

    def _backward(self, rank: int, *, is_last: bool) -> Iterator[Turn]:
        yield from self._layers(rank, "backward")
        if self.overlaps and is_last:
            yield from self._gradients(rank, waits=False)

    def _layers(self, rank: int, place: str) -> Iterator[Turn]:
        whole, part = ((_TOKENS * 2, _WIDTH),), ((_TOKENS, _WIDTH),)
        for _ in range(self.layers):
            yield from self._collective(rank, "tp", "_all_gather_base", (part, whole), place)
            yield from self._collective(
                rank, "tp", "_reduce_scatter_base", (whole, part), place
            )
            for _ in range(2):
                yield from self._collective(rank, "ep", "all_to_all", (part, part), place)

    def _collective(
        self,
        rank: int,
        kind: str,
        op: str,
        shapes: tuple[tuple[CallShape, ...], tuple[CallShape, ...]],  # of input and output
        place: str,
        *,
        dtype: str = "BFloat16",
        waits: bool = True,
    ) -> Iterator[Turn]:
        group = self.layout.groups[kind].get(rank)
        if group is not None:
            call = HungCall(
                group=group,
                op=op,
                inputs=shapes[0],
                outputs=shapes[1],
                dtype=dtype,
                place=place,
            )
            yield Turn(calls=(call,), compute_ns=self.compute_ns, waits=waits)

    def _message(self, rank: int, op: str, step: int) -> Iterator[HungCall]:
        """Yield a message with the next stage, or with the one before; none at the ends."""
        tp, dp, pp = self.layout.at(rank)
        if 0 <= pp + step < self.layout.pp:
            peer = tp + self.layout.tp * (dp + self.layout.dp * (pp + step))
            shape = ((_TOKENS, 1, _WIDTH),)
            yield HungCall(
                group=self.layout.groups["pp"][rank], op=op, inputs=shape, outputs=shape,
                peer=peer, place=f"{op}_{'next' if step > 0 else 'previous'}",
            )  # fmt: skip

    def _send(self, rank: int, step: int) -> Iterator[Turn]:
        for call in self._message(rank, "send", step):
            yield Turn(calls=(call,), compute_ns=self.compute_ns)

    def _receive(self, rank: int, step: int) -> Iterator[Turn]:
        for call in self._message(rank, "recv", step):
            yield Turn(calls=(call,))

    def _exchange(self, rank: int, step: int) -> Iterator[Turn]:
        """Yield a send to and a receive from a neighbor, as a batch or one after the other."""
        both = (*self._message(rank, "send", step), *self._message(rank, "recv", step))
        if not both:
            return
        if self.is_batched:
            yield Turn(calls=both, compute_ns=self.compute_ns, is_batch=True)
            return
        # The later stage receives first, so that neighbors never send to each other at once.
        order = both if step > 0 else both[::-1]
        yield from (Turn(calls=(call,), compute_ns=self.compute_ns) for call in order)

    def _gradients(self, rank: int, *, waits: bool) -> Iterator[Turn]:
        dp = self.layout.dp
        whole, part = ((_PARAMETERS * dp,),), ((_PARAMETERS,),)
        yield from self._collective(
            rank, "dp", "_reduce_scatter_base", (whole, part), "reduce_gradients",
            dtype="Float", waits=waits,
        )  # fmt: skip

    def _update(self, rank: int) -> Iterator[Turn]:
        one, two = ((1,),), ((2,),)
        part, whole = ((_PARAMETERS,),), ((_PARAMETERS * self.layout.dp,),)
        if not self.overlaps:
            yield from self._gradients(rank, waits=True)
        yield from self._collective(
            rank, "world", "all_reduce", (one, one), "clip_gradients", dtype="Float"
        )
        yield from self._collective(rank, "dp", "_all_gather_base", (part, whole), "optimize")
        yield from self._collective(rank, "dp", "all_reduce", (two, two), "log", dtype="Float")
        if self.gathers:
            outputs = two * self.layout.world if rank == 0 else ()
            yield from self._collective(
                rank, "world", "gather", (two, outputs), "log", dtype="Float"
            )
        yield from self._collective(
            rank, "world", "all_reduce", (one, one), "log", dtype="Float"
        )
