"""A rank and its windows by the rules of HolisticTraceAnalysis: rounding, links, trimming."""

import re
from dataclasses import dataclass, replace

import numpy as np

from fastcomm.critical_path.window import TimeRange, WindowError, instances
from fastcomm.readers.kineto.stream import find
from fastcomm.remote import place
from fastcomm.trace.columns import codes
from fastcomm.trace.events import EventRows
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import attribution
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NULL, Flags, Ints
from fastcomm_kernels.graph import NONE, Numbers

_STEP = r"^ProfilerStep#(\d+)"
# Processes of the rows by which the profiler describes itself: of category "Trace".
_SPANS = ("Spans", "Traces")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """The rows of a rank, rounded and trimmed, and which launch belongs to which work."""

    rows: EventRows
    linking: Flags  # device work and waits, which calls are linked to
    partner: Numbers  # row of the other side, or NONE
    has_partner: Flags  # of a row behind the first of the file: 0 is taken for none
    origin: int  # ns of the time 0
    has_steps: bool  # of several names: what is linked to then stands before all else


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """The part of `Linked` that a window holds."""

    linked: Linked
    rows: Ints  # of `linked`
    window: TimeRange


def linked(trace: Trace, *, keep_last: bool = False) -> Linked:
    """Read a trace as HTA does; the last profiled step is left out unless `keep_last`."""
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
    """The rows on the file's own clock, in whole microseconds if it has fractions.

    The arithmetic is that of doubles: what a JSON parser makes of the text, rounded.
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
    """Whether a start is written with a decimal point: HTA then rounds all."""
    if (start % 1000).any():
        return True
    # Only then it makes a difference; that no kept start has a fraction does not settle it.
    return bool((stop % 1000).any()) and find(place(trace.meta.path), _FLOAT) is not None


_FLOAT = re.compile(rb'"ts"\s*:\s*-?\d+[.eE]')


def _doubles(ns: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Microseconds as the nearest double to their decimal text."""
    whole, part = np.divmod(ns, 1000)
    return whole.astype(np.float64) + part / 1000.0


def _partners(rows: EventRows, linking: Flags) -> Numbers:
    """The row that each row is linked to; what has a correlation alone is linked to id 0."""
    (code,), count = codes(np.where(rows.correlation == -1, NULL, rows.correlation))
    partner = attribution.partners(code, count, linking, rows.position)
    zero = np.flatnonzero(rows.position == 0)
    if len(zero):
        partner[(partner == NONE) & (rows.correlation >= 0)] = zero[0]
    return partner


def _trimmed(whole: Linked) -> Linked:
    """Without the last profiled step, and the work that it launched."""
    rows = whole.rows
    marks = rows.matching(_STEP) & ~whole.linking
    if not marks.any():
        return whole
    kept = ~whole.linking & (rows.start < rows.start[marks].max())
    (code,), count = codes(rows.correlation)
    launched = np.zeros(count + 1, np.bool_)
    launched[code[kept]] = True
    kept |= whole.linking & launched[code]
    place = np.cumsum(kept, dtype=np.int32) - 1
    partner = whole.partner[kept]
    partner = np.where((partner >= 0) & kept[partner], place[partner], NONE).astype(np.int32)
    return Linked(
        rows=rows.take(kept),
        linking=whole.linking[kept],
        partner=partner,
        has_partner=whole.has_partner[kept] & (partner >= 0),
        origin=whole.origin,
        has_steps=True,
    )


def clipped(
    found: Linked, annotation: str, instance: object, *, exact: bool = False
) -> Clipped:
    """The rows of a window; `WindowError` where there is no such window."""
    rows = found.rows
    window = TimeRange(start=0, stop=int(rows.stop.max(initial=0)))
    inside = np.ones(len(rows), np.bool_)
    if annotation:
        marks = _marks(found, annotation, instances(instance), exact)
        window = TimeRange(start=int(rows.start[marks].min()), stop=int(rows.stop[marks].max()))
        inside = (rows.start >= window.start) & (rows.start <= window.stop)
    host = inside & (rows.stream == -1) & (rows.stop > rows.start)
    reached = np.zeros(len(rows), np.bool_)
    reached[found.partner[host & (found.partner >= 0)]] = True
    kept = host | (reached & (rows.stream != -1)) | rows.named(("Stream Wait Event",))
    return Clipped(linked=found, rows=np.flatnonzero(kept), window=window)


def _marks(found: Linked, annotation: str, wanted: tuple[int, int], exact: bool) -> Ints:
    """The rows from one instance of an annotation to another.

    HTA numbers the rows that match as they lie in its table, not in order of time.
    """
    rows = found.rows
    named = rows.named((annotation,)) if exact else rows.containing(annotation)
    marks = np.flatnonzero(named)
    if not len(marks):
        raise WindowError.no_annotation(annotation)
    behind = found.has_steps & ~found.linking[marks]
    marks = marks[np.lexsort((rows.position[marks], behind))]
    first, last = wanted
    if first >= len(marks):
        raise WindowError.no_instance(annotation, first, len(marks))
    chosen: Ints = marks[first : last + 1]
    return chosen
