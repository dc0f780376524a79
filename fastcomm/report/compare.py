"""Two runs side by side: on a terminal, as JSON, and in files."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from fastcomm.analyses.compare import BreakdownChange, Comparison
from fastcomm.report import files, json_text
from fastcomm.report.console import TerminalTable, plain_console, say, table
from fastcomm.units import (
    format_bandwidth,
    format_bytes,
    format_ns,
    format_signed_ns,
    percent,
    signed_percent,
)

_MOST_VALUES = 12
_STEP_DIGITS = 4
# Of values that changed less than this share, none is worth a line.
_WORTH = 0.01
# Of several statistics of one thing, the one that says most.
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


def write(found: Comparison, folder: str | Path, *, xlsx: bool = False) -> list[Path]:
    """Write compare.json, and parts and values as CSV and Parquet; give their paths."""
    texts = {"compare.json": json_text.dumps(found.to_dict())}
    return files.write_tables(folder, texts, found.to_arrow(), "compare" if xlsx else None)


def show(found: Comparison, conditions: Sequence[str]) -> None:
    """Print the step, what its change consists of, and what else changed most."""
    console = plain_console()
    headline = _headline(found)
    if found.incomplete:
        headline = f"{headline.removesuffix('.')} [red]({escape(found.incomplete[0])})[/]"
    say(console, headline)
    for line in found.incomplete[1:]:
        say(console, f"[red]{escape(line)}[/]", hanging=2)
    if found.parts and not found.is_same:
        console.print(_parts(found))
        say(console, "parts of the mean step; their effects add up to its change", style="dim")
    changed = _changed(found)
    if changed.row_count:
        console.print(changed)
    for note in found.notes:
        say(console, f"[yellow]note:[/] {escape(note)}", hanging=2)
    for text in conditions:
        mark = "[red]FAIL[/]" if text in found.conditions_that_hold else "[green]ok[/]  "
        say(console, f"{mark} {escape(text)}", hanging=5)


def _headline(found: Comparison) -> str:
    step = found.step
    if step.before is None or step.after is None or step.difference is None:
        return "The change of the step is n/a: a run has no iteration times."
    if found.is_same:
        return "No difference."
    relative = "" if step.relative is None else f" ({signed_percent(step.relative, 2)})"
    change = f"{format_signed_ns(step.difference)}{relative}"
    return (
        f"[bold]An iteration takes {format_ns(step.after, _STEP_DIGITS)} instead of "
        f"{format_ns(step.before, _STEP_DIGITS)}: {change}[/]"
    )


def _parts(found: Comparison) -> TerminalTable:
    rows = table(
        *("part of the step", "before", "after", "effect", "with it changed"),
        texts=("with it changed",),
    )
    for part in found.parts:
        if part.before_ns or part.after_ns:
            rows.add_row(
                part.name.replace("_", " "),
                format_ns(part.before_ns),
                format_ns(part.after_ns),
                format_signed_ns(part.effect_ns),
                _reasons(part),
            )
    return rows


def _reasons(part: BreakdownChange) -> str:
    words = []
    for each in part.reasons:
        name = _REASONS.get(each.name.rpartition(".")[2], "overlap")
        words.append(f"{name} {signed_percent(each.relative or 0.0)}")
    return ", ".join(words)


def _changed(found: Comparison) -> TerminalTable:
    """Other values, the largest relative change first; --json has all."""
    rows = table("other metrics", "before", "after", "change", drop=("before", "after"))
    known = [
        each
        for each in found.values
        if abs(each.relative or 0) >= _WORTH
        and each.name.startswith(("windows.", "bandwidth.", "volume.", "overlap."))
        and (each.name.startswith("overlap.") or each.name.endswith(_SHOWN))
    ]
    known.sort(key=lambda each: -abs(each.relative or 0))
    for each in known[:_MOST_VALUES]:
        words = (_in_unit(each.name, value) for value in (each.before, each.after))
        rows.add_row(escape(each.name), *words, signed_percent(each.relative or 0.0))
    return rows


def _in_unit(name: str, value: float | None) -> str:
    """A value as a person reads it, by the ending of its name."""
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
        return percent(value)
    return f"{value:g}"
