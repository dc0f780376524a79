"""The search: every strategy that can exist, priced, ranked by tokens a GPU and second.

Memory comes first: what does not fit is not priced.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fastcomm.cluster.cluster import Cluster
from fastcomm.cluster.curves import GemmTable
from fastcomm.errors import ConfigError
from fastcomm.isp.block import Block
from fastcomm.isp.columns import Fields, Part, Records, kept
from fastcomm.isp.correction import Correction
from fastcomm.isp.memory import memory
from fastcomm.isp.price import price
from fastcomm.isp.question import ALGOS, Question
from fastcomm.isp.result import Found
from fastcomm.isp.space import Counts, blocks
from fastcomm.isp.tables import AttentionTable

# Candidates of one search: ten seconds, and some GB.
MOST = 30_000_000


def search(
    question: Question,
    cluster: Cluster,
    gemm: GemmTable | None = None,
    attention: AttentionTable | None = None,
) -> Found:
    """All feasible strategies of every world size."""
    question.check()
    cluster = replace(cluster, gemm=gemm) if gemm else cluster
    limit = cluster.memory if question.memory is None else question.memory
    measured = Correction.of(attention, cluster) if attention else None
    counts = Counts()
    parts: list[Part] = []
    least = np.inf
    for block in _all_blocks(question, counts):
        used = memory(block, question)
        total = np.broadcast_to(used["total_mm_cost"], block.shape)
        least = min(least, float(total.min()))
        fits = total <= limit
        counts.rejected["memory"] += fits.size - int(np.count_nonzero(fits))
        if fits.any():
            costs = price(block, question, cluster, measured)
            parts.append(kept(block.shape, fits, {**_key(block, question), **costs, **used}))
    return Found(
        question=question,
        cluster=cluster.name,
        mode="default",
        candidates=counts.candidates,
        rejected=counts.rejected,
        least_memory=float(least) if np.isfinite(least) else None,
        columns=Records.of(parts),
        unsuited=tuple(sorted(counts.unsuited)),
        notes=notes(cluster),
    )


def _all_blocks(question: Question, counts: Counts) -> Iterator[Block]:
    for world in question.world_sizes:
        for block in blocks(question, world, counts):
            if counts.cells > MOST:
                raise ConfigError(
                    f"more than {MOST} candidates: narrow the batch, or say --pp or --sp"
                )
            yield block


def notes(cluster: Cluster) -> tuple[str, ...]:
    """What of a cluster was not measured, in words."""
    return (f"{cluster.name}: {cluster.note}",) if cluster.note else ()


# Where FlashAttention was measured: beyond, its formula stands alone.
_LONGEST = 256 * 2**10
_NARROWEST = 512


def _key(block: Block, question: Question) -> Fields:
    beyond = question.flash and (
        question.seq_len > _LONGEST or _width(question) // block.sp < _NARROWEST
    )
    whole = {
        "algo": ALGOS.index(block.algo),
        "pp": block.pp,
        "sp": block.sp,
        "seq_len": question.seq_len,
        "world_size": block.world,
        "ep": block.ep,
    }
    return {
        **{name: np.asarray(value, np.int64) for name, value in whole.items()},
        "wp_size": block.para,
        # The original's: what the optimizer adds to the weights' shards.
        "zp_size": block.os // block.para,
        "micro_bsz": block.bsz,
        "micro_num": block.num,
        "activation_ckpt": block.ck,
        "interleave": np.asarray(block.interleave),
        "p_para": block.para,
        "p_grads": block.grads,
        "p_os": block.os,
        "modelsize": np.asarray(question.model.parameters / 1e9),
        "extrapolated": np.asarray(beyond),
    }


def _width(question: Question) -> float:
    return question.model.hidden * question.model.breadth
