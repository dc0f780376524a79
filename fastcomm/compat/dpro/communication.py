"""Read the communication of a dPRO trial: from Horovod, NCCL and BytePS.

Events of Horovod and NCCL are read only within the span of the rank's computation,
``[start, stop)`` in ns. BytePS has one timeline of workers and one of servers per trial.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from fastcomm.compat.dpro.uniform import (
    COARSE,
    SERVER,
    SLICE_IDS,
    Event,
    event_rows,
    ns,
    read_json,
    whole_text,
)
from fastcomm.errors import TraceFileError

ACTIVITIES = (
    "QUEUE",
    "MEMCPY_IN_FUSION_BUFFER",
    "NCCL_ALLREDUCE",
    "MEMCPY_OUT_FUSION_BUFFER",
)
_DETAIL = re.compile(r"[^.]+\.(\d+(?:\+\d+)*)\.(SEND|RECV)")
COUNTS = ("loopNum", "channelNum", "chunkNum", "sliceNum")
Span = tuple[int, int]


class _Slices(dict[tuple[Any, ...], tuple[str, str, dict[str, Any]] | None]):
    """Cache: standard name, suffix and ids of a slice by raw name and ids; None for others."""

    def __missing__(self, key: tuple[Any, ...]) -> tuple[str, str, dict[str, Any]] | None:
        match = _DETAIL.fullmatch(str(key[0]).replace("<<step>>", ""))
        slice_ = None
        if match:
            ids = dict(zip(SLICE_IDS, key[1:], strict=True))
            slice_ = f"Comm.{_sorted(match[1])}.{match[2]}", "_".join(map(str, key[1:])), ids
        self[key] = slice_
        return slice_


def detail(path: Path, pid: str, span: Span) -> list[Event]:
    """Read NCCL's slices of one rank, by start.

    Parameters
    ----------
    path
        ``comm_detail.json``. A rank that communicates only within its host has no events in it.
    pid
        Process of the rank.
    span
        Start and end of the events to read, ns.

    Raises
    ------
    TraceFileError
        If the file is not JSON, or a slice has no ids.

    """
    slices, events = _Slices(), []
    for row in sorted(event_rows(read_json(path)), key=lambda row: row["ts"]):
        start = ns(row["ts"])
        if start >= span[1]:
            break
        args = row.get("args") or {}
        slice_ = slices[(row["name"], *map(args.get, SLICE_IDS))] if start >= span[0] else None
        if slice_ is None:
            continue
        name, suffix, ids = slice_
        if None in ids.values():
            raise TraceFileError(
                f"{path}: {name} at {row['ts']}: invalid ids {ids}: expected "
                f"{', '.join(SLICE_IDS)}"
            )
        events.append(
            Event(
                name=name,
                pid=pid,
                start=start,
                dur=ns(row["dur"]),
                lane=str(row["pid"]),
                cat=str(row.get("cat", "Comm")),
                suffix=suffix,
                extra=ids,
            )
        )
    return events


def _sorted(ids: str) -> str:
    return "+".join(map(str, sorted(map(int, ids.split("+")))))


def counts(events: Sequence[Event]) -> dict[str, dict[str, int]]:
    """Return how many slices a communication has, by its name `Comm.<ids>` and by `COUNTS`.

    It is the largest of the ids in the extra arguments of its events, plus 1.
    """
    numbers: dict[str, dict[str, int]] = {}
    slices = {(event.name, event.suffix): event.extra for event in events if event.suffix}
    for (standard, _), ids in slices.items():
        most = numbers.setdefault(standard.rpartition(".")[0], dict.fromkeys(COUNTS, 1))
        for number, name in zip(COUNTS, SLICE_IDS, strict=True):
            most[number] = max(most[number], int((ids or {})[name]) + 1)
    return numbers


@dataclass(slots=True)
class _TimelineState:
    """State of the reader of a timeline of Horovod."""

    tensors: Mapping[str, int]  # id by name
    activities: tuple[str, ...]  # that are read
    process: dict[Any, str] = field(default_factory=dict)  # name by number
    open: dict[Any, list[tuple[str | None, int]]] = field(default_factory=dict)
    last_sync: int | None = None  # end, ns

    def step(self, row: Any, time: int, name: str | None, pid: str) -> list[Event]:
        """Process a begin or an end; return the event that ends, if any.

        Events with the name None are dropped, and ends without a begin are ignored.
        """
        stack = self.open.setdefault(row["pid"], [])
        if row["ph"] == "B":
            stack.append((name, time))
        elif stack:
            begun, start = stack.pop()
            if self.process[row["pid"]] == "Sync":
                self.last_sync = time
            return [] if begun is None else [_horovod_event(begun, pid, start, time)]
        return []


def timeline(
    path: Path,
    pid: str,
    span: Span,
    tensors: Mapping[str, int] | None = None,
    *,
    coarse: bool = False,
) -> tuple[list[Event], int | None]:
    """Read a rank's timeline of Horovod.

    Parameters
    ----------
    path
        ``comm.json``.
    pid
        Process of the rank.
    span
        Start and end of the events to read, ns.
    tensors
        Id of each tensor by name.
    coarse
        Read one event per tensor instead of its activities.

    Returns
    -------
    tuple
        Events by start, and the end of the last Sync in ns, or None.

    Raises
    ------
    TraceFileError
        If the file is not JSON, or a process has another name than Horovod's.

    """
    state = _TimelineState(tensors=tensors or {}, activities=COARSE if coarse else ACTIVITIES)
    events: list[Event] = []
    for row in timeline_rows(path):
        if row.get("ph") == "M":
            if row.get("name") == "process_name" and (row.get("args") or {}).get("name"):
                state.process[row["pid"]] = row["args"]["name"]
        elif row.get("ph") in {"B", "E"} and row.get("pid") in state.process:
            time = ns(row["ts"])
            if time >= span[1]:
                break
            if time < span[0]:
                continue
            begun = _begin_name(state, row, path) if row["ph"] == "B" else None
            events += state.step(row, time, begun, pid)
    return _merge_syncs(events), state.last_sync


def timeline_rows(path: Path) -> list[Any]:
    """Read the events of a JSON list; its last bracket may be missing (a crashed writer).

    Raises TraceFileError if it is no list even then.
    """
    text = whole_text(path).strip()
    for candidate in (text, text.rstrip(b",") + b"]"):
        try:
            document = orjson.loads(candidate)
        except orjson.JSONDecodeError as error:
            reason = error
        else:
            return list(event_rows(document))
    raise TraceFileError(f"{path}: {reason}")


def _begin_name(state: _TimelineState, row: Any, path: Path) -> str | None:
    """Return the standard name of the event that begins, or None for events to drop."""
    process, begun = state.process[row["pid"]], str(row.get("name"))
    if process == "Sync":
        tensor = state.tensors.get(begun, begun.rpartition(".")[2])
        is_barrier = "none" in begun or "input_barrier" in begun
        return None if is_barrier else _communication(tensor, "Sync")
    head, dot, label = process.partition(".")
    if "horovod" not in head.lower() or not dot:
        raise TraceFileError(
            f"{path}: unknown process {process!r}: expected Sync or <Horovod operation>."
            "<tensor id>"
        )
    if begun not in state.activities or "input_barrier" in process:
        return None
    tensor = state.tensors.get(label, label.partition(".")[0].partition("_")[0])
    return _communication(tensor, begun)


def _communication(tensor: str | int, sub_op: str) -> str | None:
    """Return the standard name of a tensor's communication; None unless it is a gradient."""
    return f"Comm.{tensor}.{sub_op}" if str(tensor).isdecimal() else None


