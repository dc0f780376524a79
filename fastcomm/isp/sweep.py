"""Best strategies over world sizes and sequence lengths, and sensitivity to the hardware."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fastcomm.errors import ConfigError
from fastcomm.hardware.cluster import AttentionCurve, Cluster, GemmCurve
from fastcomm.isp.question import Question
from fastcomm.isp.result import HardwareChange, Record, with_units
from fastcomm.isp.search import notes, search
from fastcomm.isp.tables import AttentionTable
from fastcomm.result import TableResult

if TYPE_CHECKING:
    import pyarrow as pa


def sensitivity(
    question: Question,
    cluster: Cluster,
    best: Record | None,
    attention: AttentionTable | None = None,
) -> tuple[HardwareChange, ...]:
    """The best of each cluster that is better in one thing."""
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
