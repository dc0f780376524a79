"""Communication of a dPRO trial: Horovod's timeline, NCCL's slices, and BytePS's servers.

Of Horovod and NCCL only events within the span of the rank's computation are read:
`[start, stop)`. BytePS has one timeline of workers and one of servers for the whole trial.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro import COARSE, SERVER, Event
from fastcomm.readers.dpro.json_files import SLICE_IDS, event_rows, ns, read_json, whole_text

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
    """Standard name, suffix and ids by raw name and ids; None of what is no slice."""

    def __missing__(self, key: tuple[Any, ...]) -> tuple[str, str, dict[str, Any]] | None:
        match = _DETAIL.fullmatch(str(key[0]).replace("<<step>>", ""))
        slice_ = None
        if match:
            ids = dict(zip(SLICE_IDS, key[1:], strict=True))
            slice_ = f"Comm.{_sorted(match[1])}.{match[2]}", "_".join(map(str, key[1:])), ids
        self[key] = slice_
        return slice_


def detail(path: Path, pid: str, span: Span) -> list[Event]:
    """Slices of NCCL; a file without traceEvents has none: the rank's hops stay in its host."""
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
                f"{path}: {name} at {row['ts']}: found {ids}, wanted {SLICE_IDS}"
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
    """loopNum, channelNum, chunkNum and sliceNum of each `Comm.<ids>`: 1 + the largest id."""
    numbers: dict[str, dict[str, int]] = {}
    slices = {(each.name, each.suffix): each.extra for each in events if each.suffix}
    for (standard, _), ids in slices.items():
        most = numbers.setdefault(standard.rpartition(".")[0], dict.fromkeys(COUNTS, 1))
        for number, name in zip(COUNTS, SLICE_IDS, strict=True):
            most[number] = max(most[number], int((ids or {})[name]) + 1)
    return numbers


@dataclass(slots=True)
class _Reading:
    """Where the reader of a timeline stands."""

    tensors: Mapping[str, int]
    activities: tuple[str, ...]
    process: dict[Any, str] = field(default_factory=dict)
    open: dict[Any, list[tuple[str | None, int]]] = field(default_factory=dict)
    last_sync: int | None = None

    def step(self, row: Any, time: int, name: str | None, pid: str) -> list[Event]:
        """Open what begins, and give what ends; an end without a begin is nothing."""
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
    """Horovod's events in time order, and the end of the last Sync (None without one).

    `tensors` has ids by name. `coarse` takes one event a tensor instead of its activities.
    """
    state = _Reading(tensors=tensors or {}, activities=COARSE if coarse else ACTIVITIES)
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
            begun = _named(state, row, path) if row["ph"] == "B" else None
            events += state.step(row, time, begun, pid)
    return _joined(events), state.last_sync


def timeline_rows(path: Path) -> list[Any]:
    """The events of a list whose writer may have died before the last bracket."""
    text = whole_text(path).strip()
    for whole in (text, text.rstrip(b",") + b"]"):
        try:
            document = orjson.loads(whole)
        except orjson.JSONDecodeError as error:
            reason = error
        else:
            return list(event_rows(document))
    raise TraceFileError(f"{path}: {reason}")


def _named(state: _Reading, row: Any, path: Path) -> str | None:
    """The standard name of what begins; None of what is dropped."""
    process, begun = state.process[row["pid"]], str(row.get("name"))
    if process == "Sync":
        tensor = state.tensors.get(begun, begun.rpartition(".")[2])
        none = "none" in begun or "input_barrier" in begun
        return None if none else _communication(tensor, "Sync")
    head, dot, rest = process.partition(".")
    if "horovod" not in head.lower() or not dot:
        raise TraceFileError(
            f"{path}: process {process!r}: wanted Sync or <Horovod operation>.<tensor id>"
        )
    if begun not in state.activities or "input_barrier" in process:
        return None
    tensor = state.tensors.get(rest, rest.partition(".")[0].partition("_")[0])
    return _communication(tensor, begun)


def _communication(tensor: str | int, sub_op: str) -> str | None:
    """The name of what is done with a tensor; None of what is no gradient."""
    return f"Comm.{tensor}.{sub_op}" if str(tensor).isdecimal() else None


def _horovod_event(name: str, pid: str, start: int, stop: int) -> Event:
    return Event(
        name=name,
        pid=pid,
        start=start,
        dur=stop - start,
        lane="Comm",
        cat="Comm",
        extra={"input0": None},
    )


