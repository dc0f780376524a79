"""The schedule of a replayed step, as a timeline."""

import re
from collections.abc import Sequence

import numpy as np

from fastcomm.compat.dpro.replayed import Replayed
from fastcomm.compat.dpro.result import Session
from fastcomm.timeline.events import (
    EVENTS,
    FIRST_TAG,
    INSTANCES,
    KINDS,
    Arrays,
    append,
    joined,
    merge_short,
    take,
)
from fastcomm.timeline.timeline import MOST_DETAILED, PATH, Timeline, TimelineStep
from fastcomm.trace.parallelisms import TAG, TAGS
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL

_MOST_REPLAYED = 150_000  # of all ranks and schedules of a replay
_RANK = re.compile(r"rank(\d+)$")
_TAG = re.compile(rf"({'|'.join(tag for tag in TAGS if tag != 'OTHER')})\b")


def replay_timeline(session: Session) -> Timeline | str:
    """Return the timeline of a replayed step, and of the step with the edits, if any.

    Of more than 96 ranks it has the 96 whose step is the longest. A text is the reason why
    there is no timeline.
    """
    schedules = [("replayed", session.replayed)]
    if session.changed is not None:
        schedules.append(("with the edits", session.changed))
    by_pid = session.replayed.by_pid()
    longest = sorted(by_pid, key=lambda pid: -by_pid[pid])[:MOST_DETAILED]
    pids = [pid for pid in session.replayed.replayer.pids if pid in set(longest)]
    if not pids:
        return "no rank was replayed"
    rank_of = _ranks(pids)
    names: dict[str, int] = {}
    most = _MOST_REPLAYED // (len(pids) * len(schedules))
    steps = [
        _step(label, schedule, session, rank_of, names, most) for label, schedule in schedules
    ]
    ranks = tuple(sorted(rank_of.values()))
    return Timeline(
        ranks=ranks,
        detailed=ranks,
        names=tuple(names),
        steps=tuple(steps),
        unaligned=(),
        is_host_run=False,
    )


def _ranks(pids: Sequence[str]) -> dict[str, int]:
    """Return the number of each process: that in its name, or its place."""
    numbers = [int(match[1]) if (match := _RANK.search(pid)) else -1 for pid in pids]
    if min(numbers) < 0 or len(set(numbers)) < len(pids):
        numbers = list(range(len(pids)))
    return dict(zip(pids, numbers, strict=True))


def _step(
    label: str,
    replayed: Replayed,
    session: Session,
    rank_of: dict[str, int],
    names: dict[str, int],
    most: int,
) -> TimelineStep:
    """Return one schedule with `most` events a rank; its names are added to `names`."""
    columns = _operations(replayed, rank_of, names)
    length = int(replayed.end.max(initial=0))
    pieces, resolution = list[Arrays](), 0
    for rank in sorted(rank_of.values()):
        own = take(columns, columns["rank"] == rank)
        for is_comm in (False, True):
            part = take(own, (own["op"] != NULL) == is_comm)
            merged, width = merge_short(part, most // 2, length)
            merged = append(merged, {"start": merged["start"][:0]}, EVENTS)
            pieces.append({**merged, "rank": np.full(len(merged["start"]), rank)})
            resolution = max(resolution, width)
    pid_of, pids = replayed.replayer.pid, replayed.replayer.pids
    ends = {
        rank: replayed.end[pid_of == pids.index(pid)].max(initial=0)
        for pid, rank in rank_of.items()
    }
    on_path = session.path.nodes if replayed is session.replayed else ()
    is_on_path = np.isin(columns["node"], np.array(on_path, np.int64))
    return TimelineStep(
        number=session.step,
        label=label,
        length=length,
        spans={
            "begin": np.zeros(len(rank_of), np.int64),
            "stop": np.array([ends[rank] for rank in sorted(ends)], np.int64),
        },
        events=joined(pieces, EVENTS),
        instances=joined([], INSTANCES),
        path=joined([take(columns, is_on_path)], PATH),
        bins=np.zeros((0, 16), np.uint8),
        resolution=resolution,
    )


def _operations(replayed: Replayed, rank_of: dict[str, int], names: dict[str, int]) -> Arrays:
    """Return the operations of devices and communication by start, and `node`, their number."""
    replayer = replayed.replayer
    ranks = np.array([rank_of.get(pid, NULL) for pid in replayer.pids], np.int64)[replayer.pid]
    kinds, ops, labels = [], [], []
    for name, category in zip(replayer.names, replayer.categories, strict=True):
        group, _, op = category.partition(".")
        kind = NULL
        if group == "operator":
            kind = KINDS.index("compute")
        elif group == "Comm":
            tag = _TAG.match(name.op_name or "")
            kind = FIRST_TAG + TAG[tag[1] if tag else "OTHER"]
        kinds.append(kind)
        ops.append(OP.get(op, OP["SendRecv"]) if group == "Comm" else NULL)
        labels.append(names.setdefault(name.standard, len(names)) if kind != NULL else NULL)
    start, end = (np.rint(times).astype(np.int64) for times in (replayed.start, replayed.end))
    columns = {
        "node": np.arange(len(kinds)),
        "rank": ranks,
        "kind": np.array(kinds, np.int64),
        "op": np.array(ops, np.int64),
        "name": np.array(labels, np.int64),
        "start": start,
        "duration": end - start,
        "busy": end - start,
        "count": np.ones(len(kinds), np.int64),
    }
    shown = np.flatnonzero((columns["kind"] != NULL) & (ranks != NULL) & (end > start))
    return take(columns, shown[np.argsort(start[shown], kind="stable")])
