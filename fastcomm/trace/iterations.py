"""Where one training iteration ends and the next begins: the first rule that finds marks.

In order: the user's ranges or regular expression, `ProfilerStep#N`, common names, the ends of
the optimizer's steps, the period of the collectives, the whole trace. A result says which.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import ConfigError

Ints = NDArray[np.int64]

PROFILER_STEP = r"^ProfilerStep#(\d+)$"
COMMON_NAMES = r"^(?i:iteration|iter|step)[ _:#-]*(\d+)$"
OPTIMIZER_STEPS = (r"Optimizer\.step#.*", r"DeepSpeedEngine\.step.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRule:
    """What the user said about iterations."""

    regex: str | None = None  # of annotations; its first group, if any, is the number
    ranges: tuple[tuple[int, int, int], ...] = ()  # number, start, stop
    clock: str = "host"  # or "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What iterations are found by. All times in ns, annotations sorted by start."""

    names: Sequence[str]  # of the annotations
    start: Ints
    stop: Ints
    span: tuple[int, int]  # from the first event to the end of the last
    comm_start: Ints  # sorted
    comm_key: Ints  # equal where operation, group and size are


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterations:
    """Disjoint iterations sorted by start, and how they were found."""

    number: Ints
    start: Ints
    stop: Ints
    found_by: str
    warnings: tuple[str, ...] = field(default=())


def find_iterations(marks: Marks, rule: IterationRule) -> Iterations:
    """The iterations on the host's clock; ConfigError where the user's regex finds none."""
    if rule.ranges:
        number, start, stop = np.array(sorted(rule.ranges, key=lambda r: r[1]), np.int64).T
        return _disjoint(Iterations(number=number, start=start, stop=stop, found_by="ranges"))
    if rule.regex is not None:
        found = _by_name(marks, rule.regex, f"regex {rule.regex}")
        if found is None:
            raise ConfigError(_no_match(marks, rule.regex))
        return _disjoint(found)
    rules: tuple[Callable[[], Iterations | None], ...] = (
        lambda: _by_name(marks, PROFILER_STEP, "ProfilerStep#N"),
        lambda: _by_name(marks, COMMON_NAMES, "names of annotations"),
        lambda: _by_optimizer(marks),
        lambda: _by_period(marks),
    )
    answers = (answer for rule_ in rules if (answer := rule_()) is not None)
    return _disjoint(next(answers, None) or _whole(marks))


def _no_match(marks: Marks, regex: str) -> str:
    seen = ", ".join(sorted(set(marks.names))[:8]) or "none"
    return f"iterations: no annotation matches {regex!r}; the trace has: {seen}"


def _by_name(marks: Marks, regex: str, found_by: str) -> Iterations | None:
    """Annotations whose name matches; those of one number are one iteration."""
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise ConfigError(f"iterations: {regex!r} is no regular expression: {error}") from error
    numbers = {name: _number(pattern, name) for name in set(marks.names)}
    rows = [row for row, name in enumerate(marks.names) if numbers[name] is not None]
    if not rows:
        return None
    by_number: dict[int, tuple[int, int]] = {}
    for order, row in enumerate(rows):
        number = numbers[marks.names[row]]
        number = order if number is None or number < 0 else number
        first, last = int(marks.start[row]), int(marks.stop[row])
        known = by_number.get(number, (first, last))
        by_number[number] = min(known[0], first), max(known[1], last)
    ordered = sorted((start, stop, number) for number, (start, stop) in by_number.items())
    start, stop, number_column = np.array(ordered, np.int64).T
    return Iterations(number=number_column, start=start, stop=stop, found_by=found_by)


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    """The number in a name; -1 where the pattern has none, None where it does not match."""
    match = pattern.search(name)
    if match is None:
        return None
    group = match[1] if pattern.groups else None
    return int(group) if group is not None and re.fullmatch(r"[0-9]{1,18}", group) else -1


