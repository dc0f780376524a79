"""The original's configuration, as a mapping or a JSON file: its keys, its meaning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastcomm import inputs
from fastcomm.cluster.quantities import parse_quantity
from fastcomm.errors import ConfigError
from fastcomm.ranges import DTYPE_BYTES, PENALTY

KEYS = (
    *("world_size_max", "world_size_min", "global_bsz", "global_bsz_min", "global_bsz_max"),
    *("sequence_length", "model_size", "vocab_size", "dtype_size", "use_fa"),
    *("fixed_micro_num", "fixed_micro_bsz", "mem_threshold", "wp_penalty_coefficient"),
    *("debug", "overlap_wdp", "use_fixed_micro_bsz", "use_strict_bsz"),
)
_QUANTITIES = (
    "world_size_max",
    "world_size_min",
    "sequence_length",
    "vocab_size",
    "mem_threshold",
)
_RANGES = {"dtype_size": DTYPE_BYTES, "wp_penalty_coefficient": PENALTY}
# The README of the original calls some by other words.
_ALIASES = {
    "max_world_size": "world_size_max",
    "min_world_size": "world_size_min",
    "seq_len": "sequence_length",
}


def read(path: Path) -> dict[str, Any]:
    """The mapping of a JSON file."""
    said = inputs.json(path)
    if not isinstance(said, dict):
        raise ConfigError(f"{path}: found {type(said).__name__}, wanted an object")
    return checked(said, str(path))


def checked(said: Mapping[str, Any], where: str = "configuration") -> dict[str, Any]:
    """The same by its usual names; `ConfigError` for a key that nobody knows."""
    found = {_ALIASES.get(key, key): value for key, value in said.items()}
    # The original keeps further settings of its own beside these in "config".
    if isinstance(found.get("config"), dict):
        found |= {_ALIASES.get(key, key): value for key, value in found.pop("config").items()}
    if unknown := found.keys() - set(KEYS):
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}, known are {', '.join(KEYS)}")
    for key, value in found.items():
        if value is None:
            continue
        if key in _QUANTITIES:
            parse_quantity(value, f"{where}: {key}")
        elif key in _RANGES:
            _RANGES[key].check(value, f"{where}: {key}")
    return found
