"""Find steps of which device work is not recorded, though the calls that launched it are.

Also steps that launch none.

A profiler drops buffers of device events when it cannot write them fast enough, and its device
side may end before the host's. That time is not idle: nothing tells what the device did.
"""

from typing import NamedTuple

import numpy as np

from fastcomm import regexes
from fastcomm.trace.events import Events
from fastcomm.trace.host_names import COPY_CALL, GRAPH_LAUNCH, KERNEL_LAUNCH, LAUNCHING
from fastcomm.trace.iterations import EMPTY, DeviceWork, Iterations, up_to_next
from fastcomm.trace.run_traces import ranges
from fastcomm_kernels.arrays import NULL, Flags, Ints

_LEAST_SHARE = 0.01  # of the launches of a step
_BEGIN_CAPTURE, _END_CAPTURE = "StreamBeginCapture", "StreamEndCapture"


class Unanswered(NamedTuple):
    """Steps of which device work is missing, with numbers of launches; an item per step."""

    is_incomplete: Flags
    launches: Ints
    unrecorded: Ints  # launches without recorded work

    def warnings(self, number: Ints) -> list[str]:
        """Return a warning that names the incomplete steps, if any, of all steps `number`."""
        numbers = number[self.is_incomplete]
        if not len(numbers):
            return []
        launches = int(self.launches[self.is_incomplete].sum())
        unrecorded = int(self.unrecorded[self.is_incomplete].sum())
        noun, verb = ("iteration", "is") if len(numbers) == 1 else ("iterations", "are")
        return [
            f"{noun} {ranges(np.sort(numbers).tolist())} {verb} left out: the work of "
            f"{unrecorded} of {launches} launched kernels and copies is not recorded, as where "
            "a profiler drops buffers or ends early; what the device did then is not known"
        ]


def find_unanswered(
    marks: Iterations, events: Events, work: DeviceWork, count: int
) -> Unanswered:
    """Find the steps of which more than a small share of launches has no recorded work.

    A step is complete if nothing tells otherwise: where no correlation joins launches and work,
    or as much work has no launch as launches have no work.

    Parameters
    ----------
    marks
        Iterations on the host's clock.
    events
        Events of the rank.
    work
        Device work of the rank.
    count
        Number of leading iterations that count; others are never incomplete.

    """
    none = np.zeros(len(marks.number), np.int64)
    nothing = Unanswered(none > 0, none, none)
    is_launched = work.launch != NULL
    if not is_launched.any():
        return nothing
    calls, is_absent = _calls(events)
    graph_launches, absent_launches = _graph_launches(events)
    if not is_absent.any() and not len(absent_launches):
        return nothing
    steps = up_to_next(marks)
    launches, unrecorded = _counts(events, steps, calls, calls[is_absent])
    absent = int(is_absent.sum())
    graphs, absent_graphs = _counts(events, steps, graph_launches, absent_launches)
    if ((graphs > 0) & (absent_graphs == 0)).any():  # else graphs may have no work
        launches, unrecorded = launches + graphs, unrecorded + absent_graphs
        absent += int(absent_graphs.sum())
    unjoined = ~is_launched & (work.start >= work.start[is_launched].min())
    if not absent or unjoined.sum() >= absent:
        return nothing
    is_incomplete = (unrecorded > _LEAST_SHARE * launches) & (np.arange(len(none)) < count)
    return Unanswered(is_incomplete, launches, unrecorded)


