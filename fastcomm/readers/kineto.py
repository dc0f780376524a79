"""Kineto traces of the PyTorch profiler: one file, one rank, one `Trace`."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.readers.blocks import CutShortError, blocks
from fastcomm.readers.chrome import Scanned, scan_file
from fastcomm.readers.collectives import Collectives, find_collectives, known_groups
from fastcomm.readers.events import Events
from fastcomm.readers.kineto_layout import METRICS
from fastcomm.readers.patterns import Pattern
from fastcomm.readers.ranks import rank_from_name
from fastcomm.trace.iterations import (
    IterationRule,
    Iterations,
    Marks,
    find_iterations,
    on_device_clock,
)
from fastcomm.trace.schema import KIND, OPS, TAG, TAG_SOURCES
from fastcomm.trace.tags import Behaviour, Group, Tagged, TagRules, tag_group
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.json_numbers import NULL
from fastcomm_kernels.json_scan import WORD

Ints = NDArray[np.int64]

_BEFORE_JSON = b"\xef\xbb\xbf \t\r\n"
_DEVICE_KINDS = ("kernel", "memcpy", "memset")
_SOURCE = {name: number for number, name in enumerate(TAG_SOURCES)}
# A relative time is less than the three months between two base times; since 1970 is more.
_MOST_DEVICES = 1 << 16
_ABSOLUTE = 1_600_000_000_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What the user said about reading."""

    allow_truncated: bool = False
    iterations: IterationRule = field(default_factory=IterationRule)
    tags: TagRules = field(default_factory=TagRules)
    patterns: tuple[Pattern, ...] = ()


def read(path: Path, options: ReadOptions, rank: int | None = None) -> Trace:
    """Read the trace of one rank; `rank` is what the run takes it for, if it knows.

    Raises `TraceFileError` where the file is no trace, or says it is of another rank.
    """
    scanned = scan_file(path, METRICS, allow_truncated=options.allow_truncated)
    info = scanned.envelope.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    own, world = (info[key] if _is_count(info.get(key)) else None for key in _RANK_KEYS)
    if own is not None and rank is not None and own != rank:
        raise TraceFileError(f"{path}: distributedInfo says rank {own}, taken for rank {rank}")
    events, lanes, clock, notes = _events(scanned)
    found = find_collectives(events, known_groups(info), options.patterns)
    iterations = _iterations(events, found, options.iterations, path)
    tagged, tags = _tags(found, options.tags, len(iterations.number))
    warnings = (*scanned.warnings, *notes, *iterations.warnings, *_notes(events, found))
    return Trace.of(
        events=_event_table(events),
        lanes=lanes,
        comm=_comm_table(events, found, tags),
        groups=_group_table(found.groups, tagged),
        iterations=pa.table(
            {name: getattr(iterations, name) for name in ("number", "start", "stop")}
        ),
        meta=Meta(
            rank=own if own is not None else rank or 0,
            world_size=world,
            format="kineto",
            path=str(path),
            clock=clock,
            found_by=iterations.found_by,
            warnings=warnings,
        ),
    )


@dataclass(frozen=True, slots=True)
class Peek:
    """What the beginning of a file tells without reading on."""

    is_trace: bool
    rank: int | None = None
    world_size: int | None = None


def peek(path: Path) -> Peek:
    """Look at the first block: whether it is a trace, and of which rank if it says so there.

    A file that is no JSON is one if its name has a rank: reading it says what is wrong.
    """
    try:
        head = next(blocks(path), b"")
    except (CutShortError, TraceFileError):
        head = b""
    if head.lstrip(_BEFORE_JSON)[:1] not in (b"{", b"["):
        return Peek(is_trace=rank_from_name(path.name) is not None)
    at = head.find(b'"traceEvents"')
    is_trace = at >= 0 or head.lstrip()[:1] == b"[" or b'"schemaVersion"' in head
    info = _info(head[: max(at, 0)])
    return Peek(
        is_trace, *(info[key] if _is_count(info.get(key)) else None for key in _RANK_KEYS)
    )


_RANK_KEYS = ("rank", "world_size")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _info(head: bytes) -> dict[str, Any]:
    """The `distributedInfo` in the text before the events, if it is whole."""
    found = re.search(rb'"distributedInfo"\s*:\s*(?=\{)', head)
    try:
        text = head[found.end() :].decode(errors="replace") if found else "{}"
        return dict(json.JSONDecoder().raw_decode(text)[0])
    except ValueError:
        return {}


