"""How the device work of two runs differs, by name, operator or annotation."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from fastcomm.device_work.attribution import absent_name
from fastcomm.device_work.options import KernelKey
from fastcomm.device_work.result import Kernels
from fastcomm.errors import ConfigError

# What `fastcomm compare` compares.
COMPARED: tuple[KernelKey, ...] = ("name", "operator", "annotation")
_NUMBERS = ("before_ns", "after_ns", "effect_ns", "before_count", "after_count")
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("by", "name", "category", "state")]
    + [(name, pa.float64()) for name in _NUMBERS]
)


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
    old, new = (_sums_by_name(kernels) for kernels in (before, after))
    changes = []
    for name in {**old, **new}:
        # Time outside of all operators or annotations is known where there is none.
        none = (None, 0.0, 0.0) if name == absent_name(before.by) else (None, None, None)
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


def _sums_by_name(kernels: Kernels) -> dict[str, tuple[str, float, float]]:
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


def table_of(changes: KernelChanges) -> pa.Table:
    """Return a row per change, in the order of `changes`; times in ns, counts per step."""
    rows = [{"by": key, **one.to_dict()} for key, own in changes.items() for one in own]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)
