"""What-if edits as data: `Edit` for the events of a step, `DurationChange` for operations.

An `Edit` selects events by their columns, in texts such as ``comm:TP``, ``name:REGEX`` and
``stream:7``. Changes of durations have keys, whose meaning the changed model defines.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from fastcomm import files
from fastcomm.checks import (
    DELAY_MS,
    DURATION_NS,
    FACTOR,
    SPEED,
    check_type,
    invalid_value,
    shortened,
)
from fastcomm.errors import ConfigError
from fastcomm.options import Delay
from fastcomm.trace.events import matches
from fastcomm.trace.schema import OPS, TAGS
from fastcomm.units import parse_duration
from fastcomm_kernels.arrays import Floats

_MS = 1e6
_MAX_FILE_BYTES = 64 << 20  # of a file of changes, which may name every operation

Action = Literal["scale", "set", "remove", "fuse"]
DELAYS = get_args(Delay)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One what-if change to a step; the functions of this module construct the common ones."""

    action: Action
    target: str  # a selection of events, see `conditions`; for "remove" one of DELAYS
    value: float = 0.0  # "scale": a factor; "set" and "fuse": ns

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown action, or an invalid target or value."""
        if self.action not in get_args(Action):
            raise invalid_value(
                "edit: action", self.action, f"one of {', '.join(get_args(Action))}"
            )
        if self.action == "remove":
            _check_delays(self.target)
            return
        conditions(self.target)
        where, valid, expected = _VALUES[self.action]
        if not valid.holds(self.value) and not (self.action == "scale" and self.value == 0):
            raise invalid_value(where, self.value, expected)

    def __str__(self) -> str:
        if self.action == "remove":
            return f"remove {self.target}"
        if self.action == "fuse":
            return f"fuse kernels below {self.value / 1000:g} us"
        amount = f"{self.value:g}" if self.action == "scale" else f"{self.value / 1000:g} us"
        return f"{self.action} {self.target} = {amount}"


_NS = f"nanoseconds, {DURATION_NS}"
# Where an invalid value of an edit is, its range, and its description.
_VALUES = {
    "scale": ("scale: factor", SPEED, f'{SPEED}, or 0, as in scale("comm:TP", 0.5)'),
    "set": ("set_time: time_ns", DURATION_NS, f'{_NS}, as in set_time("comm:TP", 10_000)'),
    "fuse": ("fuse: value", DURATION_NS, _NS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSweep:
    """Step time for several values of one edit."""

    edit: Edit  # its own value is not used
    values: tuple[float, ...]
    span_ns: tuple[int, ...]  # step time for each value

    @property
    def name(self) -> str:
        """Action and target of the edit."""
        return f"{self.edit.action} {self.edit.target}"

    def to_arrow(self) -> pa.Table:
        """Return a row per value of the edit, with the step time `span_ns` that it gives."""
        columns = {"value": pa.array(self.values), "span_ns": pa.array(self.span_ns)}
        return pa.table({"edit": [self.name] * len(self.values), **columns})


def scale(selection: str, factor: float) -> Edit:
    """Multiply the durations of the selected events by a factor: `scale("comm:TP", 0.5)`.

    Parameters
    ----------
    selection
        The events, see `conditions`.
    factor
        0, or from 1e-6 to 1e6.

    Raises
    ------
    ConfigError
        If an argument is invalid.

    """
    return Edit(action="scale", target=selection, value=factor)


def set_time(selection: str, time_ns: float) -> Edit:
    """Set the duration of each selected event: `set_time("comm:TP", 10_000)` sets 10 us.

    Parameters
    ----------
    selection
        The events, see `conditions`.
    time_ns
        Nanoseconds.

    Raises
    ------
    ConfigError
        If an argument is invalid.

    """
    return Edit(action="set", target=selection, value=time_ns)


def remove(delays: str) -> Edit:
    """Remove delays: "launches", "gaps" between kernels, "host-gaps" between operators."""
    return Edit(action="remove", target=delays)


def _check_delays(delays: object) -> None:
    if delays not in DELAYS:
        raise invalid_value(
            "remove: delays", delays, f'one of {", ".join(DELAYS)}, as in remove("launches")'
        )


KINDS = ("comm", "compute", "copy", "host")
_COLUMNS = ("op", "tag", "stream", "thread", "name")
_CHOICES = {**dict.fromkeys((*KINDS, "tag"), TAGS), "op": OPS}
_INT = re.compile(r"-?\d{1,18}$")


def conditions(selection: str) -> list[tuple[str, str]]:
    """Split a selection of events into conditions, each a kind or a column, and its value.

    Parameters
    ----------
    selection
        One or several conditions joined by ``+``, all of which must hold: a kind of event
        (comm, compute, copy, host), a kind with a tag (``comm:TP``), or a column with a value
        (``op:AllReduce``, ``stream:7``, ``name:REGEX``).

    Raises
    ------
    ConfigError
        If a condition is invalid.

    """
    check_type(
        selection, str, "events", 'a text such as "compute", "comm:TP" or "name:gemm+stream:7"'
    )
    pairs = []
    for condition in selection.split("+"):
        key, _, value = condition.strip().partition(":")
        _check_condition(key, value, selection)
        pairs.append((key, value))
    return pairs


def _check_condition(key: str, value: str, selection: str) -> None:
    """Raise ConfigError, which quotes the selection, if a condition is invalid."""
    if value and key in _CHOICES:
        _check_choice(_CHOICES[key], value, selection)
    elif value and key == "name":
        matches(pa.array([""]), value)
    elif not (
        key in KINDS or (key == "thread" and value) or (key == "stream" and _INT.match(value))
    ):
        condition = f"{key}:{value}" if value else key
        example = f"name:{value or key or 'gemm'}"
        raise ConfigError(
            f"{selection!r}: invalid condition {condition!r}: expected {', '.join(KINDS)}, or "
            f"{', '.join(_COLUMNS)} with a value after a colon, as in {example}"
        )


def _check_choice(choices: tuple[str, ...], value: str, context: str) -> None:
    """Raise ConfigError, which quotes the context, if a value is none of the choices."""
    if value not in choices:
        hint = f"; did you mean {value.upper()!r}?" if value.upper() in choices else ""
        raise ConfigError(
            f"{context!r}: invalid value {value!r}: expected one of {', '.join(choices)}{hint}"
        )


def factor(text: str) -> float:
    """Parse a factor of durations: 0, or in the range `SPEED`. Raise ConfigError if invalid."""
    number = amount(text)
    if number != 0 and not SPEED.holds(number):
        raise ConfigError(f"invalid factor {shortened(text)!r}: expected {SPEED}, or 0")
    return number


def amount(text: str) -> float:
    """Parse a finite number that is 0 or more; raise ConfigError if invalid."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"invalid factor {shortened(text)!r}: expected {SPEED}, or 0")
    return number


