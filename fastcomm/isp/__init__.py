"""Which way of splitting a model over a cluster trains fastest, and fits.

The `Question` of a search has the model, the world size, the batch and the memory limit.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from fastcomm.checks import IMBALANCE, PENALTY, RANKS
from fastcomm.errors import ConfigError
from fastcomm.isp.model import Model
from fastcomm.isp.presets import load
from fastcomm.options import Quantities, SearchOptions
from fastcomm.units import parse_quantity

ALGOS = ("isp", "msp", "fsp", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRule:
    """The rule that says which micro-batches are tried.

    `least` to `most` tokens a step; `micro_bsz` and `micro_num` leave only one value each.
    """

    least: int
    most: int
    micro_bsz: int | None = None
    micro_num: int | None = None

    @property
    def strict(self) -> bool:
        """Whether the batch is one number."""
        return self.least == self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A search, in both modes; `Question.check` says what can never be answered."""

    model: Model
    world_sizes: tuple[int, ...]
    seq_len: int
    batch: MicroBatchRule
    # None is the GPU's.
    memory: float | None = None
    algos: tuple[str, ...] = ALGOS
    pp: tuple[int, ...] | None = None
    sp: tuple[int, ...] | None = None
    dtype_size: int = 2
    flash: bool = True
    # What contention takes: share of the shorter of two overlapped parts.
    penalty: float = 0.2
    overlap_grad: bool = False
    grad_sync: str = "all_reduce"
    param_sync: str = "broadcast"
    # "per_op": each product overlaps its own weights alone.
    overlap: str = "layer"
    # Virtual stages of a rank, interleaved; None is all that divide a stage's layers.
    interleave: tuple[int, ...] | None = None
    # Ranks that share a layer's experts; None is all that divide both.
    ep: tuple[int, ...] | None = None
    # Tokens of the fullest rank's experts over their mean.
    imbalance: float = 1.0
    # "copies": a token goes to each of its experts; "nodes": once to each of their nodes.
    dispatch: str = "copies"
    # Hide the experts' all-to-alls behind another micro-batch's arithmetic.
    overlap_experts: bool = False
    # What an MTP rank sends to the next stage: all of it ("whole"), or its share ("scatter").
    p2p: str = "whole"
    any_schedule: bool = False
    # DeepSpeed-Ulysses: weights whole or cut by all replicas.
    ulysses: bool = False

    def check(self) -> None:
        """Raise `ConfigError` for what no strategy can satisfy."""
        if not self.world_sizes:
            raise ConfigError("world size: none is left, wanted at least one")
        PENALTY.check(self.penalty, "penalty")
        IMBALANCE.check(self.imbalance, "imbalance")
        if unknown := set(self.algos) - set(ALGOS):
            raise ConfigError(
                f"algorithm {min(unknown)!r}: known are {', '.join(ALGOS)} (and dsp)"
            )
        self._check_batch()
        self._check_shards()

    def _check_batch(self) -> None:
        batch = self.batch
        if batch.least > batch.most:
            raise ConfigError(
                f"global batch: the least, {batch.least}, is above the most, {batch.most}"
            )
        if batch.strict and batch.least % self.seq_len:
            lower = batch.least // self.seq_len * self.seq_len
            nearest = f"{lower} or {lower + self.seq_len}" if lower else str(self.seq_len)
            raise ConfigError(
                f"global batch {batch.least}: no multiple of the sequence length "
                f"{self.seq_len}; the nearest are {nearest}"
            )

    def _check_shards(self) -> None:
        model = self.model
        for pp in self.pp or ():
            if pp > model.layers:
                raise ConfigError(
                    f"pp {pp}: {model.name} has {model.layers} layers, its most stages"
                )
        if self.ep and not model.experts and set(self.ep) != {1}:
            raise ConfigError(f"ep: {model.name} has no experts to spread")
        experts = model.experts.number if model.experts else 1
        for name, asked, whole, what in (
            ("sp", self.sp, model.heads, "heads"),
            ("ep", self.ep, experts, "experts"),
            ("interleave", self.interleave, model.layers, "layers"),
        ):
            for each in asked or ():
                if whole % each:
                    near = max(n for n in range(1, min(each, whole) + 1) if whole % n == 0)
                    raise ConfigError(
                        f"{name} {each}: {model.name} has {whole} {what}, which it has to "
                        f"divide; the nearest below is {near}"
                    )


# A batch that anything fits: the micro-batches are given.
_ANY = 1 << 60
_NODE = 8
_PAIR = 2


