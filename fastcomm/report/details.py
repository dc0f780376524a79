"""Tables of the metrics beyond the first screen, and the specification's formulas."""

from collections.abc import Iterator

from rich.markup import escape

from fastcomm.metrics.result import Metrics
from fastcomm.report import across
from fastcomm.report.rows import Table, group_name, known_by, na, percent, table
from fastcomm.trace.schema import TAGS
from fastcomm.units import format_bandwidth, format_ns

_MOST_ROWS = 8


def tables(found: Metrics) -> list[Table]:
    """Return the tables of `--full`."""
    return [
        _exposed(found),
        _bandwidth(found),
        across.waits(found.across),
        across.skew(found.across),
        across.slow_links(found.across),
        _windows(found),
        _groups(found),
    ]


def _exposed(found: Metrics) -> Table:
    """Every part of the exact breakdown."""
    rows = table("every part of a step", "time", "share")
    mean = found.iteration.mean_ns
    for name, share in found.breakdown.exact.items():
        if share and mean is not None:
            rows.add_row(name.replace("_", " "), format_ns(share * mean), percent(share))
    return rows


def _bandwidth(found: Metrics) -> Table:
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


def _windows(found: Metrics) -> Table:
    rows = table("windows between phases", "count", "mean", "p50", "p95", drop=("p50",))
    for window in sorted(found.windows or (), key=lambda window: -window.mean_ns)[:_MOST_ROWS]:
        rows.add_row(
            f"{window.source} to {window.target}",
            str(window.count),
            *(format_ns(ns) for ns in (window.mean_ns, window.p50_ns, window.p95_ns)),
        )
    return rows


def _groups(found: Metrics) -> Table:
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
    yield from across.notes(found.across)


def spec_tables(found: Metrics) -> list[Table]:
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
