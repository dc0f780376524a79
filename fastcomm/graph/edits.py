"""The what-if language: edits of a step, parsed from texts; the work that they change.

An `Edit` is an action and a target, such as ``scale comm:TP=0.5``. A target is one condition or
several joined by ``+``, all of which must hold. A condition is a key, mostly with a value:
``comm``, ``comm:TP``, ``kernel:/gemm/``, ``rank:5``. Which keys and values there are depends on
the step, see `fastcomm.graph.edits`. An `Interval` tells how far off a predicted step time
may be, by the errors that were measured for such edits.

Each kind of step (events of ranks, operations of a table or of a trial) is a `Selectable`.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files as package_files
from math import floor
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from fastcomm import files, regexes
from fastcomm.checks import SPEED, shortened
from fastcomm.errors import ConfigError, inert
from fastcomm.option_fields import build
from fastcomm.options import EditOptions
from fastcomm.regexes import matches
from fastcomm.trace.bytes import op_of_collective
from fastcomm.trace.columns import filled
from fastcomm.trace.parallelisms import PARALLELISMS
from fastcomm.trace.run_traces import ranges
from fastcomm.trace.schema import OPS
from fastcomm.units import format_ns, parse_bandwidth, parse_duration
from fastcomm_kernels.arrays import Flags, Floats, Ints

Action = Literal[
    "scale", "set", "delay", "bandwidth", "ideal", "heal", "remove", "overlap", "fuse"
]
_MOST_STEPS = 10_000  # of a sweep
# What the validation table calls the work that a key selects.
_SCALED = {
    "comm": "comm",
    "op": "comm",
    "link": "comm",
    "compute": "compute",
    "kernel": "compute",
}
# Other names of keys.
_ALIASES = {
    "communication": "comm",
    "collective": "op",
    "computation": "compute",
    "datarank": "dprank",
    "operation": "op",
}
_RANGE = re.compile(r"([0-9.eE+-]+):([0-9.eE+-]+):([0-9.eE+-]+)(\D.*)?")
_TEXT = r'"[^"]*"|/(?:\\.|[^/\\])*/'
_CONDITION = re.compile(rf"\s*([^:+\s]+)\s*(?::({_TEXT}|[^+]*))?(?:\+|$)")
# Other names of parallelisms.
_OTHER_NAMES = {row.other_name: row.tag.lower() for row in PARALLELISMS if row.other_name}
_FEW = 8
# Returns new durations of some operations, from all durations and which of them are selected.
Replacement = Callable[[Floats, Flags], Floats]
_ON_DURATIONS: dict[str, Callable[[Floats, Any], Floats]] = {
    "scale": lambda old, factor: old * factor,
    "set": np.full_like,
    "delay": lambda old, more: np.maximum(old + more, 0.0),
    "remove": lambda old, _: np.zeros_like(old),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change of a step.

    `value` is a factor to scale with; ns to set, to add (delay) or below which kernels are
    fused; bytes per second of a bandwidth; 0 for other actions.
    """

    action: Action
    target: str
    value: float = 0.0
    text: str  # as a user writes it: "scale comm:TP=0.5"

    def __str__(self) -> str:
        return self.text

    @property
    def kind(self) -> str:
        """Row of the validation table that is about edits like this one: "scale comm"."""
        keys = {key for key, _ in conditions(self.target)}
        if self.action == "scale":
            return f"scale {next((_SCALED[key] for key in _SCALED if key in keys), 'other')}"
        if self.action in ("heal", "remove"):
            return f"{self.action} {'+'.join(sorted(keys))}"
        return {"bandwidth": "set link"}.get(self.action, self.action)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedEdits:
    """The edits of one what-if, and its sweeps: edits of which each is tried in turn."""

    edits: tuple[Edit, ...] = ()
    sweeps: tuple[tuple[Edit, ...], ...] = ()

    def single(self, subject: str) -> tuple[Edit, ...]:
        """Return the edits; raise ConfigError, with the name `subject`, for a sweep."""
        if self.sweeps:
            raise ConfigError(
                f"{self.sweeps[0][0]}: {subject} tries no FROM:TO:STEP; give one value, or use "
                "fastcomm what-if"
            )
        return self.edits


