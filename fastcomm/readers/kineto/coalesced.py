"""Find the calls of which one kernel does the work: coalesced collectives, batched messages.

Each call has a `record_param_comms` of its own, which ends before the group of calls does. The
kernel is launched then, and its metadata is empty or says "coalesced".
"""

from typing import NamedTuple

import numpy as np

from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.events import Events
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Flags, Ints

_VAGUE = (OP["OTHER"], OP["SendRecv"])  # kernels of these names do other operations, too
_GROUP = ("Process Group Name", "Process Group Description", "Process Group Ranks")
_SIDES = {"In msg nelems": ("send", "isend"), "Out msg nelems": ("recv", "irecv")}


class CallBatch(NamedTuple):
    """The calls of which one kernel does the work."""

    place: int  # of the kernel among the communication
    calls: Ints  # rows of events, at least one


def batches(
    events: Events, calls: Ints, launches: Ints, ops: Ints, lacking: Flags
) -> list[CallBatch]:
    """Return the calls of kernels that have no metadata of their own.

    They are the calls on the thread of the launch that began since the launch of communication
    before and launched none themselves, as far back as operation and group are one.

    Parameters
    ----------
    events
        Events of the trace.
    calls
        Rows of all calls of collectives.
    launches
        Row of the launch of each communication event, or NONE.
    ops
        Operation that the name of each event tells, an index into OPS.
    lacking
        Whether each event lacks metadata.

    """
    chosen = np.flatnonzero(lacking & (launches >= 0))
    names = events.by_text(events.detail("Collective name", calls), _operation)
    around = events.enclosing(calls, launches)
    pending = calls[(names != NULL) & ~np.isin(calls, around)]
    if not len(chosen) or not len(pending):
        return []
    start, lane = events.start, events.lane
    pending = pending[np.lexsort((start[pending], lane[pending]))]
    lanes, begin = np.unique(lane[pending], return_index=True)
    by_lane = dict(zip(lanes.tolist(), np.split(pending, begin[1:]), strict=True))
    before = _launch_before(events, launches)
    result = []
    for index in chosen.tolist():
        launch = launches[index]
        own = by_lane.get(int(lane[launch]), pending[:0])
        first, last = np.searchsorted(start[own], np.array([before[index], start[launch]]))
        own = own[first:last]
        own = own[events.stop[own] <= start[launch]]
        own = own[_alike_from_end(events, own, int(ops[index]))]
        if len(own):
            result.append(CallBatch(index, own))
    return result


def _operation(text: str) -> int:
    """Return the operation of a call; NULL for one that names none."""
    op = byte_rules.op_of_collective(text) if text else None
    return NULL if op is None else op


def _launch_before(events: Events, launches: Ints) -> Ints:
    """Return the start (ns) of the launch of communication before each, on its thread."""
    before = np.full(len(launches), NULL, np.int64)
    indices = np.flatnonzero(launches >= 0)
    rows = launches[indices]
    order = indices[np.lexsort((events.start[rows], events.lane[rows]))]
    lane, start = events.lane[launches[order]], events.start[launches[order]]
    is_first = np.append(True, lane[1:] != lane[:-1])
    before[order] = np.where(is_first, NULL, np.append(NULL, start[:-1] + 1))
    return before


def _alike_from_end(events: Events, calls: Ints, op: int) -> slice:
    """Return the last calls that do one operation in one group, the kernel's if that tells."""
    ops = events.by_text(events.detail("Collective name", calls), _operation)
    is_same = np.ones(len(calls), np.bool_)
    if op not in _VAGUE:
        is_same = ops == op
    columns = [ops, *(events.detail(name, calls) for name in _GROUP)]
    for column in columns:
        is_same &= column == column[-1:]
    others = np.flatnonzero(~is_same)
    return slice(int(others[-1]) + 1 if len(others) else 0, None)


def described(events: Events, calls: Ints) -> dict[str, int]:
    """Return what the calls of a batch say of it together, as the metadata of one call."""
    first = calls[:1]
    dtypes = events.detail("dtype", calls)
    counts = {name: _total(events, calls, name) for name in _SIDES}
    return {
        "Collective name": int(events.detail("Collective name", first)[0]),
        "dtype": int(dtypes[0]) if (dtypes == dtypes[0]).all() else NULL,
        "In split size": NULL,
        "Out split size": NULL,
        **counts,
    }


def _total(events: Events, calls: Ints, name: str) -> int:
    """Return the sum of a count of elements of calls; NULL if one is unknown.

    Of messages, what is sent goes in, and what is received comes out.
    """
    texts = [events.text(code) for code in events.detail("Collective name", calls).tolist()]
    sides = {side for names in _SIDES.values() for side in names}
    if sides.issuperset(texts):
        calls = calls[[text in _SIDES[name] for text in texts]]
    counts = events.detail(name, calls)
    return int(counts.sum()) if len(calls) and (counts >= 0).all() else NULL