def _events(scanned: Scanned) -> tuple[Events, pa.Table, str | None, list[str]]:
    """The events sorted by start on the absolute clock, their lanes, the clock, what is odd."""
    columns = scanned.columns
    start = columns["start"]
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
    lane, lanes = _lanes(columns, scanned.texts)
    base, clock, notes = _base(columns["start"], scanned.envelope)
    columns["start"] += base
    columns["stop"] += base
    events = Events(columns=columns, details=scanned.details, texts=scanned.texts, lane=lane)
    return events, lanes, clock, notes


def _base(start: Ints, envelope: Mapping[str, Any]) -> tuple[int, str | None, list[str]]:
    """What to add to the times, the clock they are then on, and what is odd about it."""
    base = envelope.get("baseTimeNanoseconds")
    if isinstance(base, int):
        return base, "unix", []
    if not len(start) or int(start[-1]) >= _ABSOLUTE:
        return 0, "unix", []
    return 0, None, ["no baseTimeNanoseconds: the absolute time of the events is unknown"]


def _lanes(columns: dict[str, Any], texts: Sequence[str]) -> tuple[NDArray[np.int32], pa.Table]:
    """The lane of each event, and the lanes in the order of their first event."""
    is_device = np.isin(columns["kind"], [KIND[kind] for kind in _DEVICE_KINDS])
    process, thread = columns.pop("process"), columns.pop("thread")
    # A hash of the three finds the lanes; that it does not lie is checked.
    key = (process * 1_000_003) ^ (thread * 2 + is_device)
    encoded = pa.array(key).dictionary_encode()
    lane = encoded.indices.to_numpy()
    first = np.zeros(len(encoded.dictionary), np.int64)
    first[lane[::-1]] = np.arange(len(lane))[::-1]
    if not ((process[first][lane] == process) & (thread[first][lane] == thread)).all():
        parts = np.stack([process, thread, is_device.astype(np.int64)], axis=1)
        _, first, lane = np.unique(parts, axis=0, return_index=True, return_inverse=True)
        lane = lane.reshape(-1)

    device = columns["device"][first]
    device = np.where(is_device[first] & (device == NULL), process[first], device)
    no_device = ~is_device[first] | (device < 0) | (device > _MOST_DEVICES)
    lanes = pa.table(
        {
            "process": _lane_words(process[first], texts),
            "thread": _lane_words(thread[first], texts),
            "device": pa.array(device, mask=no_device),
            "is_device": is_device[first],
        }
    )
    return lane.astype(np.int32), lanes


def _lane_words(column: Ints, texts: Sequence[str]) -> list[str]:
    """Processes or threads in words: a number, the word that stood for it, or nothing."""
    return [
        "" if value == NULL else texts[WORD - value] if value <= WORD else str(value)
        for value in column.tolist()
    ]


def _iterations(
    events: Events, found: Collectives, rule: IterationRule, path: Path
) -> Iterations:
    columns = events.columns
    start, stop = columns["start"], columns["stop"]
    if not len(start):
        raise TraceFileError(f"{path}: no device work, launch or annotation in the whole trace")
    rows = events.rows("annotation")
    key = found.op.astype(np.int64) * 1_000_003 + found.group
    key = key * 1_000_003 + np.where(found.sizes.payload == NULL, -1, found.sizes.payload)
    marks = Marks(
        names=events.names(rows),
        start=start[rows],
        stop=stop[rows],
        span=(int(start[0]), int(stop.max())),
        comm_start=start[found.row],
        comm_key=key,
    )
    try:
        iterations = find_iterations(marks, rule)
        if rule.clock != "device":
            return iterations
        work = events.rows(*_DEVICE_KINDS)
        launch = events.launch_of(work)
        work, launch = work[launch >= 0], launch[launch >= 0]
        return on_device_clock(iterations, start[launch], start[work], stop[work])
    except ConfigError as error:
        raise TraceFileError(f"{path}: {error}") from error