def parse_edits(options: EditOptions) -> ParsedEdits:
    """Return the edits that options name: those of their file first, then their own.

    Edits of one file, or of one command line, apply in the order heal, set, scale, overlap,
    remove, fuse.

    Raises
    ------
    ConfigError
        If an edit is invalid, or the file is.

    """
    parsed: list[list[Edit]] = []
    if options.edits is not None:
        parsed += _of_file(str(options.edits))
    parsed += _of_options(options)
    return ParsedEdits(
        edits=tuple(one[0] for one in parsed if len(one) == 1),
        sweeps=tuple(tuple(one) for one in parsed if len(one) > 1),
    )


def _of_file(path: str) -> list[list[Edit]]:
    """Return the edits of a TOML file, whose keys are the names of the options."""
    place = files.place(path)
    try:
        options = build(EditOptions, files.toml(place), str(path))
        if options.edits is not None:
            raise ConfigError("edits: a file of edits names no other file")
        parsed = _of_options(options)
        for edit in (edit for one in parsed for edit in one):
            _check_regexes(edit.target)
        return parsed
    except ConfigError as error:
        text = str(error).removeprefix(inert(f"{path}: "))
        raise ConfigError(f"{path}: {text}") from error


def _of_options(options: EditOptions) -> list[list[Edit]]:
    """Return the edits of options; those of a sweep in one list."""
    parsed = [[_plain("heal", text)] for text in options.heal]
    parsed += [list(_valued("set", text)) for text in options.set]
    parsed += [list(_valued("scale", text)) for text in options.scale]
    parsed += [[_plain("overlap", text)] for text in options.overlap]
    parsed += [[_plain("remove", text)] for text in options.remove]
    if options.fuse_below is not None:
        below = float(options.fuse_below)
        text = f"fuse kernels below {format_ns(below)}"
        parsed.append([Edit(action="fuse", target="compute", value=below, text=text)])
    return parsed


def _plain(action: Literal["heal", "overlap", "remove"], target: str) -> Edit:
    """Return an edit without a value."""
    conditions(target)
    return Edit(action=action, target=target, text=f"{action} {target}")


def _valued(action: Literal["scale", "set"], text: str) -> Iterator[Edit]:
    """Yield the edit of WHAT=VALUE, or one for each value of WHAT=FROM:TO:STEP."""
    target, equals, value = text.rpartition("=")
    if not equals or not target:
        example = {"scale": "comm:DP=0.5", "set": "link:DP=800Gbit/s"}[action]
        raise ConfigError(
            f"{action}: invalid edit {shortened(text)!r}: expected WHAT=VALUE, as in {example}"
        )
    conditions(target)
    parts = _RANGE.fullmatch(value)
    values = [value] if parts is None else _steps(action, parts)
    for one in values:
        kind, number = _scaled(one) if action == "scale" else _set(target, one)
        yield Edit(
            action=kind, target=target, value=number, text=f"{action} {target}={one.strip()}"
        )


def _steps(action: str, parts: re.Match[str]) -> list[str]:
    """Return the values from FROM to TO inclusive, at intervals of STEP, with their unit."""
    try:
        first, last, step = (float(parts[place]) for place in (1, 2, 3))
        count = (last - first) / step + 1 + 1e-9
    except (ValueError, ZeroDivisionError):
        count = math.nan
    if not 1 <= count < _MOST_STEPS + 1 or step <= 0:
        raise ConfigError(
            f"{action}: invalid values {shortened(parts[0])!r}: expected FROM:TO:STEP with 1 "
            f"to {_MOST_STEPS} values"
        )
    return [f"{round(first + k * step, 12):.12g}{parts[4] or ''}" for k in range(floor(count))]


