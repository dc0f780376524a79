"""The metrics of a run on one screen; `--full` and `--spec` print more tables below it.

From top to bottom: what was measured, skipped ranks, findings, warnings, the breakdown, one
line per parallelism, and the ranks that cause waits.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from fastcomm.errors import inert_parts
from fastcomm.idle import totals
from fastcomm.metrics import gaps
from fastcomm.metrics.result import NO_FLOPS, Metrics
from fastcomm.report import details
from fastcomm.report.columns import NA
from fastcomm.report.console import (
    COMMAND,
    TerminalTable,
    marked,
    na,
    percent,
    plain_console,
    say,
    table,
)
from fastcomm.trace.parallelisms import LOOKS, TAGS
from fastcomm.trace.run import ranks_words
from fastcomm.units import counted, format_bandwidth, format_bytes, format_ns

_BAR = 96
_SMALL_BAR = 24
_EXACT_DIGITS = 4  # of the step time and of its bytes
_MOST_FINDINGS = 3
_MOST_WARNINGS = 4
_MOST_LINES = 3  # of a warning
_SKIPPED, _WARNING = "[red]skipped:[/]", "[yellow]warning:[/]"
_COLORS = {
    "compute": "green",
    **{f"exposed_{tag}": look.terminal for tag, look in LOOKS.items()},
    "exposed_mixed": "bright_magenta",
    "memcpy": "bright_blue",
    "idle": "bright_black",
}
_EXPOSED = "exposed_"


def show(
    metrics: Metrics, console: Console | None = None, *, full: bool = False, spec: bool = False
) -> None:
    """Print the metrics; plain text if the console is no terminal.

    Parameters
    ----------
    metrics
        The metrics of a run.
    console
        Where to print; stdout by default.
    full
        Print every table and every warning.
    spec
        Print the formulas of the specification and utilization by payload bytes.

    """
    console = plain_console(console)
    say(console, _title(metrics), hanging=2)
    for line in _skipped(metrics, console.width, full=full):
        say(console, line, hanging=2)
    for line in _sentences(metrics, full=full):
        say(console, line, indent=2, hanging=4)
    for line in _first(metrics.warnings, _WARNING, "warning", console.width, full=full):
        say(console, line, hanging=2)
    if metrics.breakdown.exact["idle"] is not None and console.is_terminal:
        console.print(_stack(metrics, min(_BAR, console.width - 4)))
    tables = [
        _breakdown(metrics),
        _parallelisms(metrics),
        details.network(metrics, by_parallelism=full),
        details.culprits(metrics),
    ]
    if full:
        tables += details.tables(metrics)
    if spec:
        tables += details.spec_tables(metrics)
    for rows in tables:
        if rows.row_count:
            console.print()
            console.print(rows)
    console.print()
    for note in _notes(metrics, full=full, spec=spec):
        say(console, escape(note), hanging=2, style="dim")


def _sentences(metrics: Metrics, *, full: bool) -> list[str]:
    """Return the headline, then the findings in order, or a sentence if there are none."""
    printed = metrics.findings if full else metrics.findings[:_MOST_FINDINGS]
    lines = [f"[bold]{escape(metrics.headline)}[/]"]
    for finding in printed:
        color = "yellow" if finding.is_symptom else "bold red"
        lines.append(f"[{color}]{escape(finding.text)}[/] Confidence: {finding.confidence}.")
    if more := len(metrics.findings) - len(printed):
        lines.append(f"{counted(more, 'more finding')} with --full.")
    lines += [f"[green]{escape(metrics.health)}[/]"] if metrics.health else []
    lines += [metrics.throughput.sentence] if metrics.throughput.sentence else []
    return lines + [escape(line) for line in metrics.flops.sentences if _has_flops(metrics)]


def _has_flops(metrics: Metrics) -> bool:
    """Return whether FLOPs were counted."""
    return NO_FLOPS not in metrics.flops.unknown.values()


def _title(metrics: Metrics) -> str:
    """Return the line on ranks, steps, how these were found, and the step time."""
    times = metrics.iteration
    if times.mean_ns is not None and times.p99_ns is not None:
        measured = f"{format_ns(times.mean_ns, _EXACT_DIGITS)} a step"
        if sum(rank.iterations for rank in metrics.by_rank) > 1:
            measured += f", {format_ns(times.p99_ns, _EXACT_DIGITS)} p99"
    else:
        measured = "no step" if metrics.iterations is not None else NA
    steps = f"{NA} steps" if metrics.iterations is None else counted(metrics.iterations, "step")
    clock = f"; {metrics.iteration_clock} clock" if times.mean_ns is not None else ""
    ranks = ranks_words(len(metrics.measured_ranks), metrics.expected_ranks)
    return (
        f"[bold]{ranks}, {steps}[/] ({escape(', '.join(metrics.found_by))}{clock}): {measured}"
    )


def _stack(metrics: Metrics, width: int) -> Text:
    """Return the breakdown as one stacked bar of at most `width` cells."""
    bar, edge = Text("  "), 0.0
    for name, share in metrics.breakdown.exact.items():
        cells = round((edge + (share or 0)) * width) - round(edge * width)
        edge += share or 0
        bar.append("█" * cells if name != "idle" else "░" * cells, style=_COLORS[name])
    return bar


def _breakdown(metrics: Metrics) -> TerminalTable:
    """Return the parts of a step, which add up to all of it."""
    rows = table("part of a step", "time", "share", "")
    parts = metrics.breakdown.parts or {}
    for part, name, color in (
        ("compute", "compute", _COLORS["compute"]),
        ("exposed", "exposed communication", "red"),
        ("memcpy", "copies", _COLORS["memcpy"]),
        ("idle", "idle", _COLORS["idle"]),
    ):
        share = parts.get(part)
        bar = Text("█" * round((share or 0) * _SMALL_BAR), style=color)
        rows.add_row(name, _of_step(metrics, share), percent(share), bar)
    return rows


def _of_step(metrics: Metrics, share: float | None) -> str:
    """Format a share (0 to 1) of the mean step as a time; "n/a" if it is unknown."""
    mean = metrics.iteration.mean_ns
    return NA if share is None or mean is None else format_ns(share * mean)


_WAITS = ("wait/step", "transfer/step")


def _parallelisms(metrics: Metrics) -> TerminalTable:
    """Return a row per parallelism; times and bytes per step, as means over ranks."""
    split = metrics.across.mean_waits()
    rows = table(
        "parallelism",
        "exposed/step",
        "of step",
        *(_WAITS if split else ()),
        f"{metrics.bytes}/step/{'rank' if metrics.is_host_run else 'GPU'}",
        "bus bandwidth",
        "events",
        drop=("events", *reversed(_WAITS)),
    )
    exact, guessed = metrics.breakdown.exact, guessed_tags(metrics)
    for tag in TAGS:
        share = exact[_EXPOSED + tag]
        if tag not in metrics.volume:
            continue
        waits = split.get(tag, (None, None)) if split else ()
        rows.add_row(
            Text(f"{tag} *" if tag in guessed else tag, style=_COLORS[_EXPOSED + tag]),
            _of_step(metrics, share),
            percent(share),
            *(na(ns, format_ns) for ns in waits),
            na(metrics.volume[tag].bytes_per_step_per_gpu, _exact_bytes),
            na(metrics.bandwidth[tag].avg_bus_bw, format_bandwidth),
            str(metrics.volume[tag].comm_events),
        )
    if share := exact[_EXPOSED + "mixed"]:
        rows.add_row("mixed", _of_step(metrics, share), percent(share))
    if host := metrics.host_communication:
        alone, step = host.alone_ns_per_step, metrics.iteration.mean_ns
        share = None if alone is None or not step else alone / step
        unknown = [NA] * (len(rows.headings) - 4)
        rows.add_row("host +", na(alone, format_ns), percent(share), *unknown, str(host.events))
    return rows


def _exact_bytes(count: float) -> str:
    """Format a number of bytes with four digits."""
    return format_bytes(count, _EXACT_DIGITS)


def guessed_tags(metrics: Metrics) -> set[str]:
    """Return the parallelisms that at least one group has only by a heuristic."""
    groups = metrics.tables["group_tags"].to_pylist()
    return {row["tag"] for row in groups if row["tag_source"] == "heuristic"}


def _notes(metrics: Metrics, *, full: bool, spec: bool) -> Iterator[str]:
    """Yield explanations of terms and tables."""
    causes = totals.sentence(metrics.idle, metrics.idle_names, metrics.iteration.mean_ns)
    yield from filter(None, [causes])
    if metrics.volume:
        yield _exposed_note(metrics)
    if any(not finding.is_symptom for finding in metrics.findings):
        yield "+ms per step: about what a fix saves; ranks that are late together share it."
    if details.culprits(metrics).row_count:
        yield "Wait caused: waits of others in collectives that the rank joins last."
    if host := metrics.host_communication:
        yield (
            "host +: collectives of the host (gloo, MPI) run for "
            f"{na(host.ns_per_step, format_ns)} per step; exposed: the device does nothing, "
            "which also counts as idle."
        )
    if guessed_tags(metrics):
        yield (
            "* parallelism guessed from the traffic; set it with --tp, --pp, --dp, --ep, --cp "
            "or [[tags]] in --config."
        )
    on_host = metrics.is_host_run
    outside = gaps.outside_sentence(metrics.outside, is_host_run=on_host)
    if outside and not gaps.outside_warning(
        metrics.outside, metrics.iteration_clock, is_host_run=on_host
    ):
        yield f"{outside}."
    yield from [note] if (note := metrics.across.matching.note) and not full else []
    if full:
        yield from details.notes(metrics)
    if spec:
        yield from details.spec_notes(metrics)
    options = [
        *([] if full else ["--full (all tables)"]),
        *([] if spec else ["--spec (the specification's formulas)"]),
    ]
    if options:
        yield f"More: {', '.join(options)}, --json."


def _exposed_note(metrics: Metrics) -> str:
    """Return the explanation of exposed time, waits, and unknown parallelism."""
    is_mixed = bool(metrics.breakdown.exact[_EXPOSED + "mixed"])
    mixed = " (mixed: of several at once)" if is_mixed else ""
    waits = " Waits may be overlapped." if metrics.across.waits else ""
    other = " OTHER: the parallelism is unknown." if "OTHER" in metrics.volume else ""
    return f"Exposed: no compute runs{mixed}.{waits}{other}"


def _skipped(metrics: Metrics, width: int, *, full: bool) -> Iterator[str]:
    """Yield a line per rank that could not be read."""
    lines = [str(rank) for rank in metrics.skipped]
    yield from _first(lines, _SKIPPED, "skipped rank", width, full=full)


def _first(
    texts: Sequence[str], mark: str, noun: str, width: int, *, full: bool
) -> Iterator[str]:
    """Yield the first texts after a mark, each shortened to a few lines.

    `noun` is what the line on further texts calls one; `width` is that of the console in cells;
    `full` yields every text unshortened.
    """
    shown = texts if full else texts[:_MOST_WARNINGS]
    room = width * _MOST_LINES - len(Text.from_markup(mark)) - 1
    for text in shown:
        yield from marked(mark, text if full else _brief(text, room))
    if more := len(texts) - len(shown):
        yield f"{mark} {counted(more, f'more {noun}')} with --full"


def _brief(text: str, room: int) -> str:
    """Shorten a text to `room` cells at the end of a sentence or word.

    A text with a command for the reader to run stays whole.
    """
    if len(text) <= room or any(line.startswith(COMMAND) for line in inert_parts(text)):
        return text
    mark = " ... (--full)"
    start = text[: room - len(mark)]
    place = max(start.rfind(". "), start.rfind("; "), start.rfind(": "))
    if place < room // 2:
        place = start.rfind(" ")
    return start[: place + 1].rstrip() + mark
