"""Prepare the events of a rank, and select those of a window, as HolisticTraceAnalysis does."""

import re
from dataclasses import dataclass, replace

import numpy as np

from fastcomm.critical_path.window import TimeRange, WindowError, chosen, instances
from fastcomm.files import place
from fastcomm.readers.stream import find
from fastcomm.trace.columns import codes
from fastcomm.trace.events import EventRows
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import graph as graphs
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints, Numbers

_STEP = r"^ProfilerStep#(\d+)"
# Processes of the events in which the profiler describes itself, of category "Trace".
_SPANS = ("Spans", "Traces")
_FLOAT = re.compile(rb'"ts"\s*:\s*-?\d+[.eE]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """The events of a rank, rounded and trimmed, with links between launches and work."""

    rows: EventRows
    linking: Flags  # device work and waits, which calls link to
    partner: Numbers  # row of the linked event, or NONE
    has_partner: Flags  # False if the partner is the first event of the file, as in HTA
    origin: int  # ns of the time 0
    has_steps: bool  # several steps; HTA's table then begins with the `linking` rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """The events of a window."""

    linked: Linked
    rows: Ints  # of `linked`
    window: TimeRange


def linked(trace: Trace, *, keep_last: bool = False) -> Linked:
    """Prepare the events of a rank as HTA does.

    Parameters
    ----------
    trace
        The rank, with all events.
    keep_last
        Keep the last profiled step.

    """
    rows = EventRows.whole(trace)
    spans = np.isin(np.array(trace.lanes["process"].to_pylist(), object), _SPANS)
    if spans.any():
        rows = rows.take((rows.kind != KIND["other"]) | ~spans[rows.lane])
    rows = replace(
        rows,
        start=rows.start - trace.meta.base,
        stream=np.where(rows.stream == NULL, -1, rows.stream),
        correlation=np.where(rows.correlation == NULL, -1, rows.correlation),
    )
    rows = _rounded(rows, trace)
    order = np.arange(len(rows))
    graphs.settle(order, rows.start, rows.position)
    if (np.diff(order) < 0).any():
        rows = rows.take(order)
    linking = (rows.stream >= 0) & (rows.correlation >= 0)
    linking |= rows.named(("Event Sync", "Context Sync"))
    partner = _partners(rows, linking)
    origin = int(rows.start[0]) if len(rows) else 0
    rows = replace(rows, start=rows.start - origin, stop=rows.stop - origin)
    whole = Linked(
        rows=rows,
        linking=linking,
        partner=partner,
        has_partner=(partner >= 0) & (rows.position[partner] > 0),
        origin=origin + trace.meta.base,
        has_steps=len(np.unique(rows.name[rows.matching(_STEP)])) > 1,
    )
    return _trimmed(whole) if whole.has_steps and not keep_last else whole


def _rounded(rows: EventRows, trace: Trace) -> EventRows:
    """Return the rows with their ends on the clock of the file, where their starts are already.

    Times are ns. If the file has fractions of us, starts are rounded up and ends down to whole
    us, computed as float64 as HTA does after it has parsed the JSON text.
    """
    stop = rows.stop - trace.meta.base
    if not _is_fractional(rows.start, stop, trace):
        return replace(rows, stop=stop)
    start, length = _doubles(rows.start), _doubles(stop - rows.start)
    return replace(
        rows,
        start=np.ceil(start).astype(np.int64) * 1000,
        stop=np.floor(start + length).astype(np.int64) * 1000,
    )


def _is_fractional(start: Ints, stop: Ints, trace: Trace) -> bool:
    """Return whether the file has a start with a decimal point; HTA then rounds all times."""
    if (start % 1000).any():
        return True
    # A start with a decimal point may be of an event that was not read; this matters only for
    # ends with fractions.
    return bool((stop % 1000).any()) and find(place(trace.meta.path), _FLOAT) is not None


def _doubles(ns: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return nanoseconds as microseconds, each the float64 nearest to its decimal text."""
    integer, fraction = np.divmod(ns, 1000)
    return integer.astype(np.float64) + fraction / 1000.0


def _partners(rows: EventRows, linking: Flags) -> Numbers:
    """Return the row with the same correlation id (launch or work) of each row, or NONE.

    A row whose correlation id is unique is linked to the first event of the file, as in HTA.
    """
    (code,), count = codes(np.where(rows.correlation == -1, NULL, rows.correlation))
    partner = matching.partners(code, count, linking, rows.position)
    zero = np.flatnonzero(rows.position == 0)
    if len(zero):
        partner[(partner == NONE) & (rows.correlation >= 0)] = zero[0]
    return partner


def _trimmed(whole: Linked) -> Linked:
    """Drop the last profiled step, and the work that it launched."""
    rows = whole.rows
    marks = rows.matching(_STEP) & ~whole.linking
    if not marks.any():
        return whole
    keep = ~whole.linking & (rows.start < rows.start[marks].max())
    (code,), count = codes(rows.correlation)
    launched = np.zeros(count + 1, np.bool_)
    launched[code[keep]] = True
    keep |= whole.linking & launched[code]
    place = np.cumsum(keep, dtype=np.int32) - 1
    partner = whole.partner[keep]
    partner = np.where((partner >= 0) & keep[partner], place[partner], NONE).astype(np.int32)
    return replace(
        whole,
        rows=rows.take(keep),
        linking=whole.linking[keep],
        partner=partner,
        has_partner=whole.has_partner[keep] & (partner >= 0),
    )


def clip(linked: Linked, annotation: str, instance: object, *, exact: bool = False) -> Clipped:
    """Select the rows of a window.

    Parameters
    ----------
    linked
        The rank.
    annotation
        Name of the annotation, or a part of it; "" for the whole trace.
    instance
        Number of the annotation, or the first and the last number.
    exact
        Whether the annotation is a whole name.

    Raises
    ------
    WindowError
        If there is no such window.

    """
    rows = linked.rows
    window = TimeRange(start=0, stop=int(rows.stop.max(initial=0)))
    inside = np.ones(len(rows), np.bool_)
    if annotation:
        marks = _marks(linked, annotation, instances(instance), exact)
        window = TimeRange(start=int(rows.start[marks].min()), stop=int(rows.stop[marks].max()))
        inside = (rows.start >= window.start) & (rows.start <= window.stop)
    host = inside & (rows.stream == -1) & (rows.stop > rows.start)
    reached = np.zeros(len(rows), np.bool_)
    reached[linked.partner[host & (linked.partner >= 0)]] = True
    selected = host | (reached & (rows.stream != -1)) | rows.named(("Stream Wait Event",))
    return Clipped(linked=linked, rows=np.flatnonzero(selected), window=window)


def _marks(linked: Linked, annotation: str, numbers: tuple[int, int], exact: bool) -> Ints:
    """Return the rows of an annotation, from a first to a last instance.

    HTA numbers the matching rows in the order of its table, not by time.
    """
    rows = linked.rows
    is_match = rows.named((annotation,)) if exact else rows.containing(annotation)
    marks = np.flatnonzero(is_match)
    if not len(marks):
        raise WindowError.no_annotation(annotation)
    comes_later = linked.has_steps & ~linked.linking[marks]
    marks = marks[np.lexsort((rows.position[marks], comes_later))]
    return chosen(marks, annotation, numbers)
