"""Tables of the schedules of an expert all-to-all."""

from collections.abc import Sequence

from fastcomm.dispatch.placement import PlacementResult
from fastcomm.dispatch.simulation import StrategyResult, in_ns
from fastcomm.report.columns import ResultTable, TableColumn

_NO_COMBINE = "the original simulator has no combine"
NO_TIME = "the bound is 0"


def schedules(ranked: Sequence[StrategyResult]) -> ResultTable:
    """Return times, multiples of the bounds, and bytes between nodes of schedules."""
    return ResultTable(name="times-table", caption="Schedules", columns=_SCHEDULES, rows=ranked)


def _bottleneck(schedule: StrategyResult) -> str:
    """Return the busiest link of the slowest layer."""
    slowest = max(schedule.layers, key=lambda layer: layer.seconds, default=None)
    return "none" if slowest is None else str(slowest.bottleneck)


_SCHEDULES = (
    TableColumn("schedule", "name"),
    TableColumn("dispatch", lambda one: in_ns(one.total_s), "ns", "dispatch.total_s"),
    TableColumn(
        *("combine", lambda one: in_ns(one.combine_s), "ns", "dispatch.combine_s"),
        why=_NO_COMBINE,
    ),
    TableColumn(
        *("of the best", "times_optimal", "multiple", "dispatch.times_optimal"), why=NO_TIME
    ),
    TableColumn(
        *("of its class", "times_bound", "multiple", "dispatch.times_bound"),
        why=NO_TIME,
        drop=1,
    ),
    TableColumn("between nodes", "inter_bytes", "bytes", "dispatch.inter_bytes", drop=2),
    TableColumn("bottleneck", _bottleneck, only="terminal", is_sentence=True),
)


def placing(result: PlacementResult) -> ResultTable:
    """Return the schedules before and after a placement of the experts."""
    rows = []
    for name, old in result.before.strategies.items():
        new = result.after.strategies[name]
        speedup = old.total_s / new.total_s if new.total_s else None
        times = in_ns(old.total_s), in_ns(new.total_s)
        rows.append((name, *times, speedup, old.inter_bytes, new.inter_bytes))
    return ResultTable(
        name="placing-table", caption="Before and after", columns=_PLACING, rows=rows
    )


_PLACING = (
    TableColumn("schedule", 0),
    TableColumn("before", 1, "ns", "dispatch.total_s"),
    TableColumn("after", 2, "ns", "dispatch.after_s"),
    TableColumn("speed-up", 3, "multiple", "dispatch.speedup"),
    TableColumn("bytes between nodes", 4, "bytes", drop=2, only="terminal"),
    TableColumn("bytes after", 5, "bytes", drop=1, only="terminal"),
)
