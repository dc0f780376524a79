"""Tables beyond the first screen of `metrics`, and the comparison of ranks."""

from collections.abc import Iterator, Sequence

from rich.markup import escape

from fastcomm.metrics.across import Across
from fastcomm.metrics.result import Metrics
from fastcomm.report.console import TerminalTable, group_name, known_by, na, percent, table
from fastcomm.trace.schema import TAGS
from fastcomm.units import format_bandwidth, format_bytes, format_ns

_MOST_ROWS = 8
_MOST_CULPRITS = 3
_NOISE = 0.005  # of a step: ranks that differ by less are not worth a line


def culprits(found: Metrics) -> TerminalTable:
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
            percent(each.last_share),
            format_ns(each.wait_ns),
        )
    return rows


def skew(found: Across) -> TerminalTable:
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


def waits(found: Across) -> TerminalTable:
    """The ranks that make others wait the longest, and their own waits by parallelism."""
    tags = [tag for tag in TAGS if any(each.tag == tag for each in found.waits)]
    rows = table(
        *("own waits a step", *tags, "last to arrive", "wait caused a step"), drop=tags[::-1]
    )
    wait = {(each.rank, each.tag): each.wait_ns for each in found.waits}
    for each in found.by_rank[:_MOST_ROWS]:
        rows.add_row(
            f"rank {each.rank}",
            *(na(wait.get((each.rank, tag)), format_ns) for tag in tags),
            percent(each.last_share),
            format_ns(each.caused_ns),
        )
    return rows


def slow_links(found: Across) -> TerminalTable:
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


def notes_across(found: Across) -> list[str]:
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


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_ROWS]))
    return shown + (" ..." if len(ranks) > _MOST_ROWS else "")


def tables(found: Metrics) -> list[TerminalTable]:
    """Return the tables of `--full`."""
    return [
        _exposed(found),
        _bandwidth(found),
        waits(found.across),
        skew(found.across),
        slow_links(found.across),
        _windows(found),
        _groups(found),
    ]


def _exposed(found: Metrics) -> TerminalTable:
    """Every part of the exact breakdown."""
    rows = table("every part of a step", "time", "share")
    mean = found.iteration.mean_ns
    for name, share in found.breakdown.exact.items():
        if share and mean is not None:
            rows.add_row(name.replace("_", " "), format_ns(share * mean), percent(share))
    return rows


def _bandwidth(found: Metrics) -> TerminalTable:
    rows = table(
        "bandwidth",
        f"algorithm ({found.bytes})",
        "bus",
        "share of link",
        "overlapped",
    )
    for tag in (tag for tag in TAGS if tag in found.volume):
        speed = found.bandwidth[tag]
        rows.add_row(
            tag,
            na(speed.avg_bw, format_bandwidth),
            na(speed.avg_bus_bw, format_bandwidth),
            percent(speed.avg_bus_util),
            percent(found.overlap.by_tag.get(tag)),
        )
    if found.volume:
        rows.add_row("all", "", "", "", percent(found.overlap.average_overlap_ratio))
    return rows


def _windows(found: Metrics) -> TerminalTable:
    rows = table("windows between phases", "count", "mean", "p50", "p95", drop=("p50",))
    for window in sorted(found.windows or (), key=lambda window: -window.mean_ns)[:_MOST_ROWS]:
        rows.add_row(
            f"{window.source} to {window.target}",
            str(window.count),
            *(format_ns(ns) for ns in (window.mean_ns, window.p50_ns, window.p95_ns)),
        )
    return rows


def _groups(found: Metrics) -> TerminalTable:
    rows = table(
        *("process groups", "ranks each", "parallelism", "known by", "on ranks", "events"),
        drop=("on ranks",),
    )
    for row in found.tables["group_tags"].to_pylist()[:_MOST_ROWS]:
        rows.add_row(
            escape(group_name(row["description"], row["size"])),
            na(row["size"], str),
            row["tag"],
            escape(known_by(row)),
            str(row["on_ranks"]),
            str(row["events"]),
        )
    return rows


def notes(found: Metrics) -> Iterator[str]:
    """Explain the tables of `--full`."""
    link = found.link_bandwidth
    yield "Parts of a step: compute hides communication, and both hide copies."
    yield "Bandwidth counts the wait for the last rank; " + (
        f"the link has {format_bandwidth(link)}."
        if link
        else "utilization is n/a without --link-bandwidth."
    )
    silent = ", ".join(
        f"{speed.events_without_bytes} of {tag}"
        for tag, speed in found.bandwidth.items()
        if speed.events_without_bytes
    )
    if silent:
        yield f"Events of unknown size are in no bandwidth and no volume: {silent}."
    yield from notes_across(found.across)


def spec_tables(found: Metrics) -> list[TerminalTable]:
    """Return the tables of `--spec`."""
    formula = table("specification formula", "share of step")
    for name, share in found.breakdown.spec.items():
        if share or name in ("compute", "idle"):
            formula.add_row(name.replace("_", " "), percent(share))
    use = table(f"utilization by {found.bytes}", "of all bytes", "mean", "p95")
    for tag in (tag for tag in TAGS if tag in found.bandwidth):
        speed = found.bandwidth[tag]
        shares = (speed.global_avg_util, speed.avg_util, speed.p95_util)
        use.add_row(tag, *map(percent, shares))
    return [formula, use]


def spec_notes(found: Metrics) -> Iterator[str]:
    """Explain the tables of `--spec`, and numbers in them that cannot be physical."""
    yield (
        "Formula: comm is the sum of the events' durations, compute the time without "
        "communication, idle the rest of the step."
    )
    idle = found.breakdown.spec["idle"]
    if idle is not None and idle < 0:
        yield (
            "Idle by the formula is negative: communication overlaps itself, and the sum of "
            "durations counts that time twice."
        )
    link = found.link_bandwidth
    yield "Utilization: bytes / time / link, " + (
        f"{format_bandwidth(link)}; only that of bus bytes has a limit of 100%."
        if link
        else "n/a without --link-bandwidth."
    )
