"""The kernels of a run: as tables on the terminal, in Markdown and CSV, and as files."""

from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from fastcomm.errors import inert
from fastcomm.kernels.result import Kernels
from fastcomm.report.console import (
    NA,
    TerminalTable,
    marked,
    na,
    percent,
    plain_console,
    say,
    table,
)
from fastcomm.units import counted, format_ns, signed_percent

_HEADINGS = (
    *("category", "total", "of step", "per step", "count", "mean", "median", "p95", "max"),
    "slowest rank",
)
_OF_FLOPS = ("TFLOP/s", "of peak", "memory", "near")
_OF_QUEUES = ("queued", "most", "launch delay")
_EVEN = 0.01  # relative difference up to which ranks are equally fast
_DROP = ("median", "max", "per step", "category", "p95", "mean")
_LONGEST = 60  # letters of the shapes of an operator


def show(kernels: Kernels, top: int) -> None:
    """Print the first sentence, the categories, the top rows, and what is left out."""
    console = plain_console()
    say(console, f"[bold]{escape(kernels.headline)}[/]")
    say(console, _scope(kernels), indent=2)
    for sentence in (*kernels.flops.sentences, *(f"{f.text}." for f in kernels.findings)):
        say(console, escape(sentence), indent=2)
    if kernels.by != "category" and len(kernels.by_category) > 1:
        console.print(_categories(kernels))
    console.print(_rows(kernels, top))
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
    rows = table("category", "total", "runs", "of step")
    for name, total in kernels.by_category.items():
        running = kernels.running_ns[name]
        times = format_ns(total), format_ns(running), percent(kernels.share(running))
        rows.add_row(escape(name), *times)
    return rows


def _rows(kernels: Kernels, top: int) -> TerminalTable:
    """Return the table of the rows with the longest totals."""
    drop = (*_DROP, *_OF_FLOPS) if _has_queues(kernels) else _DROP
    rows = table(_NOUNS.get(kernels.by, kernels.by), *_headings(kernels), drop=drop)
    for row in kernels.table.slice(0, top).to_pylist():
        rows.add_row(*map(escape, _cells(row, kernels)))
    return rows


def _has_flops(kernels: Kernels) -> bool:
    """Return whether FLOPs of the step, or rates beside the peak, are known."""
    has_rates = kernels.table["peak_share"].null_count < kernels.table.num_rows
    return has_rates or kernels.flops.executed_per_step is not None


def _has_queues(kernels: Kernels) -> bool:
    """Return whether any launch of the work of a stream was recorded."""
    return kernels.by == "stream" and "queue_mean" not in kernels.unknown


def _headings(kernels: Kernels) -> tuple[str, ...]:
    of_queues = _OF_QUEUES if _has_queues(kernels) else ()
    return (*_HEADINGS, *(_OF_FLOPS if _has_flops(kernels) else ()), *of_queues)


_NOUNS = {"name": "kernel"}


def _cells(row: dict[str, Any], kernels: Kernels) -> Sequence[str]:
    """Return the cells of a row, formatted with their units."""
    times = (format_ns(row[name]) for name in ("mean_ns", "median_ns", "p95_ns", "max_ns"))
    costs = (
        na(row["tflops_per_s"], "{:.3g}".format),
        na(row["peak_share"], percent),
        na(row["memory_share"], percent),
        row["bound"] or NA,
    )
    return (
        f"{row['name']}{_shapes(row.get('shapes') or ())}",
        row["category"],
        format_ns(row["total_ns"]),
        percent(row["share"]),
        na(row["per_step_ns"], format_ns),
        str(row["count"]),
        *times,
        _slowest(row),
        *(costs if _has_flops(kernels) else ()),
        *(_queue(row) if _has_queues(kernels) else ()),
    )


def _queue(row: dict[str, Any]) -> Sequence[str]:
    """Return the cells of the queue of a stream."""
    return (
        na(row["queue_mean"], "{:.1f}".format),
        na(row["queue_max"], str),
        na(row["launch_delay_mean_ns"], format_ns),
    )


def _shapes(shapes: Sequence[str]) -> str:
    """Return the shapes of tensors as text: " 4096x512 512x1024"."""
    texts = ["x".join(text.strip("[]").split(", ")) for text in shapes if text != "[]"]
    text = " ".join(["", *texts])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _slowest(row: dict[str, Any]) -> str:
    """Return the slowest rank and by how much it is slower: "5 (+12.0 %)"; or "even"."""
    if row["slowdown"] is None:
        return NA
    if row["slowdown"] - 1 < _EVEN:
        return "even"
    return f"{row['slowest_rank']} ({signed_percent(row['slowdown'] - 1)})"


def markdown(kernels: Kernels, top: int) -> str:
    """Return the first sentence, the top rows as a table of Markdown, and the notes."""
    headings = (_NOUNS.get(kernels.by, kernels.by), *_headings(kernels))
    lines = [
        _plain(kernels.headline),
        "",
        f"| {' | '.join(headings)} |",
        f"|{' --- |' * 2}{' ---: |' * (len(headings) - 2)}",
    ]
    for row in kernels.table.slice(0, top).to_pylist():
        name, *cells = map(_plain, _cells(row, kernels))
        lines.append(f"| {' | '.join([f'`{name}`', *cells])} |")
    notes = [text for text in (_more(kernels, top), *kernels.notes) if text]
    lines += [f"\n*{_plain(note)}*" for note in notes]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a text that cannot end a cell or a code span of Markdown."""
    return inert(text).replace("|", "\\|").replace("`", "'")
