"""Conditions on a comparison, for CI: `iteration.mean_ns > +3%`."""

import operator
import re
from dataclasses import dataclass
from math import isfinite
from typing import Literal, Self

from fastcomm.analyses.compare import Comparison
from fastcomm.checks import shortened
from fastcomm.errors import ConfigError
from fastcomm.units import format_ns

_TEXT = re.compile(
    r"\s*(\S+?)\s*(>=|<=|>|<)\s*([+-]?)(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(%|ns|us|ms|s)?\s*"
)
_COMPARE = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
_UNIT = {None: 1.0, "%": 0.01, "ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_TINY_NS, _TINY = 1e6, 1e-3  # a bare number below these, in ns and of the value, is doubted
_SHARES = ("breakdown.", "overlap.")

Of = Literal["value", "difference", "relative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A threshold for the value or the change of a metric."""

    text: str
    name: str
    of: Of  # the value after, or the change: absolute, or as a share of before
    sign: str  # of _COMPARE
    threshold: float

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Parse a condition. Raises `ConfigError` if it is invalid.

        A number with a sign is a change, with "%" relative to before: "> +3%", "< -2ms".
        Without a sign it is the value after: "overlap.average_overlap_ratio < 50%".
        """
        match = _TEXT.fullmatch(text)
        if not match:
            raise ConfigError(
                f"invalid condition {shortened(text)!r}: expected NAME > +3%, NAME > +2ms or "
                "NAME < 0.5, with >, <, >= or <="
            )
        name, sign, plus, number, unit = match.groups()
        if unit not in (None, "%") and not name.endswith("_ns"):
            raise ConfigError(
                f"invalid condition {text!r}: {name} is not a time, so it has no unit {unit}"
            )
        if unit == "%" and not plus and not _is_share(name):
            change = f"{'+' if sign in ('>', '>=') else '-'}{number}%"
            raise ConfigError(
                f"condition {text!r}: {number}% of what? {name} is not a share. For a change "
                f"relative to BEFORE give it a sign: '{name} {sign} {change}'"
            )
        of: Of = "value" if not plus else "relative" if unit == "%" else "difference"
        threshold = float(plus + number) * _UNIT[unit]
        if not isfinite(threshold):
            raise ConfigError(
                f"invalid condition {shortened(text)!r}: expected a finite number"
            )
        return cls(text=text.strip(), name=name, of=of, sign=sign, threshold=threshold)

    def holds(self, comparison: Comparison) -> bool:
        """Whether the condition is true. Raises `ConfigError` if the metric is unknown."""
        value = comparison.value(self.name)
        measured = value.after if self.of == "value" else getattr(value, self.of)
        if measured is None:
            raise ConfigError(
                f"condition {self.text!r}: cannot be judged, {self.name} is "
                f"{_formatted(value.before)} before and {_formatted(value.after)} after"
            )
        return bool(_COMPARE[self.sign](measured, self.threshold))

    def doubt(self, comparison: Comparison) -> str | None:
        """Return a warning if a bare number of ns is so small that another unit is meant."""
        value, number = comparison.value(self.name).after, abs(self.threshold)
        is_bare = self.name.endswith("_ns") and self.text[-1:].isdigit()
        if not is_bare or value is None or not 0 < number < min(_TINY_NS, value * _TINY):
            return None
        written = self.text.rpartition(self.sign)[2].strip()
        return (
            f"--fail-if {self.text!r}: {written} is {written} ns, and {self.name} is "
            f"{format_ns(value)}; write a unit, as in {written}ms"
        )


def _is_share(name: str) -> bool:
    """Whether a metric is a fraction, for which a percentage is a value."""
    last = name.rpartition(".")[2]
    return name.startswith(_SHARES) or any(word in last for word in ("share", "ratio", "util"))


def _formatted(value: float | None) -> str:
    return "n/a" if value is None else f"{value:g}"
