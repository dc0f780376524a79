"""Which training step an event is of, where the trace does not say it, and where it does."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fastcomm.errors import ConfigError
from fastcomm.readers.dpro.names import category
from fastcomm.readers.dpro.uniform import UniformTrace
from fastcomm_kernels.arrays import NULL, Ints

_BEGINS = frozenset({"I/O", "operator.FW"})
_UPDATE = "operator.UPDATE"
_GAP_NS = 5_000_000


def by_previous(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """The seed's rule: a step begins with the first input or forward op after anything else."""
    return _walk(cats, _after_other, lambda cat: True)


def by_operator(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """The seed's rule as dPRO had it for a while: only operators move the cursor."""
    return _walk(cats, _after_other, lambda cat: cat.startswith("operator"))


def by_update(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """A step begins with the first input or forward op after an update."""
    return _walk(cats, _after_update, lambda cat: cat.startswith("operator") or cat == "I/O")


def _after_other(before: str, cat: str) -> bool:
    return before not in _BEGINS and cat in _BEGINS


def _after_update(before: str, cat: str) -> bool:
    return before == _UPDATE and cat in _BEGINS


def _walk(
    cats: Sequence[str], begins: Callable[[str, str], bool], moves: Callable[[str], bool]
) -> list[int]:
    """Steps of one pid; a late update belongs to the step before."""
    step, before, found = 0, "", []
    for cat in cats:
        if before:
            step += int(begins(before, cat)) - int(before in _BEGINS and cat == _UPDATE)
        found.append(step)
        before = cat if moves(cat) else before
    return found


def by_gap(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """A step begins with a forward op 5 ms after the last op, once it had an update."""
    step, end, found = 0, None, []
    backward = update = 0
    for cat, begun, length in zip(cats, start, dur, strict=True):
        late = end is not None and begun - end > _GAP_NS
        if cat in _BEGINS and late and backward > 0 and update > 0:
            step, backward, update = step + 1, 0, 0
        found.append(step)
        backward += length if cat == "operator.BW" else 0
        update += length if cat == _UPDATE else 0
        end = begun + length if cat.startswith("operator") else end
    return found


def none(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """One step of everything."""
    return [0] * len(cats)


RULES = {
    "update": by_update,
    "seed": by_previous,
    "operator": by_operator,
    "gap": by_gap,
    "none": none,
}


def with_steps(trace: UniformTrace, rule: str = "update") -> UniformTrace:
    """The trace with a step for every event: given ones win, else `rule` makes them."""
    if rule not in RULES:
        raise ConfigError(f"step rule {rule!r}: wanted one of {', '.join(RULES)}")
    cats = [category(name) for name in trace.names]
    step = trace.step.copy()
    pid_of = {pid: i for i, pid in enumerate(trace.pids)}
    pids = np.array([pid_of[pid] for pid in trace.key_pid], np.int64)[trace.key]
    for pid in range(len(trace.pids)):
        rows = np.flatnonzero((pids == pid) & trace.counts)
        given = step[rows]
        if (given != NULL).any():
            step[rows] = _forward(given)
        else:
            kinds = [cats[key] for key in trace.key[rows]]
            step[rows] = RULES[rule](
                kinds, trace.start[rows].tolist(), trace.dur[rows].tolist()
            )
    return replace(trace, step=step)


def _forward(given: Ints) -> Ints:
    """An event without a step takes that of the last one that has one, 0 before any."""
    last = np.maximum.accumulate(np.where(given == NULL, -1, np.arange(len(given))))
    return np.where(last < 0, 0, given[np.maximum(last, 0)])