def _horovod_event(name: str, pid: str, start: int, stop: int) -> Event:
    """Return an event of Horovod's communication; `start` and `stop` are in ns."""
    return Event(
        name=name,
        pid=pid,
        start=start,
        dur=stop - start,
        lane="Comm",
        cat="Comm",
        extra={"input0": None},
    )


def _merge_syncs(events: list[Event]) -> list[Event]:
    """Merge Syncs with the same start into one Sync of all their tensors; sort by start."""
    syncs: dict[int, list[Event]] = {}
    for event in events:
        if event.name.endswith(".Sync"):
            syncs.setdefault(event.start, []).append(event)
    merged = [event for event in events if not event.name.endswith(".Sync")]
    for start, group in syncs.items():
        ids = "+".join(event.name.split(".")[1] for event in group)
        name = f"Comm.{_sorted(ids)}.Sync" if len(group) > 1 else group[0].name
        merged.append(_horovod_event(name, group[0].pid, start, start + group[0].dur))
    return sorted(merged, key=lambda event: event.start)


COMM, SERVERS = "comm_timeline.json", "server_timeline.json"
FIRST, STEPS = 10, 10  # the steps that BytePS's operations are read of
_LINK = re.compile(r"((worker|server)_\d+) *-> *((?:worker|server)_\d+)")
_THREAD = re.compile(r"(server_\d+)_t(\d+)")
_DONE = re.compile(r"(.+?)(?:~PART(\d+))?\.([A-Z_]+)")
# By how much the number of operations of a link may differ from that of most links.
_SPREAD = {"PUSH": 2, "PULL": 1}


