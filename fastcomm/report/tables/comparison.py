"""Tables of a comparison of two runs: parts of the step, kernels, other metrics."""

from collections.abc import Sequence
from typing import Final

from fastcomm.analyses.changes import KernelChange
from fastcomm.analyses.compare import BreakdownChange, Comparison
from fastcomm.report.columns import ColumnUnit, ResultTable, TableCell, TableColumn
from fastcomm.report.tables.metrics import part_name
from fastcomm.units import signed_percent

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


def parts(comparison: Comparison) -> ResultTable:
    """Return the parts of the step, and what each adds to its change."""
    return ResultTable(
        name="parts-table",
        caption="Parts of the step, the largest effect first",
        columns=(
            TableColumn("part of the step", lambda part: part_name(part.name)),
            TableColumn("before", "before_ns", "ns", "compare.part"),
            TableColumn("after", "after_ns", "ns", "compare.part"),
            TableColumn("effect", "effect_ns", "change_ns", "compare.effect"),
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


_ABSENT = "absent from this run"
_KERNELS = (
    TableColumn("category", "category", drop=1),
    TableColumn("before", "before_ns", "ns", "compare.kernel", why=_ABSENT, drop=2),
    TableColumn("after", "after_ns", "ns", "compare.kernel", why=_ABSENT),
    TableColumn("effect", "effect_ns", "change_ns", "compare.effect"),
    TableColumn("calls", _calls, "number", "compare.calls"),
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


_KEY = "compare.value"
_VALUES = (
    TableColumn("metric", "name"),
    TableColumn("before", lambda row: _in_unit(row.name, row.before), "number", _KEY, drop=1),
    TableColumn("after", lambda row: _in_unit(row.name, row.after), "number", _KEY, drop=2),
    TableColumn("change", "relative", "change", "compare.effect"),
)