def _by_optimizer(marks: Marks) -> Iterations | None:
    """From the first event, and from the end of each optimizer step, to the end of the next."""
    for pattern in OPTIMIZER_STEPS:
        rows = [row for row, name in enumerate(marks.names) if re.fullmatch(pattern, name)]
        if rows:
            # A step of several optimizers ends several times: the first one's name counts.
            name = marks.names[rows[0]]
            ends = np.sort([marks.stop[row] for row in rows if marks.names[row] == name])
            return _between([marks.span[0], *ends.tolist()], f"ends of {name}")
    return None


def _between(edges: Sequence[int], found_by: str, *warnings: str) -> Iterations:
    ends = np.array(edges, np.int64)
    number = np.arange(len(ends) - 1, dtype=np.int64)
    return Iterations(
        number=number, start=ends[:-1], stop=ends[1:], found_by=found_by, warnings=warnings
    )


def _by_period(marks: Marks) -> Iterations | None:
    """From each repetition of the sequence of collectives to the next."""
    period = _period(marks.comm_key.tolist())
    if period is None:
        return None
    edges = [*marks.comm_start[::period].tolist(), marks.span[1]]
    if len(marks.comm_key) % period:
        edges.pop(-2)
    warning = (
        f"no iteration marks: iterations are guessed from the collectives, which repeat every "
        f"{period} events; --iteration-regex names the marks"
    )
    return _between(edges, "period of the collectives", warning)


def _period(keys: Sequence[int]) -> int | None:
    """The length of the shortest part that the whole sequence repeats; None: it does not."""
    border = [0] * len(keys)
    k = 0
    for i in range(1, len(keys)):
        while k and keys[i] != keys[k]:
            k = border[k - 1]
        k += keys[i] == keys[k]
        border[i] = k
    period = len(keys) - border[-1] if keys else 0
    # One operation over and over is no evidence of a step.
    return period if 1 < period <= len(keys) // 2 else None


def _whole(marks: Marks) -> Iterations:
    warning = (
        "no iteration marks (ProfilerStep#N, iteration N, Optimizer.step): the whole trace "
        "counts as one iteration; --iteration-regex names the marks"
    )
    return _between(marks.span, "whole trace", warning)


def _disjoint(found: Iterations) -> Iterations:
    """The same with every iteration ended where the next begins, at the latest."""
    overlapping = int((found.stop[:-1] > found.start[1:]).sum())
    stop = found.stop.copy()
    stop[:-1] = np.minimum(stop[:-1], found.start[1:])
    if not overlapping:
        return found
    warning = f"{overlapping} iteration marks overlap: each ends where the next begins"
    return replace(found, stop=stop, warnings=(*found.warnings, warning))


def on_device_clock(
    found: Iterations, launch_start: Ints, work_start: Ints, work_stop: Ints
) -> Iterations:
    """The iterations by device work: from the first launched inside a mark to the next mark's.

    The three columns are of device work whose launch is known. The last iteration ends with its
    last work; one without work is left out, with a warning.
    """
    order = np.argsort(launch_start, kind="stable")
    launch, start, stop = launch_start[order], work_start[order], work_stop[order]
    low, high = np.searchsorted(launch, found.start), np.searchsorted(launch, found.stop)
    busy = np.flatnonzero(high > low)
    if not len(busy):
        raise ConfigError(
            "--iteration-clock device: no device work was launched inside the marks"
        )
    first = np.array([start[low[k] : high[k]].min() for k in busy], np.int64)
    last = stop[low[busy[-1]] : high[busy[-1]]].max()
    warnings = found.warnings
    if len(busy) < len(found.number):
        idle = [str(found.number[k]) for k in range(len(found.number)) if high[k] <= low[k]]
        warnings = (
            *warnings,
            f"iterations without device work are left out: {', '.join(idle)}",
        )
    order = np.argsort(first, kind="stable")
    return _disjoint(
        Iterations(
            number=found.number[busy][order],
            start=first[order],
            stop=np.append(first[order][1:], last),
            found_by=f"{found.found_by}, on the device's clock",
            warnings=warnings,
        )
    )
