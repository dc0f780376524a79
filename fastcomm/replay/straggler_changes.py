"""What if operations of a table took other times: changes in a file, applied in its order.

A change is `{"<which>": {"delay": ms, "ratio": r}}`, or `{"ideal": true}` for the time that is
ideal for the type. `<which>` is `all`, a type (`grads-reduce-scatter`), an operation
(`op:forward-compute_0_2`), `rank:7`, `dp_rank:1`, `stage:3`, `step:12`; with `+` between them
all have to hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import ConfigError
from fastcomm.replay import what_if
from fastcomm.replay.model import Model
from fastcomm.replay.uniform import read_json

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_NUMBERS = ("rank", "dp_rank", "stage", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happens to the times of some operations."""

    delay_ns: float = 0.0
    ratio: float = 1.0
    ideal: bool = False


def read(path: Path) -> dict[str, Change]:
    """The changes of a file, in its order."""
    said = read_json(path)
    if not isinstance(said, dict):
        raise ConfigError(
            f'{path}: wanted {{"<which>": {{"delay": ms, "ratio": r, "ideal": true}}}}'
        )
    return {str(key): _change(value, f"{path}: {key}") for key, value in said.items()}


def _change(value: Any, place: str) -> Change:
    fields = dict(value) if isinstance(value, dict) else {"?": value}
    ideal = fields.pop("ideal", False)
    if not isinstance(ideal, bool):
        raise ConfigError(f"{place}: ideal is {ideal!r}, wanted true or false")
    one = what_if.change(fields, place)
    return Change(delay_ns=one.delay_ns, ratio=one.ratio, ideal=ideal)


def times(model: Model, changes: Mapping[str, Change]) -> Floats:
    """The measured times with all changes; one that means no operation is an error."""
    out, ideal = model.measured.copy(), model.ideal_times()
    for key, change in changes.items():
        chosen = _selected(model, key)
        if not chosen.any():
            raise ConfigError(f"{key!r} means no operation of the table")
        base = np.where(chosen & change.ideal, ideal, out)
        changed = np.maximum(base + change.delay_ns, 0.0) * change.ratio
        # A transfer may be negative: it stays where nothing is added.
        changed = changed if change.delay_ns else base * change.ratio
        out = np.where(chosen, changed, out)
    return out


def _selected(model: Model, key: str) -> Bools:
    """Which operations a key means: ops x data ranks x steps."""
    chosen = np.ones(model.measured.shape, bool)
    for part in key.split("+"):
        chosen &= _part(model, part.strip(), key)
    return chosen


def _part(model: Model, part: str, key: str) -> Bools:
    table = model.table
    word, colon, value = part.partition(":")
    if part == "all":
        return np.ones((1, 1, 1), bool)
    types = {op.optype for op in model.table.ops}
    if not colon and part in types:
        return model.of_type(part)[:, None, None]
    if word == "op" and value:
        return np.array([op.name == value for op in table.ops])[:, None, None]
    if word in _NUMBERS and value.isdecimal():
        return _numbered(model, word, int(value))
    known = ", ".join(sorted(types))
    raise ConfigError(
        f"{key!r}: found {part!r}, wanted all, a type ({known}), "
        "op:NAME, or rank:, dp_rank:, stage:, step: and a number"
    )


def _numbered(model: Model, word: str, number: int) -> Bools:
    """The operations of a rank, a data rank, a stage or a step."""
    table = model.table
    stage = np.array([op.stage for op in table.ops])
    found: Bools
    if word == "rank":
        found = (table.rank_of[:, stage] == number).T[:, :, None]
    elif word == "stage":
        found = (stage == number)[:, None, None]
    elif word == "dp_rank":
        found = (np.arange(table.ranks) == number)[None, :, None]
    else:
        found = (np.array(table.steps) == number)[None, None, :]
    return found
