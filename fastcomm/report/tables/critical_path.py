"""Tables of a critical path and of a what-if: classes of time, names, ranks, edits."""

from collections.abc import Sequence

import pyarrow as pa

from fastcomm.critical_path import CriticalPath, WhatIf
from fastcomm.critical_path.candidates import SHOWN, Candidate
from fastcomm.graph.edits import EditSweep
from fastcomm.report.columns import ResultTable, TableCell, TableColumn

_STEP_DIGITS = 4
_COMMUNICATION = "gpu_communication_bound"
LABELS = {
    "cpu_bound": "host: operators and calls",
    "data_loading": "host: data loading",
    "host_gap": "host: between operators",
    "gpu_compute_bound": "device: compute",
    "gpu_memory_bound": "device: copies",
    "gpu_communication_bound": "device: communication",
    "gpu_kernel_kernel_overhead": "device: between kernels",
    "gpu_kernel_launch_overhead": "launch delay",
    "sync_wait": "host: return from synchronization",
    "unexplained": "no recorded dependency",
    "": "dependencies",
}


# Of runs without a device, whose collectives stand in its place.
_HOST_LABELS = {
    "gpu_kernel_kernel_overhead": "between collectives",
    "gpu_kernel_launch_overhead": "until a thread takes a collective",
}


def label(name: str, path: CriticalPath) -> str:
    """Return the label of a class of time on a path; without a device, "device" is left out."""
    text = LABELS.get(name, name)
    if path.about.is_host_run:
        return _HOST_LABELS.get(name, text.removeprefix("device: "))
    return text


def kind_of(name: str, path: CriticalPath) -> str:
    """Return the name of a kind of events; without a device, its work are collectives."""
    return "collective" if path.about.is_host_run and name == "kernel" else name


def classes(path: CriticalPath, *, by_tag: bool) -> ResultTable:
    """Return the time on the path by class, longest first.

    With `by_tag`, each parallelism has a row after that of all communication.
    """
    sums = path.summary_ns()
    total = sum(sums.values()) or 1
    rows = []
    for name, ns in sorted(sums.items(), key=lambda pair: (-pair[1], pair[0])):
        if not ns:
            continue
        rows.append((label(name, path), ns / total, ns))
        if by_tag and name == _COMMUNICATION:
            rows += [(f"{label(name, path)}, {tag}", ns / total, ns) for tag, ns in _tags(path)]
    return ResultTable(
        name="path-classes",
        caption="Time on the path by class",
        heading="time on the path",
        columns=(
            TableColumn("on the path", 0),
            TableColumn("share", _share, "share", "path.share"),
            TableColumn("", 1, "bar", only="terminal"),
            TableColumn("time", 2, "ns", "path.time_ns"),
        ),
        rows=rows,
    )


def _share(row: tuple[str, float, int]) -> TableCell:
    """Return the share of a row, with a bar behind it."""
    return TableCell(value=row[1], bar=row[1])


def _tags(path: CriticalPath) -> list[tuple[str, int]]:
    """Return the communication on the path in ns by parallelism, longest first."""
    return sorted(path.by_tag_ns().items(), key=lambda pair: (-pair[1], pair[0]))


def tags(path: CriticalPath) -> ResultTable:
    """Return the communication on the path by parallelism, longest first."""
    return ResultTable(
        name="path-tags",
        caption="Communication on the path",
        columns=(
            TableColumn("communication on the path", 0),
            TableColumn("time", 1, "ns", "path.time_ns"),
        ),
        rows=_tags(path),
    )


def names(path: CriticalPath, most: int) -> ResultTable:
    """Return the `most` names with the longest own time on the path."""
    rows = path.top("name", most).to_pylist()
    return ResultTable(
        name="path-names",
        caption=f"The {len(rows)} events with the longest own time on the path",
        columns=(
            TableColumn("own time on the path", "name"),
            TableColumn("kind", lambda row: kind_of(row["kind"], path), drop=2),
            TableColumn("edges", "edges", "count", "path.edges", drop=1),
            TableColumn("time", "self_ns", "ns", "path.self_ns"),
        ),
        rows=rows,
    )


