"""Draw a critical path into its trace: mark its events, and add its edges as arrows.

The JSON text is copied in slices: the bytes of unmarked events do not change. A what-if is
drawn as a new trace, which has the events of a step before and after its edits.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from fastcomm.critical_path.result import CriticalPath, WhatIf
from fastcomm.critical_path.rules import TYPES
from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.files import aside, fast_gzip, is_local, place, refuse_inputs
from fastcomm.formats.kineto.ranks import SUFFIXES
from fastcomm.formats.stream import UnreadBytesError, blocks
from fastcomm.graph.graph import EDGE_KIND, EDGE_KINDS
from fastcomm.process import temporary_folder
from fastcomm.trace import timelines
from fastcomm.trace.columns import alike, filled, text_codes
from fastcomm.trace.run_traces import named_ranks
from fastcomm.trace.schema import KIND
from fastcomm.trace.timelines import (
    ChromeTimeline,
    Piece,
    Place,
    Slices,
    is_compressed,
    join,
    threads,
)
from fastcomm.trace.trace import Trace
from fastcomm_kernels import json_text
from fastcomm_kernels._llvm import PADDING
from fastcomm_kernels.arrays import NONE, Flags, Ints, Numbers

_ARGS = re.compile(rb'"args"\s*:\s*\{\s*(\}?)')
_DRAWN = ("dependency", "launch", "sync", "inferred")
_US = 1000  # ns
_SIDES = ("measured", "predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Options of an overlay."""

    only_critical: bool = True  # keep only events on the path, and annotations
    all_edges: bool = False  # draw edges beside the path, too; needs all events
    kinds: tuple[str, ...] | None = None  # kinds of the path's edges to draw


def write(trace: Trace, path: CriticalPath, target: Path, drawing: Drawing) -> None:
    """Write a copy of a trace with a critical path drawn into it.

    Parameters
    ----------
    trace
        The rank, with all events, read from a local or remote JSON file.
    path
        The critical path.
    target
        File to write, compressed if its name ends in ``.gz``.
    drawing
        What to draw.

    Raises
    ------
    ConfigError
        If the trace is no JSON file, or the path is not of its rank alone.
    FastcommError
        If the trace has changed since it was read, or is the target.

    """
    source = place(trace.meta.path)
    if not source.name.lower().endswith(SUFFIXES) or not trace.is_whole:
        raise ConfigError(
            f"{source}: --overlay draws into a copy of a JSON trace, and this is none; pass "
            "the trace of the PyTorch profiler"
        )
    if path.is_joined or path.about.rank != trace.meta.rank:
        raise ConfigError(
            f"{source}: a path of {named_ranks(path.ranks)} cannot be drawn into the trace of "
            f"rank {trace.meta.rank}: find the path of that rank"
        )
    if is_local(source):
        refuse_inputs(target, [source])
    with aside(target) as unfinished:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _opened(unfinished, compressed=target.name.endswith(".gz")) as file:
            for piece in redrawn(trace, path, drawing):
                file.write(piece)


def redrawn(trace: Trace, path: CriticalPath, drawing: Drawing) -> Iterator[bytes | memoryview]:
    """Yield what `write` writes, in pieces; raise `FastcommError` if the trace has changed."""
    yield from _pieces(_text(place(trace.meta.path)), trace, path, drawing)


def _opened(path: Path, *, compressed: bool) -> BinaryIO:
    """Open a file for writing, through gzip if `compressed`."""
    file: BinaryIO = (
        fast_gzip().open(path, "wb", compresslevel=1) if compressed else path.open("wb")
    )
    return file


def _text(path: Path) -> bytearray:
    """Return the decompressed text, followed by NULs, because kernels read ahead."""
    text = bytearray()
    with suppress(UnreadBytesError):  # the reader has warned about it
        for block in blocks(path):
            text += block
    text += bytes(PADDING)
    return text


def _pieces(
    text: bytearray, trace: Trace, path: CriticalPath, drawing: Drawing
) -> Iterator[bytes | memoryview]:
    """Yield the text of a trace with its path marked, in pieces to write in order.

    `text` is the JSON text of the trace, with padding. Raises `TraceFileError` if the events
    are not at the offsets at which they were read.
    """
    offset = filled(trace.events["offset"])
    order = np.argsort(offset)
    begin = offset[order]
    array = np.frombuffer(text, np.uint8)
    inside = (begin >= 0) & (begin < len(text) - PADDING)
    if not inside.all() or (array[begin] != ord("{")).any():
        raise TraceFileError(
            f"{trace.meta.path}: the events are not at the positions at which they were read: "
            "the file has changed. Run the command again"
        )
    end, behind = json_text.slices(array, begin)
    if not len(begin) or (end < 0).any():
        raise TraceFileError(f"{trace.meta.path}: no complete events to mark")
    close = json_text.list_end(array, int(behind[-1]), len(text) - PADDING)
    if close < 0:
        raise TraceFileError(f"{trace.meta.path}: the list traceEvents does not end with ]")
    critical = _critical(trace, path)[order]
    changed = critical
    if drawing.only_critical:
        kind = trace.events["kind"].to_numpy()[order]
        changed = critical | ~np.isin(kind, (KIND["annotation"], KIND["python"]))
    yield from _events(memoryview(text), close, (begin, end, behind), critical, changed)
    flows = _flows(trace, path, drawing)
    if flows:
        yield b",\n  " + ",\n  ".join(flows).encode()
    yield b"\n  "
    yield memoryview(text)[close : len(text) - PADDING]


