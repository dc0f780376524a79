"""Enumerate the strategies that can exist: divisors, heads, batches and chains of shards."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fastcomm.isp.problem import SearchProblem
from fastcomm.models import Layer, Model
from fastcomm.units import format_gib

# As in `fastcomm_kernels.arrays`, whose package loads numba, which a search does without.
IntArray = NDArray[np.int64]
NONE, FULL, SELECTIVE = 0, 1, 2  # recompute
# Why candidates are rejected: the keys of `rejected`, and the texts of messages.
REASONS = {
    "heads": "as sp does not suit the attention heads",
    "experts": "as ep does not suit the experts",
    "batch": "as no micro-batch suits the global batch",
    "schedule": "for fewer micro-batches than pipeline stages (--any-schedule)",
    "memory": "for lack of memory",
}


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

    def activations(self, problem: SearchProblem, layer: Layer) -> float:
        """Return the activations of a layer, without scores: ranks repeat or shard them.

        The layer saves them for its backward pass, and element-wise work reads them. The unit
        is D/2 bytes per element of hidden states, where D are the bytes of an element.
        """
        repeated = self._repeated(problem)
        # 8 around attention and MLP, 10 of queries, keys, values and attention output.
        around = 8 + 10 * problem.model.breadth
        wide = layer.wide
        if layer.experts:
            copies = layer.experts.top_k * (4 + 8 * layer.experts.ffn / problem.model.hidden)
            wide += (problem.imbalance - 1) * copies
        return repeated + (around - repeated + wide) / self.sp

    def _repeated(self, problem: SearchProblem) -> int:
        """Return the activations that every rank of a tensor-parallel group repeats."""
        if self.algo != "mtp":
            return 0
        return 8 if problem.model.mlp == "swiglu" else 10


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
        cls, grid: StrategyGrid, problem: SearchProblem, counts: tuple[int, ...], ends: int
    ) -> "Stage":
        """Return the elements of the weights that a pipeline stage holds.

        Parameters
        ----------
        grid
            Strategies, which divide the weights.
        problem
            Has the model.
        counts
            Number of layers of each kind on the stage.
        ends
            Number of embeddings and heads on it: 0, 1 or 2.

        """
        model = problem.model
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


@dataclass(slots=True)
class Counts:
    """Number of candidates, and of those rejected by reason.

    A candidate is a layout (pipeline, sequence shards, experts, algorithm), a row (micro-batch,
    recompute, virtual stages) and a chain of shards. A layout that no micro-batch suits counts
    as if one did. `candidates` is the sum of the feasible and the rejected.
    """

    candidates: int = 0
    rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    unsuited: set[int] = field(default_factory=set)  # data-parallel degrees rejected by batch
    cells: int = 0  # candidates to price

    def reject(self, reason: str, count: int) -> None:
        """Add `count` rejected candidates to `candidates`, and to a reason of `REASONS`."""
        self.candidates += count
        self.rejected[reason] += count


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRows:
    """Rows of a layout that the schedule allows."""

    columns: dict[str, IntArray]  # fields of `StrategyGrid` by row
    count: int
    total: int  # rows before the schedule rejects any
    suited: bool  # whether any micro-batch suits the global batch


@cache
def divisors(n: int) -> tuple[int, ...]:
    """Return all divisors of a number, ascending."""
    return tuple(divisor for divisor in range(1, n + 1) if n % divisor == 0)


@cache
def chains(n: int) -> IntArray:
    """Return every chain of divisors P | G | O | n, sorted, of shape (3, chains)."""
    triples = [
        (para, grads, os)
        for os in divisors(n)
        for grads in divisors(os)
        for para in divisors(grads)
    ]
    return np.array(sorted(triples), np.int64).T


def grids(problem: SearchProblem, world: int, counts: Counts) -> Iterator[StrategyGrid]:
    """Yield the strategies of one world size, layout by layout.

    Parameters
    ----------
    problem
        Model and limits of the search.
    world
        Number of ranks.
    counts
        Numbers of candidates and of rejected ones by reason; added to.

    """
    for pp in divisors(world):
        if pp > problem.model.layers or (problem.pp and pp not in problem.pp):
            continue
        for sp in divisors(world // pp):
            if problem.sp and sp not in problem.sp:
                continue
            rows = _rows(problem, world // pp // sp, pp)
            for algo in _distinct(problem.algos, sp):
                yield from _layouts(problem, (world, pp, sp, algo), rows, counts)


def _distinct(algos: tuple[str, ...], sp: int) -> tuple[str, ...]:
    """Return the algorithms that differ: MSP, FSP and MTP are one without sequence shards."""
    tensor = [algo for algo in algos if algo != "isp"]
    return algos if sp > 1 else tuple(a for a in algos if a == "isp" or a == tensor[0])


def _layouts(
    problem: SearchProblem, key: tuple[int, int, int, str], rows: LayoutRows, counts: Counts
) -> Iterator[StrategyGrid]:
    """Yield a grid for each degree of expert parallelism; `key` is world, pp, sp, algorithm."""
    world, pp, sp, algo = key
    shards = _shards(problem, world // pp if algo == "isp" else world // pp // sp)
    columns = dict(zip(("para", "grads", "os"), shards, strict=True)) | rows.columns
    width = shards.shape[1]
    for ep in _degrees(problem, world // pp):
        if reason := _rejection(problem, sp, algo, rows):
            counts.reject(reason, rows.total * width)
            if reason == "batch":
                counts.unsuited.add(world // pp // sp)
            continue
        cells = rows.count * width
        counts.reject("schedule", rows.total * width - cells)
        counts.candidates += cells
        counts.cells += cells
        if cells:
            yield StrategyGrid(world=world, pp=pp, sp=sp, algo=algo, ep=ep, **columns)


def _degrees(problem: SearchProblem, ranks: int) -> tuple[int, ...]:
    """Return the numbers of a stage's ranks over which the experts of a layer can be spread."""
    experts = problem.model.experts
    if experts is None:
        return (1,)
    return tuple(
        ep
        for ep in divisors(ranks)
        if experts.number % ep == 0 and (problem.ep is None or ep in problem.ep)
    )