def waiting_steps(marks: Iterations, events: Events) -> Flags:
    """Return which steps launch nothing, as far as the host is recorded.

    It is within a mark that has calls of the runtime, or ranges. A mark without any event is of
    a host that does nothing if other marks have calls. One that is much shorter than others is
    no step.

    Parameters
    ----------
    marks
        Iterations on the host's clock.
    events
        Events of the rank.

    """
    (launches,) = _counts(events, up_to_next(marks), _named(events, f"{LAUNCHING}|{COPY_CALL}"))
    is_silent: Flags = launches == 0
    if not is_silent.any():
        return is_silent
    inner = events.rows("annotation")
    place = np.searchsorted(marks.start, events.start[inner]) - 1
    inner = inner[(place >= 0) & (events.stop[inner] < marks.stop[place])]
    operators = np.concatenate([events.rows(kind) for kind in ("cpu_op", "python")])
    by_kind = _counts(events, marks, events.rows("runtime"), inner, operators)
    is_recorded = by_kind[0] + by_kind[1] > 0
    is_recorded |= (by_kind[2] == 0) & by_kind[0].any()
    length = marks.stop - marks.start
    is_waiting: Flags = is_recorded & is_silent & (length > EMPTY * np.median(length))
    return is_waiting


def _counts(events: Events, steps: Iterations, *calls: Ints) -> tuple[Ints, ...]:
    """Return how many of some calls begin in each step, for each of several sets of calls."""
    starts = [np.sort(events.start[rows]) for rows in calls]
    return tuple(
        np.searchsorted(start, steps.stop) - np.searchsorted(start, steps.start)
        for start in starts
    )


def _graph_launches(events: Events) -> tuple[Ints, Ints]:
    """Return the launches of graphs, and the launches whose work is not recorded."""
    rows = _named(events, GRAPH_LAUNCH)
    if not len(rows):
        return rows, rows
    work = events.rows("kernel", "memcpy", "memset")
    is_absent = ~np.isin(rows, events.launch_of(work))
    is_absent &= ~np.isin(events.correlation[rows], [NULL, *events.correlation[work]])
    return rows, rows[is_absent]


def _calls(events: Events) -> tuple[Ints, Flags]:
    """Return the calls that launch kernels and copies, and whether the work of each is missing.

    A copy of nothing has no work. It counts if a kernel that was launched before or after it
    has none either. Kernels that are captured into a graph are not launched.
    """
    kernels = _named(events, KERNEL_LAUNCH)
    work = events.rows("kernel", "memcpy", "memset")
    launch = events.launch_of(work)
    is_absent = np.ones(len(events), np.bool_)
    is_absent[launch[launch >= 0]] = False
    absent = kernels[is_absent[kernels]]
    if not len(absent):
        return kernels, np.zeros(len(kernels), np.bool_)
    copies = _named(events, COPY_CALL)
    rows = np.concatenate([absent, copies[is_absent[copies]]])
    is_joined = np.isin(events.correlation[rows], [NULL, *events.correlation[work]])
    is_absent[rows[is_joined]] = False
    absent, answered = kernels[is_absent[kernels]], kernels[~is_absent[kernels]]
    # Of a call inside of another one, either has the correlation of the work.
    around = events.enclosing(absent, answered)
    is_absent[around[around >= 0]] = False
    is_absent[absent[events.enclosing(answered, absent) >= 0]] = False
    is_absent &= ~_in_capture(events)
    place = np.searchsorted(kernels, copies)
    by_kernel = np.concatenate([[False], is_absent[kernels], [False]])
    is_absent[copies] &= by_kernel[place] | by_kernel[place + 1]
    calls = np.union1d(kernels, copies)
    return calls, is_absent[calls]


def _in_capture(events: Events) -> Flags:
    """Return which events begin while a graph is captured."""
    calls = [_named(events, regex) for regex in (_BEGIN_CAPTURE, _END_CAPTURE)]
    rows = np.concatenate(calls)
    change = np.repeat([1, -1], [len(own) for own in calls])
    order = np.argsort(rows)
    # A capture that began before the recording ends without a beginning.
    depth = np.cumsum(change[order])
    depth = np.concatenate([[0], depth]) - min(0, int(depth.min(initial=0)))
    is_inside: Flags = depth[np.searchsorted(rows[order], np.arange(len(events)))] > 0
    return is_inside


def _named(events: Events, regex: str) -> Ints:
    """Return the calls of a device's runtime whose name contains a regular expression."""
    return events.rows_named(lambda name: regexes.search(regex, name) is not None, "runtime")
