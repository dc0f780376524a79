"""The kernels of a run: as tables on the terminal, in Markdown and CSV, and as files."""

from rich.markup import escape

from fastcomm.kernels.result import Kernels
from fastcomm.report import columns
from fastcomm.report.columns import markdown_text
from fastcomm.report.console import (
    TerminalTable,
    marked,
    percent,
    plain_console,
    say,
    shown,
    table,
)
from fastcomm.report.tables.kernels import rows
from fastcomm.units import counted, format_ns


def show(kernels: Kernels, top: int) -> None:
    """Print the first sentence, the categories, the top rows, and what is left out."""
    console = plain_console()
    say(console, f"[bold]{escape(kernels.headline)}[/]")
    say(console, _scope(kernels), indent=2)
    for sentence in (*kernels.flops.sentences, *(f"{f.text}." for f in kernels.findings)):
        say(console, escape(sentence), indent=2)
    if kernels.by != "category" and len(kernels.by_category) > 1:
        console.print(_categories(kernels))
    console.print(shown(rows(kernels, top)))
    if more := _more(kernels, top):
        say(console, more)
    for note in kernels.notes:
        for line in marked("[yellow]note:[/]", note):
            say(console, line, hanging=2)


def _more(kernels: Kernels, top: int) -> str:
    """Return the sentence on the rows that are not printed; empty if there are none."""
    more = kernels.table.num_rows - top
    sentence = f"{counted(more, 'more row')}; --top N prints N, --format csv prints all"
    return sentence if more > 0 else ""


def _scope(kernels: Kernels) -> str:
    """Return the sentence on the ranks and steps that are summed up."""
    numbers = sorted({rank.steps for rank in kernels.ranks}) or [0]
    least, most = numbers[0], numbers[-1]
    steps = counted(most, "step") if least == most else f"{least} to {most} steps"
    steps = steps if most else "no steps"
    host = (
        " A run without a device: operators and communication of the host."
        if kernels.is_host_run
        else ""
    )
    return f"{kernels.read}, {steps}{' each' if len(kernels.ranks) > 1 else ''}.{host}"


def _categories(kernels: Kernels) -> TerminalTable:
    """Return the table of categories; their times may overlap on different streams."""
    categories = table("category", "total", "runs", "of step")
    for name, total in kernels.by_category.items():
        running = kernels.running_ns[name]
        times = format_ns(total), format_ns(running), percent(kernels.share(running))
        categories.add_row(escape(name), *times)
    return categories


def markdown(kernels: Kernels, top: int) -> str:
    """Return the first sentence, the top rows as a table of Markdown, and the notes."""
    notes = [text for text in (_more(kernels, top), *kernels.notes) if text]
    lines = [
        markdown_text(kernels.headline),
        "",
        *columns.markdown(rows(kernels, top)),
        *(f"\n*{markdown_text(note)}*" for note in notes),
    ]
    return "\n".join(lines)
