"""The strategies that can exist: divisors, heads, batches and chains of shards."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from fastcomm.isp import Question
from fastcomm.isp.block import FULL, NONE, SELECTIVE, Block, Ints
from fastcomm.units import format_gib

_REASONS = ("heads", "experts", "batch", "schedule", "memory")


@dataclass(slots=True)
class Counts:
    """Candidates, and why each fell out: `candidates` is the feasible and all of `rejected`.

    A candidate is a layout (pipeline, sequence shard, experts, algorithm), a row (micro-batch,
    checkpoints, virtual stages) and a chain of shards. A layout that no batch suits counts as
    if one did.
    """

    candidates: int = 0
    rejected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))
    # The data-parallel degrees of layouts that no batch suits.
    unsuited: set[int] = field(default_factory=set)
    # Candidates that have to be priced.
    cells: int = 0

    def reject(self, reason: str, count: int) -> None:
        """Count so many candidates that fell out."""
        self.candidates += count
        self.rejected[reason] += count


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRows:
    """What varies inside a layout: those that the schedule allows, and how many there are."""

    bsz: Ints
    num: Ints
    ck: Ints
    stages: Ints
    every: int
    # Whether a micro-batch suits the batch at all.
    suited: bool


@cache
def divisors(n: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(each for each in range(1, n + 1) if n % each == 0)


@cache
def chains(n: int) -> Ints:
    """Every P | G | O | n, one a column."""
    found = [
        (para, grads, os)
        for os in divisors(n)
        for grads in divisors(os)
        for para in divisors(grads)
    ]
    return np.array(sorted(found), np.int64).T


def blocks(question: Question, world: int, counts: Counts) -> Iterator[Block]:
    """Every block of one world size that heads, experts and batch allow."""
    for pp in divisors(world):
        if pp > question.model.layers or (question.pp and pp not in question.pp):
            continue
        for sp in divisors(world // pp):
            if question.sp and sp not in question.sp:
                continue
            rows = _rows(question, world // pp // sp, pp)
            for algo in question.algos:
                yield from _layouts(question, (world, pp, sp, algo), rows, counts)


def _layouts(
    question: Question, key: tuple[int, int, int, str], rows: LayoutRows, counts: Counts
) -> Iterator[Block]:
    world, pp, sp, algo = key
    para, grads, os = _shards(question, world // pp if algo == "isp" else world // pp // sp)
    every = rows.every * len(os)
    for ep in _degrees(question, world // pp):
        if reason := _refused(question, sp, algo, rows):
            counts.reject(reason, every)
            if reason == "batch":
                counts.unsuited.add(world // pp // sp)
            continue
        cells = len(rows.num) * len(os)
        counts.reject("schedule", every - cells)
        counts.candidates += cells
        counts.cells += cells
        if cells:
            yield Block(
                world=world,
                pp=pp,
                sp=sp,
                algo=algo,
                bsz=rows.bsz,
                num=rows.num,
                ck=rows.ck,
                para=para,
                grads=grads,
                os=os,
                ep=ep,
                stages=rows.stages,
            )


def _degrees(question: Question, ranks: int) -> tuple[int, ...]:
    """Over how many of a stage's ranks the experts of a layer can be spread."""
    experts = question.model.experts
    if experts is None:
        return (1,)
    return tuple(
        each
        for each in divisors(ranks)
        if experts.number % each == 0 and (question.ep is None or each in question.ep)
    )


def _refused(question: Question, sp: int, algo: str, rows: LayoutRows) -> str | None:
    """Why a layout falls out, if it does."""
    if not _heads_allow(question, sp, algo):
        return "heads"
    # Experts take each token once: where every rank has all of them, none could tell whose.
    if question.model.experts and algo == "mtp" and sp > 1:
        return "experts"
    return None if rows.suited else "batch"


def _heads_allow(question: Question, sp: int, algo: str) -> bool:
    model = question.model
    if model.heads % sp or sp > model.heads:
        return False
    # Tensor parallelism cuts key and value heads, or repeats each on as many ranks.
    return algo == "isp" or model.kv_heads % sp == 0 or sp % model.kv_heads == 0


