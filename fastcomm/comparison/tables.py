"""The comparison of two runs as tables, on the terminal and in files."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from fastcomm.comparison.cause_changes import CauseChange
from fastcomm.comparison.kernel_changes import KernelChange
from fastcomm.comparison.result import BreakdownChange, Comparison
from fastcomm.metrics.tables import part_name
from fastcomm.show.console import marked, plain_console, say, shortened, shown
from fastcomm.show.tables import ColumnUnit, ResultTable, TableCell, TableColumn
from fastcomm.units import format_ns, format_signed_ns, signed_percent

NOUNS: Final = {"name": "kernel", "operator": "operator", "annotation": "annotation"}
# Minimum relative change of a value that is shown.
_WORTH = 0.01
# One statistic per metric is shown.
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
_ABSENT = "absent from this run"
_VALUES = (
    TableColumn("metric", "name"),
    TableColumn(
        *("before", lambda row: _in_unit(row.name, row.before), "number"),
        "compare.values.before",
        drop=1,
    ),
    TableColumn(
        *("after", lambda row: _in_unit(row.name, row.after), "number"),
        "compare.values.after",
        drop=2,
    ),
    TableColumn("change", "relative", "change", "compare.values.relative"),
)
_MOST_VALUES = 12
_MOST_CAUSES = 3
_MOST_KERNELS = 6
_MOST_NAMED = 5  # new and vanished kernels
_NAME_WIDTH = 60
_SMALL = 0.01  # of the largest effect: smaller ones are not shown
_STEP_DIGITS = 4


def parts(comparison: Comparison) -> ResultTable:
    """Return the parts of the step, and what each adds to its change."""
    return ResultTable(
        name="parts-table",
        caption="Parts of the step, the largest effect first",
        columns=(
            TableColumn("part of the step", lambda part: part_name(part.name)),
            TableColumn("before", "before_ns", "ns", "compare.parts.before_ns"),
            TableColumn("after", "after_ns", "ns", "compare.parts.after_ns"),
            TableColumn("effect", "effect_ns", "change_ns", "compare.parts.effect_ns"),
            TableColumn("what else changed", _reasons, is_sentence=True),
        ),
        rows=[part for part in comparison.parts if part.before_ns or part.after_ns],
    )


def _reasons(part: BreakdownChange) -> str:
    """Return what changed with a part of the step: "bytes +10.0 %, events +2.0 %"."""
    texts = []
    for reason in part.reasons:
        name = _REASONS.get(reason.name.rpartition(".")[2], "overlap")
        texts.append(f"{name} {signed_percent(reason.relative or 0.0)}")
    return ", ".join(texts)


def kernels(key: str, changes: Sequence[KernelChange]) -> ResultTable:
    """Return changes of the mean step of a rank by kernel, operator or annotation: `key`."""
    noun = NOUNS[key]
    return ResultTable(
        name=f"{noun}s-table",
        caption=f"{noun.capitalize()}s whose time changed, the largest effect first",
        columns=(TableColumn(noun, "name"), *_KERNELS),
        rows=changes,
    )


def _calls(change: KernelChange) -> TableCell:
    """Return the calls per step: "12", or before and after: "12 to 14"."""
    before, after = (f"{count or 0:.4g}" for count in (change.before_count, change.after_count))
    text = before if before == after else f"{before} to {after}"
    return TableCell(value=change.after_count, text=text)


_KERNELS = (
    TableColumn("category", "category", drop=1),
    TableColumn(
        *("before", "before_ns", "ns", "compare.kernels.name.before_ns"), why=_ABSENT, drop=2
    ),
    TableColumn("after", "after_ns", "ns", "compare.kernels.name.after_ns", why=_ABSENT),
    TableColumn("effect", "effect_ns", "change_ns", "compare.kernels.name.effect_ns"),
    TableColumn("calls", _calls, "number", "compare.kernels.name.after_count"),
)


def values(comparison: Comparison) -> ResultTable:
    """Return windows, bandwidth, volume and overlap that changed by 1 %, largest change first.

    One statistic of each metric is listed.
    """
    changed = [
        change
        for change in comparison.values
        if abs(change.relative or 0) >= _WORTH
        and change.name.startswith(("windows.", "bandwidth.", "volume.", "overlap."))
        and (change.name.startswith("overlap.") or change.name.endswith(_SHOWN))
    ]
    return ResultTable(
        name="values-table",
        caption="Windows, bandwidth, volume and overlap that changed by 1 % or more",
        heading="other metrics",
        columns=_VALUES,
        rows=sorted(changed, key=lambda change: -abs(change.relative or 0)),
    )


def _in_unit(name: str, value: float | None) -> TableCell:
    """Return the cell of a value, in the unit that its name implies."""
    last = name.rpartition(".")[2]
    unit: ColumnUnit = "count"
    if last.endswith("_ns"):
        unit = "ns"
    elif last.endswith("_bw"):
        unit = "bytes_per_s"
    elif "bytes" in last and not last.startswith("events"):
        unit = "bytes"
    elif "util" in last or name.startswith("overlap."):
        unit = "share"
    return TableCell(value=value, unit=unit)


def show(comparison: Comparison, conditions: Sequence[str]) -> None:
    """Print the step, the parts of its change, and the largest other changes.

    In what the jobs differ comes first, as it holds for all numbers below. `conditions` are the
    texts of --fail-if; each is printed with whether it holds.
    """
    console = plain_console()
    _show_notes(console, comparison.differences)
    text = headline(comparison)
    line = text if text.endswith(".") else f"[bold]{text}[/]"
    if comparison.incomplete:
        line = f"{line.removesuffix('.')} [red]({escape(comparison.incomplete[0])})[/]"
    say(console, line)
    for line in comparison.incomplete[1:]:
        say(console, f"[red]{escape(line)}[/]", hanging=2)
    for cause in comparison.causes[:_MOST_CAUSES]:
        say(console, _cause(cause), indent=2)
    if comparison.parts and not comparison.is_same:
        console.print(shown(parts(comparison)))
        say(console, "The effects of the parts add up to the change of the step.", style="dim")
    changed = values(comparison).top(_MOST_VALUES)
    if changed.rows:
        console.print(shown(changed))
    for key, changes in (comparison.kernels or {}).items():
        _show_kernels(console, key, changes)
    _show_notes(console, comparison.other_notes)
    for text in conditions:
        mark = "[red]FAIL[/]" if text in comparison.conditions_that_hold else "[green]ok[/]  "
        say(console, f"{mark} {escape(text)}", hanging=5)


def _show_notes(console: Console, notes: Sequence[str]) -> None:
    """Print notes on how far the runs can be compared."""
    for note in notes:
        for line in marked("[yellow]note:[/]", note):
            say(console, line, hanging=2)


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


def _show_kernels(console: Console, key: str, changes: Sequence[KernelChange]) -> None:
    """Print the changes with the largest effect on the step; new and vanished work apart."""
    most = max((abs(change.effect_ns) for change in changes), default=0.0)
    large = [change for change in changes if abs(change.effect_ns) > _SMALL * most]
    if changed := [change for change in large if change.state == "changed"]:
        console.print(shown(kernels(key, changed[:_MOST_KERNELS])))
    for state in ("new", "vanished"):
        own = [change for change in large if change.state == state]
        texts = [
            f"{escape(shortened(one.name, _NAME_WIDTH))} ({format_signed_ns(one.effect_ns)})"
            for one in own[:_MOST_NAMED]
        ]
        more = f", and {len(own) - len(texts)} more" if len(own) > len(texts) else ""
        if own:
            say(console, f"{state} {NOUNS[key]}s: {', '.join(texts)}{more}", hanging=2)
