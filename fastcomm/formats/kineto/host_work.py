"""Rewrite the events of runs without an accelerator, as if the host were a device.

So all later code is the same for both:

- the annotation of a collective becomes a kernel, launched by the operator, with the metadata
  that kernels of NCCL have: operation, sizes, splits, peer, group;
- the time of operators outside of communication becomes rows of the kind "host_work".
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.formats.communication import member
from fastcomm.formats.kineto.chrome import Scanned
from fastcomm.formats.kineto.host import ANNOTATION, Call, HostCollectives, named_rows
from fastcomm.formats.kineto.host_groups import Assigned, HostRank
from fastcomm.trace.events import outermost
from fastcomm.trace.host_names import (
    COLLECTIVE_WAIT,
    DISTRIBUTED_OPERATOR,
    HOST_LIBRARIES,
    WAIT_TENSOR,
)
from fastcomm.trace.schema import KIND
from fastcomm.trace.tags import ProcessGroup
from fastcomm_kernels.arrays import NONE, NULL, Ints

_NO_COMPUTE = re.compile(DISTRIBUTED_OPERATOR)


def as_device(scanned: Scanned, assigned: Assigned | None, *, with_waits: bool) -> Scanned:
    """Return the events of one rank without an accelerator, with its work as that of a device.

    Parameters
    ----------
    scanned
        All operators and annotations of the rank.
    assigned
        Groups of its threads and numbers of its collectives, from all ranks; None for this file
        alone.
    with_waits
        Whether to add events for the waits of threads.

    """
    rank = HostRank.of(scanned, 0)
    if assigned is None or len(assigned.numbers) != len(rank.collectives.calls):
        groups, numbers = rank.assign({}), None
    else:
        groups, numbers = assigned.groups, assigned.numbers
    of_call = rank.groups_of_calls(groups)
    return with_host_work(scanned, rank.collectives, of_call, numbers, with_waits=with_waits)


def with_host_work(
    scanned: Scanned,
    collectives: HostCollectives,
    groups: Sequence[ProcessGroup | None],
    numbers: Ints | None,
    *,
    with_waits: bool,
) -> Scanned:
    """Rewrite the events of a host run as those of a device.

    Parameters
    ----------
    scanned
        All operators and annotations of the trace.
    collectives
        Its collectives.
    groups
        The process group of each collective; None if unknown.
    numbers
        The number of each collective in its group; None if unknown.
    with_waits
        Whether to add events for the waits of threads, which only a critical path needs.

    """
    columns, details, texts = dict(scanned.columns), dict(scanned.details), list(scanned.texts)
    launched = np.flatnonzero(collectives.operator >= 0)
    kind, correlation = columns["kind"].copy(), columns["correlation"].copy()
    kind[collectives.annotation] = KIND["kernel"]
    correlation[collectives.annotation] = np.arange(1, len(collectives.annotation) + 1)
    columns |= {"kind": kind, "correlation": correlation}
    columns["name"] = _names(scanned, collectives, texts)
    columns["start"] = _starts(columns, collectives)
    columns["stream"] = _streams(columns, collectives)
    columns["detail"], details = _metadata(scanned, collectives, groups, texts)
    if numbers is not None:
        details["Seq"][-1 - len(numbers) : -1] = numbers
    launches = _copies(columns, collectives.operator[launched], KIND["runtime"])
    launches["correlation"] = correlation[collectives.annotation[launched]]
    ops = named_rows(scanned, "cpu_op", lambda _: True)
    waits = _waits(scanned, collectives, columns, ops)
    added = [launches, _compute(scanned, collectives, columns, ops, waits)]
    if with_waits:
        kind[named_rows(scanned, "cpu_op", _WAIT_TENSOR.match)] = KIND["runtime"]
        added.append(_wait_calls(waits, columns, texts))
    columns = {
        name: np.concatenate([column, *(rows[name] for rows in added)])
        for name, column in columns.items()
    }
    return replace(scanned, columns=columns, details=details, texts=texts)


def _names(scanned: Scanned, collectives: HostCollectives, texts: list[str]) -> NDArray[Any]:
    """Return the code of the name of each row; adds names to `texts`.

    A name that the user gave to a collective follows that of its operation: it may be that of
    another.
    """
    name, codes = scanned.columns["name"].copy(), dict[str, int]()
    for row, call in zip(collectives.annotation.tolist(), collectives.calls, strict=True):
        title = scanned.name(row)
        if ANNOTATION.match(title) is None:
            text = f"{HOST_LIBRARIES[0]}:{call.operation} {title}"
            name[row] = len(texts) + codes.setdefault(text, len(codes))
    texts += codes
    return name


def _starts(columns: Mapping[str, NDArray[Any]], collectives: HostCollectives) -> Ints:
    """Return the start of each row: of a message, that of the operator that issues it.

    Its annotation begins after that, so that the other side may have received it before.
    """
    start = columns["start"].copy()
    is_message = np.array([call.is_message for call in collectives.calls], np.bool_)
    start[collectives.annotation[is_message]] = collectives.called[is_message]
    return start


_WAIT_TENSOR = re.compile(WAIT_TENSOR)


def _streams(columns: Mapping[str, NDArray[Any]], collectives: HostCollectives) -> Ints:
    """Return the stream of each row: of a collective, the thread that carries it out.

    Messages to different ranks run at once; those of one peer and direction are in order.
    """
    stream = columns["stream"].copy()
    own = np.maximum(collectives.thread, 0)
    first, routes = int(own.max(initial=0)) + 1, dict[tuple[str, int], int]()
    for place, call in enumerate(collectives.calls):
        if call.is_message:
            route = call.operation, call.peer
            own[place] = first + routes.setdefault(route, len(routes))
    stream[collectives.annotation] = own
    return stream


def _metadata(
    scanned: Scanned,
    collectives: HostCollectives,
    groups: Sequence[ProcessGroup | None],
    texts: list[str],
) -> tuple[NDArray[np.int32], dict[str, Ints]]:
    """Return the places of details of all rows, and the details, with those of collectives."""
    codes: dict[str, int] = {}

    def code(text: str) -> int:
        if text and text not in codes:
            codes[text] = len(texts)
            texts.append(text)
        return codes.get(text, NULL)

    rows = [
        _details(call, group, code)
        for call, group in zip(collectives.calls, groups, strict=True)
    ]
    details = {
        name: np.concatenate(
            [column[:-1], np.array([row.get(name, NULL) for row in rows], np.int64), [NULL]]
        )
        for name, column in scanned.details.items()
    }
    place = scanned.columns["detail"].copy()
    before = len(next(iter(scanned.details.values()))) - 1
    place[collectives.annotation] = before + np.arange(len(rows))
    return place, details


_SPLITS = ("In split size", "Out split size")


def _details(
    call: Call, group: ProcessGroup | None, code: Callable[[str], int]
) -> dict[str, int]:
    """Return the details of a collective as kernels of NCCL have them; texts as codes."""
    peer = member(None if group is None else group.ranks, call.peer)
    return {
        "Collective name": code(call.operation),
        "dtype": code(call.dtype),
        "In msg nelems": call.elements_in,
        "Out msg nelems": call.elements_out,
        **{key: code(text) for key, text in zip(_SPLITS, call.splits, strict=False)},
        "Group size": _size(group, call),
        "Process Group Name": code((group and group.name) or ""),
        "Process Group Description": code((group and group.description) or ""),
        "Process Group Ranks": code(_ranks_text(group)),
        "Dst Rank": peer if call.operation == "send" else NULL,
        "Rank": call.root,
        "Src Rank": peer if call.operation == "recv" else NULL,
    }


def _ranks_text(group: ProcessGroup | None) -> str:
    """Return the ranks of a group as a trace has them, or ""."""
    return json.dumps(group.ranks) if group is not None and group.ranks else ""


def _size(group: ProcessGroup | None, call: Call) -> int:
    """Return the number of ranks of a collective, or NULL."""
    if group is not None and group.members is not None:
        return group.members
    return call.size


def _copies(
    columns: Mapping[str, NDArray[Any]], rows: Ints, kind: int
) -> dict[str, NDArray[Any]]:
    """Return copies of some rows as another kind, without details."""
    copies = {name: column[rows] for name, column in columns.items()}
    copies["kind"] = np.full(len(rows), kind, columns["kind"].dtype)
    copies["detail"] = np.full(len(rows), NONE, columns["detail"].dtype)
    return copies


def _parts(
    columns: Mapping[str, NDArray[Any]],
    parts: tuple[Sequence[Ints], Sequence[Ints], Sequence[Ints]],
    kind: int,
) -> dict[str, NDArray[Any]]:
    """Return copies of rows with other times and no launch; `parts` are rows, starts, stops."""
    rows, start, stop = map(np.concatenate, parts)
    copies = _copies(columns, rows, kind)
    copies |= {"start": start, "stop": stop, "correlation": np.full(len(rows), NULL, np.int64)}
    return copies


def _compute(
    scanned: Scanned,
    collectives: HostCollectives,
    columns: Mapping[str, NDArray[Any]],
    ops: Ints,
    waits: Mapping[int, "_ThreadWaits"],
) -> dict[str, NDArray[Any]]:
    """Return rows of compute: outermost operators, without collectives and waits for them."""
    others = named_rows(scanned, "cpu_op", _NO_COMPUTE.match)
    start, stop = columns["start"], columns["stop"]
    rows, starts, stops = [ops[:0]], [ops[:0]], [ops[:0]]
    for thread in _training_threads(columns, collectives, ops):
        own = ops[columns["thread"][ops] == thread]
        inner = _outermost(columns, others[columns["thread"][others] == thread])
        begin, end = waits[thread].start, waits[thread].stop
        excluded = np.append(start[inner], begin), np.append(stop[inner], end)
        pieces = _without(columns, _outermost(columns, own), excluded)
        for parts, piece in zip((rows, starts, stops), pieces, strict=True):
            parts.append(piece)
    return _parts(columns, (rows, starts, stops), KIND["host_work"])


def _training_threads(
    columns: Mapping[str, NDArray[Any]], collectives: HostCollectives, ops: Ints
) -> list[int]:
    """Return the threads with operators, without those that carry out collectives alone."""
    threads = columns["thread"]
    enqueuing = set(threads[collectives.operator[collectives.operator >= 0]].tolist())
    library = set(collectives.thread.tolist()) - enqueuing
    return [thread for thread in np.unique(threads[ops]).tolist() if thread not in library]


def _outermost(columns: Mapping[str, NDArray[Any]], rows: Ints) -> Ints:
    """Return the rows that no other of them encloses on its thread, by thread, then start."""
    spans = columns["thread"][rows], columns["start"][rows], columns["stop"][rows]
    return rows[outermost(spans)]


def _without(
    columns: Mapping[str, NDArray[Any]], outer: Ints, excluded: tuple[Ints, Ints]
) -> tuple[Ints, Ints, Ints]:
    """Return row, start and stop of the parts of disjoint `outer` rows outside of `excluded`.

    `excluded` are starts and stops of any times.
    """
    start, stop = columns["start"], columns["stop"]
    begin, end = excluded
    times = np.concatenate([start[outer], end, stop[outer], begin])
    step = np.repeat([1, 1, -1, -1], [len(outer), len(end), len(outer), len(begin)])
    order = np.lexsort((step, times))
    times, level = times[order], np.cumsum(step[order])
    begin = np.flatnonzero((level[:-1] == 1) & (times[:-1] < times[1:]))
    place = np.searchsorted(start[outer], times[begin], side="right") - 1
    inside = (place >= 0) & (times[begin + 1] <= stop[outer[np.maximum(place, 0)]])
    begin, place = begin[inside], place[inside]
    return outer[place], times[begin], times[begin + 1]


class _ThreadWaits(NamedTuple):
    """Times in which a thread waits for collectives; `row` is an operator around or before."""

    row: Ints
    start: Ints
    stop: Ints


def _thread_waits(
    scanned: Scanned,
    columns: Mapping[str, NDArray[Any]],
    collectives: HostCollectives,
    ops: Ints,
) -> _ThreadWaits:
    """Return the waits of one thread, whose operators are `ops`.

    `Work.wait()` leaves no event. A thread waits if one of its collectives ends while no
    operator computes on it: up to that end.
    """
    ops = ops[columns["start"][ops] < columns["stop"][ops]]
    row, begin, end = _without_compute(scanned, columns, ops)
    operator = collectives.operator
    is_own = (operator >= 0) & np.isin(operator, ops)
    order = np.argsort(collectives.stop[is_own], kind="stable")
    stops, called = (column[is_own][order] for column in (collectives.stop, collectives.called))
    if not len(stops):
        return _ThreadWaits(ops[:0], ops[:0], ops[:0])
    last = np.maximum(np.searchsorted(stops, end, side="right") - 1, 0)
    waits = (stops[last] > begin) & (stops[last] <= end) & (called[last] <= begin)
    return _ThreadWaits(row[waits], begin[waits], stops[last][waits])


# Operators that call others and compute nothing themselves: those of autograd and of FSDP, and
# all without a namespace. `aten::addmm` computes between the operators inside of it.
_COMPUTES = re.compile(r"(?!autograd::|fsdp::)\w+::")


def _without_compute(
    scanned: Scanned, columns: Mapping[str, NDArray[Any]], ops: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return row, begin and end of the times in which no operator of one thread computes.

    They lie between two boundaries of operators, outside of all or in one that only calls
    others. The row is that of the first boundary.
    """
    start, stop, index = columns["start"][ops], columns["stop"][ops], np.arange(len(ops))
    times, is_start = np.append(start, stop), np.repeat([True, False], len(ops))
    # Outer operators start first and stop last; one stops before the next one starts.
    order = np.lexsort((np.append(index, -index), np.append(-stop, -start), is_start, times))
    times, is_start, owner = times[order], is_start[order], np.tile(index, 2)[order]
    # The operator around what follows a boundary: the last that started at this depth.
    depth = np.cumsum(np.where(is_start, 1, -1))
    by_depth = np.argsort(depth, kind="stable")
    begun = np.where(is_start[by_depth], np.arange(len(by_depth)), -1)
    begun = np.maximum.accumulate(begun) if len(begun) else begun
    around = np.full(len(by_depth), -1)
    around[by_depth] = np.where(begun >= 0, owner[by_depth][begun], -1)
    calls_only = scanned.are_named(ops, lambda name: not _COMPUTES.match(name))
    is_idle = np.append(calls_only, True)[around]
    is_inner = is_start[:-1] & ~is_start[1:] & (owner[:-1] == owner[1:])
    gap = np.flatnonzero(is_idle[:-1] & ~is_inner & (times[:-1] < times[1:]))
    return ops[owner[gap]], times[gap], times[gap + 1]


def _waits(
    scanned: Scanned,
    collectives: HostCollectives,
    columns: Mapping[str, NDArray[Any]],
    ops: Ints,
) -> dict[int, _ThreadWaits]:
    """Return the waits of each thread with operators; `ops` are all operators."""
    threads = columns["thread"][ops]
    return {
        thread: _thread_waits(scanned, columns, collectives, ops[threads == thread])
        for thread in np.unique(threads).tolist()
    }


def _wait_calls(
    waits: Mapping[int, _ThreadWaits],
    columns: Mapping[str, NDArray[Any]],
    texts: list[str],
) -> dict[str, NDArray[Any]]:
    """Return the waits of all threads as calls that end with a collective."""
    rows, starts, stops = zip(*waits.values(), strict=True)
    waiting = _parts(columns, (rows, starts, stops), KIND["runtime"])
    waiting["name"] = np.full(len(waiting["start"]), len(texts), columns["name"].dtype)
    texts.append(COLLECTIVE_WAIT)
    return waiting
