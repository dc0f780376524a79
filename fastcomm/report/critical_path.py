"""The critical path for a person, and as files."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastcomm.critical_path.document import document
from fastcomm.critical_path.result import CriticalPath
from fastcomm.errors import FastcommError
from fastcomm.units import format_ns

_PIPE_WIDTH = 110
_BAR = 24
_NEARLY = 0.95
_TOP = 10
_WORDS = {
    "cpu_bound": "host: operators and calls",
    "data_loading": "host: loading of data",
    "host_gap": "host: between operators",
    "gpu_compute_bound": "device: compute",
    "gpu_memory_bound": "device: copies",
    "gpu_communication_bound": "device: communication",
    "gpu_kernel_kernel_overhead": "device: between kernels",
    "gpu_kernel_launch_overhead": "from launch to start",
    "sync_wait": "return of waiting calls",
    "unexplained": "unexplained",
    "": "dependencies",
}


def show(found: CriticalPath, console: Console | None = None) -> None:
    """Print the report to stdout; plain text where that is no terminal."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_PIPE_WIDTH, no_color=True)
    console.print(_title(found), highlight=False)
    console.print(f"  {_coverage(found)}", highlight=False)
    for table in (_classes(found), _tags(found), _top(found)):
        if table.row_count:
            console.print(table)
    for note in found.about.notes:
        console.print(f"[dim]note: {escape(note)}[/]", highlight=False)


def _title(found: CriticalPath) -> str:
    about, path = found.about, found.found
    return (
        f"[bold]rank {about.rank}, rules {about.rules}[/]: {about.clipped} events, "
        f"{len(found.graph.source)} edges; critical path of {len(path.edges)} edges, "
        f"{len(found.event_ids)} events, {format_ns(found.length_ns)}"
    )


def _coverage(found: CriticalPath) -> str:
    length, wall = found.length_ns, found.wall_ns
    share = length / wall if wall else 1.0
    words = f"The path covers {share:.1%} of the {format_ns(wall)} from first to last event."
    if share < _NEARLY:
        words += f" {format_ns(wall - length)} are on no edge of it."
    return words


def _classes(found: CriticalPath) -> Table:
    table = _table("time on the path", "share", "", "time")
    sums = found.summary_ns()
    total = sum(sums.values()) or 1
    for name, ns in sorted(sums.items(), key=lambda pair: (-pair[1], pair[0])):
        share = ns / total
        bar = "█" * round(max(share, 0) * _BAR)
        table.add_row(_WORDS.get(name, name), f"{share:.1%}", bar, format_ns(ns))
    return table


def _tags(found: CriticalPath) -> Table:
    table = _table("communication on the path", "time")
    for tag, ns in sorted(found.by_tag_ns().items(), key=lambda pair: (-pair[1], pair[0])):
        table.add_row(str(tag), format_ns(ns))
    return table


def _top(found: CriticalPath) -> Table:
    table = _table("own time on the path", "kind", "edges", "time")
    for row in found.top("name", _TOP).to_pylist():
        name = row["name"] if len(row["name"]) <= 60 else row["name"][:57] + "..."  # noqa: PLR2004
        table.add_row(escape(name), row["kind"], str(row["edges"]), format_ns(row["self_ns"]))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, style="bold", header_style="underline", no_wrap=True)
    for name in others:
        table.add_column(
            name, justify="right" if name else "left", header_style="dim", no_wrap=True
        )
    return table


def write(found: CriticalPath, folder: str | Path) -> list[Path]:
    """Write critical_path.json and the breakdown as CSV and Parquet; their paths."""
    folder = Path(folder)
    text = json.dumps(document(found), indent=2, allow_nan=False)
    writers: dict[str, Callable[[Path], object]] = {
        "critical_path.json": lambda path: path.write_text(text),
        "critical_path.parquet": lambda path: pq.write_table(found.breakdown, path),
        "critical_path.csv": lambda path: pa_csv.write_csv(found.breakdown, path),
    }
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, writer in writers.items():
            aside = folder / f".{name}.{os.getpid()}"
            writer(aside)
            written.append(aside.replace(folder / name))
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    return written
