"""What-if edits as data, of events of a step or of durations of operations.

A step's `Edit` selects events by their columns: ``comm:TP``, ``name:REGEX``, ``stream:7``. What
the key of a `DurationChange` selects is up to the model whose operations change.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import files
from fastcomm.checks import DELAY_MS, DURATION_NS, FACTOR, SPEED, shortened
from fastcomm.errors import ConfigError
from fastcomm.trace.schema import OPS, TAGS
from fastcomm_kernels.arrays import Flags, Floats

_MS = 1e6
_LARGEST = 64 << 20  # bytes of a file of changes, which may name every operation

Action = Literal["scale", "set", "remove", "fuse"]
DELAYS = ("launches", "gaps", "host-gaps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change to a step."""

    action: Action
    what: str  # a selection; of "remove" one of DELAYS
    value: float = 0.0  # a factor, or ns

    def __post_init__(self) -> None:
        """Check the factor: with a larger one times would no longer fit 64 bits."""
        if self.action == "scale":
            _check_factor(self.value, self.value)

    def __str__(self) -> str:
        if self.action == "remove":
            return f"remove {self.what}"
        if self.action == "fuse":
            return f"fuse kernels below {self.value / 1000:g} us"
        amount = f"{self.value:g}" if self.action == "scale" else f"{self.value / 1000:g} us"
        return f"{self.action} {self.what} = {amount}"


def scale(what: str, factor: float) -> Edit:
    """Multiply the own time of the selected events by a factor: `scale("comm:TP", 0.5)`."""
    return Edit(action="scale", what=what, value=factor)


def set_time(what: str, time_ns: float) -> Edit:
    """Set the own time of the selected events to a number of nanoseconds."""
    return Edit(action="set", what=what, value=time_ns)


def remove(delays: str) -> Edit:
    """Remove delays: "launches", "gaps" between kernels, "host-gaps" between operators."""
    return Edit(action="remove", what=_known(delays, DELAYS, "remove"))


_KINDS = ("comm", "compute", "copy", "host")
_WORDS = ("op", "tag", "stream", "thread", "name")


def selected(events: pa.Table, words: str) -> Flags:
    """Which rows of a table of `rows.EVENT` a selection means."""
    chosen = np.ones(events.num_rows, np.bool_)
    for part in words.split("+"):
        chosen &= _part(events, part.strip(), words)
    return chosen


def _part(events: pa.Table, part: str, words: str) -> Flags:
    key, _, value = part.partition(":")
    if key in _KINDS:
        chosen = _of_kind(events, key)
        return chosen & _equal(events["tag"], _known(value, TAGS, words)) if value else chosen
    if key == "op" and value:
        return _equal(events["op"], _known(value, OPS, words))
    if key == "tag" and value:
        return _equal(events["tag"], _known(value, TAGS, words))
    if key == "stream" and re.fullmatch(r"-?\d+", value):
        return _equal(events["stream"], int(value))
    if key == "thread" and value:
        return _equal(events["thread"], value)
    if key == "name" and value:
        try:
            return _flags(pc.match_substring_regex(events["name"], value))
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{words!r}: {value!r} is no expression: {error}") from error
    raise ConfigError(
        f"{words!r}: found {part!r}, wanted one of {', '.join(_KINDS)}, or one of "
        f"{', '.join(_WORDS)} with a value behind a colon"
    )


def _of_kind(events: pa.Table, kind: str) -> Flags:
    on_device = _flags(events["is_device"])
    is_comm = _flags(pc.is_valid(events["op"]))
    is_kernel = _equal(events["kind"], "kernel")
    return {
        "comm": is_comm,
        "compute": on_device & is_kernel & ~is_comm,
        "copy": on_device & ~is_kernel & ~is_comm,
        "host": ~on_device,
    }[kind]


def _equal(column: pa.ChunkedArray, value: str | int) -> Flags:
    return _flags(pc.equal(column, value))


def _flags(column: pa.ChunkedArray) -> Flags:
    flags: Flags = column.fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)
    return flags


def _known(word: str, words: tuple[str, ...], selection: str) -> str:
    if word not in words:
        raise ConfigError(f"{selection!r}: found {word!r}, wanted one of {', '.join(words)}")
    return word


def duration_ns(text: str) -> float:
    """Nanoseconds of "10us"; ConfigError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(ns|us|ms|s)\s*", text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    duration = number * {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[match[2] if match else "s"]
    if not DURATION_NS.holds(duration):
        raise ConfigError(
            f"duration {shortened(text)!r}: wanted a number and a unit, as in 10us, at most "
            f"{DURATION_NS.most / 1e9:.15g}s"
        )
    return duration


def factor(text: str) -> float:
    """A factor of the range `SPEED`, or 0 for no time; ConfigError for anything else."""
    number = amount(text)
    _check_factor(number, text)
    return number


def amount(text: str) -> float:
    """A finite number, 0 or more; ConfigError for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"factor {shortened(text)!r}: wanted {SPEED}, or 0")
    return number


def _check_factor(number: float, text: object) -> None:
    if number != 0 and not SPEED.holds(number):
        raise ConfigError(f"factor {shortened(text)!r}: wanted {SPEED}, or 0")


def speed(kind: str, text: str) -> Edit:
    """Return the edit that divides the durations of a kind of events by a factor."""
    times = factor(text)
    SPEED.check(times, f"{shortened(text)!r} times as fast")
    return Edit(action="scale", what=kind, value=1 / times)


def removal(text: str) -> Edit:
    """The removal of delays of a kind."""
    return Edit(action="remove", what=_known(text, DELAYS, "remove"))


def read_edits(path: Path) -> list[Edit]:
    """The edits in a TOML file: a list of tables ``[[edit]]``, in order."""
    document = files.toml(path)
    tables = document.get("edit")
    if set(document) != {"edit"} or not isinstance(tables, list):
        raise ConfigError(f"{path}: found {sorted(document)}, wanted tables [[edit]]")
    try:
        return [edit_of(table) for table in tables]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def edit_of(table: Mapping[str, Any]) -> Edit:
    """Return the edit of one table, by its action: scale, set, remove, hide, and so on."""
    words = {key: str(value) for key, value in table.items()}
    what = words.pop("what", None)
    if len(words) != 1:
        raise ConfigError(f"an edit has {sorted(table)}; wanted one action, and perhaps `what`")
    ((action, value),) = words.items()
    if action in ("scale", "set"):
        if what is None:
            raise ConfigError(f"{action} = {value}: wanted `what` it means")
        amount = factor(value) if action == "scale" else duration_ns(value)
        return Edit(action="scale" if action == "scale" else "set", what=what, value=amount)
    simple = {
        "remove": lambda: removal(value),
        "hide": lambda: Edit(action="scale", what=f"comm:{value}", value=0.0),
        "fuse_below": lambda: Edit(action="fuse", what="compute", value=duration_ns(value)),
        "compute_speedup": lambda: speed("compute", value),
        "comm_speedup": lambda: speed("comm", value),
    }
    if action not in simple or what is not None:
        raise ConfigError(
            f"found the edit {dict(table)}, wanted scale or set with `what`, or one of "
            f"{', '.join(simple)}"
        )
    return simple[action]()


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


def read_changes(path: Path, *, has_ideal: bool = False) -> dict[str, DurationChange]:
    """Return the changes of a JSON file by key, in its order.

    `has_ideal` allows ``"ideal": true``. Raises ConfigError for anything else in the file.
    """
    tables = files.json(path, _LARGEST)
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
