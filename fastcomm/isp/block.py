"""A block: strategies of one world size, pipeline, sequence shard and algorithm.

Micro-batches and checkpointing are rows of shape (n, 1), shards are columns of shape (k,): what
depends on one alone is computed once for it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.isp.model import Layer
from fastcomm.isp.question import Question

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
