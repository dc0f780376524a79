"""Rows about waiting: for a stream, for all of them, or for what a CUDA event recorded."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.nsys import layout
from fastcomm.readers.nsys.export import Export, Rows
from fastcomm_kernels.json_numbers import NULL

Ints = NDArray[np.int64]

_SYNC = ("start", "end", "deviceId", "streamId", "correlationId", "syncType", *layout.EVENT_IDS)
_RECORD = ("streamId", "correlationId", *layout.EVENT_IDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Rows of the synchronization table and, where one waits for a record, what that was."""

    rows: Rows
    columns: dict[str, Ints]  # "wait_stream" and "wait_correlation" of `schema.ARGS`

    @property
    def kind(self) -> Ints:
        """What is waited for, a key of `layout.SYNCS`."""
        return self.rows["syncType"]


def read_waits(export: Export, process: int) -> Waits:
    """The waits of a process; each finds the last record of its event before it."""
    rows = export.rows(layout.SYNC, _SYNC, process=process)
    records = export.rows(layout.CUDA_EVENT, _RECORD, process=process)
    record = _record_of(rows, records)
    columns = {
        name: np.where(record >= 0, np.append(records[column], NULL)[record], NULL)
        for name, column in (("wait_stream", "streamId"), ("wait_correlation", "correlationId"))
    }
    return Waits(rows=rows, columns=columns)


def _record_of(waits: Rows, records: Rows) -> Ints:
    """The row of the record that each wait is for, or -1.

    An event is recorded again and again; newer exports number the recordings (`eventSyncId`),
    and calls are numbered in their order (`correlationId`).
    """
    found = np.full(waits.count, -1, np.int64)
    if not records.count:
        return found
    keys = [np.concatenate([records[name], waits[name]]) for name in layout.EVENT_IDS]
    call = np.concatenate([records["correlationId"], waits["correlationId"]])
    is_wait = np.arange(len(call)) >= records.count
    order = np.lexsort((is_wait, call, *keys))
    is_record = ~is_wait[order]
    last = np.maximum.accumulate(np.where(is_record, np.arange(len(order)), -1))
    candidate = order[last]
    same = last >= 0
    for key in keys:
        same &= key[candidate] == key[order]
    kinds = np.isin(waits["syncType"], layout.WAITS_FOR_EVENT)
    at = order[is_wait[order]] - records.count
    chosen = np.where(same, candidate, -1)[is_wait[order]]
    found[at] = np.where(kinds[at], chosen, -1)
    return found