def world_sizes(text: str | float | tuple[int, ...], node: int = _NODE) -> tuple[int, ...]:
    """The sizes of "128", "64,128" or "64-256": every whole node from least to most."""
    found: list[int] = []
    for part in _parts(text):
        ends = [parse_quantity(end, "world size", RANKS.most) for end in part.split("-")]
        if len(ends) > _PAIR or ends[0] > ends[-1]:
            raise ConfigError(f"world size: found {part!r}, wanted as in 128 or 64-256")
        if len(ends) == 1:
            found += ends
        elif not (whole := list(range(-(-ends[0] // node) * node, ends[1] + 1, node))):
            raise ConfigError(f"world size: no whole node of {node} GPUs lies in {part!r}")
        else:
            found += whole
    return tuple(dict.fromkeys(found))


def numbers(text: Quantities, what: str) -> tuple[int, ...] | None:
    """The numbers of "1,2,4" or "4Ki,64Ki"; None for nothing said."""
    if text is None:
        return None
    return tuple(dict.fromkeys(parse_quantity(part, what) for part in _parts(text)))


def _parts(text: str | float | tuple[int, ...]) -> list[str]:
    return list(map(str, text)) if isinstance(text, tuple) else str(text).split(",")


def algorithms(text: str | None) -> tuple[str, ...]:
    """The algorithms of "MSP,FSP"; all where nothing is said."""
    return tuple(part.strip().lower() for part in text.split(",")) if text else ALGOS


def batch(options: SearchOptions) -> MicroBatchRule:
    """The rule of the batch: one number, a range, or a given pair."""
    whole, least, most, bsz, num = (
        None if value is None else parse_quantity(value, what)
        for what, value in (
            ("global batch", options.global_batch),
            ("global batch min", options.global_batch_min),
            ("global batch max", options.global_batch_max),
            ("micro bsz", options.micro_bsz),
            ("micro num", options.micro_num),
        )
    )
    if whole is None and least is None and most is None:
        if bsz is None or num is None:
            raise ConfigError(
                "global batch: say its tokens, as in 4Mi, or both micro_bsz and micro_num"
            )
        return MicroBatchRule(least=1, most=_ANY, micro_bsz=bsz, micro_num=num)
    if whole is not None and (least is not None or most is not None):
        raise ConfigError("global batch: one number or a range, not both")
    if whole is None and most is None:
        raise ConfigError("global batch: a range needs a most")
    return MicroBatchRule(
        least=whole or least or 1, most=whole or most or _ANY, micro_bsz=bsz, micro_num=num
    )


def question_of(options: SearchOptions, *, seq_len: int | None = None) -> Question:
    """Return the question that the options ask.

    With several sequence lengths, `seq_len` chooses one; by default the first is taken, and
    the question is not checked.

    Raises
    ------
    ConfigError
        If an option is missing, or no strategy can satisfy the options.

    """
    model, world_size, length = options.model, options.world_size, options.seq_len
    if model is None:
        raise ConfigError("model: not said")
    if world_size is None:
        raise ConfigError("world size: not said")
    if length is None:
        raise ConfigError("seq len: not said")
    algos = algorithms(options.algorithms)
    ulysses = algos == ("dsp",)
    if "dsp" in algos and not ulysses:
        raise ConfigError("dsp is isp with weights whole or fully sharded: ask for it alone")
    # DeepSpeed-Ulysses overlaps nothing: both parts count whole.
    penalty = 1.0 if ulysses else options.penalty
    lengths = numbers(length, "sequence length") or ()
    question = Question(
        model=_model(model, options.vocab),
        world_sizes=world_sizes(world_size),
        seq_len=seq_len or lengths[0],
        batch=batch(options),
        memory=None if options.memory is None else parse_quantity(options.memory, "memory"),
        algos=("isp",) if ulysses else algos,
        pp=numbers(options.pp, "pp"),
        sp=numbers(options.sp, "sp"),
        ep=numbers(options.ep, "ep"),
        interleave=numbers(options.interleave, "interleave"),
        dtype_size=options.dtype_size or 2,
        flash=options.flash is not False,
        penalty=0.2 if penalty is None else penalty,
        overlap_grad=options.overlap_grad,
        grad_sync=options.grad_sync,
        param_sync=options.param_sync,
        overlap=options.overlap,
        imbalance=1.0 if options.imbalance is None else options.imbalance,
        dispatch=options.dispatch,
        overlap_experts=options.overlap_experts,
        p2p=options.p2p,
        any_schedule=options.any_schedule,
        ulysses=ulysses,
    )
    if len(lengths) == 1 or seq_len:
        question.check()
    return question


def _model(name: str | Path, vocab: str | float | None) -> Model:
    model = load(str(name))
    return replace(model, vocab=parse_quantity(vocab, "vocabulary")) if vocab else model