def _scaled(text: str) -> tuple[Action, float]:
    """Parse a factor of durations: 0, or in the range `SPEED`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if number != 0 and not SPEED.holds(number):
        raise ConfigError(f"scale: invalid factor {shortened(text)!r}: expected {SPEED}, or 0")
    return "scale", number


def _set(target: str, text: str) -> tuple[Action, float]:
    """Parse what a duration is set to: a time, a time to add, a bandwidth, or "ideal"."""
    if text.casefold() == "ideal":
        return "ideal", 0.0
    if any(key == "link" for key, _ in conditions(target)):
        return "bandwidth", parse_bandwidth(text, "set")
    if text[:1] in ("+", "-"):
        sign = -1 if text[0] == "-" else 1
        return "delay", sign * parse_duration(text[1:], "set: duration")
    return "set", parse_duration(text, "set: duration")


def conditions(target: str) -> list[tuple[str, str | None]]:
    """Split a target into conditions: pairs of a key, and its value or None.

    Raises
    ------
    ConfigError
        If a condition has no key, or a colon without a value.

    """
    pairs: list[tuple[str, str | None]] = []
    place = 0
    while place < len(target) or not pairs:
        match = _CONDITION.match(target, place)
        if match is None or match[2] == "":
            raise ConfigError(
                f"invalid target {shortened(target)!r}: expected conditions such as comm, "
                "comm:TP, kernel:/gemm/ or rank:5, joined by +"
            )
        pairs.append((_ALIASES.get(folded(match[1]), folded(match[1])), match[2]))
        place = match.end()
    return pairs


def _check_regexes(target: str) -> None:
    """Raise `ConfigError` for a regular expression of a file whose time may be endless."""
    for key, value in conditions(target):
        if value and len(value) > 1 and value[0] == value[-1] == "/":
            regexes.check_of_file(key, value[1:-1])


def folded(text: str) -> str:
    """Return a name without case, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]", "", text).casefold()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How far off a predicted step time may be, as far as measured errors tell.

    It is the prediction, give or take the error of the replay without edits, and the largest
    errors that the validation table shows for such edits.
    """

    predicted_ns: float
    replay_error_ns: float  # of the step time without edits
    edit_error: float | None  # sum of the largest relative errors; None if one is unknown
    reason: str  # which rows of the validation table were used, or why there is none

    @classmethod
    def of(
        cls,
        predicted_ns: float,
        replay_error_ns: float,
        edits: Sequence[Edit],
        unknown: str | None = None,
    ) -> "Interval":
        """Look up the errors of edits; `unknown` is why the table does not apply to them."""
        table = validation()
        kinds = list(dict.fromkeys(edit.kind for edit in edits))
        absent = [kind for kind in kinds if kind not in table]
        if unknown is None and absent:
            unknown = f"no validated prediction of {', '.join(absent)}"
        return cls(
            predicted_ns=predicted_ns,
            replay_error_ns=replay_error_ns,
            edit_error=None if unknown else sum(table[kind] for kind in kinds),
            reason=unknown or f"largest validated error of {', '.join(kinds)}",
        )

    @property
    def width_ns(self) -> float | None:
        """Largest distance from the prediction; None if the error of an edit is unknown."""
        if self.edit_error is None:
            return None
        return self.replay_error_ns + self.edit_error * self.predicted_ns

    @property
    def bounds_ns(self) -> tuple[float, float] | None:
        """Lower and upper bound; None if the error of an edit is unknown."""
        if self.width_ns is None:
            return None
        return max(self.predicted_ns - self.width_ns, 0.0), self.predicted_ns + self.width_ns

    @property
    def because(self) -> str:
        """What the interval is made of."""
        share = "" if self.edit_error is None else f" ({self.edit_error * 100:.2g} %)"
        replay = f"the replay's own error ({format_ns(self.replay_error_ns)})"
        return f"{replay} and the {self.reason}{share}"

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `interval` in JSON documents."""
        low, high = self.bounds_ns or (None, None)
        return {
            "low_ns": low,
            "high_ns": high,
            "replay_error_ns": self.replay_error_ns,
            "edit_error": self.edit_error,
            "edit_error_of": self.reason,
        }

    def __str__(self) -> str:
        if self.bounds_ns is None:
            return f"Interval: n/a, {self.reason}."
        low, high = (format_ns(ns, 4) for ns in self.bounds_ns)
        return f"Interval: {low} to {high}, by {self.because}."