def _shards(question: Question, replicas: int) -> Ints:
    found = chains(replicas)
    if question.ulysses:
        return found[:, (found[0] == 1) | (found[0] == replicas)]
    return found


def _rows(question: Question, dp: int, pp: int) -> LayoutRows:
    """Every micro-batch, checkpointing and number of virtual stages."""
    pairs = micro_batches(question, dp)
    ways = (NONE, FULL) if question.flash else (NONE, FULL, SELECTIVE)
    table = np.array(
        [
            (b, m, ck, v)
            for b, m in pairs or [(1, 0)]
            for ck in ways
            for v in _virtual(question, pp)
        ],
        np.int64,
    ).reshape(-1, 4)
    _, num, _, stages = table.T
    allowed = (num > 0) & ((num >= pp) | question.any_schedule)
    allowed &= (stages == 1) | (num % pp == 0)
    bsz, num, ck, stages = (column[:, None] for column in table[allowed].T)
    return LayoutRows(
        bsz=bsz, num=num, ck=ck, stages=stages, every=len(table), suited=bool(pairs)
    )


def _virtual(question: Question, pp: int) -> tuple[int, ...]:
    """Virtual stages of a rank: what divides a stage's layers, if all stages have as many."""
    layers = question.model.layers
    if pp == 1 or layers % pp:
        return (1,) if question.interleave is None or 1 in question.interleave else ()
    return tuple(
        each
        for each in divisors(layers // pp)
        if question.interleave is None or each in question.interleave
    )


def micro_batches(question: Question, dp: int) -> list[tuple[int, int]]:
    """Every pair of micro-batch size and number whose tokens lie in the batch."""
    batch = question.batch
    unit = dp * question.seq_len
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
    wholes = range(max(1, least), most + 1)
    return [(b, whole // b) for whole in wholes for b in divisors(whole)]


def nearest(
    question: Question,
    rejected: dict[str, int],
    least_memory: float | None,
    unsuited: tuple[int, ...],
) -> str:
    """One sentence, by what a search has counted."""
    if least_memory is not None:
        need = format_gib(least_memory)
        return f"nothing fits: the least memory that any strategy needs is {need}"
    if unsuited:
        unit = min(unsuited) * question.seq_len
        near = max(unit, round(question.batch.most / unit) * unit)
        return (
            f"no strategy: global batch {question.batch.most} is no multiple of "
            f"data-parallel degree x sequence length for any of them; {near} would be"
        )
    if rejected.get("schedule"):
        return (
            "no strategy: each has fewer micro-batches than pipeline stages; a smaller pp, a "
            "larger global batch or --any-schedule would work"
        )
    fell = [f"{count} by {reason}" for reason, count in rejected.items() if count]
    return f"no strategy: rejected {', '.join(fell)}" if fell else _undivided(question)


def _undivided(question: Question) -> str:
    """Which degree that was asked for divides nothing that it has to."""
    layers = {question.model.layers}
    stages = [pp for pp in question.pp or (1,) if question.model.layers % pp == 0]
    wholes = {
        "pp": (question.pp, set(question.world_sizes)),
        "sp": (question.sp, _over(question.world_sizes, question.pp)),
        "ep": (question.ep, _over(question.world_sizes, question.pp)),
        "interleave": (question.interleave, _over(layers, stages)),
    }
    for name, (asked, whole) in wholes.items():
        if asked and not any(each % degree == 0 for each in whole for degree in asked):
            most = max(whole, default=1)
            near = max(n for n in range(1, min(asked) + 1) if most % n == 0)
            parts = " or ".join(str(each) for each in sorted(whole)) or "one layer"
            return (
                f"no strategy: {name} {', '.join(map(str, asked))} does not divide {parts} "
                f"({_WHOLES[name]}); the nearest below is {near}"
            )
    return "no strategy: no pp, sp, ep and interleave divide the GPUs and layers together"


_WHOLES = {
    "pp": "GPUs",
    "sp": "GPUs of a stage",
    "ep": "GPUs of a stage",
    "interleave": "layers of a stage",
}


def _over(wholes: Iterable[int], parts: Iterable[int] | None) -> set[int]:
    return {each // part for each in wholes for part in parts or (1,) if each % part == 0}
