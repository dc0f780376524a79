"""Guess which work waits for another stream, where the trace does not record such waits.

Work that starts right after the end of work on another stream may wait for it. In other
instances the same work starts later for another reason, and the wait does not show. It matters
for a replay: after an edit, the wait may be what determines the start.
"""

from dataclasses import dataclass
from itertools import permutations
from typing import Self

import numpy as np

from fastcomm.critical_path.waits import Selected
from fastcomm.trace.columns import alike, filled
from fastcomm_kernels.arrays import NONE, Flags, Ints
from fastcomm_kernels.constraints import LAUNCH_NS

_MOST_STREAMS = 16  # with work on them; all pairs are compared
_NEAR = 4  # works of a stream that are candidates to wait for work launched before them
_PROMPT_NS = 10_000  # a start within this time after an end follows the end


@dataclass(frozen=True, slots=True)
class _Stream:
    """The work on a stream in the order of its launches, with one value per work."""

    row: Ints
    launch: Ints  # row of the call
    start: Ints  # ns
    stop: Ints
    before: Ints  # end of the work before on the stream
    name: Ints  # code

    @classmethod
    def of(cls, selected: Selected, work: Ints) -> Self:
        """Return the columns of `work`, rows of one stream."""
        rows, launch = selected.rows, selected.call[work].astype(np.int64)
        order = np.argsort(launch, kind="stable")
        row = work[order]
        stop = rows.stop[row]
        before = np.concatenate([np.full(1, np.iinfo(np.int64).min), stop])[:-1]
        return cls(
            row, launch[order], rows.start[row], stop, before, rows.name[row].astype(np.int64)
        )


def stream_waits(selected: Selected) -> tuple[Ints, Ints]:
    """Return pairs of rows: work, and work on another stream that it seems to wait for.

    A stream waits for another one if it continues right after most of the other's work. Then
    the first work on it that never begins before that end, in any of its instances, waits for
    it. Pairs are left out if the measured times already show the wait: there the end is what
    determines the start.
    """
    work = np.flatnonzero(selected.is_device & (selected.call >= 0))
    lanes = np.unique(selected.rows.lane[work])
    if len(lanes) > _MOST_STREAMS:
        return work[:0], work[:0]
    device = filled(selected.rows.lanes["device"], NONE)
    streams = {
        lane: _Stream.of(selected, work[selected.rows.lane[work] == lane])
        for lane in lanes.tolist()
    }
    pairs = [
        _pairs(streams[a], streams[b])
        for a, b in permutations(streams, 2)
        if device[a] == device[b]
    ]
    waiting, source, before = (
        (np.concatenate([work[:0], *columns]) for columns in zip(*pairs, strict=True))
        if pairs
        else (work[:0],) * 3
    )
    keep = _is_hidden(selected, waiting, source, before)
    return waiting[keep], source[keep]


def _is_hidden(selected: Selected, waiting: Ints, source: Ints, before: Ints) -> Flags:
    """Return which pairs do not determine the start; `before` is the end before, ns."""
    rows = selected.rows
    stop = rows.stop[source]
    latest = np.zeros(len(rows), np.int64)
    np.maximum.at(latest, waiting, stop)
    delay = rows.start[waiting] - rows.start[selected.call[waiting]]
    hidden: Flags = (stop < before) | ((stop < latest[waiting]) & (delay >= LAUNCH_NS))
    return hidden


def _pairs(stream: _Stream, other: _Stream) -> tuple[Ints, Ints, Ints]:
    """Return the waits of a stream for another one, and the ends of the work before."""
    last = np.searchsorted(other.launch, stream.launch) - 1
    first = np.searchsorted(stream.launch, other.launch, "right")
    distance = np.arange(len(last)) - first[last]
    at = np.flatnonzero((last >= 0) & (distance < _NEAR))
    source, distance = last[at], distance[at]
    end, start = other.stop[source], stream.start[at]
    is_after = end <= start
    prompt = is_after & (end > stream.before[at]) & (start - end <= _PROMPT_NS)
    empty = at[:0]
    if not len(at) or 2 * len(np.unique(source[prompt])) < len(np.unique(source)):
        return empty, empty, empty
    _, kind = alike(stream.name[at], other.name[source], distance)
    is_regular = np.bincount(kind[~is_after], minlength=len(kind)) == 0
    at, source = at[is_regular[kind]], source[is_regular[kind]]
    # The first one that waits is enough: later work follows it.
    source, where = np.unique(source, return_index=True)
    at = at[where]
    return stream.row[at], other.row[source], stream.before[at]
