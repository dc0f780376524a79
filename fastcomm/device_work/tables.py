"""The kernels of a run as tables, on the terminal, in Markdown and CSV, and in files."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.markup import escape

from fastcomm.device_work.result import Kernels
from fastcomm.show import tables
from fastcomm.show.console import (
    TerminalTable,
    marked,
    percent,
    plain_console,
    say,
    shown,
    table,
)
from fastcomm.show.tables import ResultTable, TableCell, TableColumn, markdown_text
from fastcomm.units import counted, format_ns, signed_percent

_EVEN = 0.01  # relative difference up to which ranks are equally fast
_LONGEST = 60  # letters of the shapes of an operator
_NOUNS = {"name": "kernel"}
_WHY = "unknown for this row"
_OF_FLOPS = (
    TableColumn("TFLOP/s", "tflops_per_s", "number", "kernels.rows.tflops_per_s", why=_WHY),
    TableColumn("of peak", "peak_share", "share", "kernels.rows.peak_share", why=_WHY),
    TableColumn("of memory", "memory_share", "share", "kernels.rows.memory_share", why=_WHY),
    TableColumn("near", "bound", only="terminal"),
)
_OF_QUEUES = (
    TableColumn("queued", "queue_mean", "decimal", "kernels.rows.queue_mean", why=_WHY),
    TableColumn("most", "queue_max", "count", only="terminal"),
    TableColumn(
        "launch delay",
        "launch_delay_mean_ns",
        "ns",
        "kernels.rows.launch_delay_mean_ns",
        why=_WHY,
    ),
)


def rows(kernels: Kernels, most: int) -> ResultTable:
    """Return the `most` rows with the longest totals."""
    return ResultTable(
        name="kernels-table",
        caption="The longest first",
        columns=_columns(kernels),
        rows=kernels.table.slice(0, most).to_pylist(),
    )


def _columns(kernels: Kernels) -> tuple[TableColumn, ...]:
    """Return the columns; those of FLOPs and queues where these are known."""
    by, of_flops = kernels.by, _OF_FLOPS if _has_flops(kernels) else ()
    has_queues = by == "stream" and "queue_mean" not in kernels.unknown
    return (
        TableColumn(_NOUNS.get(by, by), _short_name, only="terminal"),
        TableColumn(by, _full_name, only="page"),
        *_COLUMNS,
        *(replace(one, drop=7) if has_queues else one for one in of_flops),
        *(_OF_QUEUES if has_queues else ()),
    )


def _has_flops(kernels: Kernels) -> bool:
    """Return whether FLOPs of the step, or rates beside the peak, are known."""
    has_rates = kernels.table["peak_share"].null_count < kernels.table.num_rows
    return has_rates or kernels.flops.executed_per_step is not None


def _full_name(row: dict[str, Any]) -> str:
    """Return the name of a row and all shapes of its tensors."""
    return " ".join([row["name"], *map(str, row.get("shapes") or ())])


def _short_name(row: dict[str, Any]) -> str:
    """Return the name of a row and the first shapes: "aten::mm 4096x512 512x1024"."""
    return f"{row['name']}{_shapes(row.get('shapes') or ())}"


def _shapes(shapes: Sequence[str]) -> str:
    """Return the shapes of tensors as text: " 4096x512 512x1024"."""
    texts = ["x".join(text.strip("[]").split(", ")) for text in shapes if text != "[]"]
    text = " ".join(["", *texts])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _slowest(row: dict[str, Any]) -> TableCell | None:
    """Return the slowest rank and by how much it is slower: "5 (+12.0 %)"; or "even"."""
    slowdown = row["slowdown"]
    if slowdown is None:
        return None
    is_even = slowdown - 1 < _EVEN
    text = "even" if is_even else f"{row['slowest_rank']} ({signed_percent(slowdown - 1)})"
    return TableCell(value=slowdown, text=text)


_COLUMNS = (
    TableColumn("category", "category", drop=4),
    TableColumn("of step", "share", "share", "kernels.rows.share", why=_WHY),
    TableColumn("total", "total_ns", "ns", "kernels.rows.total_ns", why=_WHY),
    TableColumn("per step", "per_step_ns", "ns", drop=3, only="terminal"),
    TableColumn("count", "count", "count", "kernels.rows.count", why=_WHY),
    TableColumn("mean", "mean_ns", "ns", "kernels.rows.mean_ns", why=_WHY, drop=6),
    TableColumn("median", "median_ns", "ns", "kernels.rows.median_ns", why=_WHY, drop=1),
    TableColumn("p95", "p95_ns", "ns", "kernels.rows.p95_ns", why=_WHY, drop=5),
    TableColumn("longest", "max_ns", "ns", "kernels.rows.max_ns", why=_WHY, drop=2),
    TableColumn("slowest rank", _slowest, "factor", "kernels.rows.slowdown", why=_WHY),
)


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
        *tables.markdown(rows(kernels, top)),
        *(f"\n*{markdown_text(note)}*" for note in notes),
    ]
    return "\n".join(lines)
