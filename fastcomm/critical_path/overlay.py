"""Draw a critical path into its trace: mark its events, and add its edges as arrows.

The JSON text is copied in slices: the bytes of unmarked events do not change.
"""

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fastcomm.critical_path import CriticalPath
from fastcomm.critical_path.rules import TYPES
from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.files import aside, is_local, place, refuse_inputs
from fastcomm.graph import EDGE_KIND, EDGE_KINDS
from fastcomm.readers.kineto.head import SUFFIXES
from fastcomm.readers.kineto.stream import UnreadBytesError, blocks
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import json_text
from fastcomm_kernels._llvm import PADDING
from fastcomm_kernels.arrays import Flags, Ints
from fastcomm_kernels.graph import Numbers

_engine: Any
try:
    from isal import igzip as _engine
except ImportError:  # no wheel for this platform
    _engine = gzip

_ARGS = re.compile(rb'"args"\s*:\s*\{\s*(\}?)')
_DRAWN = ("dependency", "launch", "sync", "inferred")
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Options of an overlay."""

    only_critical: bool = True  # keep only events on the path, and annotations
    all_edges: bool = False  # draw edges beside the path, too; needs all events
    kinds: tuple[str, ...] | None = None  # kinds of the path's edges to draw

    def inset_ns(self, on_device: Flags) -> Ints:
        """Return for each event how many ns before its end an arrow begins, here 1."""
        return np.ones(len(on_device), np.int64)

    def microseconds(self, ns: int) -> str:
        """Return the JSON text of a time in us, exact to the nanosecond."""
        sign, ns = ("-", -ns) if ns < 0 else ("", ns)
        return f"{sign}{ns // 1000}.{ns % 1000:03d}"


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
        If the trace is no JSON file.
    FastcommError
        If the trace has changed since it was read, or is the target.

    """
    source = place(trace.meta.path)
    if not source.name.lower().endswith(SUFFIXES) or trace.args is None:
        raise ConfigError(
            f"{source}: --overlay draws into a copy of a JSON trace, and this is none; pass "
            "the trace of the PyTorch profiler"
        )
    if is_local(source):
        refuse_inputs(target, [source])
    with aside(target) as unfinished:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _opened(unfinished, compressed=target.name.endswith(".gz")) as file:
            for piece in _pieces(_text(source), trace, path, drawing):
                file.write(piece)


def _opened(path: Path, *, compressed: bool) -> BinaryIO:
    """Open a file for writing, through gzip if `compressed`."""
    file: BinaryIO = (
        _engine.open(path, "wb", compresslevel=1) if compressed else path.open("wb")
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
    assert trace.args is not None
    return np.isin(trace.args["position"].to_numpy(), positions)


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
    ends = [_ends(trace, path, side[edges], drawing) for side in (graph.source, graph.target)]
    rows = []
    weights, kinds_of = graph.weight[edges].tolist(), graph.kind[edges].tolist()
    for number, (weight, kind, marked, first, second) in enumerate(
        zip(weights, kinds_of, on_path[edges].tolist(), *ends, strict=True)
    ):
        args = (
            f'"cat": "critical_path", "name": "critical_path", "args": {{"weight": '
            f'{drawing.microseconds(weight)}, "critical": {json.dumps(marked)}, '
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


def _ends(trace: Trace, path: CriticalPath, nodes: Numbers, drawing: Drawing) -> list[str]:
    """Return process, thread and time of the end of each arrow, within its node's event."""
    graph = path.graph
    table = path.events.describe(graph.event[nodes])
    start, stop = (table[name].to_numpy() for name in ("start", "stop"))
    on_device = table["is_device"].to_numpy(zero_copy_only=False)
    inside = drawing.inset_ns(on_device)
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
        ends.append(f'{lane}, "ts": {drawing.microseconds(ns)}')
    return ends


def _label(text: str) -> str:
    """Return the JSON text of a process or thread, which is a number or a string."""
    return text if re.fullmatch(r"-?(0|[1-9]\d*)", text) else json.dumps(text)
