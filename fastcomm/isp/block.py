"""Strategies that share their layout, and the parameters that each pipeline stage holds."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.isp import Question
from fastcomm.isp.model import Layer, Model

# As in `fastcomm_kernels.arrays`, whose package loads numba, which a search does without.
Ints = NDArray[np.int64]

NONE, FULL, SELECTIVE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What is priced at once; `Block.one` makes that of a single strategy."""

    world: int
    pp: int
    sp: int
    algo: str
    bsz: Ints
    num: Ints
    ck: Ints
    para: Ints
    grads: Ints
    os: Ints
    # Ranks that share a layer's experts, next to one another.
    ep: int = 1
    # Virtual stages of a rank, by rows; None is one everywhere.
    stages: Ints | None = None

    @classmethod
    def one(  # noqa: PLR0913 a strategy has so many numbers
        cls,
        *,
        world: int,
        algo: str,
        pp: int = 1,
        sp: int = 1,
        bsz: int = 1,
        num: int = 1,
        ck: int = 0,
        shards: tuple[int, int, int] = (1, 1, 1),
        ep: int = 1,
        interleave: int = 1,
    ) -> "Block":
        """A single strategy."""
        row = [np.array([[value]], np.int64) for value in (bsz, num, ck)]
        cut = [np.array([value], np.int64) for value in shards]
        return cls(
            world=world,
            pp=pp,
            sp=sp,
            algo=algo,
            bsz=row[0],
            num=row[1],
            ck=row[2],
            para=cut[0],
            grads=cut[1],
            os=cut[2],
            ep=ep,
            stages=np.array([[interleave]], np.int64),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.bsz), len(self.os)

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.world // self.pp // self.sp

    @property
    def isp(self) -> bool:
        """Whether weights are sharded apart from the sequence."""
        return self.algo == "isp"

    @property
    def tp(self) -> int:
        """By how much the algorithm itself cuts the weights."""
        return 1 if self.isp else self.sp

    @property
    def replicas(self) -> int:
        """Ranks that hold, or share, the same weights."""
        return self.world // self.pp if self.isp else self.dp

    @property
    def holders(self) -> int:
        """Ranks that hold, or share, the same experts."""
        return self.world // self.pp // self.ep

    @property
    def interleave(self) -> Ints | int:
        """Virtual stages of a rank, by rows."""
        return 1 if self.stages is None else self.stages

    @property
    def whole(self) -> int:
        """By how much the norms and stage inputs are cut: MTP repeats them on every rank."""
        return 1 if self.algo == "mtp" else self.sp

    def kept(self, question: Question, layer: Layer) -> float:
        """What a layer keeps, scores apart, in units of D/2 bytes a hidden element."""
        whole = 4 if self.algo == "msp" else self._repeated(question)
        return self._spread(question, layer, whole)

    def touched(self, question: Question, layer: Layer) -> float:
        """The same of what element-wise work reads: MSP cuts its norms."""
        return self._spread(question, layer, self._repeated(question))

    def _spread(self, question: Question, layer: Layer, whole: int) -> float:
        # 8 around attention and MLP, 10 of queries, keys, values and their result.
        around = 8 + 10 * question.model.breadth
        wide = layer.wide
        if layer.experts:
            copies = layer.experts.top_k * (4 + 8 * layer.experts.ffn / question.model.hidden)
            wide += (question.imbalance - 1) * copies
        return whole + (around - whole + wide) / self.sp

    def _repeated(self, question: Question) -> int:
        if self.algo != "mtp":
            return 0
        return 8 if question.model.mlp == "swiglu" else 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedElements:
    """Elements of a rank before its shards; the ranks that have them too are `stride` apart."""

    elements: float
    para: Ints
    grads: Ints
    os: Ints
    replicas: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What shards cut, and ISP's embedding and head, which only the sequence's shards cut."""

    pieces: tuple[ShardedElements, ...]
    rest: float

    @classmethod
    def of(
        cls, block: Block, question: Question, counts: tuple[int, ...], ends: int
    ) -> "Stage":
        """A stage of so many layers of each kind, with so many of embedding and head."""
        model = question.model
        inside = sum(
            count * kind.parameters for count, kind in zip(counts, model.kinds, strict=True)
        )
        inside = inside / block.tp
        ends = min(ends, 1) if model.tied else ends
        outside = ends * model.embedding / block.sp
        blocks, rest = (inside, outside) if block.isp else (inside + outside, 0.0)
        pieces = [layers_of(block, blocks)]
        if model.experts:
            pieces.append(experts_of(block, counts[0] * model.expert_parameters / block.ep))
        return cls(pieces=tuple(pieces), rest=rest)

    def states(self, block: Block) -> NDArray[np.float64]:
        """Elements that a rank optimizes; of ISP's ends half, where there are two to share."""
        cut = sum(piece.elements / piece.os for piece in self.pieces)
        return np.asarray(cut + self.rest / min(2, block.dp))


def places(pp: int, model: Model) -> list[int]:
    """Stages that can be slowest or fullest: first, first of the long, last; around experts."""
    least, longer = divmod(model.layers, pp)
    found = {0, pp - longer if longer else 0, pp - 1}
    if len(model.kinds) > 1 and model.experts:
        begin = model.experts.dense_layers // least
        found |= {place for place in (begin, begin + 1) if place < pp}
    return sorted(found)


def layers_of(block: Block, elements: float) -> ShardedElements:
    """So many elements of layers, apart from their routed experts."""
    return ShardedElements(
        elements=elements,
        para=block.para,
        grads=block.grads,
        os=block.os,
        replicas=block.replicas,
        stride=block.tp,
    )


def experts_of(block: Block, elements: float) -> ShardedElements:
    """So many elements of routed experts: cut as far as the ranks that hold them allow."""
    return ShardedElements(
        elements=elements,
        para=np.gcd(block.para, block.holders),
        grads=np.gcd(block.grads, block.holders),
        os=np.gcd(block.os, block.holders),
        replicas=block.holders,
        stride=block.ep,
    )
