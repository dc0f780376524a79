"""Iterations of training: where each begins and ends, by the first rule that finds marks.

Rules, in order: the user's ranges or regular expression, `ProfilerStep#N`, common names, ends
of optimizer steps, the period of the collectives, the whole trace. A result names its rule.

Marks are times of the host, and a device runs behind its host. `on_device_clock` moves
iterations to the work that was launched inside each mark.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fastcomm import checks, regexes
from fastcomm.errors import ConfigError
from fastcomm.options import StepBoundary
from fastcomm.trace.run_traces import ranges as in_ranges
from fastcomm.units import counted, format_ns, percent
from fastcomm_kernels.arrays import NULL, Flags, Ints

PERIOD, WHOLE, RANGES = "period of the collectives", "whole trace", "ranges"
NO_MARKS = (
    "no iteration marks (ProfilerStep#N, iteration N, Optimizer.step): the whole trace counts "
    "as one iteration; --iteration-regex names the marks"
)
BY_PROFILER, BY_NAMES, BY_REGEX = "ProfilerStep#N", "names of annotations", "regex "
PROFILER_STEP = r"^ProfilerStep#(\d+)$"
COMMON_NAMES = r"^(?i:iteration|iter|step)[ _:#-]*(\d+)$"
OPTIMIZER_STEPS = (r"Optimizer\.step#.*", r"DeepSpeedEngine\.step.*")
_NEVER = np.iinfo(np.int64).max
_LEAST_SHARE = 0.01  # of the device time of a step, to be worth a warning
_DIGITS, _SEPARATORS = "0123456789", " _:#-"
EMPTY = 0.01  # of the median step: shorter marks are no steps
_NO_PAUSE = 0.01  # of a step: marks that are not further apart follow each other
_WAITED = 0.05  # of a step: work that begins this much later than its launch waits for a device
_UNUSUAL = 10  # times the median time between marks


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRule:
    """The user's options about iterations.

    `clock` selects the windows of metrics: "host" for the marks, "device" for the work launched
    inside the marks, "auto" for the device if launches are recorded.
    """

    regex: str | None = None  # of annotations; its first group, if any, is the number
    ranges: tuple[tuple[int, int, int], ...] = ()  # number, start, stop
    clock: StepBoundary = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Events by which iterations are found. Times in ns, annotations sorted by start."""

    names: Sequence[str]  # of the annotations
    start: Ints
    stop: Ints
    span: tuple[int, int]  # from the first event to the end of the last
    comm_start: Ints  # sorted
    comm_key: Ints  # equal for equal operation, group and size


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterations:
    """Disjoint iterations sorted by start, and the rule that found them."""

    number: Ints
    start: Ints
    stop: Ints
    found_by: str
    warnings: tuple[str, ...] = field(default=())


def mark_patterns(regex: str | None) -> list[str]:
    """Return the regular expressions of names that mark iterations, first the one to prefer.

    Raises `ConfigError` if the user's `regex` is invalid.
    """
    if regex is not None:
        checks.regex("iterations", regex)
        return [regex]
    return [PROFILER_STEP, COMMON_NAMES, *(rf"^(?:{name})$" for name in OPTIMIZER_STEPS)]


def are_numbered(found_by: str) -> bool:
    """Return whether a rule finds the job's numbers of steps, the same on all ranks.

    Other rules count the steps of each recording.
    """
    regex = found_by.removeprefix(BY_REGEX)
    has_group = regex != found_by and checks.regex("iterations", regex).groups > 0
    return has_group or found_by.startswith((BY_PROFILER, BY_NAMES, "column "))


