"""What would change with a faster link, more memory, a quicker GPU: the search, asked again."""

from dataclasses import dataclass, replace

from fastcomm.cluster.cluster import Cluster
from fastcomm.cluster.curves import AttentionCurve, GemmCurve
from fastcomm.isp.question import Question
from fastcomm.isp.result import Record
from fastcomm.isp.search import search
from fastcomm.isp.tables import AttentionTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The best strategy of a cluster that differs in one thing."""

    what: str
    best: Record | None
    # Of the rate, over that of the cluster as it is; None where one of them has no strategy.
    gain: float | None


def sensitivity(
    question: Question,
    cluster: Cluster,
    best: Record | None,
    attention: AttentionTable | None = None,
) -> list[Change]:
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
        found.append(Change(what=what, best=new, gain=gain))
    return found


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