def _critical(trace: Trace, path: CriticalPath) -> Flags:
    """Return which rows of the trace are on the path."""
    positions = np.array(path.event_ids, np.int64)
    return np.isin(trace.arguments["position"].to_numpy(), positions)


def _events(
    text: memoryview,
    close: int,
    places: tuple[Ints, Ints, Ints],
    critical: Flags,
    changed: Flags,
) -> Iterator[bytes | memoryview]:
    """Yield the text up to the last event, without a comma after it.

    Of the `changed` events, `critical` ones are marked, and the others left out.
    """
    at = 0
    for k in np.flatnonzero(changed).tolist():
        begin, end, behind = (int(place[k]) for place in places)
        if at < begin:
            yield text[at:begin]
        at = behind
        if critical[k]:
            yield _marked(bytes(text[begin:end]))
            at = end
    tail = bytes(text[at:close]).rstrip(b", \t\r\n")
    yield tail


def _marked(event: bytes) -> bytes:
    """Return the text of an event with ``"critical": 1`` added to its args."""
    match = _ARGS.search(event)
    if match is None:
        return b'{"args": {"critical": 1}, ' + event[1:].lstrip()
    if match[1]:
        return event[: match.end() - 1] + b'"critical": 1}' + event[match.end() :]
    return event[: match.end()] + b'"critical": 1, ' + event[match.end() :]


def _flows(trace: Trace, path: CriticalPath, drawing: Drawing) -> list[str]:
    """Return the JSON text of two flow events per drawn edge."""
    graph = path.graph
    on_path = np.zeros(len(graph.source), np.bool_)
    on_path[path.valid_path.edges] = True
    if drawing.all_edges and not drawing.only_critical:
        shown = (graph.kind != EDGE_KIND["launch"]) | (graph.weight != 0)
    else:
        kinds = [EDGE_KIND[_kind(name)] for name in drawing.kinds or _DRAWN]
        shown = on_path & np.isin(graph.kind, kinds)
    edges = np.flatnonzero(shown)
    ends = [_ends(trace, path, side[edges]) for side in (graph.source, graph.target)]
    rows = []
    weights, kinds_of = graph.weight[edges].tolist(), graph.kind[edges].tolist()
    for number, (weight, kind, marked, first, second) in enumerate(
        zip(weights, kinds_of, on_path[edges].tolist(), *ends, strict=True)
    ):
        args = (
            f'"cat": "critical_path", "name": "critical_path", "args": {{"weight": '
            f'{_microseconds(weight, path)}, "critical": {json.dumps(marked)}, '
            f'"type": "{TYPES[EDGE_KINDS[kind]]}"}}'
        )
        rows.append(f'{{"ph": "s", "id": {number}, {first}, {args}}}')
        rows.append(f'{{"ph": "f", "id": {number}, {second}, {args}, "bp": "e"}}')
    return rows


def _kind(name: str) -> str:
    """Return the kind of edge with a name of fastcomm or HTA."""
    for kind, text in TYPES.items():
        if name.lower() in (kind, text, text.removeprefix("critical_path_")):
            return kind
    raise FastcommError(f"unknown type of edges {name!r}: expected one of {', '.join(TYPES)}")


def _ends(trace: Trace, path: CriticalPath, nodes: Numbers) -> list[str]:
    """Return process, thread and time of the end of each arrow, within its node's event."""
    graph = path.graph
    table = path.events.describe(graph.event[nodes])
    start, stop = (table[name].to_numpy() for name in ("start", "stop"))
    on_device = table["is_device"].to_numpy(zero_copy_only=False)
    # HTA's arrows begin 1 us before the end of work, and at the end of events of the host.
    inside = 1 if path.about.rules.is_exact else np.where(on_device, _US, 0)
    time = np.where(graph.is_end[nodes], np.maximum(start, stop - inside), start)
    time -= trace.meta.base
    lanes: dict[tuple[str, str], str] = {}
    ends = []
    for process, thread, ns in zip(
        table["process"].to_pylist(), table["thread"].to_pylist(), time.tolist(), strict=True
    ):
        lane = lanes.setdefault(
            (process, thread), f'"pid": {_label(process)}, "tid": {_label(thread)}'
        )
        ends.append(f'{lane}, "ts": {_microseconds(ns, path)}')
    return ends


