"""The comparison of two runs: on the terminal, and as files."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from fastcomm import units
from fastcomm.analyses.changes import CauseChange, KernelChange
from fastcomm.analyses.compare import BreakdownChange, Comparison, Value
from fastcomm.report.console import (
    TerminalTable,
    marked,
    na,
    plain_console,
    say,
    shortened,
    table,
)
from fastcomm.report.details import part_name
from fastcomm.units import (
    format_bandwidth,
    format_bytes,
    format_ns,
    format_signed_ns,
    signed_percent,
)

_MOST_VALUES = 12
_MOST_CAUSES = 3
_MOST_KERNELS = 6
_MOST_NAMED = 5  # new and vanished kernels
_NAME_WIDTH = 60
_SMALL = 0.01  # of the largest effect: smaller ones are not shown
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


def show(comparison: Comparison, conditions: Sequence[str]) -> None:
    """Print the step, the parts of its change, and the largest other changes.

    `conditions` are the texts of --fail-if; each is printed with whether it holds.
    """
    console = plain_console()
    text = headline(comparison)
    shown = text if text.endswith(".") else f"[bold]{text}[/]"
    if comparison.incomplete:
        shown = f"{shown.removesuffix('.')} [red]({escape(comparison.incomplete[0])})[/]"
    say(console, shown)
    for line in comparison.incomplete[1:]:
        say(console, f"[red]{escape(line)}[/]", hanging=2)
    for cause in comparison.causes[:_MOST_CAUSES]:
        say(console, _cause(cause), indent=2)
    if comparison.parts and not comparison.is_same:
        console.print(_parts(comparison))
        say(console, "The effects of the parts add up to the change of the step.", style="dim")
    changed = _changed(comparison)
    if changed.row_count:
        console.print(changed)
    for key, changes in (comparison.kernels or {}).items():
        _show_kernels(console, key, changes)
    for note in comparison.notes:
        for line in marked("[yellow]note:[/]", note):
            say(console, line, hanging=2)
    for text in conditions:
        mark = "[red]FAIL[/]" if text in comparison.conditions_that_hold else "[green]ok[/]  "
        say(console, f"{mark} {escape(text)}", hanging=5)


def headline(comparison: Comparison) -> str:
    """Return the sentence on the change of the step time."""
    step = comparison.step
    if step.before is None or step.after is None or step.difference is None:
        return "The change of the step is n/a: a run has no step times."
    if comparison.is_same:
        return "No difference."
    relative = "" if step.relative is None else f" ({signed_percent(step.relative, 2)})"
    change = f"{format_signed_ns(step.difference)}{relative}"
    return (
        f"A step takes {format_ns(step.after, _STEP_DIGITS)} instead of "
        f"{format_ns(step.before, _STEP_DIGITS)}: {change}"
    )


def _cause(cause: CauseChange) -> str:
    """Return the sentence on a cause that is new, gone or changed."""
    if cause.before_ns is None:
        return f"[bold]New:[/] {escape(cause.text)} Confidence: {cause.confidence}."
    if cause.after_ns is None:
        return f"Gone: {escape(cause.text)}"
    return (
        f"{format_ns(abs(cause.effect_ns))} {'more' if cause.effect_ns > 0 else 'less'} than "
        f"before: {escape(cause.text)} "
        f"Confidence: {cause.confidence}."
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
                reasons(part),
            )
    return rows


def reasons(part: BreakdownChange) -> str:
    """Return what changed with a part of the step: "bytes +10.0 %, events +2.0 %"."""
    parts = []
    for reason in part.reasons:
        name = _REASONS.get(reason.name.rpartition(".")[2], "overlap")
        parts.append(f"{name} {signed_percent(reason.relative or 0.0)}")
    return ", ".join(parts)


def _show_kernels(console: Console, key: str, changes: Sequence[KernelChange]) -> None:
    """Print the changes with the largest effect on the step; new and vanished work apart."""
    rows = table(
        *(NOUNS[key], "category", "before", "after", "effect", "calls/step"),
        drop=("category", "before"),
    )
    most = max((abs(change.effect_ns) for change in changes), default=0.0)
    shown = [change for change in changes if abs(change.effect_ns) > _SMALL * most]
    for change in [one for one in shown if one.state == "changed"][:_MOST_KERNELS]:
        rows.add_row(
            escape(change.name),
            escape(change.category),
            *(na(value, format_ns) for value in (change.before_ns, change.after_ns)),
            format_signed_ns(change.effect_ns),
            calls(change),
        )
    if rows.row_count:
        console.print(rows)
    for state in ("new", "vanished"):
        own = [change for change in shown if change.state == state]
        texts = [
            f"{escape(shortened(one.name, _NAME_WIDTH))} ({format_signed_ns(one.effect_ns)})"
            for one in own[:_MOST_NAMED]
        ]
        more = f", and {len(own) - len(texts)} more" if len(own) > len(texts) else ""
        if own:
            say(console, f"{state} {NOUNS[key]}s: {', '.join(texts)}{more}", hanging=2)


NOUNS = {"name": "kernel", "operator": "operator", "annotation": "annotation"}


def calls(change: KernelChange) -> str:
    """Return the calls per step: "12", or before and after: "12 to 14"."""
    before, after = (f"{count or 0:.4g}" for count in (change.before_count, change.after_count))
    return before if before == after else f"{before} to {after}"


def other_changes(comparison: Comparison) -> list[Value]:
    """Return windows, bandwidth, volume and overlap that changed by 1 %, largest change first.

    One statistic of each metric is listed.
    """
    values = [
        change
        for change in comparison.values
        if abs(change.relative or 0) >= _WORTH
        and change.name.startswith(("windows.", "bandwidth.", "volume.", "overlap."))
        and (change.name.startswith("overlap.") or change.name.endswith(_SHOWN))
    ]
    return sorted(values, key=lambda change: -abs(change.relative or 0))


def _changed(comparison: Comparison) -> TerminalTable:
    """Return the table of the metrics with the largest relative changes, largest first.

    It has windows, bandwidth, volume and overlap; the times of the step have a table of their
    own.
    """
    rows = table("other metrics", "before", "after", "change", drop=("before", "after"))
    for change in other_changes(comparison)[:_MOST_VALUES]:
        cells = (in_unit(change.name, value) for value in (change.before, change.after))
        rows.add_row(escape(change.name), *cells, signed_percent(change.relative or 0.0))
    return rows


def in_unit(name: str, value: float | None) -> str:
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
