"""Tables beyond the first screen of `metrics`: ranks beside each other, and two runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.markup import escape

from fastcomm import result, units
from fastcomm.analyses.compare import BreakdownChange, Comparison
from fastcomm.metrics.across import Across
from fastcomm.metrics.result import Metrics
from fastcomm.report import files
from fastcomm.report.console import (
    TerminalTable,
    group_name,
    known_by,
    na,
    percent,
    plain_console,
    say,
    table,
)
from fastcomm.trace.schema import TAGS
from fastcomm.units import (
    format_bandwidth,
    format_bytes,
    format_ns,
    format_signed_ns,
    signed_percent,
)

_MOST_ROWS = 8
_MOST_CULPRITS = 3
_NOISE = 0.005  # of a step: ranks that differ by less are not worth a line

_MOST_VALUES = 12
_STEP_DIGITS = 4
# Minimum relative change of a printed value.
_WORTH = 0.01
# One statistic per metric is printed.
_SHOWN = (
    ".mean_ns",
    ".avg_bus_bw",
    ".global_avg_util",
    ".bytes_per_step_per_gpu",
    ".comm_events",
)
_REASONS = {
    "bytes_per_step_per_gpu": "bytes",
    "avg_bus_bw": "bus bandwidth",
    "events": "events",
}


def culprits(metrics: Metrics) -> TerminalTable:
    """Return the ranks that cause the longest waits, if that is more than noise."""
    rows = table(
        *("rank", "wait caused/step", "of step", "last to arrive", "own wait/step"),
        drop=("own wait/step",),
    )
    mean = metrics.iteration.mean_ns or 0.0
    for row in metrics.across.by_wait_caused(_MOST_CULPRITS):
        if not mean or row.caused_ns < _NOISE * mean:
            continue
        rows.add_row(
            f"rank {row.rank}",
            format_ns(row.caused_ns),
            percent(row.caused_ns / mean),
            percent(row.last_share),
            format_ns(row.wait_ns),
        )
    return rows


def skew(across: Across) -> TerminalTable:
    """Return arrival skew and transfer time by class of collectives."""
    rows = table(
        *("collectives", "size from", "count", "mean skew", "p95 skew"),
        *("mean transfer", "p95 transfer", "waiting share"),
        drop=("p95 transfer", "p95 skew", "count"),
    )
    for row in across.skew[:_MOST_ROWS]:
        rows.add_row(
            f"{row.tag} {row.op}",
            na(row.size_from, format_bytes),
            str(row.count),
            *(
                format_ns(ns)
                for ns in (
                    row.skew_mean_ns,
                    row.skew_p95_ns,
                    row.transfer_mean_ns,
                    row.transfer_p95_ns,
                )
            ),
            percent(row.wait_share),
        )
    return rows


def waits(across: Across) -> TerminalTable:
    """Return the ranks that cause the longest waits, and their own waits by parallelism."""
    tags = [tag for tag in TAGS if any(row.tag == tag for row in across.waits)]
    rows = table(
        *("own waits/step", *tags, "last to arrive", "wait caused/step"), drop=tags[::-1]
    )
    wait = {(row.rank, row.tag): row.wait_ns for row in across.waits}
    for row in across.by_rank[:_MOST_ROWS]:
        rows.add_row(
            f"rank {row.rank}",
            *(na(wait.get((row.rank, tag)), format_ns) for tag in tags),
            percent(row.last_share),
            format_ns(row.caused_ns),
        )
    return rows


def slow_links(across: Across) -> TerminalTable:
    """Return the groups whose collectives are slower than those of similar groups.

    Only the first `_MOST_ROWS` groups are listed, the most lost time per step first.
    """
    rows = table("slow links", "ranks", "bus bandwidth", "of peers", "lost/step")
    slow = [row for row in across.links if row.is_slow]
    for row in sorted(slow, key=lambda link: -(link.excess_ns or 0))[:_MOST_ROWS]:
        rows.add_row(
            f"{row.tag} {row.op}",
            _ranks(row.ranks),
            na(row.bus_bw, format_bandwidth),
            na(row.peers_bus_bw, format_bandwidth),
            na(row.excess_ns, lambda ns: f"+{format_ns(ns)}"),
        )
    return rows


def notes_across(across: Across) -> list[str]:
    """Return explanations of the tables that compare ranks."""
    note = across.matching.note
    notes_ = [note] if note else []
    if not across.matching.matched:
        return notes_
    widest = max((row.spread_ns or 0 for row in across.offsets), default=0)
    times = f"aligned, to {format_ns(widest)}" if across.clocks == "aligned" else "raw"
    share = percent(across.matching.share)
    return [
        *notes_,
        "Skew: from the first to the last arrival; transfer: from there to the end. "
        "Wait caused: how long others wait in collectives because the rank is last; one delay "
        "counts in every collective that it reaches, so this can exceed the cost of a finding. "
        f"{share} of the collectives are matched across ranks; clocks {times}.",
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """Return the first 8 ranks, separated by commas."""
    shown = ", ".join(map(str, ranks[:_MOST_ROWS]))
    return shown + (" ..." if len(ranks) > _MOST_ROWS else "")


def tables(metrics: Metrics) -> list[TerminalTable]:
    """Return the tables of `--full`."""
    return [
        _exposed(metrics),
        _bandwidth(metrics),
        waits(metrics.across),
        skew(metrics.across),
        slow_links(metrics.across),
        _windows(metrics),
        _groups(metrics),
    ]


def _exposed(metrics: Metrics) -> TerminalTable:
    """Return every part of the exact breakdown."""
    rows = table("every part of a step", "time", "share")
    mean = metrics.iteration.mean_ns
    for name, share in metrics.breakdown.exact.items():
        if share and mean is not None:
            rows.add_row(part_name(name), format_ns(share * mean), percent(share))
    return rows


def part_name(key: str) -> str:
    """Return the printed name of a part of the exact breakdown, given its key in JSON."""
    return "copies" if key == "memcpy" else key.replace("_", " ")


def _bandwidth(metrics: Metrics) -> TerminalTable:
    """Return the table of algorithm bandwidth, bus bandwidth and overlap by parallelism."""
    rows = table(
        "bandwidth",
        f"algorithm ({metrics.bytes})",
        "bus",
        "share of link",
        "overlapped",
    )
    for tag in (tag for tag in TAGS if tag in metrics.volume):
        speed = metrics.bandwidth[tag]
        rows.add_row(
            tag,
            na(speed.avg_bw, format_bandwidth),
            na(speed.avg_bus_bw, format_bandwidth),
            percent(speed.avg_bus_util),
            percent(metrics.overlap.by_tag.get(tag)),
        )
    if metrics.volume:
        rows.add_row("all", "", "", "", percent(metrics.overlap.average_overlap_ratio))
    return rows


def _windows(metrics: Metrics) -> TerminalTable:
    """Return the table of windows between phases, with the longest mean first."""
    rows = table("windows between phases", "count", "mean", "p50", "p95", drop=("p50",))
    for window in sorted(metrics.windows or (), key=lambda window: -window.mean_ns)[
        :_MOST_ROWS
    ]:
        rows.add_row(
            f"{window.source} to {window.target}",
            str(window.count),
            *(format_ns(ns) for ns in (window.mean_ns, window.p50_ns, window.p95_ns)),
        )
    return rows


def _groups(metrics: Metrics) -> TerminalTable:
    """Return the table of process groups, and where their parallelism is known from."""
    rows = table(
        *("process groups", "ranks each", "parallelism", "known by", "on ranks", "events"),
        drop=("on ranks",),
    )
    for row in metrics.tables["group_tags"].to_pylist()[:_MOST_ROWS]:
        rows.add_row(
            escape(group_name(row["description"], row["size"])),
            na(row["size"], str),
            row["tag"],
            escape(known_by(row)),
            str(row["on_ranks"]),
            str(row["events"]),
        )
    return rows


def notes(metrics: Metrics) -> Iterator[str]:
    """Yield explanations of the tables of `--full`.

    These are how the time of a step is divided, what bandwidth includes, the number of events
    of unknown size if there are any, and notes on matched collectives.
    """
    link = metrics.link_bandwidth
    yield (
        "Parts of a step: all time with compute is compute; of the rest, all time with "
        "communication is exposed communication (mixed: of several parallelisms at once), then "
        "all time with copies is copies."
    )
    yield "Bandwidth includes the wait for the last rank; " + (
        f"the link has {format_bandwidth(link)}."
        if link
        else "utilization is n/a without --link-bandwidth."
    )
    unsized = ", ".join(
        f"{speed.events_without_bytes} of {tag}"
        for tag, speed in metrics.bandwidth.items()
        if speed.events_without_bytes
    )
    if unsized:
        yield f"Events of unknown size are in no bandwidth and no volume: {unsized}."
    yield from notes_across(metrics.across)


def spec_tables(metrics: Metrics) -> list[TerminalTable]:
    """Return the tables of `--spec`."""
    formula = table("specification formula", "share of step")
    for name, share in metrics.breakdown.spec.items():
        if share or name in ("compute", "idle"):
            formula.add_row(name.replace("_", " "), percent(share))
    use = table(f"utilization by {metrics.bytes}", "of all bytes", "mean", "p95")
    for tag in (tag for tag in TAGS if tag in metrics.bandwidth):
        speed = metrics.bandwidth[tag]
        shares = (speed.global_avg_util, speed.avg_util, speed.p95_util)
        use.add_row(tag, *map(percent, shares))
    return [formula, use]


def spec_notes(metrics: Metrics) -> Iterator[str]:
    """Yield explanations of the tables of `--spec`, and of numbers that cannot be physical."""
    yield (
        "Formula: comm is the sum of the events' durations, compute the time without "
        "communication, idle the rest of the step."
    )
    idle = metrics.breakdown.spec["idle"]
    if idle is not None and idle < 0:
        yield (
            "Idle by the formula is negative: communication overlaps itself, and the sum of "
            "durations counts that time twice."
        )
    link = metrics.link_bandwidth
    yield "Utilization: bytes / time / link, " + (
        f"{format_bandwidth(link)}; only that of bus bytes has a limit of 100%."
        if link
        else "n/a without --link-bandwidth."
    )


def write(comparison: Comparison, folder: str | Path, *, xlsx: bool = False) -> list[Path]:
    """Write compare.json, and parts and values as CSV and Parquet; return their paths."""
    texts = {"compare.json": result.dumps(comparison.to_dict())}
    return files.write_tables(folder, texts, comparison.to_arrow(), "compare" if xlsx else None)


def show(comparison: Comparison, conditions: Sequence[str]) -> None:
    """Print the step, the parts of its change, and the largest other changes.

    `conditions` are the texts of --fail-if; each is printed with whether it holds.
    """
    console = plain_console()
    headline = _headline(comparison)
    if comparison.incomplete:
        headline = f"{headline.removesuffix('.')} [red]({escape(comparison.incomplete[0])})[/]"
    say(console, headline)
    for line in comparison.incomplete[1:]:
        say(console, f"[red]{escape(line)}[/]", hanging=2)
    if comparison.parts and not comparison.is_same:
        console.print(_parts(comparison))
        say(console, "The effects of the parts add up to the change of the step.", style="dim")
    changed = _changed(comparison)
    if changed.row_count:
        console.print(changed)
    for note in comparison.notes:
        say(console, f"[yellow]note:[/] {escape(note)}", hanging=2)
    for text in conditions:
        mark = "[red]FAIL[/]" if text in comparison.conditions_that_hold else "[green]ok[/]  "
        say(console, f"{mark} {escape(text)}", hanging=5)


def _headline(comparison: Comparison) -> str:
    """Return the sentence on the change of the step time."""
    step = comparison.step
    if step.before is None or step.after is None or step.difference is None:
        return "The change of the step is n/a: a run has no step times."
    if comparison.is_same:
        return "No difference."
    relative = "" if step.relative is None else f" ({signed_percent(step.relative, 2)})"
    change = f"{format_signed_ns(step.difference)}{relative}"
    return (
        f"[bold]A step takes {format_ns(step.after, _STEP_DIGITS)} instead of "
        f"{format_ns(step.before, _STEP_DIGITS)}: {change}[/]"
    )


def _parts(comparison: Comparison) -> TerminalTable:
    """Return the table of the parts of the step, and what each adds to its change."""
    rows = table(
        *("part of the step", "before", "after", "effect", "what else changed"),
        texts=("what else changed",),
    )
    for part in comparison.parts:
        if part.before_ns or part.after_ns:
            rows.add_row(
                part_name(part.name),
                format_ns(part.before_ns),
                format_ns(part.after_ns),
                format_signed_ns(part.effect_ns),
                _reasons(part),
            )
    return rows


def _reasons(part: BreakdownChange) -> str:
    """Return what changed with a part of the step: "bytes +10.0 %, events +2.0 %"."""
    parts = []
    for reason in part.reasons:
        name = _REASONS.get(reason.name.rpartition(".")[2], "overlap")
        parts.append(f"{name} {signed_percent(reason.relative or 0.0)}")
    return ", ".join(parts)


def _changed(comparison: Comparison) -> TerminalTable:
    """Return other values with the largest relative changes; --json has all."""
    rows = table("other metrics", "before", "after", "change", drop=("before", "after"))
    values = [
        change
        for change in comparison.values
        if abs(change.relative or 0) >= _WORTH
        and change.name.startswith(("windows.", "bandwidth.", "volume.", "overlap."))
        and (change.name.startswith("overlap.") or change.name.endswith(_SHOWN))
    ]
    values.sort(key=lambda change: -abs(change.relative or 0))
    for change in values[:_MOST_VALUES]:
        cells = (_in_unit(change.name, value) for value in (change.before, change.after))
        rows.add_row(escape(change.name), *cells, signed_percent(change.relative or 0.0))
    return rows


def _in_unit(name: str, value: float | None) -> str:
    """Format a value with the unit that its name implies."""
    if value is None:
        return "n/a"
    last = name.rpartition(".")[2]
    if last.endswith("_ns"):
        return format_ns(value)
    if last.endswith("_bw"):
        return format_bandwidth(value)
    if "bytes" in last and not last.startswith("events"):
        return format_bytes(value)
    if "util" in last or name.startswith("overlap."):
        return units.percent(value)
    return f"{value:g}"