def not_validated(*, is_host_run: bool, is_replay: bool, one_rank: bool) -> str | None:
    """Return why measured errors do not apply to a step of a run; None if they do.

    Parameters
    ----------
    is_host_run
        Whether ranks compute and communicate without a device.
    is_replay
        Whether its times are those of the dependencies of execution traces.
    one_rank
        Whether the step is that of one rank.

    """
    if is_replay:
        return "what-ifs are not validated on execution traces"
    if is_host_run:
        return (
            "what-ifs are not validated on runs of the host: pauses between operators stay as "
            "long as measured, though a thread may wait in them"
        )
    if one_rank:
        return "the validated steps are those of all ranks, and this is one rank"
    return None


def validation() -> dict[str, float]:
    """Return the largest relative error of the step time by kind of edit.

    `docs/what_if_accuracy.py` measures them.
    """
    text = package_files("fastcomm.graph").joinpath("edit_errors.json").read_text("utf-8")
    errors: dict[str, float] = json.loads(text)
    return errors


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSweep:
    """Step time for each of several edits that differ in their value."""

    edits: tuple[Edit, ...]
    span_ns: tuple[int, ...]
    intervals: tuple[Interval, ...]

    @property
    def name(self) -> str:
        """Action and target of the edits."""
        return self.edits[0].text.rpartition("=")[0]

    @property
    def values(self) -> tuple[float, ...]:
        """Value of each edit: a factor, ns, or bytes per second."""
        return tuple(edit.value for edit in self.edits)

    @property
    def labels(self) -> tuple[str, ...]:
        """Value of each edit as a user writes it, "800Gbit/s"."""
        return tuple(edit.text.rpartition("=")[2] for edit in self.edits)

    def to_arrow(self) -> pa.Table:
        """Return a table with one row per value."""
        columns = {"value": pa.array(self.values), "span_ns": pa.array(self.span_ns)}
        return pa.table({"edit": [self.name] * len(self.edits), **columns})

    def to_dict(self) -> dict[str, Any]:
        """Return the element of `sweeps` in JSON documents."""
        return {
            "edit": self.name,
            "values": list(self.values),
            "span_ns": list(self.span_ns),
            "intervals": [interval.to_dict() for interval in self.intervals],
        }


class Selectable(Protocol):
    """A step whose work edits can select."""

    @property
    def targets(self) -> Mapping[str, Sequence[str]]:
        """Values that there are by key, such as "comm": ("DP", "TP")."""
        ...

    def rows(self, key: str, values: Collection[str] | None) -> Flags:
        """Return the work whose `key` has one of the values; None is every value."""
        ...


