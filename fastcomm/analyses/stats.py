"""Compare two runs by operation: new, gone, and changed means."""

from dataclasses import dataclass

from fastcomm.readers.dpro.statistics import Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanChange:
    """Mean durations of one name in both runs."""

    name: str
    before_ns: float
    after_ns: float

    @property
    def absolute_ns(self) -> float:
        """How much longer it takes after."""
        return self.after_ns - self.before_ns

    @property
    def relative(self) -> float | None:
        """The same as a share of before; None where that is 0."""
        return self.absolute_ns / self.before_ns if self.before_ns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationComparison:
    """All names of two runs; changes with the largest first."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[MeanChange, ...]


def comparison(before: Statistics, after: Statistics) -> OperationComparison:
    """Compare means by name; what is equal is left out."""
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
        changed=tuple(sorted(changed, key=lambda each: -abs(each.absolute_ns))),
    )
