"""Make whole events of begins and ends: events of the phases "B" and "E" of a Chrome trace.

On each lane they nest: an end belongs to the innermost event that is open. So all begins and
ends of a file are read, also of events that are not selected.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from fastcomm.formats.kineto import chrome
from fastcomm.formats.kineto.chrome import Scanned, Selection
from fastcomm.trace.columns import alike
from fastcomm.units import counted
from fastcomm_kernels import json_events, slices
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints


def scan_file(path: Path, selection: Selection, *, allow_truncated: bool = False) -> Scanned:
    """Read the selected events of a Chrome-trace file, as `chrome.scan_file` does.

    An event may also be two of the file, its begin and its end.
    """
    scanned = chrome.scan_file(path, selection, allow_truncated=allow_truncated)
    if not scanned.begins:
        return scanned
    every = [json_events.KEEP_ALL] * len(selection.keep)
    halves = replace(selection, keep=every, halves=True)
    scanned = chrome.scan_file(path, halves, allow_truncated=allow_truncated)
    return joined(scanned, selection, path)


def joined(scanned: Scanned, selection: Selection, path: Path) -> Scanned:
    """Join begins and ends, and keep the events of a selection.

    Parameters
    ----------
    scanned
        All events of a file, begins and ends among them.
    selection
        Which events and args to keep.
    path
        The file, for a warning.

    Returns
    -------
    Scanned
        With a warning on begins without an end, and ends without a begin, which are left out.

    """
    columns = scanned.columns
    halves = np.flatnonzero(columns["stop"] < NULL + 3)
    is_begin = columns["stop"][halves] == json_events.AT_BEGIN
    stop = _stops(columns["process"][halves], columns["thread"][halves],
                  columns["start"][halves], is_begin)  # fmt: skip
    columns["stop"][halves] = stop
    begins = int(is_begin.sum())
    whole = int((stop != NULL).sum())
    single = len(halves) - 2 * whole
    is_kept, is_only_long = _selected(scanned, selection)
    is_kept[halves[stop == NULL]] = False
    for name in selection.row_args:
        columns[name][is_only_long] = NULL
    columns["detail"][is_only_long] = NONE
    warnings = scanned.warnings
    if single:
        warnings = (
            *warnings,
            f"{path}: {counted(begins - whole, 'event')} without an end, and "
            f"{single - begins + whole} ends without a begin, were left out",
        )
    return replace(
        scanned,
        columns={name: column[is_kept] for name, column in columns.items()},
        warnings=warnings,
    )


def _stops(process: Ints, thread: Ints, time: Ints, is_begin: Flags) -> Ints:
    """Return when each begin ends; NULL for ends, and for begins without an end."""
    _, lane = alike(process, thread)
    order = np.argsort(lane, kind="stable")
    if not slices.is_in_order(lane, time, order):
        # Ends before begins at equal times.
        order = np.lexsort((is_begin, time, lane))
    stop = np.full(len(time), NULL, np.int64)
    slices.stops_by_nesting(is_begin, lane, time, order, stop)
    return stop


def _selected(scanned: Scanned, selection: Selection) -> tuple[Flags, Flags]:
    """Return which events a selection keeps, and which only because they are long."""
    columns = scanned.columns
    keep = np.array(selection.keep)[columns["kind"]]
    named = np.flatnonzero(np.isin(keep, (json_events.KEEP_NAMED, json_events.KEEP_LONG)))
    prefixes = tuple(prefix.decode() for prefix in selection.prefixes)
    is_named = np.zeros(len(keep), np.bool_)
    is_named[named] = scanned.are_named(named, lambda text: text.startswith(prefixes))
    length = columns["stop"] - columns["start"]
    is_long = (keep == json_events.KEEP_LONG) & (length >= json_events.LONG) & ~is_named
    return (keep == json_events.KEEP_ALL) | is_named | is_long, is_long
