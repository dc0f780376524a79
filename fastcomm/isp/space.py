"""The strategies that can exist: divisors, heads, batches and chains of shards."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fastcomm.isp.block import FULL, NONE, SELECTIVE, Block
from fastcomm.isp.question import Question

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Counts:
    """Cells looked at, and what fell out; `heads` and `batch` count layouts, not cells."""

    candidates: int = 0
    rejected: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("heads", "batch", "schedule", "memory"), 0)
    )
    # The data-parallel degrees of layouts that no batch suits.
    unsuited: set[int] = field(default_factory=set)


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
    """Every block of one world size that heads and batch allow."""
    for pp in divisors(world):
        if pp > question.model.layers or (question.pp and pp not in question.pp):
            continue
        if question.interleave > 1 and question.model.layers % (pp * question.interleave):
            counts.rejected["schedule"] += 1
            continue
        for sp in divisors(world // pp):
            if question.sp and sp not in question.sp:
                continue
            yield from _layouts(question, world, pp, sp, counts)


def _layouts(
    question: Question, world: int, pp: int, sp: int, counts: Counts
) -> Iterator[Block]:
    rows = None
    for algo in question.algos:
        if not _heads_allow(question, sp, algo):
            counts.rejected["heads"] += 1
            continue
        rows = _rows(question, world // pp // sp, pp) if rows is None else rows
        replicas = world // pp if algo == "isp" else world // pp // sp
        para, grads, os = _shards(question, replicas)
        scheduled, all_rows = rows
        if not all_rows:
            counts.rejected["batch"] += 1
            counts.unsuited.add(world // pp // sp)
            continue
        counts.candidates += all_rows * len(os)
        counts.rejected["schedule"] += (all_rows - len(scheduled[0])) * len(os)
        if not len(scheduled[0]):
            continue
        bsz, num, ck = (column[:, None] for column in scheduled)
        yield Block(
            world=world,
            pp=pp,
            sp=sp,
            algo=algo,
            bsz=bsz,
            num=num,
            ck=ck,
            para=para,
            grads=grads,
            os=os,
        )


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


def _rows(question: Question, dp: int, pp: int) -> tuple[Ints, int]:
    """Batch, number and checkpointing of each row that the schedule allows; how many in all."""
    pairs = micro_batches(question, dp)
    ways = (NONE, FULL) if question.flash else (NONE, FULL, SELECTIVE)
    table = np.array([(b, m, ck) for b, m in pairs for ck in ways], np.int64).reshape(-1, 3)
    allowed = np.full(len(table), True) if question.any_schedule else table[:, 1] >= pp
    if question.interleave > 1 and pp > 1:
        allowed &= table[:, 1] % pp == 0
    return table[allowed].T, len(table)


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
