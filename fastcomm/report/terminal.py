"""The metrics on one screen: what matters in sentences, then the tables."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fastcomm.metrics import outside
from fastcomm.metrics.result import Metrics
from fastcomm.report import across
from fastcomm.report.console import plain_console
from fastcomm.report.rows import NA, group_name, na, percent, table
from fastcomm.trace.run import ranks_words, skipped_lines
from fastcomm.trace.schema import TAGS
from fastcomm.units import format_bandwidth, format_bytes, format_ns

_BAR = 24
_MOST_ROWS = 8
_COLORS = {
    "compute": "green",
    "exposed_DP": "blue",
    "exposed_TP": "red",
    "exposed_PP": "magenta",
    "exposed_EP": "yellow",
    "exposed_CP": "cyan",
    "exposed_OTHER": "bright_red",
    "exposed_mixed": "bright_magenta",
    "memcpy": "bright_blue",
    "idle": "bright_black",
}


def show(found: Metrics, console: Console | None = None) -> None:
    """Print the report to stdout; plain text where that is no terminal."""
    console = plain_console(console)
    console.print(_title(found), highlight=False)
    for line in _skipped(found):
        console.print(line, highlight=False)
    for sentence in sentences(found):
        console.print(f"  {sentence}", highlight=False)
    if found.breakdown.exact["idle"] is not None:
        console.print(_stack(found))
    for rows in (
        _breakdown(found),
        _tags(found),
        across.waits(found.across),
        across.skew(found.across),
        across.slow_links(found.across),
        _windows(found),
        _groups(found),
    ):
        if rows.row_count:
            console.print(rows)
    for note in (*_notes(found), *_problems(found)):
        for line in note.splitlines():
            # A command to copy stays on one line.
            console.print(line, highlight=False, soft_wrap=line.startswith("    "))


def sentences(found: Metrics) -> list[str]:
    """Return the headline, then a line per finding, or one that says there is none."""
    lines = [f"[bold]{escape(found.headline)}[/]"]
    for each in found.findings[:_MOST_ROWS]:
        color = "yellow" if each.is_symptom else "bold red"
        lines.append(f"[{color}]{escape(each.text)}[/] Confidence: {each.confidence}.")
    if hidden := len(found.findings) - _MOST_ROWS:
        lines += [f"{hidden} more findings in --json."] if hidden > 0 else []
    return lines + ([f"[green]{escape(found.health)}[/]"] if found.health else [])


def _title(found: Metrics) -> str:
    times = found.iteration
    measured = (
        f"iteration {format_ns(times.mean_ns)} mean, {format_ns(times.p99_ns)} p99"
        if times.mean_ns is not None and times.p99_ns is not None
        else "no iteration"
        if found.iterations is not None
        else NA
    )
    clock = f"; {found.iteration_clock} clock" if times.mean_ns is not None else ""
    ranks = ranks_words(len(found.ranks), found.expected_ranks)
    return (
        f"[bold]{ranks}, {na(found.iterations, str)} iterations[/] "
        f"({escape(', '.join(found.found_by))}{clock}): {measured}"
    )


def _stack(found: Metrics) -> Text:
    """The exact breakdown as one stacked bar, as wide as four small ones."""
    width, bar = 4 * _BAR, Text("  ")
    edge = 0.0
    for name, share in found.breakdown.exact.items():
        cells = round((edge + (share or 0)) * width) - round(edge * width)
        edge += share or 0
        bar.append("█" * cells if name != "idle" else "░" * cells, style=_COLORS[name])
    return bar


def _breakdown(found: Metrics) -> Table:
    """Exact shares, and beside each what the specification's formula says."""
    rows = table("time of an iteration", "exact", "", "a step", "formula")
    exact, spec = found.breakdown.exact, found.breakdown.spec
    for name, share in exact.items():
        tag = name.removeprefix("exposed_")
        formula = spec.get(name, spec.get(f"comm_{tag}"))
        always = ("compute", "idle") if share is None else ("idle",)
        if not share and not formula and name not in always:
            continue
        rows.add_row(
            name.replace("_", " "),
            percent(share),
            Text("█" * round((share or 0) * _BAR), style=_COLORS[name]),
            na(share and (found.iteration.mean_ns or 0) * share, format_ns),
            percent(formula) if name not in ("memcpy", "exposed_mixed") else "",
        )
    return rows


