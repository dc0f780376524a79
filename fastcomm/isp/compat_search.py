"""The original's search: its candidates, its numbers; ranked by its sorted list."""

from dataclasses import replace

import numpy as np

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp import compat, compat_price
from fastcomm.isp.columns import Fields, Part, Records, kept
from fastcomm.isp.compat import CompatBlock, CompatRules
from fastcomm.isp.question import ALGOS, Question
from fastcomm.isp.result import Found
from fastcomm.isp.tables import Tables

_COMPAT_VOCAB = 103168
# More candidates than any world has: ties go by world, then by enumeration.
_WORLD = 1 << 40
_REASONS = ("candidates", "divisibility", "memory", "table")


def search(
    question: Question, rules: CompatRules, cluster: Cluster, tables: Tables | None = None
) -> Found:
    """Every feasible strategy of the original's space, by its formulas."""
    question.check()
    compat.check(question, rules)
    counted = dict.fromkeys(_REASONS, 0)
    if tables:
        cluster = replace(cluster, gemm=tables.gemm)
    parts: list[Part] = []
    least = np.inf
    for place, world in enumerate(sorted(question.world_sizes, reverse=True)):
        for block in compat.blocks(question, rules, world, counted):
            part, needed = _priced(
                block, question, rules, cluster, tables, counted, place * _WORLD
            )
            least = min(least, needed)
            if part:
                parts.append(part)
    return Found(
        question=question,
        cluster=cluster.name,
        mode=rules.variant,
        candidates=counted.pop("candidates"),
        rejected=counted,
        least_memory=float(least) if np.isfinite(least) else None,
        columns=Records.of(parts),
        notes=()
        if tables
        else ("no measured tables: closed forms stand for products and attention",),
    )


def _priced(
    block: CompatBlock,
    question: Question,
    rules: CompatRules,
    cluster: Cluster,
    tables: Tables | None,
    counted: dict[str, int],
    shift: int,
) -> tuple[Part | None, float]:
    shape = (len(block.bsz), len(block.zp))
    used = compat_price.memory(block, question)
    total = np.broadcast_to(used["total_mm_cost"], shape)
    limit = cluster.memory if question.memory is None else question.memory
    fits = total <= limit
    counted["memory"] += int((~fits).sum())
    if tables:
        attention, known = compat_price.measured_attention(block, question, tables.attention)
        counted["table"] += int((fits & ~known).sum())
        fits = fits & known
    else:
        attention = compat_price.attention(block, question, cluster)
    if not fits.any():
        return None, float(total.min())
    costs = compat_price.times(block, question, rules, cluster, attention)
    named = _key(block, question, shift)
    return kept(shape, fits, {**named, **costs, **used}), float(total.min())


def _key(block: CompatBlock, question: Question, shift: int) -> Fields:
    model = question.model
    return {
        "order": block.order + shift,
        "algo": np.int64(ALGOS.index(block.algo)),
        "pp": block.pp,
        "sp": block.sp,
        "wp_size": block.wp,
        "zp_size": block.zp,
        "seq_len": question.seq_len,
        "micro_bsz": block.bsz,
        "micro_num": block.num,
        "activation_ckpt": block.ck,
        "world_size": block.world,
        "modelsize": (model.parameters - 2 * (model.embedding - _COMPAT_VOCAB * model.hidden))
        / 1e9,
    }