def _rejection(problem: SearchProblem, sp: int, algo: str, rows: LayoutRows) -> str | None:
    """Return the reason to reject a layout, or None."""
    if not _heads_allow(problem, sp, algo):
        return "heads"
    # Experts take each token once: where every rank has all of them, none could tell whose.
    if problem.model.experts and algo == "mtp" and sp > 1:
        return "experts"
    return None if rows.suited else "batch"


def _heads_allow(problem: SearchProblem, sp: int, algo: str) -> bool:
    """Whether a sequence or tensor degree divides the heads as the algorithm requires."""
    model = problem.model
    if model.heads % sp or sp > model.heads:
        return False
    # Tensor parallelism cuts key and value heads, or repeats each on as many ranks.
    return algo == "isp" or model.kv_heads % sp == 0 or sp % model.kv_heads == 0


def _shards(problem: SearchProblem, replicas: int) -> IntArray:
    """Return the chains of shards over replicas, shape (3, chains)."""
    shards = chains(replicas)
    if problem.ulysses:
        return shards[:, (shards[0] == 1) | (shards[0] == replicas)]
    return shards


def _rows(problem: SearchProblem, dp: int, pp: int) -> LayoutRows:
    """Return the micro-batches, recompute modes and virtual stages that the schedule allows.

    `total` also counts those that it rejects. If no micro-batch suits the global batch there
    are no rows, and `total` counts as if one did.
    """
    pairs = micro_batches(problem, dp)
    modes = (NONE, FULL) if problem.flash else (NONE, FULL, SELECTIVE)
    table = np.array(
        [
            (b, m, recompute, v)
            for b, m in pairs or [(1, 0)]
            for recompute in modes
            for v in _virtual(problem, pp)
        ],
        np.int64,
    ).reshape(-1, 4)
    _, num, _, stages = table.T
    allowed = (num > 0) & ((num >= pp) | problem.any_schedule)
    allowed &= (stages == 1) | (num % pp == 0)
    columns = (column[:, None] for column in table[allowed].T)
    return LayoutRows(
        columns=dict(zip(("bsz", "num", "recompute", "stages"), columns, strict=True)),
        count=int(np.count_nonzero(allowed)),
        total=len(table),
        suited=bool(pairs),
    )