class TextColumns:
    """Work that edits select by columns of text, with one value per row; null is none."""

    def __init__(self, columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> None:
        """Number the values of each column."""
        self.targets: dict[str, tuple[str, ...]] = {}
        self._codes: dict[str, Ints] = {}
        for key, column in columns.items():
            encoded = pa.chunked_array([column]) if isinstance(column, pa.Array) else column
            encoded = encoded.cast(pa.string()).combine_chunks().dictionary_encode()
            if isinstance(encoded, pa.ChunkedArray):
                encoded = encoded.combine_chunks()
            values = tuple(encoded.dictionary.to_pylist())
            codes = filled(encoded.indices, len(values))
            if values:
                self.targets[key], self._codes[key] = values, codes

    def codes(self, key: str) -> Ints:
        """Return the position of each row's value in `targets`; their number for null."""
        return self._codes[key]

    def rows(self, key: str, values: Collection[str] | None) -> Flags:
        """Return the rows whose `key` has one of the values; None is every value."""
        present = self.targets[key]
        chosen = np.array([values is None or value in values for value in present] + [False])
        mask: Flags = chosen[self._codes[key]]
        return mask


def select(step: Selectable, target: str) -> Flags:
    """Return the work of a step that a target selects.

    Case, hyphens and underscores of keys and values do not matter. A value between slashes is a
    regular expression, found anywhere; one between quotes is taken as it is.

    Raises
    ------
    ConfigError
        If the step has no such key or value, or nothing meets all conditions. The message lists
        what there is.

    """
    keys = {folded(key): key for key in step.targets}
    mask: Any = True
    for key, value in conditions(target):
        if key not in keys:
            raise ConfigError(f"{target!r}: there is no {key!r} here; {listing(step)}")
        name = keys[key]
        values = None if value is None else _values(name, value, step.targets[name], target)
        mask = mask & step.rows(name, values)
    if not mask.any():
        raise ConfigError(f"{target!r} matches nothing: no work meets all of its conditions")
    selected: Flags = mask
    return selected


def _values(key: str, value: str, present: Sequence[str], target: str) -> set[str]:
    """Return the present values that the value of a condition means."""
    if len(value) > 1 and value[0] == value[-1] == "/":
        flags = matches(pa.array(present, pa.string()), f"(?i){value[1:-1]}").to_pylist()
        chosen = {text for text, is_match in zip(present, flags, strict=True) if is_match}
    elif value[0] == value[-1] == '"' and len(value) > 1:
        chosen = {value[1:-1]} & set(present)
    else:
        names = {folded(value), *_number_range(value)}
        names |= {_OTHER_NAMES[name] for name in names & set(_OTHER_NAMES)}
        if key == "op" and (op := op_of_collective(value)) is not None:
            names |= {folded(OPS[op])} - {"other"}
        chosen = {text for text in present if folded(text) in names}
    if not chosen:
        near = get_close_matches(value, present, n=1)
        hint = f"; did you mean {key}:{near[0]}?" if near else ""
        raise ConfigError(
            f"{target!r} matches nothing: there is {_described(key, present, most=40)}{hint}"
        )
    return chosen


def _number_range(value: str) -> list[str]:
    """Return the numbers of a range such as 0-3; none for another text."""
    first, _, last = value.partition("-")
    if not (first.isdecimal() and last.isdecimal() and len(value) < 16):  # noqa: PLR2004
        return []
    return [str(number) for number in range(int(first), min(int(last), int(first) + 10**6) + 1)]


def listing(step: Selectable) -> str:
    """Return the sentence on what can be selected: "there is comm:DP|TP, compute, ..."."""
    parts = (_described(key, values) for key, values in step.targets.items())
    return f"there is {', '.join(parts)}"


def _described(key: str, values: Sequence[str], most: int = _FEW) -> str:
    """Return a key with its values, or with their number where they are many."""
    if tuple(values) == (key,):
        return key
    if all(value.isdecimal() for value in values):
        return f"{key}:{ranges(sorted(map(int, values)))}"
    if len(values) <= most and sum(map(len, values)) < 400:  # noqa: PLR2004
        return f"{key}:{'|'.join(sorted(values))}"
    example = shortened(min(values, key=len))
    return f"{key}:NAME or {key}:/REGEX/ ({len(values)} names, as {example!r})"


def durations_after(
    edits: Sequence[Edit],
    step: Selectable,
    durations: Floats,
    replacements: Mapping[str, Replacement] | None = None,
) -> Floats:
    """Return durations of operations after edits.

    Parameters
    ----------
    edits
        In the order in which they apply.
    step
        The operations.
    durations
        Of each operation, ns.
    replacements
        Of the actions "heal" and "ideal", where the step has them.

    Raises
    ------
    ConfigError
        If an edit selects nothing, or has an action that these operations do not have.

    """
    actions = {**_ON_DURATIONS, **(replacements or {})}
    for edit in edits:
        if edit.action not in actions:
            raise not_possible(edit)
        mask = select(step, edit.target)
        change = actions[edit.action]
        after = (
            change(durations, mask)
            if edit.action in (replacements or ())
            else change(durations, edit.value)
        )
        durations = np.where(mask, after, durations)
    return durations


def not_possible(edit: Edit) -> ConfigError:
    """Return the error of an action that a kind of step does not have."""
    return ConfigError(
        f"{edit}: not possible here. fastcomm what-if has it for the traces of all ranks"
    )