def byteps_events(
    folder: Path, ids: Mapping[str, int], first: int = FIRST, steps: int = STEPS
) -> list[Event]:
    """Read pushes, pulls and operations of servers in a window of steps.

    The files have begins and ends by process: "worker_0 -> server_1" with ``<tensor>.PUSH`` and
    ``.PULL``, "server_1_t0" with ``<tensor>.COPY_FIRST``, ``.SUM`` and ``.COPY_MERGED``. The
    name of a part of a tensor ends with ``~PART<i>``. A link has one operation per step, and
    one push before, which sets the tensor up.

    Parameters
    ----------
    folder
        Has ``comm_timeline.json``, and perhaps ``server_timeline.json``.
    ids
        Id of each tensor by name.
    first
        First step to read; 0 in traces of fewer than `first` + `steps` steps.
    steps
        Number of steps to read.

    Raises
    ------
    TraceFileError
        If a file is not JSON, or an operation has another name.

    """
    comm = list(_read_operations(folder / COMM, ids))
    most = Counter(_operation_counts(comm, "PULL").values())
    usual = most.most_common(1)[0][0] if most else 0
    begin = first if usual >= first + steps else 0
    path = folder / SERVERS
    server = list(_read_operations(path, ids)) if path.exists() else []
    return [*_window(comm, begin, steps), *_window(_numbered(server), begin, steps)]


def _read_operations(path: Path, ids: Mapping[str, int]) -> Iterator[Event]:
    """Yield the operations of gradients, by end."""
    process: dict[Any, str] = {}
    open_: dict[Any, list[tuple[str, int]]] = {}
    for row in timeline_rows(path):
        pid = row.get("pid")
        if row.get("ph") == "M" and row.get("name") == "process_name":
            process[pid] = str((row.get("args") or {}).get("name", ""))
        elif row.get("ph") == "B":
            open_.setdefault(pid, []).append((str(row["name"]), ns(row["ts"])))
        elif row.get("ph") == "E" and open_.get(pid):
            name, start = open_[pid].pop()
            if event := _byteps_event(process.get(pid, ""), name, ids, path):
                yield replace(event, start=start, dur=ns(row["ts"]) - start)


def _byteps_event(process: str, text: str, ids: Mapping[str, int], path: Path) -> Event | None:
    """Return an operation without its times; None unless its tensor is a gradient."""
    done = _DONE.fullmatch(text)
    link, thread = _LINK.fullmatch(process), _THREAD.fullmatch(process)
    sub_op = done[3] if done else ""
    if link and sub_op in _SPREAD:
        sub_op += "_REQ" if link[2] == "worker" else "_RES"
        pid, suffix = f"{link[1]}::{link[3]}", f"{link[1]}::{link[3]}::"
    elif thread and sub_op in SERVER:
        pid, suffix = process, f"server_t{thread[2]}::~PART"
    else:
        raise TraceFileError(
            f"{path}: unknown operation {text!r} of process {process!r}: expected "
            '<tensor>.PUSH or .PULL of "worker_0 -> server_1", or '
            f'{", ".join(SERVER)} of "server_1_t0"'
        )
    tensor = str(ids.get(done[1], done[1].rpartition(".")[2])) if done else ""
    if not tensor.isdecimal() or not done:
        return None
    return Event(
        name=f"Comm.{tensor}.{sub_op}",
        pid=pid,
        start=0,
        dur=0,
        lane=pid,
        cat="Comm" if link else "ServerOp",
        suffix=suffix + (done[2] or "0"),
    )


def _numbered(events_: list[Event]) -> list[Event]:
    """Add a number to the suffix of each sum of a tensor, counted from its COPY_FIRST."""
    numbered, sums = [], Counter[tuple[str, str]]()
    for event in events_:
        key = event.name.rpartition(".")[0], (event.suffix or "").rpartition("~")[2]
        if event.name.endswith(".COPY_FIRST"):
            sums[key] = 0
        if event.name.endswith(".SUM"):
            thread, _, part = (event.suffix or "").partition("::")
            numbered.append(replace(event, suffix=f"{thread}::{sums[key]}::{part}"))
            sums[key] += 1
        else:
            numbered.append(event)
    return numbered


def _operation_key(event: Event) -> tuple[str, str, str | None]:
    return event.pid, event.name, event.suffix


def _operation_counts(events_: list[Event], kind: str) -> Counter[tuple[str, str, str | None]]:
    """Count the operations of a kind, PUSH or PULL, by link, name and suffix."""
    return Counter(_operation_key(event) for event in events_ if f".{kind}_" in event.name)


def _window(events_: list[Event], first: int, steps: int) -> Iterator[Event]:
    """Yield the operations of `steps` steps, with their steps.

    Links with an unusual number of operations are left out.
    """
    unusual = set()
    for kind, spread in _SPREAD.items():
        counts = _operation_counts(events_, kind)
        usual = Counter(counts.values()).most_common(1)
        unusual |= {key for key, n in counts.items() if abs(n - usual[0][0]) > spread}
    count: Counter[tuple[str, str, str | None]] = Counter()
    for event in events_:
        key = _operation_key(event)
        step = count[key] - first - int(".PUSH_" in event.name)
        count[key] += 1
        if key not in unusual and 0 <= step < steps:
            yield replace(event, step=step)