def speed(kind: str, text: str) -> Edit:
    """Return the edit that divides the durations of a kind of events by a speedup.

    Parameters
    ----------
    kind
        "compute" or "comm".
    text
        The speedup as text, in the range `SPEED`.

    Raises
    ------
    ConfigError
        If the text is not such a number.

    """
    speedup = factor(text)
    SPEED.check(speedup, "speedup")
    return Edit(action="scale", target=kind, value=1 / speedup)


# As messages show it: lines that begin with four spaces are to copy.
_EXAMPLE = '    [[edit]]\n    what = "comm:DP"\n    scale = 0.5'


def read_edits(path: Path) -> list[Edit]:
    """Read the edits of a TOML file, tables ``[[edit]]``, in order.

    Raises ConfigError if the file is not TOML, or an edit is invalid.
    """
    document = files.toml(path)
    tables = document.get("edit")
    if set(document) != {"edit"} or not isinstance(tables, list):
        keys = ", ".join(map(repr, sorted(document))) or "nothing"
        raise ConfigError(f"{path}: found {keys}, expected only tables such as\n{_EXAMPLE}")
    try:
        return [edit_of(table) for table in tables]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def edit_of(table: Mapping[str, Any]) -> Edit:
    """Return the edit of one table ``[[edit]]``.

    Parameters
    ----------
    table
        One action: ``scale`` or ``set`` together with ``what``, a selection of events, or one
        of ``remove``, ``hide``, ``fuse_below``, ``compute_speedup``
        and ``comm_speedup``.

    Raises
    ------
    ConfigError
        If there is no action, several, or an invalid value.

    """
    values = {key: str(value) for key, value in table.items()}
    selection = values.pop("what", None)
    if len(values) != 1:
        raise ConfigError(
            f"invalid edit with {', '.join(sorted(table)) or 'no key'}: expected exactly one "
            "action, and `what` for scale and set"
        )
    ((action, value),) = values.items()
    if action in ("scale", "set"):
        if selection is None:
            raise ConfigError(f"{action} = {value}: missing `what`, the events to change")
        amount = factor(value) if action == "scale" else parse_duration(value)
        return Edit(
            action="scale" if action == "scale" else "set", target=selection, value=amount
        )
    simple = {
        "remove": lambda: remove(value),
        "hide": lambda: Edit(action="scale", target=f"comm:{value}", value=0.0),
        "fuse_below": lambda: Edit(
            action="fuse", target="compute", value=parse_duration(value)
        ),
        "compute_speedup": lambda: speed("compute", value),
        "comm_speedup": lambda: speed("comm", value),
    }
    if action not in simple or selection is not None:
        raise ConfigError(
            f"invalid edit {dict(table)}: expected scale or set with `what`, or one of "
            f"{', '.join(simple)} without it"
        )
    return simple[action]()


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationChange:
    """Change of an operation's duration to ``(duration + delay_ns) * ratio``."""

    delay_ns: float = 0.0
    ratio: float = 1.0
    is_ideal: bool = False  # change the ideal duration instead of the measured one

    def applied(self, duration: Floats) -> Floats:
        """Return the changed durations in ns: plus the delay, at least 0, times the ratio."""
        delayed = np.maximum(duration + self.delay_ns, 0.0) if self.delay_ns else duration
        return np.asarray(delayed * self.ratio)


