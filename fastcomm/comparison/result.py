"""The changes between two runs: the step, its parts, causes, kernels and all metrics."""

from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from fastcomm.checks import check_type
from fastcomm.comparison.cause_changes import CauseChange
from fastcomm.comparison.kernel_changes import KernelChanges, table_of
from fastcomm.result import Result
from fastcomm.units import format_ns, format_signed_ns

_FLOATS = pa.float64()
_VALUES = pa.schema(
    [("name", pa.string())]
    + [(name, _FLOATS) for name in ("before", "after", "difference", "relative")]
)
_PARTS = pa.schema(
    [("name", pa.string())]
    + [(name, _FLOATS) for name in ("before_ns", "after_ns", "effect_ns")]
    + [("reasons", pa.string())]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A metric in both runs, by its dotted path in the JSON; None if a run does not have it."""

    name: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float | None:
        """The value after minus the value before; None if one is unknown."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    def to_dict(self) -> dict[str, Any]:
        """Return the value as a row of the JSON document and of the table of values."""
        return {**asdict(self), "difference": self.difference, "relative": self.relative}

    @property
    def relative(self) -> float | None:
        """The difference divided by the value before; None if that is 0 or unknown."""
        if self.difference is None or not self.before:
            return None
        return self.difference / abs(self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownChange:
    """A part of the exact partition, in ns of the mean step, and metrics that explain it."""

    name: str
    before_ns: float
    after_ns: float
    reasons: tuple[Value, ...] = ()  # of its parallelism, the most changed first

    @property
    def effect_ns(self) -> float:
        """Time after minus time before, in ns; all parts add up to the change of the step."""
        return self.after_ns - self.before_ns

    def to_dict(self) -> dict[str, Any]:
        """Return the part as a row of the JSON document, with the names of its reasons."""
        return {
            "name": self.name,
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "effect_ns": self.effect_ns,
            "reasons": [reason.name for reason in self.reasons],
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Result):
    """The changes between two runs."""

    step: Value  # the mean iteration in ns
    # The largest effect first; none where a breakdown is unknown.
    parts: tuple[BreakdownChange, ...]
    values: tuple[Value, ...]  # every metric, in the order of the JSON
    notes: tuple[str, ...]  # why the runs might not be comparable
    # Of the notes those on other ranks, another layout, other GPUs or other steps: all numbers
    # compare unlike things, and outputs have these notes first.
    differences: tuple[str, ...] = ()
    causes: tuple[CauseChange, ...] = ()  # that are new, gone or changed; the largest first
    incomplete: tuple[str, ...] = ()  # which ranks of which run are missing
    conditions_that_hold: tuple[str, ...] = ()  # of those that were judged
    kernels: KernelChanges | None = None  # None: not compared

    @property
    def other_notes(self) -> tuple[str, ...]:
        """The notes that are no `differences`."""
        return tuple(note for note in self.notes if note not in self.differences)

    @property
    def is_same(self) -> bool:
        """Whether the step time is known, and no metric differs."""
        return self.step.difference == 0 and all(
            value.before == value.after for value in self.values
        )

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "differences": list(self.differences),
            "step": self.step.to_dict(),
            "causes": [cause.to_dict() for cause in self.causes],
            "parts": [value.to_dict() for value in self.parts],
            "values": [value.to_dict() for value in self.values],
            "kernels": None
            if self.kernels is None
            else {key: [one.to_dict() for one in own] for key, own in self.kernels.items()},
            "conditions_that_hold": list(self.conditions_that_hold),
            "incomplete": list(self.incomplete),
            "notes": list(self.notes),
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the tables `parts`, `values` and `kernels` (changes); times in ns."""
        parts = [
            {**part.to_dict(), "reasons": " ".join(value.name for value in part.reasons)}
            for part in self.parts
        ]
        values = [value.to_dict() for value in self.values]
        return {
            "parts": pa.Table.from_pylist(parts, schema=_PARTS),
            "values": pa.Table.from_pylist(values, schema=_VALUES),
            "kernels": table_of(self.kernels or {}),
        }

    def figures(self) -> dict[str, str]:
        """Return the mean step of both runs, and the part with the largest change."""
        times = (self.step.before, self.step.after)
        before, after = ("n/a" if value is None else format_ns(value) for value in times)
        part = self.parts[0] if self.parts else None
        change = "n/a" if part is None else f"{part.name} {format_signed_ns(part.effect_ns)}"
        return {"before": before, "after": after, "largest change": change}

    def value(self, name: str) -> Value:
        """Return a metric by its name. Raises `ConfigError`, with similar names, if unknown."""
        check_type(name, str, "value: name", 'a name such as "iteration.mean_ns"')
        for value in self.values:
            if value.name == name:
                return value
        from fastcomm.comparison.metric_names import unknown_metric

        raise unknown_metric(name, "no metric of either run", [one.name for one in self.values])