def find_iterations(marks: Marks, rule: IterationRule) -> Iterations:
    """Find the iterations of a trace on the host's clock.

    Raises
    ------
    ConfigError
        If the user's regular expression is invalid or matches no annotation.

    """
    if rule.ranges:
        number, start, stop = np.array(sorted(rule.ranges, key=lambda r: r[1]), np.int64).T
        return _disjoint(Iterations(number=number, start=start, stop=stop, found_by=RANGES))
    if rule.regex is not None:
        by_regex = _by_regex(marks, rule.regex)
        if by_regex is None:
            raise ConfigError(_no_match(marks, rule.regex))
        return _disjoint(by_regex)
    rules: tuple[Callable[[], Iterations | None], ...] = (
        lambda: _without_empty_end(_by_name(marks, PROFILER_STEP, BY_PROFILER)),
        lambda: _by_name(marks, COMMON_NAMES, BY_NAMES),
        lambda: _by_optimizer(marks),
        lambda: _by_period(marks),
    )
    results = (result for rule_ in rules if (result := rule_()) is not None)
    return _disjoint(next(results, None) or _whole(marks))


def _without_empty_end(steps: Iterations | None) -> Iterations | None:
    """Leave out a last step that is no more than an opened and closed mark.

    PyTorch's profiler opens the mark of a step when the one before ends. If the loop is over
    then, the end of the profiler closes it.
    """
    if steps is None or len(steps.number) < 2:  # noqa: PLR2004 - a step to compare with
        return steps
    length = steps.stop - steps.start
    last = int(np.argmax(steps.start))
    if length[last] >= EMPTY * np.median(np.delete(length, last)):
        return steps
    others = np.delete(np.arange(len(length)), last)
    warning = (
        f"iteration {steps.number[last]} is left out: it takes {format_ns(length[last])}; the "
        "profiler ended as it began"
    )
    return replace(
        steps,
        number=steps.number[others],
        start=steps.start[others],
        stop=steps.stop[others],
        warnings=(*steps.warnings, warning),
    )


def _no_match(marks: Marks, regex: str) -> str:
    names = ", ".join(sorted(set(marks.names))[:8]) or "none"
    return f"iterations: no annotation matches {regex!r}; the trace has: {names}"


def _by_regex(marks: Marks, regex: str) -> Iterations | None:
    """Return annotations in whose names a user's `regex` is found; None if none are.

    The first group is the number, without one the position among them; annotations of one
    number are one iteration. Raises `ConfigError` if `regex` is invalid.
    """
    checks.regex("iterations", regex)
    groups, rows = _named(marks, regex)
    if not rows:
        return None
    spans: dict[int, tuple[int, int]] = {}
    for order, row in enumerate(rows):
        number = _number(groups[marks.names[row]])
        number = order if number is None else number
        first, last = int(marks.start[row]), int(marks.stop[row])
        span = spans.get(number, (first, last))
        spans[number] = min(span[0], first), max(span[1], last)
    return _of_spans(spans, f"{BY_REGEX}{regex}")


def _by_name(marks: Marks, regex: str, found_by: str) -> Iterations | None:
    """Return annotations with a common name and a number; None if there are none.

    Annotations of one number are one iteration, as of several threads, unless a whole mark of
    another number lies between them: then the numbers have restarted, as they do in each epoch,
    and are counted on, as are marks that all have one number. After a pause one number is left
    out. Marks inside of others are parts of steps.
    """
    groups, rows = _named(marks, regex)
    if not rows:
        return None
    rows, warnings = _of_one_kind(marks, rows)
    own_numbers = {row: _number(groups[marks.names[row]]) or 0 for row in rows}
    rows, parts = _outermost(marks, rows, own_numbers)
    is_single = len({own_numbers[row] for row in rows}) == 1
    spans: dict[int, tuple[int, int]] = {}
    latest: dict[int, int] = {}  # by number of the mark: number of its iteration
    base, top, between = 0, 0, _Between()
    for row in rows:
        first, last = int(marks.start[row]), int(marks.stop[row])
        own = own_numbers[row]
        number = latest.get(own, base + own)
        start, stop = spans.get(number, (first, last))
        is_again = own not in latest and number in spans  # that number is another mark's
        is_again |= is_single and own in latest and first >= stop
        if is_again or between.has_mark(stop, first):
            base = top + 1 - own + (first - spans[top][1] > _NO_PAUSE * (last - first))
            number, start, stop = base + own, first, last
        spans[number] = min(start, first), max(stop, last)
        latest[own], top = number, max(top, number)
        between.add(first, last)
    if base:
        warnings.append(
            f"numbers of marks {'stay' if is_single else 'restart'}, and are counted on up to "
            f"{top}: other ranks may count otherwise"
        )
    return _of_spans(spans, found_by, *warnings, *parts)