def _virtual(problem: SearchProblem, pp: int) -> tuple[int, ...]:
    """Return the numbers of virtual stages of a rank, which divide the layers of each stage."""
    layers = problem.model.layers
    if pp == 1 or layers % pp:
        return (1,) if problem.interleave is None or 1 in problem.interleave else ()
    return tuple(
        stages
        for stages in divisors(layers // pp)
        if problem.interleave is None or stages in problem.interleave
    )


def micro_batches(problem: SearchProblem, dp: int) -> list[tuple[int, int]]:
    """Return every pair of micro-batch size and number that the global batch allows."""
    batch = problem.batch
    unit = dp * problem.seq_len
    least, most = -(-batch.least // unit), batch.most // unit
    if batch.micro_bsz is not None and batch.micro_num is not None:
        fits = least <= batch.micro_bsz * batch.micro_num <= most
        return [(batch.micro_bsz, batch.micro_num)] if fits else []
    if batch.micro_bsz is not None:
        b = batch.micro_bsz
        return [(b, m) for m in range(max(1, -(-least // b)), most // b + 1)]
    if batch.micro_num is not None:
        m = batch.micro_num
        return [(b, m) for b in range(max(1, -(-least // m)), most // m + 1)]
    totals = range(max(1, least), most + 1)
    return [(b, total // b) for total in totals for b in divisors(total)]


def nearest(
    problem: SearchProblem,
    rejected: dict[str, int],
    least_memory: float | None,
    unsuited: tuple[int, ...],
) -> str:
    """Explain why no strategy is feasible, and what would help.

    Parameters
    ----------
    problem
        The problem of the search.
    rejected
        Candidates by reason.
    least_memory
        Bytes of the smallest candidate; None if none was priced.
    unsuited
        Data-parallel degrees that the global batch rules out.

    """
    if least_memory is not None:
        need = format_gib(least_memory)
        return f"no strategy fits into memory: the smallest needs {need}"
    if unsuited:
        unit = min(unsuited) * problem.seq_len
        near = max(unit, round(problem.batch.most / unit) * unit)
        return (
            f"no strategy: the global batch {problem.batch.most} is not a multiple of "
            f"data-parallel degree x sequence length for any strategy; try {near}"
        )
    if rejected.get("schedule"):
        return (
            "no strategy: all have fewer micro-batches than pipeline stages; try a smaller "
            "--pp-sizes, a larger global batch or --any-schedule"
        )
    reasons = [
        f"{count} {REASONS.get(reason, f'by {reason}')}"
        for reason, count in rejected.items()
        if count
    ]
    return f"no strategy: rejected {', '.join(reasons)}" if reasons else _undivided(problem)


def _undivided(problem: SearchProblem) -> str:
    """Name the requested degree that divides nothing that it has to divide."""
    layers = {problem.model.layers}
    stages = [pp for pp in problem.pp or (1,) if problem.model.layers % pp == 0]
    ranks = _over(problem.world_sizes, problem.pp)
    degrees = {
        "pp": (problem.pp, set(problem.world_sizes), "GPUs"),
        "sp": (problem.sp, ranks, "GPUs of a stage"),
        "ep": (problem.ep, ranks, "GPUs of a stage"),
        "interleave": (problem.interleave, _over(layers, stages), "layers of a stage"),
    }
    for name, (requested, totals, unit) in degrees.items():
        if requested and not any(n % degree == 0 for n in totals for degree in requested):
            most = max(totals, default=1)
            near = max(n for n in range(1, min(requested) + 1) if most % n == 0)
            parts = " or ".join(str(n) for n in sorted(totals)) or "one layer"
            return (
                f"no strategy: {name} {', '.join(map(str, requested))} does not divide {parts} "
                f"({unit}); the nearest smaller degree is {near}"
            )
    return "no strategy: no combination of pp, sp, ep and interleave divides the GPUs"


def _over(totals: Iterable[int], parts: Iterable[int] | None) -> set[int]:
    """Return each total divided by each part that divides it."""
    return {total // part for total in totals for part in parts or (1,) if total % part == 0}
