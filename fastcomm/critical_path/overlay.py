"""A critical path drawn into its trace: the events on it marked, its edges as arrows.

The text of the trace is cut into slices and put together again: what is not marked stays
byte by byte as it was.
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
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.files import aside, is_local, place, refuse_inputs
from fastcomm.graph import EDGE_KIND, EDGE_KINDS
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
    """What an overlay shows."""

    only_critical: bool = True  # of the events, those on the path and annotations alone
    all_edges: bool = False  # not only those on the path; needs all events
    kinds: tuple[str, ...] | None = None  # of the path's edges, these

    def inset_ns(self, on_device: Flags) -> Ints:
        """Return how far before the end of its event an arrow touches it, by event."""
        return np.ones(len(on_device), np.int64)

    def microseconds(self, ns: int) -> str:
        """Write a time as JSON has it, to the nanosecond."""
        sign, ns = ("-", -ns) if ns < 0 else ("", ns)
        return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def write(trace: Trace, found: CriticalPath, target: Path, drawing: Drawing) -> None:
    """Write the trace with the path in it, compressed where the name ends in .gz."""
    source = place(trace.meta.path)
    if trace.meta.format != "kineto" or trace.args is None:
        raise FastcommError(f"{source}: an overlay needs a JSON trace, read with every event")
    if is_local(source):
        refuse_inputs(target, [source])
    with aside(target) as unfinished:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _opened(unfinished, compressed=target.name.endswith(".gz")) as file:
            for piece in _pieces(_text(source), trace, found, drawing):
                file.write(piece)


def _opened(path: Path, *, compressed: bool) -> BinaryIO:
    file: BinaryIO = (
        _engine.open(path, "wb", compresslevel=1) if compressed else path.open("wb")
    )
    return file


def _text(path: Path) -> bytearray:
    """The decompressed text, with NULs behind it that a kernel may look at."""
    text = bytearray()
    with suppress(UnreadBytesError):  # the reader warns of it
        for block in blocks(path):
            text += block
    text += bytes(PADDING)
    return text


def _pieces(
    text: bytearray, trace: Trace, found: CriticalPath, drawing: Drawing
) -> Iterator[bytes | memoryview]:
    """The overlay's text, in order."""
    offset = filled(trace.events["offset"])
    order = np.argsort(offset)
    begin = offset[order]
    array = np.frombuffer(text, np.uint8)
    inside = (begin >= 0) & (begin < len(text) - PADDING)
    if not inside.all() or (array[begin] != ord("{")).any():
        raise TraceFileError(
            f"{trace.meta.path}: no JSON trace whose events are where they were read; an "
            "overlay needs the trace itself, unchanged"
        )
    end, behind = json_text.slices(array, begin)
    if not len(begin) or (end < 0).any():
        raise TraceFileError(f"{trace.meta.path}: no whole events to mark")
    close = json_text.list_end(array, int(behind[-1]), len(text) - PADDING)
    if close < 0:
        raise TraceFileError(f"{trace.meta.path}: traceEvents does not end; wanted ]")
    critical = _critical(trace, found)[order]
    changed = critical
    if drawing.only_critical:
        kind = trace.events["kind"].to_numpy()[order]
        changed = critical | ~np.isin(kind, (KIND["annotation"], KIND["python"]))
    yield from _events(memoryview(text), close, (begin, end, behind), critical, changed)
    flows = _flows(trace, found, drawing)
    if flows:
        yield b",\n  " + ",\n  ".join(flows).encode()
    yield b"\n  "
    yield memoryview(text)[close : len(text) - PADDING]


def _critical(trace: Trace, found: CriticalPath) -> Flags:
    """Which rows of the trace are on the path."""
    positions = np.array(found.event_ids, np.int64)
    assert trace.args is not None
    return np.isin(trace.args["position"].to_numpy(), positions)


def _events(
    text: memoryview,
    close: int,
    places: tuple[Ints, Ints, Ints],
    critical: Flags,
    changed: Flags,
) -> Iterator[bytes | memoryview]:
    """The text up to the end of the events: some marked, some left out, no comma at the end."""
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
    """The text of an event with ``"critical": 1`` among its args."""
    found = _ARGS.search(event)
    if found is None:
        return b'{"args": {"critical": 1}, ' + event[1:].lstrip()
    if found[1]:
        return event[: found.end() - 1] + b'"critical": 1}' + event[found.end() :]
    return event[: found.end()] + b'"critical": 1, ' + event[found.end() :]


def _flows(trace: Trace, found: CriticalPath, drawing: Drawing) -> list[str]:
    """Two flow events an edge."""
    graph, path = found.graph, found.found
    on_path = np.zeros(len(graph.source), np.bool_)
    on_path[path.edges] = True
    if drawing.all_edges and not drawing.only_critical:
        shown = (graph.kind != EDGE_KIND["launch"]) | (graph.weight != 0)
    else:
        kinds = [EDGE_KIND[_kind(name)] for name in drawing.kinds or _DRAWN]
        shown = on_path & np.isin(graph.kind, kinds)
    edges = np.flatnonzero(shown)
    ends = [_ends(trace, found, side[edges], drawing) for side in (graph.source, graph.target)]
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
    """The kind of edge that HTA or we call so."""
    for kind, text in TYPES.items():
        if name.lower() in (kind, text, text.removeprefix("critical_path_")):
            return kind
    raise FastcommError(f"no edges of type {name!r}; there are {', '.join(TYPES)}")


def _ends(trace: Trace, found: CriticalPath, nodes: Numbers, drawing: Drawing) -> list[str]:
    """Where an arrow touches: inside of the slice of the node's event."""
    graph = found.graph
    table = found.events.describe(graph.event[nodes])
    start, stop = (table[name].to_numpy() for name in ("start", "stop"))
    on_device = table["is_device"].to_numpy(zero_copy_only=False)
    inside = drawing.inset_ns(on_device)
    time = np.where(graph.is_end[nodes], np.maximum(start, stop - inside), start)
    time -= trace.meta.base
    words: dict[tuple[str, str], str] = {}
    found_words = []
    for process, thread, ns in zip(
        table["process"].to_pylist(), table["thread"].to_pylist(), time.tolist(), strict=True
    ):
        lane = words.setdefault(
            (process, thread), f'"pid": {_word(process)}, "tid": {_word(thread)}'
        )
        found_words.append(f'{lane}, "ts": {drawing.microseconds(ns)}')
    return found_words


def _word(text: str) -> str:
    """A process or thread as the trace writes it: a number where it is one."""
    return text if re.fullmatch(r"-?(0|[1-9]\d*)", text) else json.dumps(text)
