"""Tables of the metrics of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastcomm.metrics.result import Metrics
from fastcomm.report.columns import ResultTable, TableColumn


def part_name(key: str) -> str:
    """Return the printed name of a part of the exact breakdown, given its key in JSON."""
    return "copies" if key == "memcpy" else key.replace("_", " ")


def windows(metrics: Metrics) -> ResultTable:
    """Return the windows between phases by pair of parallelisms, longest mean first."""
    return ResultTable(
        name="windows-table",
        caption="Windows by pair of parallelisms",
        heading="windows between phases",
        columns=(
            TableColumn("windows", lambda window: f"{window.source} to {window.target}"),
            TableColumn("count", "count", "count", "windows.count"),
            TableColumn("mean", "mean_ns", "ns", "windows.mean_ns"),
            TableColumn("median", "p50_ns", "ns", "windows.p50_ns", drop=1),
            TableColumn("p95", "p95_ns", "ns", "windows.p95_ns"),
        ),
        rows=sorted(metrics.windows or (), key=lambda window: -window.mean_ns),
    )


def groups(metrics: Metrics) -> ResultTable:
    """Return the process groups, and where their parallelism is known from."""
    return ResultTable(
        name="groups-table",
        caption="Process groups, and the evidence for their parallelism",
        heading="process groups",
        columns=(
            TableColumn("process group", _group_name),
            *_GROUP,
            TableColumn("level", "level", drop=2, only="terminal"),
            TableColumn("on ranks", "on_ranks", "count", "groups.on_ranks", drop=1),
            TableColumn("events", "events", "count", "groups.events"),
        ),
        rows=metrics.tables["group_tags"].to_pylist(),
    )


def kinds_of_groups(kinds: Sequence[Mapping[str, Any]]) -> ResultTable:
    """Return the kinds of process groups; `kinds` are rows of `analyses.info.kinds`."""
    return ResultTable(
        name="groups-table",
        caption="Kinds of process groups",
        heading="process groups",
        columns=(
            TableColumn("process group", _group_name),
            TableColumn("groups", "groups", "count", drop=2),
            *_GROUP,
            TableColumn("on ranks", "ranks", "count", "groups.on_ranks", drop=1),
            TableColumn("events", "events", "count", "groups.events"),
        ),
        rows=kinds,
    )


def _group_name(row: Mapping[str, Any]) -> str:
    """Return the description of a process group, or a replacement if it has none."""
    return row["description"] or ("not named" if row["size"] is None else "undefined")


def _known_by(row: Mapping[str, Any]) -> str:
    """Return the source of a group's parallelism, and the candidates that fit it."""
    fits = f" ({row['candidates']})" if row["candidates"] else ""
    return f"{row['tag_source']}{fits}"


_NO_MEMBERS = "the trace does not record the members of the group"
_GROUP = (
    TableColumn("ranks each", "size", "count", "groups.size", why=_NO_MEMBERS),
    TableColumn("parallelism", "tag"),
    TableColumn("known by", _known_by),
)
