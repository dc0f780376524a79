"""Join calls with the device work that they launch, where no correlation does.

ROCm builds of 2024 write an `External id` instead. Other writers have nothing but flow events,
the arrows that viewers draw from a call to its work.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.formats.kineto.chrome import Scanned, Selection, scan_file
from fastcomm.formats.kineto.devices import label_of
from fastcomm.trace.columns import alike, first_seen
from fastcomm.trace.events import enclosing, outermost
from fastcomm_kernels import json_flows
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints
from fastcomm_kernels.json_events import KEEP_ALL, KEEP_NONE, TEXT_LANE

CATEGORIES = (b"ac2g", b"async_cpu_to_gpu")  # of arrows from calls to device work
_FLOWS = Selection(
    kinds={name: kind for kind, name in enumerate(CATEGORIES)},
    keep=[KEEP_ALL] * len(CATEGORIES) + [KEEP_NONE],
    prefixes=(),
    row_args=json_flows.COLUMNS,
    detail_args=(),
    detail_texts=(),
    flows=True,
)
_FAR = 1 << 62  # numbers that are lower can be counted on
_KINDS = 1 << 7  # more than there are kinds
_DENSE = 16  # times as many numbers as launches can be counted one by one
_Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowEnds:
    """Begins and ends of arrows, a row each; times in ns."""

    key: Ints  # equal for the begin of an arrow and its end
    process: Ints
    thread: Ints
    time: Ints
    is_begin: Flags
    is_inside: Flags  # whether the event around the time is meant, not the next one

    def __getitem__(self, rows: Flags | Ints) -> "ArrowEnds":
        """Return some of the rows."""
        return ArrowEnds(**{name: getattr(self, name)[rows] for name in self.__slots__})


def join_launches(
    columns: _Columns, calls: int, work: Sequence[int], arrows: Callable[[], ArrowEnds | None]
) -> None:
    """Set the correlation of calls and device work to a number of each launch, if none has any.

    Numbers of 0 and less join nothing: writers mean none. They become NULL.

    Parameters
    ----------
    columns
        The columns of `Scanned`; "correlation" is written.
    calls, work
        The kinds of calls and of device work.
    arrows
        Returns the flow events of the trace. It is called only for work that neither
        correlations nor external ids join with a call.

    """
    correlation, external, kind = (
        columns[name] for name in ("correlation", "External id", "kind")
    )
    is_call, is_work = kind == calls, np.bincount(work, minlength=_KINDS)[kind] > 0
    is_numbered = correlation > 0
    if (is_none := (is_call | is_work) & ~is_numbered).any():
        correlation[is_none] = NULL
    numbered = np.flatnonzero(is_call & is_numbered)
    if len(numbered) and (is_work & is_numbered).any():
        _number_reused(columns, numbered)
        return
    of_call, of_work = np.flatnonzero(is_call), np.flatnonzero(is_work)
    if not len(of_call) or not len(of_work):
        return
    by_id = (external[of_work] > 0) & np.isin(external[of_work], external[of_call])
    ends = None if by_id.all() else arrows()
    if by_id.any():
        both = np.concatenate([of_call, of_work])
        correlation[both] = np.where(external[both] > 0, external[both], NULL)
    if ends is not None:
        _join_by_arrows(columns, of_call, of_work[~by_id], ends)


def _number_reused(columns: _Columns, calls: Ints) -> None:
    """Give the launches of one correlation numbers of their own, if it is used again.

    It is if calls of one process have it one after the other, not one inside of the other, and
    each has work.
    """
    correlation, start = columns["correlation"], columns["start"]
    repeated = _repeated(correlation[calls])
    process = columns["process"][calls]
    if not len(repeated) or (process != process[0]).any():
        return
    rows = np.flatnonzero(np.isin(correlation, repeated))
    is_call = np.isin(rows, calls)
    calls, others = rows[is_call], rows[~is_call]
    code, of_other = (np.searchsorted(repeated, correlation[own]) for own in (calls, others))
    first = outermost((code.astype(np.int32), start[calls], columns["stop"][calls]))
    launches = code[first], start[calls[first]]
    launch = _begins(launches, (of_other, start[others]))
    count, used = (
        np.bincount(code[first[own]], minlength=len(repeated))
        for own in (np.arange(len(first)), np.unique(launch[launch != NONE]))
    )
    is_reused = (count > 1) & (used == count)
    numbers = _first_free(correlation) + np.arange(len(first))
    around = _last_before(launches, (code, start[calls]))
    for own, key, place in ((calls, code, around), (others, of_other, launch)):
        chosen = is_reused[key] & (place != NONE)
        correlation[own[chosen]] = numbers[place[chosen]]


def _repeated(ids: Ints) -> Ints:
    """Return the numbers that some positive numbers contain more than once, ascending."""
    least = int(ids.min())
    if int(ids.max()) - least < _DENSE * len(ids):  # without a sort
        return least + np.flatnonzero(np.bincount(ids - least) > 1)
    ids = np.sort(ids)
    return np.unique(ids[1:][ids[1:] == ids[:-1]])


def _first_free(correlation: Ints) -> int:
    """Return a number from which on none is in use."""
    last = int(correlation.max(initial=0))
    return last + 1 if 0 < last < _FAR else 1


def _join_by_arrows(columns: _Columns, calls: Ints, work: Ints, ends: ArrowEnds) -> None:
    """Set the correlation of launches by arrows to that of the call, or to a new number."""
    correlation = columns["correlation"]
    place = _calls_by_arrows(columns, calls, work, ends)
    work, call = work[place != NONE], calls[place[place != NONE]]
    new = _first_free(correlation) + place[place != NONE]
    number = np.where(correlation[call] > 0, correlation[call], new)
    correlation[call] = number
    correlation[work] = number


def flow_events(path: Path, scanned: Scanned) -> ArrowEnds | None:
    """Return the arrows from calls to device work in a file; None if it has none.

    `scanned` has the file's other events. Ids count within the part of a file that a tool
    merged from several, where it labels the processes, and one id is of one process there.
    """
    flows: Scanned | None = None
    with suppress(TraceFileError):  # the other events could be read
        flows = scan_file(path, _FLOWS, allow_truncated=True)
    if flows is None or not len(flows.columns["start"]):
        return None
    columns = flows.columns
    _, key = alike(columns["kind"], columns["id"], _labels(columns["process"], flows.texts))
    codes = {text: code for code, text in enumerate(scanned.texts)}
    process, thread = (
        _translated(columns[name], flows.texts, codes) for name in ("process", "thread")
    )
    ends = ArrowEnds(
        key=key,
        process=process,
        thread=thread,
        time=columns["start"],
        is_begin=columns["phase"] == json_flows.BEGIN,
        is_inside=columns["is_inside"] != NULL,
    )
    return ends[~_are_shared(ends)[key]]


def _labels(process: Ints, texts: Sequence[str]) -> Ints:
    """Return a number for each process, equal for those with equal labels."""
    distinct, place = np.unique(process, return_inverse=True)
    labels = [
        label_of(texts[TEXT_LANE - code]) if NULL < code <= TEXT_LANE else ""
        for code in distinct.tolist()
    ]
    return np.unique(np.array(labels), return_inverse=True)[1][place]


def _translated(lane: Ints, texts: Sequence[str], codes: dict[str, int]) -> Ints:
    """Return processes or threads with the codes of other texts; NULL where one is missing."""
    distinct, place = np.unique(lane, return_inverse=True)
    for n, code in enumerate(distinct.tolist()):
        if NULL < code <= TEXT_LANE:
            text = texts[TEXT_LANE - code]
            distinct[n] = TEXT_LANE - codes[text] if text in codes else NULL
    result: Ints = distinct[place]
    return result


def _are_shared(ends: ArrowEnds) -> Flags:
    """Return by key whether arrows of several processes have it."""
    begins = ends[ends.is_begin]
    first, _ = alike(begins.key, begins.process)
    shared: Flags = np.bincount(begins.key[first], minlength=int(ends.key.max()) + 1) > 1
    return shared


def _calls_by_arrows(columns: _Columns, calls: Ints, work: Ints, ends: ArrowEnds) -> Ints:
    """Return the place among `calls` of the launch of each row of `work`, or NONE.

    An arrow begins at the innermost call around its begin, and ends at the work around its end,
    or at the next one on its lane. Of several arrows to one kernel, the last counts.
    """
    lanes = (
        np.concatenate([columns[name][calls], columns[name][work], getattr(ends, name)])
        for name in ("process", "thread")
    )
    lane = first_seen(*lanes)[1].astype(np.int32)
    of_call, of_work, of_end = np.split(lane, [len(calls), len(calls) + len(work)])
    start, stop = columns["start"], columns["stop"]
    moments = of_end, ends.time, ends.time
    inside = enclosing((of_work, start[work], stop[work]), moments)
    following = _next((of_work, start[work]), (of_end, ends.time))
    target = np.where(ends.is_inside, inside, following)
    source = enclosing((of_call, start[calls], stop[calls]), moments)

    begins = np.flatnonzero(ends.is_begin & (source != NONE))
    stops = np.flatnonzero(~ends.is_begin & (target != NONE))
    begin = _begins((ends.key[begins], ends.time[begins]), (ends.key[stops], ends.time[stops]))
    stops, begin = stops[begin != NONE], begins[begin[begin != NONE]]
    order = np.argsort(ends.time[stops], kind="stable")
    call = np.full(len(work), NONE, np.int64)
    call[target[stops[order]]] = source[begin[order]]
    return call


_Points = tuple[Ints | NDArray[np.int32], Ints]  # group and time of each


def _begins(points: _Points, moments: _Points) -> Ints:
    """Return which point of its group leads to each moment; NONE if it has none.

    In a group with as many moments as points, each leads to one, in order, if none is later;
    else the last one before the moment does.
    """
    (group, time), (of_moment, at) = points, moments
    before = _last_before(points, moments)
    if not len(time) or not len(at):
        return before
    size = int(max(group.max(), of_moment.max())) + 1
    count, moment_count = (np.bincount(own, minlength=size) for own in (group, of_moment))
    order, sequence = np.lexsort((time, group)), np.lexsort((at, of_moment))
    shift = (np.cumsum(count) - np.cumsum(moment_count))[of_moment[sequence]]
    is_paired = (count == moment_count)[of_moment]
    place = np.where(is_paired[sequence], np.arange(len(at)) + shift, 0)
    paired = np.empty(len(at), np.int64)
    paired[sequence] = order[place]
    is_late = np.zeros(size, np.bool_)
    is_late[of_moment[time[paired] > at]] = True
    return np.where(is_paired & ~is_late[of_moment], paired, before)


def _next(points: _Points, moments: _Points) -> Ints:
    """Return the first point of a group at or after each moment; NONE if there is none."""
    order, place = _places(points, moments, "left")
    return _in_group(points, moments, order, place)


def _last_before(points: _Points, moments: _Points) -> Ints:
    """Return the last point of a group at or before each moment, or else the group's first."""
    order, place = _places(points, moments, "right")
    before, after = (_in_group(points, moments, order, place - n) for n in (1, 0))
    return np.where(before == NONE, after, before)


def _places(
    points: _Points, moments: _Points, side: Literal["left", "right"]
) -> tuple[Ints, Ints]:
    """Return the order of points by group and time, and the place of each moment in it."""
    times = np.unique(points[1])
    width = np.int64(len(times) + 1)
    own = points[0] * width + np.searchsorted(times, points[1])
    sought = moments[0] * width + np.searchsorted(times, moments[1], side=side)
    order = np.argsort(own, kind="stable")
    return order, np.searchsorted(own[order], sought)


def _in_group(points: _Points, moments: _Points, order: Ints, place: Ints) -> Ints:
    """Return the point at each place of the order, NONE if it is not of the moment's group."""
    padded = np.append(order, NONE)
    point = padded[np.where((place >= 0) & (place < len(order)), place, NONE)]
    groups = np.append(points[0], NONE)
    return np.where(groups[point] == moments[0], point, NONE)
