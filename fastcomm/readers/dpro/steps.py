"""Assign the events of a uniform trace to steps. Times are ns."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from fastcomm.errors import ConfigError
from fastcomm.options import StepRule
from fastcomm.readers.dpro import UniformTrace, category
from fastcomm_kernels.arrays import NULL, Ints

_BEGINS = frozenset({"I/O", "operator.FW"})
_UPDATE = "operator.UPDATE"
_GAP_NS = 5_000_000


def by_previous(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """Return the step of each event by the rule of dPRO's first version.

    A step begins at the first input or forward operation after any other one.

    Parameters
    ----------
    cats
        Categories of the events, by start.
    start, dur
        Not used.

    """
    return _walk(cats, _after_other, lambda cat: True)


def by_operator(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """Return the step of each event by the rule of a later version of dPRO.

    A step begins at the first forward operator after any other one; events that are no
    operators are ignored.

    Parameters
    ----------
    cats
        Categories of the events, by start.
    start, dur
        Not used.

    """
    return _walk(cats, _after_other, lambda cat: cat.startswith("operator"))


def by_update(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """Return each event's step; one begins at an input or forward operation after an update.

    Parameters
    ----------
    cats
        Categories of the events, by start.
    start, dur
        Not used.

    """
    return _walk(cats, _after_update, lambda cat: cat.startswith("operator") or cat == "I/O")


def _after_other(before: str, cat: str) -> bool:
    return before not in _BEGINS and cat in _BEGINS


def _after_update(before: str, cat: str) -> bool:
    return before == _UPDATE and cat in _BEGINS


def _walk(
    cats: Sequence[str], begins: Callable[[str, str], bool], moves: Callable[[str], bool]
) -> list[int]:
    """Return the step of each event of one process, counted from 0.

    An update that comes after the next step has begun counts to the step before.

    Parameters
    ----------
    cats
        Fine category of each event, in the order of the trace.
    begins
        Whether a step begins between two categories.
    moves
        Whether events of a category count as the event before the next one.

    """
    step, before, steps = 0, "", []
    for cat in cats:
        if before:
            # A late update belongs to the step before.
            step += int(begins(before, cat)) - int(before in _BEGINS and cat == _UPDATE)
        steps.append(step)
        before = cat if moves(cat) else before
    return steps


def by_gap(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """Return each event's step; one begins after a gap of 5 ms without operators.

    Such a step begins only at an input or forward operation, and if the previous step has
    backward operations and an update.

    Parameters
    ----------
    cats
        Categories of the events, by start.
    start, dur
        Start and duration of each event, ns.

    """
    step, end, steps = 0, None, []
    backward = update = 0
    for cat, begun, length in zip(cats, start, dur, strict=True):
        late = end is not None and begun - end > _GAP_NS
        if cat in _BEGINS and late and backward > 0 and update > 0:
            step, backward, update = step + 1, 0, 0
        steps.append(step)
        backward += length if cat == "operator.BW" else 0
        update += length if cat == _UPDATE else 0
        end = begun + length if cat.startswith("operator") else end
    return steps


RULES: dict[str, Callable[[Sequence[str], Sequence[int], Sequence[int]], list[int]]] = {
    "update": by_update,
    "seed": by_previous,
    "operator": by_operator,
    "gap": by_gap,
    "none": lambda cats, start, dur: [0] * len(cats),
}


RULE = get_args(StepRule)[0]  # by default


def has_steps(trace: UniformTrace) -> bool:
    """Return whether the trace has steps of all of its processes."""
    pids, is_known = _pids(trace), trace.step != NULL
    return set(pids[trace.counts]) == set(pids[trace.counts & is_known])


def _pids(trace: UniformTrace) -> Ints:
    """Return the index of the process of each event."""
    pid_of = {pid: i for i, pid in enumerate(trace.pids)}
    return np.array([pid_of[pid] for pid in trace.key_pid], np.int64)[trace.key]


def with_steps(trace: UniformTrace, rule: str = RULE) -> UniformTrace:
    """Return the trace with a step for every event.

    Processes without steps in the trace get them by a rule.

    Parameters
    ----------
    trace
        The trace.
    rule
        A key of `RULES`.

    Raises
    ------
    ConfigError
        If the rule is unknown, or another than the default and all processes have steps.

    """
    if rule != RULE and has_steps(trace):
        raise ConfigError("the trace has steps; leave --step-rule out")
    if rule not in RULES:
        raise ConfigError(f"invalid step rule {rule!r}: expected one of {', '.join(RULES)}")
    cats = [category(name) for name in trace.names]
    step, pids = trace.step.copy(), _pids(trace)
    for pid in range(len(trace.pids)):
        rows = np.flatnonzero((pids == pid) & trace.counts)
        recorded = step[rows]
        if (recorded != NULL).any():
            step[rows] = _filled(recorded)
        else:
            kinds = [cats[key] for key in trace.key[rows]]
            step[rows] = RULES[rule](
                kinds, trace.start[rows].tolist(), trace.dur[rows].tolist()
            )
    return replace(trace, step=step)


def _filled(steps: Ints) -> Ints:
    """Replace NULL by the last step before it, or by 0."""
    last = np.maximum.accumulate(np.where(steps == NULL, -1, np.arange(len(steps))))
    return np.where(last < 0, 0, steps[np.maximum(last, 0)])