def ranks(by_rank: pa.Table) -> ResultTable:
    """Return the time of ranks on the path, their waits, and those that they cause."""
    return ResultTable(
        name="path-ranks",
        caption="Who waits, and who causes it",
        columns=_RANKS,
        rows=by_rank.to_pylist(),
    )


_RANKS = (
    TableColumn("rank", lambda row: TableCell(value=row["rank"], text=f"rank {row['rank']}")),
    TableColumn("on the path", "on_path_ns", "ns", "path.on_path_ns"),
    TableColumn("slack", "arrival_slack_ns", "ns", drop=1, only="terminal"),
    TableColumn("waits", "wait_ns", "ns", "path.wait_ns"),
    TableColumn("transfers", "transfer_ns", "ns", "path.transfer_ns", drop=2),
    TableColumn("arrived last", "arrived_last", "count", "path.arrived_last"),
    TableColumn("wait caused", "wait_caused_ns", "ns", "path.wait_caused_ns", only="page"),
    TableColumn("wait caused, with messages", "wait_caused_ns", "ns", only="terminal"),
)


def changes(what_if: WhatIf) -> ResultTable:
    """Return the time on the path by class before and after the edits, longest first."""
    before, after = what_if.before.summary_ns(), what_if.after.summary_ns()
    times = {name: (before.get(name, 0), after.get(name, 0)) for name in before | after}
    return ResultTable(
        name="before-after",
        caption="Time on the critical path before and after",
        heading="time on the path",
        columns=(
            TableColumn("on the path", 0),
            TableColumn("before", 1, "ns", "path.time_ns"),
            TableColumn("after", 2, "ns", "path.time_ns"),
            TableColumn("change", 3, "ns", "path.time_ns", only="page"),
        ),
        rows=[
            (label(name, what_if.before), old, new, new - old)
            for name, (old, new) in sorted(times.items(), key=lambda pair: -pair[1][0])
            if old or new
        ],
    )


def candidates(edits: Sequence[Candidate], before_ns: int) -> ResultTable:
    """Return the edits that shorten a step of `before_ns` most, each tried alone."""
    return ResultTable(
        name="candidates",
        caption="Edits that shorten the step most",
        heading="edit, each alone",
        columns=(
            TableColumn("edit", lambda one: one.edit.text),
            TableColumn("saves", "saved_ns", "ns", "path.time_ns"),
            TableColumn(
                "of the step", lambda one: one.saved_ns / before_ns, "share", only="terminal"
            ),
            TableColumn("step", "after_ns", "ns", "whatif.span_ns", digits=_STEP_DIGITS),
            TableColumn(
                *("of today", lambda one: one.after_ns / before_ns, "share", "whatif.share"),
                only="page",
            ),
        ),
        rows=edits[:SHOWN],
    )


def sweep(name: str, values: EditSweep, before_ns: int) -> ResultTable:
    """Return the step time for each value of a sweep; `name` is its id on a page.

    `before_ns` is the step time without edits, and the length of a whole bar; where a value
    makes the step longer, the longest step is.
    """
    longest = max(before_ns, *values.span_ns) or 1
    return ResultTable(
        name=name,
        caption=f"The step by {values.name}",
        heading=values.name,
        columns=(
            TableColumn("value", 0),
            TableColumn("step", 1, "ns", "whatif.span_ns", digits=_STEP_DIGITS),
            TableColumn("of today", 2, "share", "whatif.share"),
            TableColumn("", lambda row: row[1] / longest, "bar", only="terminal"),
        ),
        rows=[
            (value, ns, ns / before_ns if before_ns else None)
            for value, ns in zip(values.labels, values.span_ns, strict=True)
        ],
    )
