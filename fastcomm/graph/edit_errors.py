"""How far off the predictions of what-ifs are: measured errors, as intervals of predictions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from typing import Any

import pyarrow as pa

from fastcomm.graph.edits import Edit
from fastcomm.units import format_ns


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
