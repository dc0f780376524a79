"""Where one training iteration ends and the next begins: the first rule that finds marks.

In order: the user's ranges or regular expression, `ProfilerStep#N`, common names, the ends of
the optimizer's steps, the period of the collectives, the whole trace. A result says which.

Marks are times of the host, and a device runs behind its host. `on_device_clock` moves the
windows to the work that was launched inside each mark.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fastcomm.errors import ConfigError
from fastcomm.options import StepClock
from fastcomm.trace.run import ranges as in_ranges
from fastcomm.units import counted, percent
from fastcomm_kernels.arrays import NULL, Ints

PERIOD, WHOLE, RANGES = "period of the collectives", "whole trace", "ranges"
# the launch of device work that has none recorded

PROFILER_STEP = r"^ProfilerStep#(\d+)$"
COMMON_NAMES = r"^(?i:iteration|iter|step)[ _:#-]*(\d+)$"
OPTIMIZER_STEPS = (r"Optimizer\.step#.*", r"DeepSpeedEngine\.step.*")
_LEAST_SHARE = 0.01  # of the device time of a step, to be worth a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRule:
    """What the user said about iterations.

    `clock` chooses the windows that metrics use: "host" for the marks, "device" for the work
    launched inside the marks, "auto" for the device where launches are recorded.
    """

    regex: str | None = None  # of annotations; its first group, if any, is the number
    ranges: tuple[tuple[int, int, int], ...] = ()  # number, start, stop
    clock: StepClock = "auto"


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
        return _disjoint(Iterations(number=number, start=start, stop=stop, found_by=RANGES))
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
    return _between(edges, PERIOD, warning)


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
    return _between(marks.span, WHOLE, warning)


def _disjoint(found: Iterations) -> Iterations:
    """The same with every iteration ended where the next begins, at the latest."""
    overlapping = int((found.stop[:-1] > found.start[1:]).sum())
    stop = found.stop.copy()
    stop[:-1] = np.minimum(stop[:-1], found.start[1:])
    if not overlapping:
        return found
    warning = f"{counted(overlapping, 'iteration mark')} cut where the next begins"
    return replace(found, stop=stop, warnings=(*found.warnings, warning))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """Kernels, copies and communication of a device, in ns.

    `launch` is when the call that launched the work began, or NULL.
    """

    start: Ints
    stop: Ints
    launch: Ints

    def launched(self) -> "DeviceWork":
        """Return the work whose launch is recorded, sorted by launch."""
        rows = np.flatnonzero(self.launch != NULL)
        rows = rows[np.argsort(self.launch[rows], kind="stable")]
        return DeviceWork(
            start=self.start[rows],
            stop=self.stop[rows],
            launch=self.launch[rows],
        )


def without_cut_end(
    found: Iterations, work: DeviceWork, unanswered: Ints, *, is_ordered: bool
) -> Iterations:
    """Drop the iterations of a truncated trace that the file does not show to be whole.

    `unanswered` are the moments of launches whose device work is not in the file. Only in a
    file whose events are in order of time (`is_ordered`) nothing before the last event is
    behind the cut: there, the first iterations stay that have device work and all work of
    their launches, and are followed by an iteration with device work. Those that are dropped
    are named in a warning.
    """
    # What is guessed from the collectives, or lasts to the end, depends on what is cut off.
    is_marked = found.found_by not in (WHOLE, PERIOD)
    kept = _whole_count(found, work, unanswered) if is_marked and is_ordered else 0
    count = len(found.number)
    if kept == count:
        return found
    dropped = found.number[kept:]
    words = f"iterations {in_ranges(np.sort(dropped).tolist())} are"
    words = words if len(dropped) > 1 else f"iteration {dropped[0]} is"
    why = "the trace is truncated before the end of the device work"
    if not len(work.start):
        why = "the trace is truncated before any device work"
    elif not is_marked:
        why = "the trace is truncated and has no marks that show which steps are whole"
    elif not is_ordered:
        why = (
            "the trace is truncated and its events are not in order of time, so that device "
            "work of any step may be missing"
        )
    warning = f"{words} left out ({len(dropped)} of {count}): {why}"
    others = found.warnings if is_marked else ()  # what they say of a guess is void
    return replace(_first(found, kept), warnings=(*others, warning))


def _whole_count(found: Iterations, work: DeviceWork, unanswered: Ints) -> int:
    """Return how many of the first iterations are whole in a file in order of time."""
    moment = np.sort(np.where(work.launch == NULL, work.start, work.launch))
    low, high = _between_edges(moment, found)
    is_busy = high > low
    is_whole = is_busy & np.append(is_busy[1:], False)
    if len(unanswered):
        is_whole &= found.stop <= unanswered.min()
    return int(np.cumprod(is_whole).sum())


def _first(found: Iterations, kept: int) -> Iterations:
    """Return the first iterations."""
    return replace(
        found, number=found.number[:kept], start=found.start[:kept], stop=found.stop[:kept]
    )


def _between_edges(moment: Ints, found: Iterations) -> tuple[Ints, Ints]:
    """Return the first and the last row, exclusive, of the sorted moments in each iteration."""
    return np.searchsorted(moment, found.start), np.searchsorted(moment, found.stop)


def why_not_on_device_clock(found: Iterations, work: DeviceWork) -> str | None:
    """Return why the windows should stay by the host's marks, or None where they need not."""
    is_launched = work.launch != NULL
    if not is_launched.any():
        return "no launch of device work is recorded"
    # Work that runs before all that is launched in the recording was launched before it.
    is_candidate = work.start >= work.start[is_launched].min()
    known, candidates = int(is_launched.sum()), int(is_candidate.sum())
    if 2 * known < candidates:
        return f"only {known} of {candidates} device events have a recorded launch"
    return None