def _named(marks: Marks, regex: str) -> tuple[dict[str, str | None], list[int]]:
    """Return the first group by name of annotations with `regex` in it, and their rows."""
    groups = regexes.first_groups(regex, sorted(set(marks.names)))
    return groups, [row for row, name in enumerate(marks.names) if name in groups]


def _of_spans(
    spans: Mapping[int, tuple[int, int]], found_by: str, *warnings: str
) -> Iterations:
    """Return iterations by number, sorted by start."""
    ordered = sorted((start, stop, number) for number, (start, stop) in spans.items())
    start, stop, number = np.array(ordered, np.int64).T
    return Iterations(
        number=number, start=start, stop=stop, found_by=found_by, warnings=warnings
    )


def _of_one_kind(marks: Marks, rows: list[int]) -> tuple[list[int], list[str]]:
    """Return the marks of the name that covers most time, and a warning if there are others.

    Iterations may have steps inside of them, which are parts; of equal ones, the longer count.
    """
    kinds: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        kinds[marks.names[row].rstrip(_DIGITS).rstrip(_SEPARATORS).casefold()].append(row)
    if len(kinds) == 1:
        return rows, []

    def covered(own: list[int]) -> int:
        stop = np.maximum.accumulate(marks.stop[own])
        start = np.maximum(marks.start[own], np.append(marks.start[own[0]], stop[:-1]))
        return int(np.maximum(stop - start, 0).sum())

    chosen = max(kinds, key=lambda kind: (covered(kinds[kind]), -len(kinds[kind]), kind))
    others = sorted(kinds.keys() - {chosen})
    listed = ", ".join(f"{kind!r} ({len(kinds[kind])})" for kind in others)
    return kinds[chosen], [
        f"marks {chosen!r} ({len(kinds[chosen])}) are the steps, as they cover most time; "
        f"those named {listed} are not: --iteration-regex selects"
    ]


def _outermost(
    marks: Marks, rows: list[int], numbers: Mapping[int, int]
) -> tuple[list[int], list[str]]:
    """Return the marks that lie in no other one, and a warning if others have other numbers."""
    outer: list[int] = []
    parts = 0
    for row in sorted(rows, key=lambda row: (marks.start[row], -marks.stop[row])):
        if outer and marks.stop[row] <= marks.stop[outer[-1]]:
            parts += numbers[row] != numbers[outer[-1]]
        else:
            outer.append(row)
    if not parts:
        return outer, []
    return outer, [
        f"{counted(parts, 'mark')} inside of others of the same kind are parts of steps, and "
        "are left out: --iteration-regex selects"
    ]


class _Between:
    """Answers whether a mark lies wholly between two times; marks are added by start."""

    def __init__(self) -> None:
        self._start: list[int] = []
        self._stop: list[int] = []  # rising: no later mark stops earlier

    def add(self, start: int, stop: int) -> None:
        """Add a mark, which starts no earlier than those before."""
        while self._stop and self._stop[-1] >= stop:
            self._start.pop()
            self._stop.pop()
        self._start.append(start)
        self._stop.append(stop)

    def has_mark(self, begin: int, end: int) -> bool:
        """Return whether a mark starts at `begin` or later, and stops at `end` or earlier."""
        place = bisect_left(self._start, begin)
        return place < len(self._start) and self._stop[place] <= end


def _number(group: str | None) -> int | None:
    """Return the number that the first group of a match has; None if it is no number.

    Of longer ones, as of times, the last digits count that fit.
    """
    return int(group[-18:]) if group is not None and re.fullmatch(r"[0-9]+", group) else None


def _by_optimizer(marks: Marks) -> Iterations | None:
    """Return iterations that end where optimizer steps end."""
    for pattern in OPTIMIZER_STEPS:
        rows = [row for row, name in enumerate(marks.names) if re.fullmatch(pattern, name)]
        if rows:
            # With several optimizers only the first name counts: a step ends once.
            name = marks.names[rows[0]]
            ends = np.sort([marks.stop[row] for row in rows if marks.names[row] == name])
            return _between([marks.span[0], *ends.tolist()], f"ends of {name}")
    return None


