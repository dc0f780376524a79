"""Search all strategies by tokens per second per GPU: once, over sizes, on other hardware."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastcomm.checks import build, shows
from fastcomm.errors import ConfigError
from fastcomm.hardware import AttentionCurve, Cluster, GemmCurve
from fastcomm.hardware.measurements import AttentionTable
from fastcomm.isp import ALGOS, Question, question_of
from fastcomm.isp.block import Block
from fastcomm.isp.calibration import setting
from fastcomm.isp.layer import Correction
from fastcomm.isp.price import memory, price
from fastcomm.isp.result import (
    FeasibleCells,
    Fields,
    HardwareChange,
    Record,
    Records,
    SearchResult,
    kept,
    with_units,
)
from fastcomm.isp.space import Counts, blocks
from fastcomm.options import SearchOptions
from fastcomm.result import TableResult

if TYPE_CHECKING:
    import pyarrow as pa


# Candidates of one search: ten seconds, and some GB.
MOST = 30_000_000


def search(
    question: Question,
    cluster: Cluster,
    attention: AttentionTable | None = None,
) -> SearchResult:
    """Return all feasible strategies of every world size, ranked."""
    question.check()
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
    """Return what of a cluster was not measured, in words."""
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


def sensitivity(
    question: Question,
    cluster: Cluster,
    best: Record | None,
    attention: AttentionTable | None = None,
) -> tuple[HardwareChange, ...]:
    """Search again with a cluster that is better in one thing, for each such thing."""
    limit = cluster.memory if question.memory is None else question.memory
    changed = {
        "links in a node x2": (question, replace(cluster, bw_intra=2 * cluster.bw_intra)),
        "links between nodes x2": (question, replace(cluster, bw_node=2 * cluster.bw_node)),
        "memory bandwidth x2": (question, replace(cluster, hbm=2 * cluster.hbm)),
        "memory x1.5": (replace(question, memory=1.5 * limit), cluster),
        "arithmetic x1.5": (question, _quicker(cluster, 1.5)),
    }
    found = []
    for what, (asked, other) in changed.items():
        new = next(iter(search(asked, other, attention=attention).best(1)), None)
        gain = new["tgs"] / best["tgs"] - 1 if new and best else None
        found.append(HardwareChange(what=what, best=new, gain=gain))
    return tuple(found)


def _quicker(cluster: Cluster, times: float) -> Cluster:
    """Curves of a GPU that multiplies and attends so much faster."""
    attention, gemm = cluster.attention, cluster.gemm
    if isinstance(gemm, GemmCurve):
        gemm = replace(gemm, rates=tuple(rate * times for rate in gemm.rates))
    else:
        gemm = replace(gemm, times=tuple(time / times for time in gemm.times))
    forward, backward = attention.rate
    faster = AttentionCurve(
        start=attention.start,
        element=attention.element,
        rate=(forward * times, backward * times),
    )
    return replace(cluster, gemm=gemm, attention=faster, peak=cluster.peak * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One search of a sweep."""

    world_size: int
    seq_len: int
    candidates: int
    feasible: int
    best: Record | None
    # Why there is none, in words.
    why: str
    # Rate over that of the smallest world with an answer: T_1 / (T_N N).
    scaling: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the search as it stands in JSON."""
        return {**asdict(self), "best": self.best and with_units(self.best)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchSweep(TableResult):
    """All searches, by sequence length and then by world size."""

    cells: tuple[SweepPoint, ...]
    # What was not measured of the cluster.
    notes: tuple[str, ...] = ()

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {"cells": [cell.to_dict() for cell in self.cells], "notes": list(self.notes)}

    def to_arrow(self) -> "pa.Table":
        """Return a row per search, with the fields of its best strategy, null without one."""
        import pyarrow as pa

        cells = self.contents()["cells"]
        best: Record = next((cell["best"] for cell in cells if cell["best"]), {})
        names = [name for name in best if name not in {"world_size", "seq_len"}]
        own = ("world_size", "seq_len", "candidates", "feasible", "scaling")
        rows = [
            {name: cell[name] for name in own}
            | {name: (cell["best"] or {}).get(name) for name in names}
            for cell in cells
        ]
        return pa.Table.from_pylist(rows)

    def figures(self) -> dict[str, str]:
        """Return the number of searches, and of those with an answer."""
        found = sum(cell.best is not None for cell in self.cells)
        return {"searches": str(len(self.cells)), "with a strategy": str(found)}


def sweep(
    question: Question,
    cluster: Cluster,
    seq_lens: Sequence[int],
    attention: AttentionTable | None = None,
) -> SearchSweep:
    """Search every world size of the question at every sequence length."""
    cells = []
    for seq_len in seq_lens:
        base = None
        for world in sorted(question.world_sizes):
            asked = replace(question, world_sizes=(world,), seq_len=seq_len)
            cell = _cell(asked, cluster, attention)
            if cell.best:
                base = base or cell.best["tgs"]
                cell = replace(cell, scaling=cell.best["tgs"] / base)
            cells.append(cell)
    return SearchSweep(cells=tuple(cells), notes=notes(cluster))


def _cell(question: Question, cluster: Cluster, attention: AttentionTable | None) -> SweepPoint:
    world, seq_len = question.world_sizes[0], question.seq_len
    try:
        found = search(question, cluster, attention=attention)
    except ConfigError as error:
        return SweepPoint(
            world_size=world,
            seq_len=seq_len,
            candidates=0,
            feasible=0,
            best=None,
            why=str(error),
        )
    best = next(iter(found.best(1)), None)
    return SweepPoint(
        world_size=world,
        seq_len=seq_len,
        candidates=found.candidates,
        feasible=found.feasible,
        best=best,
        why="" if best else found.nearest(),
    )