def _tags(found: Metrics) -> Table:
    rows = table(
        "by parallelism",
        "events",
        f"{found.bytes} a step+GPU",
        "avg bw",
        "avg bus bw",
        "util",
        "bus util",
        "p95 util",
        "overlap",
    )
    for tag in TAGS:
        if tag not in found.volume:
            continue
        speed, amount = found.bandwidth[tag], found.volume[tag]
        rows.add_row(
            tag,
            str(amount.comm_events),
            na(amount.bytes_per_step_per_gpu, format_bytes),
            na(speed.avg_bw, format_bandwidth),
            na(speed.avg_bus_bw, format_bandwidth),
            percent(speed.global_avg_util),
            percent(speed.avg_bus_util),
            percent(speed.p95_util),
            percent(found.overlap.by_tag.get(tag)),
        )
    if found.volume:
        all_tags = percent(found.overlap.average_overlap_ratio)
        rows.add_row("all", *[""] * 7, all_tags)
    return rows


def _windows(found: Metrics) -> Table:
    rows = table("windows between phases", "count", "mean", "p50", "p95")
    for window in sorted(found.windows or (), key=lambda window: -window.mean_ns)[:_MOST_ROWS]:
        rows.add_row(
            f"{window.source} to {window.target}",
            str(window.count),
            *(format_ns(ns) for ns in (window.mean_ns, window.p50_ns, window.p95_ns)),
        )
    return rows


def _groups(found: Metrics) -> Table:
    rows = table("process groups", "ranks each", "tag", "by", "on ranks", "events")
    for row in found.tables["group_tags"].to_pylist()[:_MOST_ROWS]:
        source = row["tag_source"]
        fits = f" ({row['candidates']})" if row["candidates"] else ""
        rows.add_row(
            escape(group_name(row["description"], row["size"])),
            na(row["size"], str),
            row["tag"],
            f"{source}{fits}",
            str(row["on_ranks"]),
            str(row["events"]),
        )
    return rows


def _notes(found: Metrics) -> list[str]:
    """What a reader might take for something else."""
    link = found.link_bandwidth
    notes = [
        "exact: a partition of the iteration; compute hides communication, both hide copies.",
        "formula: sums of durations; compute = iteration - union of communication.",
        f"bandwidth counts {found.bytes} bytes, and the wait for the slowest rank; "
        + (
            f"util = bytes / time / {format_bandwidth(link)}, physical only for bus bytes."
            if link
            else "utilisation n/a: --link-bandwidth is not given."
        ),
    ]
    if (beyond := outside.sentence(found.outside)) and not outside.warning(
        found.outside, found.iteration_clock
    ):
        notes.append(f"{beyond}.")
    idle = found.breakdown.spec["idle"]
    if idle is not None and idle < 0:
        notes.append(
            "idle by the formula is negative: communication overlaps itself, and its sum of "
            "durations counts that time twice."
        )
    silent = {
        tag: speed.events_without_bytes
        for tag, speed in found.bandwidth.items()
        if speed.events_without_bytes
    }
    if silent:
        words = ", ".join(f"{count} of {tag}" for tag, count in silent.items())
        notes.append(f"events of unknown size are in no bandwidth and no volume: {words}.")
    return [f"[dim]{note}[/]" for note in (*notes, *across.notes(found.across))]


def _skipped(found: Metrics) -> list[str]:
    """The ranks that could not be read, and so are in no number below."""
    return [f"[red]skipped:[/] {escape(line)}" for line in skipped_lines(found.failed)]


def _problems(found: Metrics) -> list[str]:
    return [f"[yellow]warning:[/] {escape(warning)}" for warning in found.warnings]
