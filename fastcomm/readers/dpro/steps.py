"""Steps of a uniform trace: which step an event belongs to, and how long each step takes.

A step of a rank goes from its first operator's start to the end of its operators. `compat`
takes, as dPRO does, the end of the one that starts last, and counts a step's first op with the
step before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import ConfigError, FastcommError
from fastcomm.readers.dpro.names import category, category_by_substring, coarse
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