def _between(edges: Sequence[int], found_by: str, *warnings: str) -> Iterations:
    """Return iterations between successive edges (ns), numbered from 0."""
    ends = np.array(edges, np.int64)
    number = np.arange(len(ends) - 1, dtype=np.int64)
    return Iterations(
        number=number, start=ends[:-1], stop=ends[1:], found_by=found_by, warnings=warnings
    )


def _by_period(marks: Marks) -> Iterations | None:
    """Return iterations from each repetition of the sequence of collectives to the next."""
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
    """Return the length of the shortest repeated part of a sequence; None if none repeats."""
    border = [0] * len(keys)
    k = 0
    for i in range(1, len(keys)):
        while k and keys[i] != keys[k]:
            k = border[k - 1]
        k += keys[i] == keys[k]
        border[i] = k
    period = len(keys) - border[-1] if keys else 0
    # A single repeated operation is no evidence of a step.
    return period if 1 < period <= len(keys) // 2 else None


def _whole(marks: Marks) -> Iterations:
    """Return the whole trace as one iteration, with a warning."""
    return _between(marks.span, WHOLE, NO_MARKS)


def _disjoint(iterations: Iterations) -> Iterations:
    """Return the iterations, each cut where the next one begins."""
    overlapping = int((iterations.stop[:-1] > iterations.start[1:]).sum())
    stop = iterations.stop.copy()
    stop[:-1] = np.minimum(stop[:-1], iterations.start[1:])
    if not overlapping:
        return iterations
    warning = f"{counted(overlapping, 'iteration mark')} cut where the next begins"
    return replace(iterations, stop=stop, warnings=(*iterations.warnings, warning))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """Kernels, copies and communication of a device; times in ns.

    `launch` is the start of the call that launched the work, or NULL.
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
    iterations: Iterations, work: DeviceWork, unanswered: Ints, *, is_ordered: bool
) -> Iterations:
    """Drop the iterations of a truncated trace that may be incomplete.

    If events are in order of time, everything before the last event is in the file. Then the
    leading iterations are kept that have device work, have all work of their launches, and are
    followed by an iteration with device work. Otherwise all are dropped.

    Parameters
    ----------
    iterations
        By the host's marks.
    work
        Device work in the file.
    unanswered
        Times of launches without device work in the file.
    is_ordered
        Whether events in the file are in order of time.

    Returns
    -------
    Iterations
        With a warning that names the dropped iterations.

    """
    # Iterations guessed from collectives, or up to the end, depend on what is cut off.
    is_marked = iterations.found_by not in (WHOLE, PERIOD)
    complete = _whole_count(iterations, work, unanswered) if is_marked and is_ordered else 0
    count = len(iterations.number)
    if complete == count:
        return iterations
    dropped = iterations.number[complete:]
    subject = f"iterations {in_ranges(np.sort(dropped).tolist())} are"
    subject = subject if len(dropped) > 1 else f"iteration {dropped[0]} is"
    reason = "the trace is truncated before the end of the device work"
    if not len(work.start):
        reason = "the trace is truncated before any device work"
    elif not is_marked:
        reason = "the trace is truncated and has no marks that show which steps are whole"
    elif not is_ordered:
        reason = (
            "the trace is truncated and its events are not in order of time, so that device "
            "work of any step may be missing"
        )
    warning = f"{subject} left out ({len(dropped)} of {count}): {reason}"
    others = iterations.warnings if is_marked else ()  # warnings about a guess do not apply
    return replace(_first(iterations, complete), warnings=(*others, warning))


def _whole_count(iterations: Iterations, work: DeviceWork, unanswered: Ints) -> int:
    """Return the number of leading iterations that are complete in a file in order of time."""
    moment = np.sort(np.where(work.launch == NULL, work.start, work.launch))
    low, high = _between_edges(moment, iterations)
    is_busy = high > low
    is_whole = is_busy & np.append(is_busy[1:], False)
    if len(unanswered):
        is_whole &= iterations.stop <= unanswered.min()
    return int(np.cumprod(is_whole).sum())


def without_incomplete(iterations: Iterations, incomplete: Flags, *warnings: str) -> Iterations:
    """Return the iterations that are not incomplete, with more warnings.

    `incomplete` has a flag for each of them, and maybe more.
    """
    rows = np.flatnonzero(~incomplete[: len(iterations.number)])
    return replace(
        iterations,
        number=iterations.number[rows],
        start=iterations.start[rows],
        stop=iterations.stop[rows],
        warnings=(*iterations.warnings, *warnings),
    )


def _first(iterations: Iterations, count: int) -> Iterations:
    """Return the first iterations."""
    return replace(
        iterations,
        number=iterations.number[:count],
        start=iterations.start[:count],
        stop=iterations.stop[:count],
    )


def _between_edges(moment: Ints, iterations: Iterations) -> tuple[Ints, Ints]:
    """Return the range of sorted moments in each iteration: first index, and end."""
    return np.searchsorted(moment, iterations.start), np.searchsorted(moment, iterations.stop)


def why_not_on_device_clock(
    iterations: Iterations, work: DeviceWork, launches: int = 0
) -> str | None:
    """Return why iterations have to stay on the host's clock; None if they do not.

    `launches` are recorded calls that launch work, joined with it or not.
    """
    is_launched = work.launch != NULL
    if not is_launched.any():
        if launches:
            return (
                f"{launches} launches are recorded, but no correlation joins one with its "
                "device work"
            )
        return "no launch of device work is recorded"
    # Work before all launched work was launched before the recording.
    is_candidate = work.start >= work.start[is_launched].min()
    launched, candidates = int(is_launched.sum()), int(is_candidate.sum())
    if 2 * launched < candidates:
        return f"only {launched} of {candidates} device events have a recorded launch"
    return None


class Launching(NamedTuple):
    """What calls of the host tell of iterations: a flag for each."""

    is_incomplete: Flags  # device work that was launched is not recorded: it is left out
    is_waiting: Flags  # the host is recorded, and launches nothing


def on_device_clock(
    iterations: Iterations,
    work: DeviceWork,
    count: int | None = None,
    launching: Launching | None = None,
) -> Iterations:
    """Return iterations on the device's clock.

    An iteration begins where its mark does, or later: where the device ends the work of the one
    before, or begins its own, whichever is first. It lasts to the next one, and the last one to
    the end of its mark or of the work of all iterations, whichever is later; so does one before
    a pause, with the work of those before it. The first with work begins no later than work of
    another. Work launched between a mark and the next that follows it is of the first. An
    iteration without device work is idle, but left out before the first and behind the last
    with work unless its host is known to wait. Iterations by the period of collectives stay as
    they are; a whole trace lasts from its first to its last device work.

    Parameters
    ----------
    iterations
        On the host's clock.
    work
        Device work.
    count
        Number of leading iterations to return; None: all.
    launching
        What calls tell of each iteration; None: nothing. If the first work behind an incomplete
        one waited for the device, the next one begins there.

    Raises
    ------
    ConfigError
        If no mark has device work.

    """
    count = len(iterations.number) if count is None else count
    if launching is None:
        launching = Launching(*np.zeros((2, len(iterations.number)), np.bool_))
    incomplete = launching.is_incomplete
    unmarked = _unmarked(iterations, work, count)
    if unmarked is not None:
        return without_incomplete(replace(unmarked, warnings=()), incomplete)
    launched = work.launched()
    low, high = _between_edges(launched.launch, up_to_next(iterations))
    busy = np.flatnonzero(high > low)
    if not (busy < count).any():
        raise ConfigError("no recorded launch of device work lies inside a mark of a step")
    end = int(launched.stop[: high[busy[-1]]].max())
    places = _with_waiting(busy, iterations, end, launching.is_waiting)
    first, last = _spans(launched, low[places], high[places])
    before = _end_of_earlier(work, int(iterations.start[places[0]]), first)
    ended = np.append(before, last[busy - places[0]])[np.searchsorted(busy, places, "right")]
    behind = _behind_unrecorded(iterations, launched, (low, high), incomplete)[places]
    begin = np.where(behind, first, np.minimum(first, np.append(before, ended[:-1])))
    leading = slice(int(busy[0] - places[0]) + 1)  # the first with work, and those before
    begin[leading] = np.minimum(begin[leading], first.min())
    start = np.maximum.accumulate(np.maximum(begin, iterations.start[places]))
    stop = np.maximum(np.maximum.accumulate(last), iterations.stop[places])
    is_followed = _is_followed(iterations)[places[:-1]]
    stop[:-1] = np.where(is_followed, start[1:], np.minimum(stop[:-1], start[1:]))
    # A step during which the device works for others only is a step without time of its own.
    rows = np.flatnonzero(~incomplete[places] & (places < count))
    used = places[rows]
    others = np.setdiff1d(np.flatnonzero(~incomplete[:count]), places)
    gaps = start[1:] - stop[:-1]
    pauses = np.flatnonzero((gaps > 0) & (places[1:] < count))
    return Iterations(
        number=iterations.number[used],
        start=start[rows],
        stop=stop[rows],
        found_by=iterations.found_by,
        warnings=(
            *_without("device work", iterations.number[others]),
            *_empty(iterations.number[used[start[rows] == stop[rows]]], len(rows)),
            *_pauses(iterations.number[places], pauses, gaps[pauses]),
            *_long_gaps(iterations, places[places < count]),
            *_launched_before(work, int(iterations.number[places[0]]), start[0], stop[0]),
        ),
    )


def _with_waiting(busy: Ints, iterations: Iterations, end: int, waiting: Flags) -> Ints:
    """Return iterations from the first to the last busy one, and waiting ones around them.

    Behind the last, one counts if it waits for more than the device, which works until `end`:
    a host that runs ahead waits for the device when all steps are over.
    """
    first, last = int(busy[0]), int(busy[-1])
    own = iterations.stop - np.maximum(iterations.start, end)
    is_step = waiting & (own > EMPTY * (iterations.stop - iterations.start))
    while first and waiting[first - 1]:
        first -= 1
    while is_step[last + 1 : last + 2].any():
        last += 1
    return np.arange(first, last + 1)


def _unmarked(iterations: Iterations, work: DeviceWork, count: int) -> Iterations | None:
    """Return the first `count` iterations if no mark of the host bounds them; else None."""
    if iterations.found_by == PERIOD or not count:
        return _first(iterations, count)
    if iterations.found_by == WHOLE and len(work.start):
        edges = np.array([work.start.min(), work.stop.max()], np.int64)
        return replace(iterations, start=edges[:1], stop=edges[1:])
    return None


def _behind_unrecorded(
    iterations: Iterations, launched: DeviceWork, edges: tuple[Ints, Ints], incomplete: Flags
) -> Flags:
    """Return which iterations begin with their first work, behind work that is not recorded.

    Their first work begins much later than it was launched. `edges` are the first row of
    `launched` of each iteration, and the end of its rows.
    """
    low, high = edges
    is_behind = np.zeros(len(low), np.bool_)
    for k in (np.flatnonzero(incomplete[:-1]) + 1).tolist():
        own = slice(low[k], high[k])
        if not incomplete[k] and high[k] > low[k]:
            first = low[k] + int(np.argmin(launched.start[own]))
            length = iterations.stop[k] - iterations.start[k]
            waited = launched.start[first] - launched.launch[first]
            is_behind[k] = waited > _WAITED * length
    return is_behind


def up_to_next(iterations: Iterations) -> Iterations:
    """Return marks that reach to those that follow them: what lies between is of the first."""
    stop = iterations.stop.copy()
    stop[:-1] = np.where(_is_followed(iterations), iterations.start[1:], stop[:-1])
    return replace(iterations, stop=stop)


def _spans(work: DeviceWork, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Return the first start and the last end of each range of work; `_NEVER` and NULL of none.

    Ranges are from `low` to `high`, rows of `work`.
    """
    first, last = (np.full(len(low), end) for end in (_NEVER, NULL))
    for k in np.flatnonzero(high > low).tolist():
        own = slice(low[k], high[k])
        first[k], last[k] = work.start[own].min(), work.stop[own].max()
    return first, last