def _microseconds(ns: int, path: CriticalPath) -> str:
    """Return the JSON text of a time in us: exact, or for a path of HTA as a whole number."""
    if not path.about.rules.is_exact:
        return str(ns // _US)
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // _US}.{ns % _US:03d}"


def _label(text: str) -> str:
    """Return the JSON text of a process or thread, which is a number or a string."""
    return text if re.fullmatch(r"-?(0|[1-9]\d*)", text) else json.dumps(text)


def write_what_if(answer: WhatIf, target: Path) -> None:
    """Write a step before and after edits, for Perfetto and chrome://tracing.

    Each rank is two processes, as measured and as predicted, which begin at 0. Events on the
    critical path have `critical` among their arguments, and arrows between them.

    Parameters
    ----------
    answer
        The what-if, of one rank or several.
    target
        File to write, gzipped if its name ends in ``.gz``.

    Raises
    ------
    FastcommError
        If the file cannot be written.

    """
    with temporary_folder(target.parent) as folder:
        compressed = is_compressed(target)
        paths = (answer.before, answer.after)
        pieces = [
            Piece.write(folder / name, _step_text(path, name, side), compressed=compressed)
            for side, (path, name) in enumerate(zip(paths, _SIDES, strict=True))
        ]
        timeline = ChromeTimeline()
        end = timeline.end(2 * answer.before.ranks[0])
        join(timeline.begin, pieces, end, target, folder)


def _step_text(path: CriticalPath, name: str, side: int) -> Iterator[bytes]:
    """Yield the lines of a step: `side` is 0 before edits, 1 after them."""
    graph = path.graph
    first, last = graph.places
    rows = np.flatnonzero((first != NONE) & (last != NONE))
    start, stop = (graph.time[nodes[rows]] for nodes in (first, last))
    table = path.events.describe(rows.astype(np.int32))
    pid = 2 * np.array(path.ranks)[path.across.rank_of[first[rows]]] + side
    tid, titles = _event_threads(table, pid, start, stop)
    for process in np.unique(pid).tolist():
        threads = {own: titles[own] for own in np.unique(tid[pid == process]).tolist()}
        title = f"rank {process // 2}, {name}"
        yield timelines.titles(process, title, process, threads)
    nodes = path.valid_path.nodes if path.path is not None else np.empty(0, np.int32)
    heads, head = _event_heads(table, pid, tid, np.isin(rows, graph.event[nodes]))
    begin = int(graph.time.min()) if len(graph.time) else 0
    slices = Slices(heads=heads, head=head, start=start - begin, stop=stop - begin)
    yield timelines.slice_lines(slices)
    place = np.full(len(first) + 1, NONE, np.int64)
    place[rows] = np.arange(len(rows))
    at = place[graph.event[nodes]]
    # An arrow ends inside its event, else it would be bound to the next one.
    time = np.clip(graph.time[nodes], start[at], np.maximum(stop[at] - 1, start[at])) - begin
    crosses = np.flatnonzero((at[1:] != at[:-1]) & (at[1:] != NONE) & (at[:-1] != NONE))
    ends = (Place(pid=pid[at[k]], tid=tid[at[k]], time=time[k]) for k in (crosses, crosses + 1))
    if len(crosses):
        yield timelines.arrows("critical_path", 2 * np.arange(len(crosses)) + side, *ends)


def _event_heads(
    table: pa.Table, pid: Ints, tid: Ints, is_critical: Flags
) -> tuple[list[dict[str, Any]], Ints]:
    """Return what events have in common, and the index of each event in it."""
    names = ("name", "tag", "kind")
    rows, head = alike(*(text_codes(table[name]) for name in names), pid, tid, is_critical)
    common = zip(
        *(table[name].take(pa.array(rows)).to_pylist() for name in names),
        *(column[rows].tolist() for column in (pid, tid, is_critical)),
        strict=True,
    )
    return [
        {
            "name": name,
            "cat": tag or kind,
            "pid": process,
            "tid": thread,
            **({"args": {"critical": 1}} if critical else {}),
        }
        for name, tag, kind, process, thread, critical in common
    ], head


def _event_threads(
    table: pa.Table, pid: Ints, start: Ints, stop: Ints
) -> tuple[Ints, dict[int, str]]:
    """Return the thread of each event, numbered from 1 over all processes, and titles."""
    _, lane = alike(pid, text_codes(table["process"]), text_codes(table["thread"]))

    def title(row: int) -> str:
        kind = "stream" if table["is_device"][row].as_py() else "thread"
        return f"{kind} {table['thread'][row].as_py()}"

    return threads(1, lane, (start, stop), title, nests=True)
