"""Select the work of a step that edits change, by keys and values that the step has.

Each kind of step (events of ranks, operations of a table or of a trial) is a `Selectable`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from fastcomm.checks import shortened
from fastcomm.errors import ConfigError
from fastcomm.graph.edits import Edit, conditions, folded
from fastcomm.regexes import matches
from fastcomm.trace.bytes import op_of_collective
from fastcomm.trace.columns import filled
from fastcomm.trace.parallelisms import PARALLELISMS
from fastcomm.trace.run import ranges
from fastcomm.trace.schema import OPS
from fastcomm_kernels.arrays import Flags, Floats, Ints

# Other names of parallelisms.
_OTHER_NAMES = {row.other_name: row.tag.lower() for row in PARALLELISMS if row.other_name}


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


_FEW = 8


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


# Returns new durations of some operations, from all durations and which of them are selected.
Replacement = Callable[[Floats, Flags], Floats]


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


_ON_DURATIONS: dict[str, Callable[[Floats, Any], Floats]] = {
    "scale": lambda old, factor: old * factor,
    "set": np.full_like,
    "delay": lambda old, more: np.maximum(old + more, 0.0),
    "remove": lambda old, _: np.zeros_like(old),
}


def not_possible(edit: Edit) -> ConfigError:
    """Return the error of an action that a kind of step does not have."""
    return ConfigError(
        f"{edit}: not possible here. fastcomm what-if and fastcomm replay have it for the "
        "traces of all ranks"
    )
