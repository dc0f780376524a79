"""Two runs side by side: on a terminal, as JSON, and in files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.markup import escape
from rich.table import Table

from fastcomm.metrics.comparison import Comparison, Part, Value
from fastcomm.report import files
from fastcomm.report.console import plain_console
from fastcomm.units import format_bandwidth, format_bytes, format_ns

_MOST_VALUES = 12
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


def to_dict(found: Comparison, holding: Sequence[str]) -> dict[str, Any]:
    """The object that `--json` prints. Times in ns; null is unknown."""
    return {
        "step": _value(found.step),
        "parts": [
            {
                "name": part.name,
                "before_ns": part.before_ns,
                "after_ns": part.after_ns,
                "effect_ns": part.effect_ns,
                "reasons": [each.name for each in part.reasons],
            }
            for part in found.parts
        ],
        "values": [_value(each) for each in found.values],
        "conditions_that_hold": list(holding),
        "incomplete": list(found.incomplete),
        "notes": list(found.notes),
    }


def json_text(found: Comparison, holding: Sequence[str]) -> str:
    """The same as text."""
    return json.dumps(to_dict(found, holding), indent=2, allow_nan=False)


def write(
    found: Comparison, holding: Sequence[str], folder: str | Path, *, xlsx: bool = False
) -> list[Path]:
    """Write compare.json, and parts and values as CSV and Parquet; give their paths."""
    whole = to_dict(found, holding)
    parts = [{**part, "reasons": " ".join(part["reasons"])} for part in whole["parts"]]
    tables = {
        "parts": pa.Table.from_pylist(parts, schema=_PARTS),
        "values": pa.Table.from_pylist(whole["values"], schema=_VALUES),
    }
    texts = {"compare.json": json_text(found, holding)}
    return files.write_tables(folder, texts, tables, "compare" if xlsx else None)


_FLOATS = pa.float64()
_VALUES = pa.schema(
    [("name", pa.string())]
    + [(name, _FLOATS) for name in ("before", "after", "difference", "relative")]
)
_PARTS = pa.schema(
    [("name", pa.string())]
    + [(name, _FLOATS) for name in ("before_ns", "after_ns", "effect_ns")]
    + [("reasons", pa.string())]
)


def _value(each: Value) -> dict[str, Any]:
    return {
        "name": each.name,
        "before": each.before,
        "after": each.after,
        "difference": each.difference,
        "relative": each.relative,
    }


def show(found: Comparison, conditions: Sequence[str], holding: Sequence[str]) -> None:
    """Print the step, what its change consists of, and what else changed most."""
    console = plain_console()
    console.print(_headline(found), highlight=False)
    for line in found.incomplete:
        console.print(f"[red]{escape(line)}[/]", highlight=False)
    if found.parts:
        console.print(_parts(found))
        console.print(
            "[dim]exact parts of the mean iteration; their effects add up to its change[/]",
            highlight=False,
        )
    changed = _changed(found)
    if changed.row_count:
        console.print(changed)
    for note in found.notes:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)
    for text in conditions:
        mark = "[red]FAIL[/]" if text in holding else "[green]ok[/]  "
        console.print(f"{mark} {escape(text)}", highlight=False)


def _headline(found: Comparison) -> str:
    step = found.step
    if step.before is None or step.after is None or step.difference is None:
        return "The change of the step is n/a: a run has no iteration times."
    relative = "" if step.relative is None else f" ({step.relative:+.2%})"
    change = f"{_signed(step.difference)}{relative}"
    return (
        f"[bold]An iteration takes {format_ns(step.after)} instead of "
        f"{format_ns(step.before)}: {change}[/]"
    )


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{format_ns(abs(ns))}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, style="bold", header_style="underline", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    return table


def _parts(found: Comparison) -> Table:
    table = _table("part of the step", "before", "after", "effect")
    table.add_column("with it changed", header_style="dim")
    for part in found.parts:
        if part.before_ns or part.after_ns:
            table.add_row(
                part.name.replace("_", " "),
                format_ns(part.before_ns),
                format_ns(part.after_ns),
                _signed(part.effect_ns),
                _reasons(part),
            )
    return table


def _reasons(part: Part) -> str:
    words = []
    for each in part.reasons:
        name = _REASONS.get(each.name.rpartition(".")[2], "overlap")
        words.append(f"{name} {each.relative:+.1%}")
    return ", ".join(words)


def _changed(found: Comparison) -> Table:
    """Other values, the largest relative change first; --json has all."""
    table = _table("other metrics", "before", "after", "change")
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
        table.add_row(escape(each.name), *words, f"{each.relative:+.1%}")
    return table


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
        return f"{value:.1%}"
    return f"{value:g}"
