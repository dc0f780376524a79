"""Elements of a pipeline stage: what chains of shards cut, and how its replicas lie."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.isp.block import Block
from fastcomm.isp.model import Model
from fastcomm.isp.question import Question

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
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

    pieces: tuple[Piece, ...]
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


def layers_of(block: Block, elements: float) -> Piece:
    """So many elements of layers, apart from their routed experts."""
    return Piece(
        elements=elements,
        para=block.para,
        grads=block.grads,
        os=block.os,
        replicas=block.replicas,
        stride=block.tp,
    )


def experts_of(block: Block, elements: float) -> Piece:
    """So many elements of routed experts: cut as far as the ranks that hold them allow."""
    return Piece(
        elements=elements,
        para=np.gcd(block.para, block.holders),
        grads=np.gcd(block.grads, block.holders),
        os=np.gcd(block.os, block.holders),
        replicas=block.holders,
        stride=block.ep,
    )