def _joined(events: list[Event]) -> list[Event]:
    """Syncs of one start are one Sync of all their tensors; then in time order."""
    syncs: dict[int, list[Event]] = {}
    for each in events:
        if each.name.endswith(".Sync"):
            syncs.setdefault(each.start, []).append(each)
    merged = [each for each in events if not each.name.endswith(".Sync")]
    for start, same in syncs.items():
        ids = "+".join(each.name.split(".")[1] for each in same)
        name = f"Comm.{_sorted(ids)}.Sync" if len(same) > 1 else same[0].name
        merged.append(_horovod_event(name, same[0].pid, start, start + same[0].dur))
    return sorted(merged, key=lambda each: each.start)


COMM, SERVERS = "comm_timeline.json", "server_timeline.json"
FIRST, STEPS = 10, 10
_LINK = re.compile(r"((worker|server)_\d+) *-> *((?:worker|server)_\d+)")
_THREAD = re.compile(r"(server_\d+)_t(\d+)")
_DONE = re.compile(r"(.+?)(?:~PART(\d+))?\.([A-Z_]+)")
# By how much a link may have more or fewer of an operation than most have.
_SPREAD = {"PUSH": 2, "PULL": 1}


def byteps_events(
    folder: Path, ids: Mapping[str, int], first: int = FIRST, steps: int = STEPS
) -> list[Event]:
    """Return pushes, pulls and operations of servers in a window of steps.

    `comm_timeline.json` and `server_timeline.json` have begins and ends by process:
    "worker_0 -> server_1" with `<tensor>.PUSH` and `.PULL`, "server_1_t0" with
    `<tensor>.COPY_FIRST`, `.SUM` and `.COPY_MERGED`; a part of a tensor has `~PART<i>` behind
    its name. `ids` is by tensor name. Of each link the operations count from the 10th on: one a
    step, and one push before the first, which sets the tensor up. A trace of fewer steps
    counts from its begin.
    """
    comm = list(_read_operations(folder / COMM, ids))
    most = Counter(_operation_counts(comm, "PULL").values())
    usual = most.most_common(1)[0][0] if most else 0
    begin = first if usual >= first + steps else 0
    path = folder / SERVERS
    server = list(_read_operations(path, ids)) if path.exists() else []
    return [*_window(comm, begin, steps), *_window(_numbered(server), begin, steps)]


def _read_operations(path: Path, ids: Mapping[str, int]) -> Iterator[Event]:
    """All operations of known tensors, in the order of their ends."""
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
    """One operation without its times; None of a tensor that is no gradient."""
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
            f"{path}: {text!r} of process {process!r}: wanted <tensor>.PUSH or .PULL of "
            '"worker_0 -> server_1", or an operation of "server_1_t0": ' + ", ".join(SERVER)
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
    """Sums of one tensor by their place behind the copy that begins them."""
    numbered, sums = [], Counter[tuple[str, str]]()
    for each in events_:
        key = each.name.rpartition(".")[0], (each.suffix or "").rpartition("~")[2]
        if each.name.endswith(".COPY_FIRST"):
            sums[key] = 0
        if each.name.endswith(".SUM"):
            thread, _, part = (each.suffix or "").partition("::")
            numbered.append(replace(each, suffix=f"{thread}::{sums[key]}::{part}"))
            sums[key] += 1
        else:
            numbered.append(each)
    return numbered


def _operation_key(event: Event) -> tuple[str, str, str | None]:
    return event.pid, event.name, event.suffix


def _operation_counts(events_: list[Event], kind: str) -> Counter[tuple[str, str, str | None]]:
    """How often each link did each operation of a kind."""
    return Counter(_operation_key(each) for each in events_ if f".{kind}_" in each.name)


def _window(events_: list[Event], first: int, steps: int) -> Iterator[Event]:
    """The operations of `steps` steps, numbered; links that are far from most do not count."""
    odd = set()
    for kind, spread in _SPREAD.items():
        counts = _operation_counts(events_, kind)
        usual = Counter(counts.values()).most_common(1)
        odd |= {key for key, n in counts.items() if abs(n - usual[0][0]) > spread}
    seen: Counter[tuple[str, str, str | None]] = Counter()
    for each in events_:
        key = _operation_key(each)
        step = seen[key] - first - int(".PUSH_" in each.name)
        seen[key] += 1
        if key not in odd and 0 <= step < steps:
            yield replace(each, step=step)
