"""Strategies of one layout, and the parameters that each pipeline stage holds."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.isp.internevo import Question
from fastcomm.isp.model import Layer, Model

# As in `fastcomm_kernels.arrays`, whose package loads numba, which a search does without.
IntArray = NDArray[np.int64]

NONE, FULL, SELECTIVE = 0, 1, 2  # recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyGrid:
    """Strategies of one layout, priced at once.

    A row, (rows, 1), is a micro-batch, a recompute mode and a number of virtual stages. A
    column, (columns,), is a set of shards. `one` makes the grid of a single strategy.
    """

    world: int
    pp: int
    sp: int
    algo: str
    # By row: sequences of a micro-batch, number of micro-batches, NONE, FULL or SELECTIVE.
    bsz: IntArray
    num: IntArray
    recompute: IntArray
    # By column: shards of parameters, gradients and optimizer states.
    para: IntArray
    grads: IntArray
    os: IntArray
    ep: int = 1  # consecutive ranks that share a layer's experts
    stages: IntArray | None = None  # virtual stages of a rank, by row; None is one everywhere

    @classmethod
    def one(  # noqa: PLR0913 numbers of a strategy
        cls,
        *,
        world: int,
        algo: str,
        pp: int = 1,
        sp: int = 1,
        bsz: int = 1,
        num: int = 1,
        recompute: int = 0,
        shards: tuple[int, int, int] = (1, 1, 1),
        ep: int = 1,
        interleave: int = 1,
    ) -> "StrategyGrid":
        """Make the grid of one strategy, with one row and one column.

        Parameters
        ----------
        world, pp, sp, ep
            Numbers of ranks: of the job, of pipeline stages, that share a sequence, that share
            a layer's experts.
        algo
            One of `ALGOS`.
        bsz, num
            Sequences of a micro-batch, number of micro-batches.
        recompute
            NONE, FULL or SELECTIVE.
        shards
            Shards of parameters, gradients and optimizer states.
        interleave
            Virtual stages of a rank.

        """
        rows = {"bsz": bsz, "num": num, "recompute": recompute, "stages": interleave}
        columns = zip(("para", "grads", "os"), shards, strict=True)
        return cls(
            world=world,
            pp=pp,
            sp=sp,
            ep=ep,
            algo=algo,
            **{name: np.array([[value]], np.int64) for name, value in rows.items()},
            **{name: np.array([value], np.int64) for name, value in columns},
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns."""
        return len(self.bsz), len(self.os)

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.world // self.pp // self.sp

    @property
    def isp(self) -> bool:
        """Whether the algorithm is ISP, which shards weights independently of the sequence."""
        return self.algo == "isp"

    @property
    def tp(self) -> int:
        """Degree by which the algorithm itself shards the weights."""
        return 1 if self.isp else self.sp

    @property
    def replicas(self) -> int:
        """Ranks that hold or share the same weights."""
        return self.world // self.pp if self.isp else self.dp

    @property
    def holders(self) -> int:
        """Number of ranks that share the same experts, or hold a copy of them."""
        return self.world // self.pp // self.ep

    @property
    def interleave(self) -> IntArray | int:
        """Virtual stages of a rank, by row: shape (rows, 1), or 1 if everywhere one."""
        return 1 if self.stages is None else self.stages

    @property
    def whole(self) -> int:
        """Degree by which norms and stage inputs are sharded; 1 for MTP."""
        return 1 if self.algo == "mtp" else self.sp

    def activations(self, question: Question, layer: Layer) -> float:
        """Return the activations of a layer, without scores: ranks repeat or shard them.

        The layer saves them for its backward pass, and element-wise work reads them. The unit
        is D/2 bytes per element of hidden states, where D are the bytes of an element.
        """
        repeated = self._repeated(question)
        # 8 around attention and MLP, 10 of queries, keys, values and attention output.
        around = 8 + 10 * question.model.breadth
        wide = layer.wide
        if layer.experts:
            copies = layer.experts.top_k * (4 + 8 * layer.experts.ffn / question.model.hidden)
            wide += (question.imbalance - 1) * copies
        return repeated + (around - repeated + wide) / self.sp

    def _repeated(self, question: Question) -> int:
        """Return the activations that every rank of a tensor-parallel group repeats."""
        if self.algo != "mtp":
            return 0
        return 8 if question.model.mlp == "swiglu" else 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedElements:
    """Elements of a rank before sharding, and the shards by which they are divided."""

    elements: float
    para: IntArray
    grads: IntArray
    os: IntArray
    replicas: int  # ranks that hold the same elements
    stride: int  # distance between these ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Parameters of a pipeline stage: sharded pieces, and those sharded by `sp` alone."""

    pieces: tuple[ShardedElements, ...]
    unsharded: float  # elements of ISP's embedding and head; 0 for other algorithms

    @classmethod
    def of(
        cls, grid: StrategyGrid, question: Question, counts: tuple[int, ...], ends: int
    ) -> "Stage":
        """Return the elements of the weights that a pipeline stage holds.

        Parameters
        ----------
        grid
            Strategies, which divide the weights.
        question
            Has the model.
        counts
            Number of layers of each kind on the stage.
        ends
            Number of embeddings and heads on it: 0, 1 or 2.

        """
        model = question.model
        kinds = zip(counts, model.kinds, strict=True)
        inside = sum(count * kind.parameters for count, kind in kinds) / grid.tp
        ends = min(ends, 1) if model.tied else ends
        outside = ends * model.embedding / grid.sp
        layers, unsharded = (inside, outside) if grid.isp else (inside + outside, 0.0)
        pieces = [layers_of(grid, layers)]
        if model.experts:
            pieces.append(experts_of(grid, counts[0] * model.expert_parameters / grid.ep))
        return cls(pieces=tuple(pieces), unsharded=unsharded)

    def states(self, grid: StrategyGrid) -> NDArray[np.float64]:
        """Return the elements whose optimizer states a rank holds, by column of the grid."""
        sharded = sum(piece.elements / piece.os for piece in self.pieces)
        # Two data-parallel ranks share ISP's embedding and head.
        return np.asarray(sharded + self.unsharded / min(2, grid.dp))


def candidate_stages(pp: int, model: Model) -> list[int]:
    """Return the stages that can be the slowest or the fullest, sorted.

    These are the first, the first with one layer more, the last, and with experts the first
    ones that have them.
    """
    least, longer = divmod(model.layers, pp)
    stages = {0, pp - longer if longer else 0, pp - 1}
    if len(model.kinds) > 1 and model.experts:
        dense, shorter = model.experts.dense_layers, pp - longer  # the last stages are longer
        beyond = dense - shorter * least
        begin = dense // least if beyond < 0 else shorter + beyond // (least + 1)
        stages |= {stage for stage in (begin, begin + 1) if stage < pp}
    return sorted(stages)


def layers_of(grid: StrategyGrid, elements: float) -> ShardedElements:
    """Return `elements` of layers, without routed experts, with the shards of a grid."""
    return ShardedElements(
        elements=elements,
        para=grid.para,
        grads=grid.grads,
        os=grid.os,
        replicas=grid.replicas,
        stride=grid.tp,
    )


def experts_of(grid: StrategyGrid, elements: float) -> ShardedElements:
    """Return `elements` of routed experts, sharded over the ranks that hold them."""
    return ShardedElements(
        elements=elements,
        para=np.gcd(grid.para, grid.holders),
        grads=np.gcd(grid.grads, grid.holders),
        os=np.gcd(grid.os, grid.holders),
        replicas=grid.holders,
        stride=grid.ep,
    )
