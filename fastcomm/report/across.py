"""Ranks beside each other on a terminal: what is wrong, and who waits for whom."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from fastcomm.metrics.across import Across
from fastcomm.metrics.skew import Wait
from fastcomm.report.rows import na, percent, table
from fastcomm.trace.schema import TAGS
from fastcomm.units import format_bandwidth, format_bytes, format_ns

_MOST_ROWS = 8


def last_to_arrive(found: Across) -> list[str]:
    """Name the rank that others wait for the most, or say that ranks cannot be compared."""
    if len(found.heat.ranks) < 2:  # noqa: PLR2004 - nobody to be compared with
        return []
    if not found.matching.matched:
        return ["Which rank others wait for is n/a: no collective was matched across ranks."]
    return [
        f"Rank [bold]{each.rank}[/] causes the most waiting: {format_ns(each.caused_ns)} per "
        f"step. It is the last to arrive in {each.last} of {each.collectives} collectives."
        for each in found.by_wait_caused(1)
    ]


def skew(found: Across) -> Table:
    """Classes of collectives: waiting and moving apart."""
    rows = table("collectives", "size from", "count", "skew", "p95", "transfer", "p95", "wait")
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
    """Return the ranks that cause the most waiting in collectives."""
    tags = [tag for tag in TAGS if any(each.tag == tag for each in found.waits)]
    rows = table("waits a step", *tags, "last", "wait caused")
    by_rank: dict[int, list[Wait]] = {}
    for each in found.waits:
        by_rank.setdefault(each.rank, []).append(each)
    chosen = sorted(by_rank, key=lambda rank: (-_wait_caused(by_rank[rank]), rank))
    for rank in chosen[:_MOST_ROWS]:
        own = {each.tag: each for each in by_rank[rank]}
        count = sum(each.collectives for each in own.values())
        rows.add_row(
            f"rank {rank}",
            *(na(own[tag].wait_ns if tag in own else None, format_ns) for tag in tags),
            percent(sum(each.last for each in own.values()) / count),
            format_ns(_wait_caused(own.values())),
        )
    return rows


def slow_links(found: Across) -> Table:
    """Groups whose collectives are slower than those of their peers."""
    rows = table("slow links", "ranks", "bus bw", "peers", "a step")
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
    """What a reader might take for something else."""
    note = found.matching.note
    said = [note] if note else []
    if not found.matching.matched:
        return said
    widest = max((each.spread_ns or 0 for each in found.offsets), default=0)
    times = f"aligned, to {format_ns(widest)}" if found.clocks == "aligned" else "raw"
    share = percent(found.matching.share)
    return [
        *said,
        "skew: from the first to the last arrival; transfer: from there to the end. "
        "wait caused: how long others wait in collectives because the rank is last; one delay "
        "counts in every collective that it reaches, so this can exceed the cost of a finding. "
        f"{share} of the collectives are matched across ranks; clocks {times}.",
    ]


def _wait_caused(waits: Iterable[Wait]) -> float:
    return sum(each.wait_caused_ns for each in waits)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_ROWS]))
    return shown + (" ..." if len(ranks) > _MOST_ROWS else "")