def _end_of_earlier(work: DeviceWork, mark: int, first: Ints) -> int:
    """Return where the work ends that was launched before the first mark; NULL if none was.

    Work without a recorded launch was launched before, if it runs before the first work of the
    first iteration with some; `first` has that of each, or `_NEVER`.
    """
    own = first[first < _NEVER][0]
    earlier = np.where(work.launch == NULL, work.start < own, work.launch < mark)
    return int(work.stop[earlier].max(initial=NULL))


def _is_followed(iterations: Iterations) -> Flags:
    """Return whether each iteration but the last goes on in the next, without a pause."""
    gap = iterations.start[1:] - iterations.stop[:-1]
    length = iterations.stop[:-1] - iterations.start[:-1]
    is_followed: Flags = (np.diff(iterations.number) == 1) | (gap <= _NO_PAUSE * length)
    return is_followed


def _pauses(number: Ints, pauses: Ints, gaps: Ints) -> list[str]:
    """Return a note on the time between steps that do not follow each other, if any.

    `pauses` are the places in `number` of steps before a pause, `gaps` their lengths in ns.
    """
    if not len(pauses):
        return []
    longest = pauses[np.argmax(gaps)]
    one, two = number[longest], number[longest + 1]
    times = f"{format_ns(int(gaps.max()))} between {one} and {two}"
    if len(pauses) > 1:
        times = f"{format_ns(int(gaps.sum()))} in {len(pauses)} pauses, the longest {times}"
    return [f"the recorded steps do not follow each other: {times} are in no step"]