def _tags(
    found: Collectives, rules: TagRules, iterations: int
) -> tuple[list[Tagged], NDArray[np.int8]]:
    """The tag of each group; and, for each event, tag and source.

    Where the ranks fit several tags, each operation is asked for alone: one rank set may serve
    experts by its all-to-alls and gradients by its all-reduces.
    """
    by_group: dict[int, Counter[int]] = {}
    for group, op in zip(found.group.tolist(), found.op.tolist(), strict=True):
        by_group.setdefault(group, Counter())[op] += 1
    tagged, answers = [], {}
    for place, group in enumerate(found.groups):
        ops = by_group.get(place, Counter())
        whole = _ask(group, dict(ops), rules, iterations)
        tagged.append(whole)
        for op, count in ops.items():
            alone = _ask(group, {op: count}, rules, iterations) if whole.candidates else whole
            answers[place, op] = alone
    tags = np.empty((len(found.row), 2), np.int8)
    for row, (group, op, name) in enumerate(
        zip(found.group.tolist(), found.op.tolist(), found.name.tolist(), strict=True)
    ):
        said = answers.get((group, op), _UNKNOWN)
        if said.source == "none" and (by_name := found.named[name].tag):
            said = Tagged(tag=by_name, source="heuristic")
        tags[row] = TAG[said.tag], _SOURCE[said.source]
    return tagged, tags


_UNKNOWN = Tagged(tag="OTHER", source="none")


def _ask(group: Group, ops: Mapping[int, int], rules: TagRules, iterations: int) -> Tagged:
    counts = {OPS[op]: count for op, count in ops.items()}
    return tag_group(group, Behaviour(counts=counts, iterations=iterations), rules)


def _notes(events: Events, found: Collectives) -> list[str]:
    """What a user should know before trusting the numbers."""
    notes = []
    if not len(found.row):
        notes.append("no communication on the device" + _host_only(events))
    elif unknown := int((found.sizes.payload == NULL).sum()):
        notes.append(
            f"{unknown} of {len(found.row)} communication events have no known size "
            "(no metadata on the kernel, none on its host call): bandwidth and volume omit them"
        )
    if fused := sum(found.named[name].fused for name in found.name.tolist()):
        notes.append(f"{fused} communication kernels are fused with other work")
    return notes


def _host_only(events: Events) -> str:
    """How many collectives the host shows that run on the host."""
    gloo = events.rows_named(lambda name: name.startswith("gloo:"), "annotation", "cpu_op")
    if not len(gloo):
        return ""
    return (
        f": {len(gloo)} gloo: annotations show collectives of the host, which are not measured"
    )


def _event_table(events: Events) -> pa.Table:
    columns = events.columns
    return pa.table(
        {
            "start": columns["start"],
            "stop": columns["stop"],
            "kind": columns["kind"],
            "name": pa.DictionaryArray.from_arrays(
                pa.array(columns["name"]), pa.array(events.texts, pa.string()), safe=False
            ),
            "lane": events.lane,
            "correlation": _nullable(columns["correlation"]),
            "offset": columns["offset"],
        }
    )


def _comm_table(events: Events, found: Collectives, tags: NDArray[np.int8]) -> pa.Table:
    columns, row = events.columns, found.row
    return pa.table(
        {
            "op": found.op,
            "start": columns["start"][row],
            "stop": columns["stop"][row],
            "stream": _nullable(columns["stream"][row]),
            "group": pa.array(found.group, mask=found.group < 0),
            "seq": _nullable(found.seq),
            "tag": np.ascontiguousarray(tags[:, 0]),
            "tag_source": np.ascontiguousarray(tags[:, 1]),
            "msg_bytes": _nullable(found.sizes.msg),
            "payload_bytes": _nullable(found.sizes.payload),
            "bus_bytes": _nullable(found.sizes.bus),
            "event": row.astype(np.int32),
        }
    )


def _nullable(column: Ints) -> pa.Array:
    return pa.array(column, mask=column == NULL)


def _group_table(groups: Sequence[Group], tagged: Sequence[Tagged]) -> pa.Table:
    return pa.table(
        {
            "name": pa.array([group.name for group in groups], pa.string()),
            "description": pa.array([group.description for group in groups], pa.string()),
            "ranks": pa.array([group.ranks for group in groups], pa.list_(pa.int32())),
            "size": pa.array([group.members for group in groups], pa.int32()),
            "tag": pa.array([TAG[each.tag] for each in tagged], pa.int8()),
            "tag_source": pa.array([_SOURCE[each.source] for each in tagged], pa.int8()),
            "candidates": pa.array(
                [[TAG[tag] for tag in each.candidates] for each in tagged], pa.list_(pa.int8())
            ),
        }
    )
