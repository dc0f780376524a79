"""How long a step takes, by rank and over all, and what its ranks compute in it.

A step of a rank goes from its first operator's start to the end of its operators. `compat`
takes, as dPRO does, the end of the one that starts last, and counts a step's first op with the
step before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import FastcommError
from fastcomm.readers.dpro.names import category, category_by_substring, coarse
from fastcomm.readers.dpro.uniform import UniformTrace
from fastcomm_kernels.arrays import NULL, Ints

_PARTS = {"fw": "operator.FW", "bw": "operator.BW", "update": "operator.UPDATE"}
_RANKS = ("host", "traces_", "default")
_SPREAD = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """Nanoseconds of each step of a rank: the whole, and sums of its operators by part."""

    time: tuple[int, ...]
    parts: Mapping[str, tuple[int, ...]]

    def mean_ns(self, part: str) -> float:
        """Mean over steps of what a part sums to."""
        return sum(self.parts[part]) / len(self.parts[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The step time of a run: mean over ranks of each step, of which mean or median."""

    ranks: Mapping[str, RankSteps]
    steps: tuple[float, ...]
    time_ns: float
    opt_step: int


def step_time(trace: UniformTrace, *, compat: bool = False) -> StepTime:
    """Measure the steps that every rank has."""
    rule = category_by_substring if compat else category
    cats = np.array([rule(name) for name in trace.names])
    operator = np.array([coarse(cat) == "operator" for cat in cats], bool)
    numbers = {each: i for i, each in enumerate(trace.pids)}
    pid = np.array([numbers[each] for each in trace.key_pid], np.int64)
    ranks = {}
    for number, name in enumerate(trace.pids):
        if not name.startswith(_RANKS):
            continue
        kept = (pid[trace.key] == number) & trace.counts & operator[trace.key]
        rows = np.flatnonzero(kept & (trace.step != NULL))
        if len(rows):
            ranks[name] = _rank(trace, rows, cats[trace.key[rows]], compat=compat)
    return _over_all(ranks)


def _rank(
    trace: UniformTrace, rows: Ints, cats: NDArray[np.str_], *, compat: bool
) -> RankSteps:
    """The steps of one rank; `rows` are its operators in time order."""
    step, stop = trace.step[rows], trace.start[rows] + trace.dur[rows]
    order = np.argsort(step, kind="stable")
    rows, step, stop, cats = rows[order], step[order], stop[order], cats[order]
    bounds = np.flatnonzero(np.diff(step, prepend=NULL, append=NULL))
    firsts = bounds[:-1]
    ends = stop[bounds[1:] - 1] if compat else np.maximum.reduceat(stop, firsts)
    begins = trace.start[rows[firsts]]
    barrier = np.array(["input_barrier" in name for name in trace.names], bool)
    if barrier.any():
        for k, (low, high) in enumerate(pairwise(bounds.tolist())):
            begins[k] = _begin(trace, rows[low:high], cats[low:high], barrier)
    time = (ends - begins).tolist()
    number = np.repeat(np.arange(len(time)), np.diff(bounds))
    if compat:
        # An operator that opens a step after the first is counted with the one before it.
        number[bounds[1:-1]] -= 1
        time = time[: len(time) - int(_unfinished(cats, bounds))]
    dur = trace.dur[rows]
    parts = {}
    for part, cat in _PARTS.items():
        own = cats == cat
        sums = np.zeros(len(firsts), np.int64)
        np.add.at(sums, number[own], dur[own])
        parts[part] = tuple(sums.tolist())
    return RankSteps(time=tuple(time), parts=parts)


def _begin(
    trace: UniformTrace, rows: Ints, cats: NDArray[np.str_], barrier: NDArray[np.bool_]
) -> int:
    """Where a step begins: at its first op, or the first forward op after a barrier."""
    barriers = np.flatnonzero(barrier[trace.key[rows]])
    after = int(barriers[-1]) + 1 if len(barriers) else 0
    forward = np.flatnonzero(cats[after:] == "operator.FW")
    first = after + int(forward[0]) if after and len(forward) else 0
    return int(trace.start[rows[first]])


def _unfinished(cats: NDArray[np.str_], bounds: Ints) -> bool:
    """Whether the last step is cut: a later one with no backward but its first op."""
    inner = np.ones(len(cats), bool)
    inner[bounds[:-1]] = False
    forward, backward = inner & (cats == "operator.FW"), inner & (cats == "operator.BW")
    last = backward[bounds[-2] :].any()
    return len(bounds) > 2 and not (forward.any() and backward.any() and last)  # noqa: PLR2004


def _over_all(ranks: Mapping[str, RankSteps]) -> StepTime:
    """Means over ranks; where steps differ by more than a tenth the median step counts."""
    if not ranks:
        raise FastcommError(
            "no operator of any rank in the trace: wanted FW, BW or UPDATE events"
        )
    fewest = min(len(each.time) for each in ranks.values())
    steps = np.array([each.time[:fewest] for each in ranks.values()], np.float64).mean(axis=0)
    time = float(steps.mean())
    if steps.std() / time > _SPREAD:
        time = float(np.median(steps))
    return StepTime(
        ranks=ranks,
        steps=tuple(steps.tolist()),
        time_ns=time,
        opt_step=int(np.argmin(np.abs(steps - time))),
    )
