"""Search all strategies, price each, and rank them by tokens per second per GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastcomm.checks import build, shows
from fastcomm.errors import ConfigError
from fastcomm.hardware import cluster as load_
from fastcomm.hardware.cluster import Cluster, GemmTable
from fastcomm.isp import tables as tables_
from fastcomm.isp.block import Block
from fastcomm.isp.calibration import Calibrated, calibrated
from fastcomm.isp.layer import Correction
from fastcomm.isp.memory import memory
from fastcomm.isp.price import price
from fastcomm.isp.question import ALGOS, Question, question_of
from fastcomm.isp.result import FeasibleCells, Fields, Records, SearchResult, kept
from fastcomm.isp.space import Counts, blocks
from fastcomm.isp.tables import AttentionTable, ComputeTables
from fastcomm.options import SearchOptions

# Candidates of one search: ten seconds, and some GB.
MOST = 30_000_000


def search(
    question: Question,
    cluster: Cluster,
    gemm: GemmTable | None = None,
    attention: AttentionTable | None = None,
) -> SearchResult:
    """All feasible strategies of every world size."""
    question.check()
    cluster = replace(cluster, gemm=gemm) if gemm else cluster
    limit = cluster.memory if question.memory is None else question.memory
    measured = Correction.of(attention, cluster) if attention else None
    counts = Counts()
    parts: list[FeasibleCells] = []
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
    return SearchResult(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a question is answered with."""

    cluster: Cluster
    attention: AttentionTable | None = None
    calibration: Calibrated | None = None
    tables: ComputeTables | None = None  # where both products and attention were measured


def setting(options: SearchOptions) -> Setting:
    """Return cluster, measured tables and mode, as the options say."""
    cluster = load_.load(str(options.cluster or "a800"))
    gemm = options.gemm_table and tables_.gemm(Path(options.gemm_table))
    attention = options.attention_table and tables_.attention(Path(options.attention_table))
    gpu = "910b" if "910b" in cluster.name.lower() else "a800"
    found = tables_.find(Path(options.tables), gpu) if options.tables else None
    if found is None and gemm and attention:
        found = ComputeTables(gemm, attention)
    if found:
        gemm, attention = found
    measured = calibrated(str(options.calibrate), cluster) if options.calibrate else None
    cluster = measured.cluster if measured else cluster
    return Setting(
        cluster=replace(cluster, gemm=gemm or cluster.gemm, comm_model=options.comm_model),
        attention=attention or None,
        calibration=measured,
        tables=found,
    )


@shows(SearchOptions)
def search_strategies(**options: Any) -> SearchResult:
    """Search all strategies with `SearchOptions`, as in `search_strategies(model="7B", ...)`.

    Raises
    ------
    ConfigError
        If an option is unknown, missing or wrong.

    """
    asked = build(SearchOptions, options, "search_strategies")
    if asked.compat is not None:
        raise ConfigError("compat: wanted fastcomm.compat.isp.search_strategies for that")
    using = setting(asked)
    found = search(question_of(asked), using.cluster, attention=using.attention)
    return replace(found, calibration=using.calibration)