def on_device_clock(found: Iterations, work: DeviceWork, kept: int | None = None) -> Iterations:
    """Return the windows of iterations on the device's clock: of the first `kept`, else of all.

    A window lasts from the first device work launched inside a mark to the first of the next
    mark. The last window, and one before a mark without device work, ends with its own mark or
    with the last work launched inside it, whichever is later. Windows that were cut at
    collectives stay as they are, and a whole trace lasts from its first to its last device
    work. A mark without device work is left out, with a warning. Raises ConfigError if no mark
    has device work.
    """
    kept = len(found.number) if kept is None else kept
    if found.found_by == PERIOD or not kept:
        return replace(_first(found, kept), warnings=())
    if found.found_by == WHOLE and len(work.start):
        edges = np.array([work.start.min(), work.stop.max()], np.int64)
        return replace(found, start=edges[:1], stop=edges[1:], warnings=())
    known = work.launched()
    low, high = _between_edges(known.launch, found)
    busy = np.flatnonzero(high > low)
    if not (busy < kept).any():
        raise ConfigError("no recorded launch of device work lies inside a mark of a step")
    first = np.array([known.start[low[k] : high[k]].min() for k in busy], np.int64)
    last = np.array([known.stop[low[k] : high[k]].max() for k in busy], np.int64)
    last = np.maximum(last, found.stop[busy])
    order = np.argsort(first, kind="stable")
    busy, first, last = busy[order], first[order], last[order]
    is_next = np.diff(busy) == 1
    ends = np.where(is_next, first[1:], np.minimum(last[:-1], first[1:]))
    stops, rows = np.append(ends, last[-1]), busy < kept
    return Iterations(
        number=found.number[busy[rows]],
        start=first[rows],
        stop=stops[rows],
        found_by=found.found_by,
        warnings=(
            *_without_work(found.number[:kept][(high <= low)[:kept]]),
            *_launched_before(work, int(found.number[busy[0]]), first[0], stops[0]),
        ),
    )


def _launched_before(work: DeviceWork, number: int, start: int, stop: int) -> list[str]:
    """Return a warning where work without a launch is much of the first window.

    The queue of the device at the beginning of a recording was launched before it, and runs
    beside the first work of the first step.
    """
    inside = (work.start >= start) & (work.start < stop)
    took = work.stop - work.start
    lacking = inside & (work.launch == NULL)
    share = took[lacking].sum() / max(1, took[inside].sum())
    if share <= _LEAST_SHARE:
        return []
    events = counted(int(lacking.sum()), "device event")
    return [
        f"iteration {number}: {percent(share)} of its device time is work without a recorded "
        f"launch ({events}), which counts by its time; if it was launched before the "
        "recording, leave the iteration out with --steps"
    ]


def _without_work(numbers: Ints) -> tuple[str, ...]:
    if not len(numbers):
        return ()
    words = in_ranges(np.sort(numbers).tolist())
    return (f"iterations without device work are left out: {words}",)
