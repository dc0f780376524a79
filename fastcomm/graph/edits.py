"""Changes of durations that a what-if file names: ``{key: {"delay": ms, "ratio": r}}``.

What a key selects is up to the model whose operations change.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastcomm import inputs
from fastcomm.errors import ConfigError
from fastcomm.ranges import DELAY_MS, FACTOR
from fastcomm_kernels.arrays import Floats

_MS = 1e6
_LARGEST = 64 << 20  # bytes of a file, which may name every operation


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationChange:
    """A delay in ns that is added to a duration, and the ratio by which the sum is scaled."""

    delay_ns: float = 0.0
    ratio: float = 1.0
    is_ideal: bool = False  # the duration is the ideal one before the change

    def applied(self, duration: Floats) -> Floats:
        """Return changed durations; with a delay none falls below 0."""
        delayed = np.maximum(duration + self.delay_ns, 0.0) if self.delay_ns else duration
        return np.asarray(delayed * self.ratio)


def read(path: Path, *, has_ideal: bool = False) -> dict[str, DurationChange]:
    """Return the changes of a JSON file by key, in its order.

    `has_ideal` allows ``"ideal": true``. Raises ConfigError for anything else in the file.
    """
    tables = inputs.json(path, _LARGEST)
    if not isinstance(tables, dict):
        ideal = ', "ideal": true' if has_ideal else ""
        raise ConfigError(f'{path}: wanted {{"<key>": {{"delay": ms, "ratio": r{ideal}}}}}')
    return {
        str(key): _change(table, f"{path}: {key}", has_ideal=has_ideal)
        for key, table in tables.items()
    }


def _change(table: Any, place: str, *, has_ideal: bool) -> DurationChange:
    names = ["delay", "ratio", "ideal"] if has_ideal else ["delay", "ratio"]
    fields = table if isinstance(table, dict) else {"?": table}
    if odd := set(fields) - set(names):
        raise ConfigError(f"{place}: found {sorted(odd)}, wanted {' and '.join(names)}")
    delay, ratio = fields.get("delay", 0.0), fields.get("ratio", 1.0)
    ideal = fields.get("ideal", False)
    DELAY_MS.check(delay, f"{place}: delay, in ms")
    FACTOR.check(ratio, f"{place}: ratio")
    if not isinstance(ideal, bool):
        raise ConfigError(f"{place}: ideal is {ideal!r}, wanted true or false")
    return DurationChange(delay_ns=delay * _MS, ratio=float(ratio), is_ideal=ideal)
