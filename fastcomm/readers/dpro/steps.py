"""Assign the events of a uniform trace to steps. Times are ns."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np

from fastcomm.errors import ConfigError
from fastcomm.options import StepRule
from fastcomm.readers.dpro import UniformTrace, category, coarse
from fastcomm_kernels.arrays import NULL, Ints

RULE = get_args(StepRule)[0]  # by default

# Returns the step of each event of a process from category, start and duration, by start.
_Rule = Callable[[Sequence[str], Sequence[int], Sequence[int]], list[int]]

_BEGINS = frozenset({"I/O", "operator.FW"})
_UPDATE = "operator.UPDATE"
_GAP_NS = 5_000_000


def _by_category(
    cats: Sequence[str],
    _start: Sequence[int],
    _dur: Sequence[int],
    *,
    ends: Callable[[str], bool],
    kinds: Sequence[str] = (),
) -> list[int]:
    """Return the step of each event by the categories of the events alone.

    A step begins at an input or forward operation after an event whose category `ends` a step.
    An update that comes after the next step has begun counts to the step before. Only events of
    the coarse categories `kinds` count as the event before the next one; by default all.
    """
    step, before, steps = 0, "", []
    for cat in cats:
        if before:
            step += int(ends(before) and cat in _BEGINS)
            step -= int(before in _BEGINS and cat == _UPDATE)
        steps.append(step)
        if not kinds or coarse(cat) in kinds:
            before = cat
    return steps


def _by_gap(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """Return the step of each event; one begins after a gap of 5 ms without operators.

    Such a step begins only at an input or forward operation, and if the previous step has
    backward operations and an update.
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
        end = begun + length if coarse(cat) == "operator" else end
    return steps


def _is_other(cat: str) -> bool:
    return cat not in _BEGINS


RULES: dict[str, _Rule] = {
    "update": partial(_by_category, ends=_UPDATE.__eq__, kinds=("operator", "I/O")),
    "seed": partial(_by_category, ends=_is_other),  # the first version of dPRO
    "operator": partial(_by_category, ends=_is_other, kinds=("operator",)),  # a later version
    "gap": _by_gap,
    "none": lambda cats, start, dur: [0] * len(cats),
}


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
    process, step = trace.process, trace.step.copy()
    has_step = trace.counts & (step != NULL)
    if rule != RULE and set(process[trace.counts]) == set(process[has_step]):
        raise ConfigError("the trace has steps; leave --step-rule out")
    if rule not in RULES:
        raise ConfigError(f"invalid step rule {rule!r}: expected one of {', '.join(RULES)}")
    cats = [category(name) for name in trace.names]
    for pid in range(len(trace.pids)):
        rows = np.flatnonzero((process == pid) & trace.counts)
        if has_step[rows].any():
            step[rows] = _filled(step[rows])
        else:
            kinds = [cats[key] for key in trace.key[rows]]
            start, dur = trace.start[rows].tolist(), trace.dur[rows].tolist()
            step[rows] = RULES[rule](kinds, start, dur)
    return replace(trace, step=step)


def _filled(steps: Ints) -> Ints:
    """Replace NULL by the last step before it, or by 0."""
    last = np.maximum.accumulate(np.where(steps == NULL, -1, np.arange(len(steps))))
    return np.where(last < 0, 0, steps[np.maximum(last, 0)])
