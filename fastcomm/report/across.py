"""Comparison of ranks on a terminal: what is wrong, and who waits for whom."""

from collections.abc import Iterable, Sequence

from fastcomm.metrics.across import Across
from fastcomm.metrics.result import Metrics
from fastcomm.metrics.skew import Wait
from fastcomm.report.rows import Table, na, percent, table
from fastcomm.trace.schema import TAGS
from fastcomm.units import format_bandwidth, format_bytes, format_ns

_MOST_ROWS = 8
_MOST_CULPRITS = 3
_NOISE = 0.005  # of a step: ranks that differ by less are not worth a line


def wait_and_transfer(found: Across) -> dict[str, tuple[float, float]]:
    """Return the time that a mean rank waits and transfers in a step, in ns, by parallelism."""
    ranks = max(1, len(found.heat.ranks))
    sums: dict[str, tuple[float, float]] = {}
    for each in found.waits:
        wait, transfer = sums.get(each.tag, (0.0, 0.0))
        sums[each.tag] = (wait + each.wait_ns, transfer + each.transfer_ns)
    return {tag: (wait / ranks, took / ranks) for tag, (wait, took) in sums.items()}


def culprits(found: Metrics) -> Table:
    """Return the ranks that make others wait the longest, where that is more than noise."""
    rows = table(
        *("rank", "wait caused a step", "of step", "last to arrive", "own wait a step"),
        drop=("own wait a step",),
    )
    mean = found.iteration.mean_ns or 0.0
    for each in found.across.by_wait_caused(_MOST_CULPRITS):
        if not mean or each.caused_ns < _NOISE * mean:
            continue
        rows.add_row(
            f"rank {each.rank}",
            format_ns(each.caused_ns),
            percent(each.caused_ns / mean),
            percent(each.last / each.collectives),
            format_ns(each.wait_ns),
        )
    return rows


def skew(found: Across) -> Table:
    """Classes of collectives: arrival skew and transfer time."""
    rows = table(
        *("collectives", "size from", "count", "mean skew", "p95 skew"),
        *("mean transfer", "p95 transfer", "waiting share"),
        drop=("p95 transfer", "p95 skew", "count"),
    )
    for each in found.skew[:_MOST_ROWS]:
        rows.add_row(
            f"{each.tag} {each.op}",
            na(each.size_from, format_bytes),
            str(each.count),
            *(
                format_ns(ns)
                for ns in (
                    each.skew_mean_ns,
                    each.skew_p95_ns,
                    each.transfer_mean_ns,
                    each.transfer_p95_ns,
                )
            ),
            percent(each.wait_share),
        )
    return rows


def waits(found: Across) -> Table:
    """The ranks that make others wait the longest, and their own waits by parallelism."""
    tags = [tag for tag in TAGS if any(each.tag == tag for each in found.waits)]
    rows = table(
        *("own waits a step", *tags, "last to arrive", "wait caused a step"), drop=tags[::-1]
    )
    by_rank = _by_rank(found)
    chosen = sorted(by_rank, key=lambda rank: (-_wait_caused(by_rank[rank]), rank))
    for rank in chosen[:_MOST_ROWS]:
        own = {each.tag: each for each in by_rank[rank]}
        rows.add_row(
            f"rank {rank}",
            *(na(own[tag].wait_ns if tag in own else None, format_ns) for tag in tags),
            percent(_last_share(by_rank[rank])),
            format_ns(_wait_caused(by_rank[rank])),
        )
    return rows


def _by_rank(found: Across) -> dict[int, list[Wait]]:
    by_rank: dict[int, list[Wait]] = {}
    for each in found.waits:
        by_rank.setdefault(each.rank, []).append(each)
    return by_rank


def _last_share(waits: Sequence[Wait]) -> float:
    """Share of a rank's matched collectives to which it came last."""
    return sum(each.last for each in waits) / sum(each.collectives for each in waits)


def slow_links(found: Across) -> Table:
    """Groups whose collectives are slower than those of their peers."""
    rows = table("slow links", "ranks", "bus bandwidth", "of peers", "longer a step")
    slow = [each for each in found.links if each.is_slow]
    for each in sorted(slow, key=lambda link: -(link.excess_ns or 0))[:_MOST_ROWS]:
        rows.add_row(
            f"{each.tag} {each.op}",
            _ranks(each.ranks),
            na(each.bus_bw, format_bandwidth),
            na(each.peers_bus_bw, format_bandwidth),
            na(each.excess_ns, lambda ns: f"+{format_ns(ns)}"),
        )
    return rows


def notes(found: Across) -> list[str]:
    """Explain the tables of many ranks."""
    note = found.matching.note
    said = [note] if note else []
    if not found.matching.matched:
        return said
    widest = max((each.spread_ns or 0 for each in found.offsets), default=0)
    times = f"aligned, to {format_ns(widest)}" if found.clocks == "aligned" else "raw"
    share = percent(found.matching.share)
    return [
        *said,
        "Skew: from the first to the last arrival; transfer: from there to the end. "
        "Wait caused: how long others wait in collectives because the rank is last; one delay "
        "counts in every collective that it reaches, so this can exceed the cost of a finding. "
        f"{share} of the collectives are matched across ranks; clocks {times}.",
    ]


def _wait_caused(waits: Iterable[Wait]) -> float:
    return sum(each.wait_caused_ns for each in waits)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_ROWS]))
    return shown + (" ..." if len(ranks) > _MOST_ROWS else "")