def read_changes(path: Path, *, has_ideal: bool = False) -> dict[str, DurationChange]:
    """Read changes of durations from a JSON file: ``{"KEY": {"delay": ms, "ratio": r}}``.

    Parameters
    ----------
    path
        JSON file, at most 64 MiB.
    has_ideal
        Whether changes may have the key ``"ideal"``.

    Returns
    -------
    dict
        Change by key, in the order of the file.

    Raises
    ------
    ConfigError
        If the file has another form or no change, or a value is out of range.

    """
    tables = files.json(path, _MAX_FILE_BYTES)
    if not isinstance(tables, dict) or not tables:
        ideal = ', "ideal": true' if has_ideal else ""
        empty = "found nothing, " if tables == {} else ""
        raise ConfigError(
            f'{path}: {empty}expected an object {{"<key>": {{"delay": ms, "ratio": r{ideal}}}}}'
        )
    return {
        str(key): _change(table, f"{path}: {key}", has_ideal=has_ideal)
        for key, table in tables.items()
    }


def _change(table: Any, place: str, *, has_ideal: bool) -> DurationChange:
    """Return the change of one JSON object; `place`, its file and key, begins every error."""
    names = ["delay", "ratio", "ideal"] if has_ideal else ["delay", "ratio"]
    if not isinstance(table, dict):
        raise ConfigError(f"{place}: expected an object with {' and '.join(names)}")
    if not table:
        raise ConfigError(f"{place} changes nothing; expected {' or '.join(names)}")
    if unknown := set(table) - set(names):
        raise ConfigError(
            f"{place}: unknown key {', '.join(map(repr, sorted(unknown)))}: expected "
            f"{' and '.join(names)}"
        )
    fields = table
    delay, ratio = fields.get("delay", 0.0), fields.get("ratio", 1.0)
    ideal = fields.get("ideal", False)
    DELAY_MS.check(delay, f"{place}: delay (ms)")
    FACTOR.check(ratio, f"{place}: ratio")
    if not isinstance(ideal, bool):
        raise ConfigError(f"{place}: invalid ideal {ideal!r}: expected true or false")
    return DurationChange(delay_ns=delay * _MS, ratio=float(ratio), is_ideal=ideal)
