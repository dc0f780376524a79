"""Read the constants of expert all-to-alls that `dispatch evaluate --calibrate` has fitted.

The file is the JSON document of that command; the rows of its `calibration` have the constants.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fastcomm import files
from fastcomm.checks import Range
from fastcomm.errors import ConfigError
from fastcomm.hardware.expert_exchange import (
    FAMILIES,
    PHASES,
    SCOPES,
    CostKey,
    ExchangeCosts,
    measured_gpu,
    shipped_costs,
)
from fastcomm.hardware.gpus import gpus
from fastcomm.result import SCHEMA_VERSION

_NAMES = tuple(
    one.name
    for one in fields(ExchangeCosts)
    if one.name.endswith(("_us", "_ns", "_share")) and not one.name.startswith("notify")
)
_CHOICES = {"family": tuple(FAMILIES), "scope": SCOPES, "phase": PHASES, "constant": _NAMES}
# Values by the end of a name, the first that suits: of links up to ten times as fast as those
# of clusters, of kernels of at most a second, and of 1 us a byte. A fit brings times that no
# row tells near 0.
_VALUES = {
    "_share": Range(1e-3, 10.0),
    "_us": Range(1e-12, 1e6),
    "byte_ns": Range(1e-12, 1e3),
    "pass_ns": Range(1e-12, 1e3),
    "_ns": Range(1e-12, 1e6),
}
_LARGEST = 1 << 26  # bytes of a document; it also has the rows of the table


@dataclass(frozen=True, slots=True, eq=False)
class FittedCosts:
    """Constants that were fitted to measurements, in place of those that come with fastcomm."""

    path: str
    costs: Mapping[CostKey, ExchangeCosts]

    def families(self, name: str) -> list[str]:
        """Return the families with constants for GPU `name`; ConfigError if there are none."""
        if own := sorted({key[0] for key in self.costs if key[1] == name}):
            return own
        others = ", ".join(sorted({key[1] for key in self.costs}))
        raise ConfigError(f"{self.path}: no constants for {name}; it has those of {others}")

    def note(self, families: Iterable[str]) -> str:
        """Return the note on a result whose exchanges by these families have the constants."""
        return f"exchange of experts by {', '.join(families)}: constants of {self.path}"


def read_fitted(path: Path) -> FittedCosts:
    """Read fitted constants.

    Parameters
    ----------
    path
        JSON of `fastcomm dispatch evaluate TABLE --calibrate`.

    Raises
    ------
    ConfigError
        If the file cannot be read, has no fitted constants or another version of the document,
        or a constant is invalid.

    """
    document = files.json(path, _LARGEST)
    rows = document.get("calibration") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            f"{path}: no fitted constants; write it with `fastcomm dispatch evaluate TABLE "
            "--calibrate --json`"
        )
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version {document.get('schema_version')!r}: expected "
            f"{SCHEMA_VERSION}; write the file with this version of fastcomm"
        )
    values: dict[CostKey, dict[str, float]] = {}
    for number, row in enumerate(rows, 1):
        key, constant, value = _constant(row, f"{path}: constant {number}")
        own = values.setdefault(key, {})
        if constant in own:
            raise ConfigError(f"{path}: constant {number}: {constant} of {key} is there twice")
        own[constant] = value
    return FittedCosts(str(path), {key: _costs(key, own, path) for key, own in values.items()})


def _constant(row: Any, where: str) -> tuple[CostKey, str, float]:
    """Return the key, the name and the value of a constant; `where` begins errors."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object")
    for name, choices in {"gpu": tuple(gpus()), **_CHOICES}.items():
        if row.get(name) not in choices:
            expected = ", ".join(choices)
            raise ConfigError(f"{where}: invalid {name} {row.get(name)!r}: expected {expected}")
    constant = row["constant"]
    values = next(own for end, own in _VALUES.items() if constant.endswith(end))
    values.check(row.get("fitted"), f"{where}: {constant}")
    key = row["family"], row["gpu"], row["scope"], row["phase"]
    return key, constant, float(row["fitted"])


def _costs(key: CostKey, values: Mapping[str, float], path: Path) -> ExchangeCosts:
    """Return the shipped constants with fitted values in their place."""
    family, name, scope, phase = key
    source = measured_gpu(family, name, scope)
    if source is None:
        raise ConfigError(f"{path}: {family} has no constants {scope} NVLink domains")
    return replace(shipped_costs()[family, source, scope, phase], **values)
