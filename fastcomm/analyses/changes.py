"""Compare the kernels, operators and annotations of two runs by their effect on the step."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from fastcomm.errors import ConfigError
from fastcomm.kernels.attribution import absent
from fastcomm.kernels.result import Kernels
from fastcomm.metrics.findings.detection import identity
from fastcomm.options import KernelKey

# What `fastcomm compare` compares.
COMPARED: tuple[KernelKey, ...] = ("name", "operator", "annotation")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChange:
    """Device work of one name in the mean step of a rank, in both runs; None where absent."""

    name: str
    category: str
    before_ns: float | None
    after_ns: float | None
    before_count: float | None
    after_count: float | None

    @property
    def state(self) -> str:
        """Whether the work is "new", "vanished" or "changed"."""
        if self.before_ns is None:
            return "new"
        return "vanished" if self.after_ns is None else "changed"

    @property
    def effect_ns(self) -> float:
        """Time after minus time before, in ns; what is absent takes none."""
        return (self.after_ns or 0.0) - (self.before_ns or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the change as a row of the JSON document and of the table."""
        return {**asdict(self), "state": self.state, "effect_ns": self.effect_ns}


KernelChanges = Mapping[KernelKey, tuple[KernelChange, ...]]  # the largest effect first


def kernel_changes(pairs: Iterable[tuple[Kernels, Kernels]]) -> dict[KernelKey, Any]:
    """Return the changes between two runs by key.

    Parameters
    ----------
    pairs
        The device work before and after, by one key each.

    Raises
    ------
    ConfigError
        If the two of a pair have different keys, or a run has no steps.

    """
    changes = {}
    for before, after in pairs:
        if before.by != after.by:
            raise ConfigError(f"kernels by {before.by} before, and by {after.by} after")
        for when, kernels in (("before", before), ("after", after)):
            if not kernels.steps:
                raise ConfigError(f"{when}: no steps, so that kernels have no effect on them")
        changes[before.by] = _changes(before, after)
    return changes


def _changes(before: Kernels, after: Kernels) -> tuple[KernelChange, ...]:
    old, new = (_by_name(kernels) for kernels in (before, after))
    changes = []
    for name in {**old, **new}:
        # Time outside of all operators or annotations is known where there is none.
        none = (None, 0.0, 0.0) if name == absent(before.by) else (None, None, None)
        _, before_ns, before_count = old.get(name, none)
        _, after_ns, after_count = new.get(name, none)
        change = KernelChange(
            name=name,
            category=str((new.get(name) or old[name])[0]),
            before_ns=before_ns,
            after_ns=after_ns,
            before_count=before_count,
            after_count=after_count,
        )
        changes.append(change)
    return tuple(sorted(changes, key=lambda change: (-abs(change.effect_ns), change.name)))


def _by_name(kernels: Kernels) -> dict[str, tuple[str, float, float]]:
    """Return the category of each name, and its time and count per step, of any shapes."""
    sums: dict[str, tuple[str, float, float]] = {}
    columns = ["name", "category", "total_ns", "count"]
    for row in kernels.table.select(columns).to_pylist():
        category, time, count = sums.get(row["name"], (row["category"], 0.0, 0.0))
        sums[row["name"]] = (
            category,
            time + row["total_ns"] / kernels.steps,
            count + row["count"] / kernels.steps,
        )
    return sums


_FLOATS = ("before_ns", "after_ns", "effect_ns", "before_count", "after_count")
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("by", "name", "category", "state")]
    + [(name, pa.float64()) for name in _FLOATS]
)


def table_of(changes: KernelChanges) -> pa.Table:
    """Return a row per change, in the order of `changes`; times in ns, counts per step."""
    rows = [{"by": key, **one.to_dict()} for key, own in changes.items() for one in own]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


Object = Mapping[str, Any]

# Minimum change as a share of the longer step.
_LEAST = 0.01
_SURE = ("high", "medium")


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseChange:
    """A cause of lost time in either run; costs are ns per step, null where it is not found."""

    kind: str
    ranks: tuple[int, ...]
    text: str  # of the finding after, or before if it is gone
    confidence: str
    before_ns: float | None
    after_ns: float | None

    @property
    def effect_ns(self) -> float:
        """Return by how much more it costs after."""
        return (self.after_ns or 0.0) - (self.before_ns or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the cause as in JSON."""
        return {**asdict(self), "ranks": list(self.ranks), "effect_ns": self.effect_ns}


def cause_changes(before: Object, after: Object) -> tuple[CauseChange, ...]:
    """Return the causes that cost more or less than before, the largest effect first.

    `before` and `after` are metrics as in JSON. Causes of low confidence are left out, unless
    the other run has them with a higher one.
    """
    old, new = _causes(before), _causes(after)
    step = max(_mean_step(before), _mean_step(after))
    changes = []
    for key in dict.fromkeys([*new, *old]):
        was, is_ = old.get(key), new.get(key)
        shown = is_ or was or {}
        costs = [finding["cost_ns"] if finding else None for finding in (was, is_)]
        change = CauseChange(
            kind=shown["kind"],
            ranks=tuple(shown["ranks"]),
            text=shown["text"],
            confidence=shown["confidence"],
            before_ns=costs[0],
            after_ns=costs[1],
        )
        is_sure = any(finding and finding["confidence"] in _SURE for finding in (was, is_))
        if is_sure and abs(change.effect_ns) >= _LEAST * step:
            changes.append(change)
    return tuple(sorted(changes, key=lambda change: -abs(change.effect_ns)))


def _causes(metrics: Object) -> dict[tuple[Any, ...], Object]:
    """Return the findings that name causes, by what identifies them in another run."""
    findings = metrics.get("findings") or ()
    named = ((identity(finding["kind"], finding["ranks"]), finding) for finding in findings)
    return {key: finding for key, finding in named if key is not None}


def _mean_step(metrics: Object) -> float:
    """Return the mean step in ns; 0 if unknown."""
    return float(metrics["iteration"]["mean_ns"] or 0)