def _long_gaps(iterations: Iterations, places: Ints) -> list[str]:
    """Return a note on the longest time between marks that follow each other, if it is unusual.

    It is if it is longer than the marks around it, and many times as long as others.
    """
    start, stop = iterations.start[places], iterations.stop[places]
    gap = np.where(_is_followed(iterations)[places[:-1]], start[1:] - stop[:-1], 0)
    if not len(gap):
        return []
    longest = int(np.argmax(gap))
    around = int((stop - start)[longest : longest + 2].max())
    if gap[longest] <= max(around, _UNUSUAL * float(np.median(gap))):
        return []
    one, two = iterations.number[places[longest : longest + 2]].tolist()
    return [
        f"{format_ns(int(gap[longest]))} between the marks of {one} and {two} count in {one}, "
        "as where a job evaluates or saves; --steps selects others"
    ]


def _launched_before(work: DeviceWork, number: int, start: int, stop: int) -> list[str]:
    """Return a warning if much of the first iteration is work without a recorded launch.

    Work that was queued when the recording began runs beside the first work of the first step.
    """
    inside = (work.start >= start) & (work.start < stop)
    duration = work.stop - work.start
    unlaunched = inside & (work.launch == NULL)
    share = duration[unlaunched].sum() / max(1, duration[inside].sum())
    if share <= _LEAST_SHARE:
        return []
    events = counted(int(unlaunched.sum()), "device event")
    return [
        f"iteration {number}: {percent(share)} of its device time is work without a recorded "
        f"launch ({events}), which counts by its time; if it was launched before the "
        "recording, leave the iteration out with --steps"
    ]


def _empty(numbers: Ints, count: int) -> tuple[str, ...]:
    """Return a warning that names empty iterations, if any of `count` are."""
    if not len(numbers):
        return ()
    text = in_ranges(np.sort(numbers).tolist())
    return (
        f"{len(numbers)} of {counted(count, 'iteration')} have no time of their own on the "
        f"device, which runs behind its host: {text}. Means count them; which of their "
        "neighbors has their time depends on which work runs first",
    )


def _without(lack: str, numbers: Ints) -> tuple[str, ...]:
    """Return a warning that names iterations without something; () if there are none."""
    if not len(numbers):
        return ()
    text = in_ranges(np.sort(numbers).tolist())
    return (f"iterations without {lack} are left out: {text}",)
