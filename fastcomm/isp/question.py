"""What is asked: a model, a world, a batch, a limit of memory. Tokens, bytes."""

from dataclasses import dataclass

from fastcomm.errors import ConfigError
from fastcomm.isp.model import Model
from fastcomm.ranges import IMBALANCE, PENALTY

ALGOS = ("isp", "msp", "fsp", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
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
    batch: Batch
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
