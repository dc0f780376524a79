"""Tables of kernels: a row per name, operator, module, stream or layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastcomm.kernels.result import Kernels
from fastcomm.report.columns import ResultTable, TableCell, TableColumn
from fastcomm.units import signed_percent

_EVEN = 0.01  # relative difference up to which ranks are equally fast
_LONGEST = 60  # letters of the shapes of an operator
_NOUNS = {"name": "kernel"}


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


_WHY = "unknown for this row"
_COLUMNS = (
    TableColumn("category", "category", drop=4),
    TableColumn("of step", "share", "share", "kernels.share", why=_WHY),
    TableColumn("total", "total_ns", "ns", "kernels.total", why=_WHY),
    TableColumn("per step", "per_step_ns", "ns", drop=3, only="terminal"),
    TableColumn("count", "count", "count", "kernels.count", why=_WHY),
    TableColumn("mean", "mean_ns", "ns", "kernels.mean", why=_WHY, drop=6),
    TableColumn("median", "median_ns", "ns", "kernels.median", why=_WHY, drop=1),
    TableColumn("p95", "p95_ns", "ns", "kernels.p95", why=_WHY, drop=5),
    TableColumn("longest", "max_ns", "ns", "kernels.max", why=_WHY, drop=2),
    TableColumn("slowest rank", _slowest, "factor", "kernels.slowdown", why=_WHY),
)
_OF_FLOPS = (
    TableColumn("TFLOP/s", "tflops_per_s", "number", "kernels.flops", why=_WHY),
    TableColumn("of peak", "peak_share", "share", "kernels.peak", why=_WHY),
    TableColumn("of memory", "memory_share", "share", "kernels.memory", why=_WHY),
    TableColumn("near", "bound", only="terminal"),
)
_OF_QUEUES = (
    TableColumn("queued", "queue_mean", "decimal", "kernels.queue", why=_WHY),
    TableColumn("most", "queue_max", "count", only="terminal"),
    TableColumn("launch delay", "launch_delay_mean_ns", "ns", "kernels.delay", why=_WHY),
)
