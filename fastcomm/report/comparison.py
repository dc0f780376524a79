"""The comparison of two runs: on the terminal, and as files."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from fastcomm.analyses.changes import CauseChange, KernelChange
from fastcomm.analyses.compare import Comparison
from fastcomm.report.console import marked, plain_console, say, shortened, shown
from fastcomm.report.tables import comparison as tables
from fastcomm.units import format_ns, format_signed_ns, signed_percent

_MOST_VALUES = 12
_MOST_CAUSES = 3
_MOST_KERNELS = 6
_MOST_NAMED = 5  # new and vanished kernels
_NAME_WIDTH = 60
_SMALL = 0.01  # of the largest effect: smaller ones are not shown
_STEP_DIGITS = 4


def show(comparison: Comparison, conditions: Sequence[str]) -> None:
    """Print the step, the parts of its change, and the largest other changes.

    `conditions` are the texts of --fail-if; each is printed with whether it holds.
    """
    console = plain_console()
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
        console.print(shown(tables.parts(comparison)))
        say(console, "The effects of the parts add up to the change of the step.", style="dim")
    changed = tables.values(comparison).top(_MOST_VALUES)
    if changed.rows:
        console.print(shown(changed))
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


def _show_kernels(console: Console, key: str, changes: Sequence[KernelChange]) -> None:
    """Print the changes with the largest effect on the step; new and vanished work apart."""
    most = max((abs(change.effect_ns) for change in changes), default=0.0)
    large = [change for change in changes if abs(change.effect_ns) > _SMALL * most]
    if changed := [change for change in large if change.state == "changed"]:
        console.print(shown(tables.kernels(key, changed[:_MOST_KERNELS])))
    for state in ("new", "vanished"):
        own = [change for change in large if change.state == state]
        texts = [
            f"{escape(shortened(one.name, _NAME_WIDTH))} ({format_signed_ns(one.effect_ns)})"
            for one in own[:_MOST_NAMED]
        ]
        more = f", and {len(own) - len(texts)} more" if len(own) > len(texts) else ""
        if own:
            say(console, f"{state} {tables.NOUNS[key]}s: {', '.join(texts)}{more}", hanging=2)
