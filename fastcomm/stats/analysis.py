"""Measure the operations of a run, and compare two runs: added, removed, changed means."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from fastcomm.compat import dpro
from fastcomm.formats.dpro.job import ParameterDict
from fastcomm.formats.dpro.statistics import MS, Statistics, StepTime
from fastcomm.result import TableResult
from fastcomm.trace.run import ReadRanks, SkippedRank
from fastcomm.units import format_ns


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunStatistics(TableResult):
    """The operations and step times of a run, a trial, or a uniform trace."""

    operations: Statistics
    time: StepTime
    tensors: ParameterDict | None = None  # of a trial
    read: ReadRanks | None = None  # of a run
    numbers: tuple[int, ...] | None = None  # of the steps in the traces of a run
    is_dpro: bool = False  # whether the JSON has dPRO's keys, in ms
    warnings: tuple[str, ...] = ()  # of the traces
    rows: tuple[int, ...] | None = None  # indices of the operations in the JSON; None is all

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps in the traces; positions from 0 if these have none."""
        return self.numbers or tuple(range(len(self.time.steps)))

    @property
    def typical_step(self) -> int:
        """Number of the step whose time is closest to the step time of the run."""
        return self.steps[self.time.opt_step]

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version; dPRO's keys are in ms."""
        statistics = self.operations
        read = {} if self.read is None else self.read.to_dict()
        tensors = {} if self.tensors is None else {"tensors": _tensors(self.tensors)}
        if self.is_dpro:
            steps = {"opt_step": self.time.opt_step, **self._steps("ms", MS)}
            categories = statistics.categories
            row: Callable[[Statistics, int], dict[str, Any]] = dpro.operation
        else:
            steps = {
                "steps": list(self.steps),
                "typical_step": self.typical_step,
                **self._steps("ns", 1),
            }
            categories = {key: _category(own) for key, own in statistics.categories.items()}
            row = _operation
        shown = range(len(statistics.names)) if self.rows is None else self.rows
        ops = {statistics.names[k]: row(statistics, k) for k in shown}
        warnings = {"warnings": list(self.warnings)}
        return {**steps, "categories": categories, **warnings, **read, **tensors, "ops": ops}

    def _steps(self, unit: str, size: float) -> dict[str, Any]:
        """Return the step times of the run and of each rank, in a unit of `size` ns."""
        return {
            f"iteration_time_{unit}": self.time.time_ns / size,
            f"step_time_{unit}": [step_ns / size for step_ns in self.time.steps],
            "ranks": {
                pid: {
                    f"step_time_{unit}": [step_ns / size for step_ns in rank.time],
                    **{f"{part}_{unit}": rank.mean_ns(part) / size for part in rank.parts},
                }
                for pid, rank in self.time.ranks.items()
            },
        }

    def to_arrow(self) -> pa.Table:
        """Return a row per operation, with the columns of `Statistics.table`; times in ns."""
        return self.operations.table()

    def figures(self) -> dict[str, str]:
        """Return the ranks, the steps, the step time, and the number of operations."""
        ranks = f"{len(self.read.ranks)} of {self.read.expected}" if self.read else ""
        return {
            "ranks": ranks or str(len(self.time.ranks)),
            "steps": str(len(self.time.steps)),
            "step": format_ns(self.time.time_ns),
            "operations": str(len(self.operations.names)),
        }


def _category(category: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dPRO's row of a category from ms to ns."""
    time_ns = round(category["time"] * MS)
    return {
        "max_ns": category["max_t"] * MS,
        "max_name": category["max_name"],
        "time_ns": time_ns,
        "cnt": category["cnt"],
        "op_cnt": category["op_cnt"],
        "avg_ns": time_ns / category["cnt"],
    }


def _operation(statistics: Statistics, k: int) -> dict[str, Any]:
    """Return the JSON row of the operation at index `k`, in ns."""
    return {
        "avg_ns": float(statistics.avg[k]),
        "cnt": int(statistics.count[k]),
        "time_ns": statistics.times[statistics.first[k] : statistics.first[k + 1]].tolist(),
        "min_ns": int(statistics.least[k]),
        "max_ns": int(statistics.most[k]),
        "median_ns": int(statistics.median[k]),
        "var_ns2": float(statistics.variance[k]),
        "id": k,
        "step_ids": [None if i < 0 else i for i in statistics.step_ids[k].tolist()],
        "cat": statistics.category[k],
    }


def _tensors(parameters: ParameterDict) -> list[dict[str, Any]]:
    """Return a row per tensor; null for fields that the trial does not have."""
    return [
        {
            "id": parameter.index,
            "name": parameter.name,
            "shape": parameter.shape,
            "dtype": parameter.dtype,
            "bytes": parameter.size,
            "updates": parameters.update_of.get(parameter.index, ()),
        }
        for parameter in parameters.parameters
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanChange:
    """Mean durations of one name in both runs."""

    name: str
    before_ns: float
    after_ns: float

    @property
    def absolute_ns(self) -> float:
        """Mean after minus mean before, in ns."""
        return self.after_ns - self.before_ns

    @property
    def relative(self) -> float | None:
        """The difference of the means divided by the mean before; None if that is 0."""
        return self.absolute_ns / self.before_ns if self.before_ns else None

    def to_dict(self) -> dict[str, float | None]:
        """Return the means and their difference as a row of the JSON document."""
        return {name: getattr(self, name) for name in _CHANGES.names[1:]}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OperationComparison(TableResult):
    """All names of two runs; changes with the largest first."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[MeanChange, ...]
    warnings: tuple[str, ...] = ()  # of the traces of both runs
    skipped: tuple[SkippedRank, ...] = ()  # of both runs

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "added": list(self.added),
            "removed": list(self.removed),
            "changed": {change.name: change.to_dict() for change in self.changed},
            "warnings": list(self.warnings),
            "failed": [asdict(rank) for rank in self.skipped],
        }

    def to_arrow(self) -> pa.Table:
        """Return a row per operation whose mean has changed; times in ns."""
        rows = [{"name": change.name, **change.to_dict()} for change in self.changed]
        return pa.Table.from_pylist(rows, schema=_CHANGES)

    def figures(self) -> dict[str, str]:
        """Return the numbers of changed, added and removed operations."""
        return {
            "changed": str(len(self.changed)),
            "added": str(len(self.added)),
            "removed": str(len(self.removed)),
        }


_CHANGES = pa.schema(
    [("name", pa.string())]
    + [(name, pa.float64()) for name in ("before_ns", "after_ns", "absolute_ns", "relative")]
)


def comparison(before: Statistics, after: Statistics) -> OperationComparison:
    """Compare the mean duration of every operation in two runs, by its name.

    Returns the names that only one run has, and for each name in both the means, in ns, unless
    they are equal.
    """
    old = dict(zip(before.names, before.avg.tolist(), strict=True))
    new = dict(zip(after.names, after.avg.tolist(), strict=True))
    changed = [
        MeanChange(name=name, before_ns=old[name], after_ns=new[name])
        for name in old
        if name in new and new[name] != old[name]
    ]
    return OperationComparison(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(sorted(changed, key=lambda change: -abs(change.absolute_ns))),
    )
