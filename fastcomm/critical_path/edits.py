"""What-if edits as data: which events, and what happens to them.

A selection names events in words: `comm`, `comm:DP`, `compute`, `copy`, `host`, `op:AllReduce`,
`tag:TP`, `stream:7`, `thread:1234`, `name:REGEX`; with `+` between them all have to hold.
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

from fastcomm.errors import ConfigError
from fastcomm.inputs import toml
from fastcomm.ranges import DURATION_NS, SPEED, shortened
from fastcomm.trace.schema import OPS, TAGS
from fastcomm_kernels.graph import Flags

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


_KINDS = ("comm", "compute", "copy", "host")
_WORDS = ("op", "tag", "stream", "thread", "name")


def selected(events: pa.Table, words: str) -> Flags:
    """Which rows of a table of `events.EVENT` a selection means."""
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
    found: Flags = column.fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)
    return found


def _known(word: str, words: tuple[str, ...], selection: str) -> str:
    if word not in words:
        raise ConfigError(f"{selection!r}: found {word!r}, wanted one of {', '.join(words)}")
    return word


def duration_ns(text: str) -> float:
    """Nanoseconds of "10us"; ConfigError for anything else."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(ns|us|ms|s)\s*", text)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    duration = number * {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[found[2] if found else "s"]
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
    """Events of a kind by a clock or a link that is so many times as fast."""
    times = factor(text)
    SPEED.check(times, f"{shortened(text)!r} times as fast")
    return Edit(action="scale", what=kind, value=1 / times)


def removal(text: str) -> Edit:
    """The removal of delays of a kind."""
    return Edit(action="remove", what=_known(text, DELAYS, "remove"))


def read(path: Path) -> list[Edit]:
    """The edits in a TOML file: a list of tables ``[[edit]]``, in order."""
    document = toml(path)
    tables = document.get("edit")
    if set(document) != {"edit"} or not isinstance(tables, list):
        raise ConfigError(f"{path}: found {sorted(document)}, wanted tables [[edit]]")
    try:
        return [edit_of(table) for table in tables]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def edit_of(table: Mapping[str, Any]) -> Edit:
    """The edit of one table: scale, set, remove, hide, fuse_below, clock or link."""
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
        "clock": lambda: speed("compute", value),
        "link": lambda: speed("comm", value),
    }
    if action not in simple or what is not None:
        raise ConfigError(
            f"found the edit {dict(table)}, wanted scale or set with `what`, or one of "
            f"{', '.join(simple)}"
        )
    return simple[action]()
