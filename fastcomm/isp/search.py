"""Rank all strategies by tokens/s/GPU: one search, sweeps, and searches on other hardware."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastcomm.errors import ConfigError
from fastcomm.hardware.calibration import AttentionTable
from fastcomm.hardware.clusters import Cluster
from fastcomm.hardware.gpus import GemmCurve
from fastcomm.isp.layer import Correction
from fastcomm.isp.price import memory, price
from fastcomm.isp.problem import ALGOS, SearchProblem
from fastcomm.isp.result import (
    FeasibleCells,
    Fields,
    HardwareChange,
    Record,
    Records,
    SearchResult,
    with_units,
)
from fastcomm.isp.space import Counts, StrategyGrid, grids
from fastcomm.result import TableResult

if TYPE_CHECKING:
    import pyarrow as pa

# Most candidates of one search, which takes about ten seconds and some GB.
MOST = 30_000_000


def search(
    problem: SearchProblem,
    cluster: Cluster,
    attention: AttentionTable | None = None,
) -> SearchResult:
    """Return all feasible strategies of every world size, ranked by tokens/s/GPU.

    Parameters
    ----------
    problem
        Model, batch, world sizes and constraints.
    cluster
        Hardware whose GPU memory is the limit, unless the problem has one.
    attention
        Measured attention times, which correct the formula.

    Raises
    ------
    ConfigError
        If no strategy can satisfy the problem, or it has more than `MOST` candidates.

    """
    problem.check()
    limit = cluster.memory if problem.memory is None else problem.memory
    correction = Correction.of(attention, cluster) if attention else None
    counts = Counts()
    parts: list[FeasibleCells] = []
    least = np.inf
    virtual_stages: set[int] = set()
    for grid in _all_grids(problem, counts):
        virtual_stages.update(np.unique(grid.interleave).tolist())
        memory_terms = memory(grid, problem)
        total = np.broadcast_to(memory_terms["total_mm_cost"], grid.shape)
        least = min(least, float(total.min()))
        fits = total <= limit
        counts.rejected["memory"] += fits.size - int(np.count_nonzero(fits))
        if fits.any():
            costs = price(grid, problem, cluster, correction)
            fields = {**_key(grid, problem), **costs, **memory_terms}
            parts.append(FeasibleCells.of(grid.shape, fits, fields))
    return SearchResult(
        problem=problem,
        cluster=cluster.name,
        mode="default",
        candidates=counts.candidates,
        rejected=counts.rejected,
        least_memory=float(least) if np.isfinite(least) else None,
        columns=Records.of(parts),
        unsuited=tuple(sorted(counts.unsuited)),
        notes=(*notes(cluster), *_unused_interleave(problem, virtual_stages)),
    )


def _unused_interleave(problem: SearchProblem, used: set[int]) -> tuple[str, ...]:
    """Return a note on requested virtual stages per rank that no candidate has.

    `used` are the numbers of virtual stages of all candidates. Without any candidate, the
    result says why.
    """
    unused = sorted(set(problem.interleave or ()) - used)
    if not unused or not used:
        return ()
    return (
        f"--interleave {', '.join(map(str, unused))} fits no strategy: it has to divide the "
        "layers of a stage, and the pipeline stages the number of micro-batches",
    )


def _all_grids(problem: SearchProblem, counts: Counts) -> Iterator[StrategyGrid]:
    """Yield the candidates of all world sizes; raise `ConfigError` if there are too many."""
    for world in problem.world_sizes:
        for grid in grids(problem, world, counts):
            if counts.cells > MOST:
                raise ConfigError(
                    f"more than {MOST} candidates: narrow the batch, or set --pp-sizes "
                    "or --sp-sizes"
                )
            yield grid


def notes(cluster: Cluster) -> tuple[str, ...]:
    """Return the notes of a cluster on values that were not measured."""
    return (f"{cluster.name}: {cluster.note}",) if cluster.note else ()


# FlashAttention was measured up to this length, and from this local hidden size on.
_LONGEST = 256 * 2**10
_NARROWEST = 512


def _key(grid: StrategyGrid, problem: SearchProblem) -> Fields:
    """Return the fields of a record that identify a strategy."""
    extrapolated = problem.flash and (
        problem.seq_len > _LONGEST or _width(problem) // grid.sp < _NARROWEST
    )
    degrees = {
        "algo": ALGOS.index(grid.algo),
        "pp": grid.pp,
        "sp": grid.sp,
        "seq_len": problem.seq_len,
        "world_size": grid.world,
        "ep": grid.ep,
    }
    return {
        **{name: np.asarray(value, np.int64) for name, value in degrees.items()},
        "wp_size": grid.para,
        # As in the original simulator: shards of optimizer states over those of weights.
        "zp_size": grid.os // grid.para,
        "micro_bsz": grid.bsz,
        "micro_num": grid.num,
        "activation_ckpt": grid.recompute,
        "interleave": np.asarray(grid.interleave),
        "p_para": grid.para,
        "p_grads": grid.grads,
        "p_os": grid.os,
        "modelsize": np.asarray(problem.model.parameters / 1e9),
        "extrapolated": np.asarray(extrapolated),
    }


def _width(problem: SearchProblem) -> float:
    return problem.model.hidden * problem.model.breadth


def sensitivity(
    problem: SearchProblem,
    cluster: Cluster,
    best: Record | None,
    attention: AttentionTable | None = None,
) -> tuple[HardwareChange, ...]:
    """Search again on clusters that differ in one thing, such as twice the link bandwidth.

    Parameters
    ----------
    problem, cluster
        The job and its hardware.
    best
        Best strategy of the cluster as it is; None if there is none, and gains are then None.
    attention
        Measured times of attention; None without any.

    Returns
    -------
    tuple of HardwareChange
        The gain is the relative increase of tokens/s/GPU.

    """
    limit = cluster.memory if problem.memory is None else problem.memory
    variants = {
        "links in a node x2": (problem, replace(cluster, bw_intra=2 * cluster.bw_intra)),
        "links between nodes x2": (problem, replace(cluster, bw_node=2 * cluster.bw_node)),
        "memory bandwidth x2": (problem, replace(cluster, hbm=2 * cluster.hbm)),
        "memory x1.5": (replace(problem, memory=1.5 * limit), cluster),
        "arithmetic x1.5": (problem, _with_faster_compute(cluster, 1.5)),
    }
    changes = []
    for name, (varied, hardware) in variants.items():
        new = next(iter(search(varied, hardware, attention=attention).best(1)), None)
        gain = new["tgs"] / best["tgs"] - 1 if new and best else None
        changes.append(HardwareChange(name=name, best=new, gain=gain))
    return tuple(changes)


def _with_faster_compute(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with GEMM and attention faster by a factor."""
    attention, gemm = cluster.attention, cluster.gemm
    if isinstance(gemm, GemmCurve):
        gemm = replace(gemm, rates=tuple(rate * factor for rate in gemm.rates))
    else:
        gemm = replace(gemm, times=tuple(seconds / factor for seconds in gemm.times))
    forward, backward = attention.rate
    attention = replace(attention, rate=(forward * factor, backward * factor))
    return replace(cluster, gemm=gemm, attention=attention, peak=cluster.peak * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One search of a sweep."""

    world_size: int
    seq_len: int
    candidates: int = 0
    feasible: int = 0
    best: Record | None = None
    why: str = ""  # why there is no strategy; empty if there is one
    # tokens/s/GPU over those of the smallest world size with a strategy.
    scaling: float | None = None
    # T_1 / (N T_N) of equal work; None if one GPU was not searched, or has no strategy.
    scaling_factor: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the search as a JSON object."""
        return {**asdict(self), "best": self.best and with_units(self.best)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchSweep(TableResult):
    """Searches of a sweep, ordered by sequence length and then by world size."""

    cells: tuple[SweepPoint, ...]
    notes: tuple[str, ...] = ()  # of the cluster, and options without effect on any search

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {"cells": [cell.to_dict() for cell in self.cells], "notes": list(self.notes)}

    def to_arrow(self) -> "pa.Table":
        """Return a row per search, with fields of its best strategy, null without one."""
        import pyarrow as pa

        cells = self.contents()["cells"]
        best: Record = next((cell["best"] for cell in cells if cell["best"]), {})
        names = [name for name in best if name not in {"world_size", "seq_len"}]
        own = ("world_size", "seq_len", "candidates", "feasible", "scaling", "scaling_factor")
        rows = [
            {name: cell[name] for name in own}
            | {name: (cell["best"] or {}).get(name) for name in names}
            for cell in cells
        ]
        return pa.Table.from_pylist(rows)

    def figures(self) -> dict[str, str]:
        """Return the number of searches, and of those with a strategy."""
        feasible = sum(cell.best is not None for cell in self.cells)
        return {"searches": str(len(self.cells)), "with a strategy": str(feasible)}


def sweep(
    problem: SearchProblem,
    cluster: Cluster,
    seq_lens: Sequence[int],
    attention: AttentionTable | None = None,
) -> SearchSweep:
    """Search every world size of the problem at every sequence length.

    Parameters
    ----------
    problem
        Model, batch and world sizes; its sequence length is replaced.
    cluster
        Cluster to search on.
    seq_lens
        Sequence lengths in tokens.
    attention
        Measured times of attention, which correct the times of the formula; None for the
        formula alone.

    Returns
    -------
    SearchSweep
        A cell per sequence length and world size, world sizes ascending. `scaling` is the rate
        per GPU divided by that of the smallest world size with a result, and `scaling_factor`
        divided by that of one GPU.

    """
    cells, common = [], None
    for seq_len in seq_lens:
        smallest_rate = rate_of_one = None
        for world in sorted(problem.world_sizes):
            point = replace(problem, world_sizes=(world,), seq_len=seq_len)
            cell, cell_notes = _cell(point, cluster, attention)
            if cell.candidates:
                common = [note for note in cell_notes if common is None or note in common]
            if cell.best:
                rate = cell.best["tgs"]
                smallest_rate = smallest_rate or rate
                rate_of_one = rate if world == 1 else rate_of_one
                cell = replace(
                    cell,
                    scaling=rate / smallest_rate,
                    scaling_factor=rate_of_one and rate / rate_of_one,
                )
            cells.append(cell)
    return SearchSweep(cells=tuple(cells), notes=tuple(common or notes(cluster)))


def _cell(
    problem: SearchProblem, cluster: Cluster, attention: AttentionTable | None
) -> tuple[SweepPoint, Sequence[str]]:
    """Search one world size and sequence length, and return the point and its notes.

    If the search raises `ConfigError`, the point has its message.
    """
    point = SweepPoint(world_size=problem.world_sizes[0], seq_len=problem.seq_len)
    try:
        result = search(problem, cluster, attention=attention)
    except ConfigError as error:
        return replace(point, why=str(error)), ()
    best = next(iter(result.best(1)), None)
    point = replace(
        point,
        candidates=result.candidates,
        feasible=result.feasible,
        best=best,
        why="" if best else result.nearest(),
    )
    return point, result.notes
