"""Communication of one rank: Horovod's timeline and the slices that NCCL sends and receives.

Only events within the span of the rank's computation are read: `[start, stop)`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro.names import COARSE
from fastcomm.readers.dpro.uniform import Event, ns, read_json, whole_text

ACTIVITIES = (
    "QUEUE",
    "MEMCPY_IN_FUSION_BUFFER",
    "NCCL_ALLREDUCE",
    "MEMCPY_OUT_FUSION_BUFFER",
)
_DETAIL = re.compile(r"[^.]+\.(\d+(?:\+\d+)*)\.(SEND|RECV)")
_IDS = ("loopId", "channelId", "chunkId", "sliceId")
_NUMS = ("loopNum", "channelNum", "chunkNum", "sliceNum")

Span = tuple[int, int]


class _Slices(dict[tuple[Any, ...], tuple[str, str, dict[str, Any]] | None]):
    """Standard name, suffix and ids by raw name and ids; None of what is no slice."""

    def __missing__(self, key: tuple[Any, ...]) -> tuple[str, str, dict[str, Any]] | None:
        match = _DETAIL.fullmatch(str(key[0]).replace("<<step>>", ""))
        found = None
        if match:
            ids = dict(zip(_IDS, key[1:], strict=True))
            found = f"Comm.{_sorted(match[1])}.{match[2]}", "_".join(map(str, key[1:])), ids
        self[key] = found
        return found


def detail(path: Path, pid: str, span: Span) -> list[Event]:
    """Slices of NCCL; a file without traceEvents has none: the rank's hops stay in its host."""
    said = read_json(path)
    rows = said.get("traceEvents", []) if isinstance(said, dict) else said
    slices, found = _Slices(), []
    for row in sorted(rows, key=lambda row: row["ts"]):
        start = ns(row["ts"])
        if start >= span[1]:
            break
        args = row.get("args") or {}
        slice_ = slices[(row["name"], *map(args.get, _IDS))] if start >= span[0] else None
        if slice_ is None:
            continue
        name, suffix, ids = slice_
        if None in ids.values():
            raise TraceFileError(f"{path}: {name} at {row['ts']}: found {ids}, wanted {_IDS}")
        found.append(
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
    return found


def _sorted(ids: str) -> str:
    return "+".join(map(str, sorted(map(int, ids.split("+")))))


def counts(events: Sequence[Event]) -> dict[str, dict[str, int]]:
    """loopNum, channelNum, chunkNum and sliceNum of each `Comm.<ids>`: 1 + the largest id."""
    found: dict[str, dict[str, int]] = {}
    slices = {(each.name, each.suffix): each.extra for each in events if each.suffix}
    for (standard, _), ids in slices.items():
        most = found.setdefault(standard.rpartition(".")[0], dict.fromkeys(_NUMS, 1))
        for number, name in zip(_NUMS, _IDS, strict=True):
            most[number] = max(most[number], int((ids or {})[name]) + 1)
    return found


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
            return [] if begun is None else [_event(begun, pid, start, time)]
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
    found: list[Event] = []
    for row in rows(path):
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
            found += state.step(row, time, begun, pid)
    return _joined(found), state.last_sync


def rows(path: Path) -> list[Any]:
    """The events of a list whose writer may have died before the last bracket."""
    text = whole_text(path).strip()
    for whole in (text, text.rstrip(b",") + b"]"):
        try:
            said = orjson.loads(whole)
        except orjson.JSONDecodeError as error:
            reason = error
        else:
            return list(said.get("traceEvents", []) if isinstance(said, dict) else said)
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


def _event(name: str, pid: str, start: int, stop: int) -> Event:
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
    found = [each for each in events if not each.name.endswith(".Sync")]
    for start, same in syncs.items():
        ids = "+".join(each.name.split(".")[1] for each in same)
        name = f"Comm.{_sorted(ids)}.Sync" if len(same) > 1 else same[0].name
        found.append(_event(name, same[0].pid, start, start + same[0].dur))
    return sorted(found, key=lambda each: each.start)
