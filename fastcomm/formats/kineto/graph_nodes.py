"""Order among the nodes of a CUDA graph: what each waits for, and streams that are lost.

The device side of newer profilers states the dependencies of a replay as arrows between its
nodes. A tool that draws nodes on lanes of process groups replaces their streams.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson

from fastcomm.errors import TraceFileError
from fastcomm.formats.kineto.chrome import Scanned
from fastcomm.formats.stream import CutShortError, blocks
from fastcomm.trace.columns import alike
from fastcomm.trace.schema import KIND
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

NODE_ARGS = ("graph id", "graph node id")
_LEAST_ID = 1 << 40  # of the arrows between nodes; smaller ones are correlations
_ARROW = re.compile(rb'"id"\s*:\s*"?[0-9]{13,19}\b')
_LONGEST = 1 << 10  # bytes of an arrow
_MOST_PASSED = 1000  # nodes that are no work, between a node and what it waits for
_WORK = [KIND[name] for name in ("kernel", "memcpy", "memset", "host_node")]
# Lanes on which the tool draws nodes: without a process group, and from the first of one on.
_PLAIN_LANES, _GROUP_LANES = (7, 8), range(60, 1000)
_INLINE = "cudaGraphInlineAnnotated"  # member of traces that keep the streams
_Point = tuple[int, int, int]  # process, thread, ns
_SIDES = ("s", "f")  # phases of the begin and the end of an arrow


def with_order(scanned: Scanned, waits: Callable[[Ints], Iterable[tuple[int, int]]]) -> Scanned:
    """Add to the columns of a trace's events what tells the order of nodes of a CUDA graph.

    `waits` returns the rows of nodes that wait, and of those that they wait for, from the rows
    of all nodes. `after` is the code of a text: the positions of the nodes that one waits for,
    separated by spaces; NULL unless its replay has arrows. `on_lane` is 1 if its stream is
    unknown.
    """
    nodes = _nodes(scanned)
    if not len(nodes):
        return scanned
    columns, replay = scanned.columns, _replays(scanned, nodes)
    after, on_lane = (np.full(len(columns["kind"]), NULL, np.int64) for _ in range(2))
    on_lane[nodes[_are_on_lanes(scanned, nodes, replay)]] = 1
    texts = list(scanned.texts)
    codes: dict[str, int] = {}
    for row, sources in _before(scanned, nodes, replay, waits(nodes)).items():
        positions = sorted(int(columns["position"][source]) for source in sources)
        text = " ".join(map(str, positions))
        if text not in codes:
            codes[text] = len(texts)
            texts.append(text)
        after[row] = codes[text]
    return replace(
        scanned, columns={**columns, "after": after, "on_lane": on_lane}, texts=texts
    )


def _nodes(scanned: Scanned) -> Ints:
    """Return the rows of nodes of CUDA graphs."""
    place = scanned.columns["detail"]
    numbers = (scanned.details[name][place] for name in NODE_ARGS)
    return np.flatnonzero(np.logical_or(*(number > 0 for number in numbers)))


def _replays(scanned: Scanned, nodes: Ints) -> Ints:
    """Return the number of the replay of each node: those of one launch."""
    columns = scanned.columns
    _, replay = alike(columns["process"][nodes], columns["correlation"][nodes])
    return replay


def _are_on_lanes(scanned: Scanned, nodes: Ints, replay: Ints) -> Flags:
    """Return which nodes are on lanes that replaced their streams, which nothing states.

    A replay on a single lane is in order, whatever the lane is.
    """
    original = scanned.details["original_stream"][scanned.columns["detail"][nodes]]
    stream = scanned.columns["stream"][nodes]
    is_lane = np.isin(stream, (*_PLAIN_LANES, *_GROUP_LANES)) & (original == NULL)
    if _INLINE in scanned.envelope or not is_lane.any():
        return np.zeros(len(nodes), np.bool_)
    first, _ = alike(replay[is_lane], stream[is_lane])
    lanes = np.bincount(replay[is_lane][first], minlength=int(replay.max()) + 1)
    result: Flags = is_lane & (lanes[replay] > 1)
    return result


def waits_by_arrows(path: Path, scanned: Scanned, nodes: Ints) -> Iterator[tuple[int, int]]:
    """Yield the rows of nodes that wait, and of what they wait for, by arrows in a file."""
    arrows = list(_arrows(path))
    if not arrows:
        return
    starts, stops = (_moments(scanned, nodes, side) for side in ("start", "stop"))
    for begin, end in arrows:
        source, target = _row_at(stops, begin), _row_at(starts, end)
        if NONE not in (source, target) and source != target:
            yield target, source


def _before(
    scanned: Scanned, nodes: Ints, replay: Ints, waits: Iterable[tuple[int, int]]
) -> dict[int, set[int]]:
    """Return by row what each node waits for, of replays in which any node waits.

    What waits for a node that is no work waits for all that this one waits for.
    """
    sources: dict[int, set[int]] = defaultdict(set)
    for row, source in waits:
        sources[row].add(source)
    if not sources:
        return {}
    replay_of = dict(zip(nodes.tolist(), replay.tolist(), strict=True))
    ordered = {replay_of[row] for row in sources if row in replay_of}
    is_work = np.isin(scanned.columns["kind"], _WORK)
    return {
        row: _works(row, sources, is_work)
        for row in nodes.tolist()
        if replay_of[row] in ordered and is_work[row]
    }


def _works(row: int, sources: dict[int, set[int]], is_work: Flags) -> set[int]:
    """Return the work that a node waits for, also through some nodes that are none."""
    works, visited, pending = set[int](), {row}, list(sources.get(row, ()))
    while pending and len(visited) < _MOST_PASSED:
        source = pending.pop()
        if source in visited:
            continue
        visited.add(source)
        if is_work[source]:
            works.add(source)
        else:
            pending += sources.get(source, ())
    return works


def _moments(scanned: Scanned, nodes: Ints, side: str) -> dict[_Point, int]:
    """Return the row of the node at each point; `side` is "start" or "stop"."""
    keys = (scanned.columns[name][nodes].tolist() for name in ("process", "thread", side))
    return dict(zip(zip(*keys, strict=True), nodes.tolist(), strict=True))


def _row_at(moments: dict[_Point, int], point: _Point) -> int:
    """Return the node at a point, or NONE; a sum of times in us may be off by 1 ns."""
    process, thread, time = point
    near = (moments.get((process, thread, time + off), NONE) for off in (0, 1, -1))
    return next((row for row in near if row != NONE), NONE)


def _arrows(path: Path) -> Iterator[tuple[_Point, _Point]]:
    """Yield begin and end of each arrow between nodes in a file."""
    halves: dict[int, dict[str, _Point]] = defaultdict(dict)
    for number, side, point in _events(path):
        sides = halves[number]
        sides[side] = point
        if len(sides) == len(_SIDES):
            yield sides["s"], sides["f"]
            del halves[number]


def _events(path: Path) -> Iterator[tuple[int, str, _Point]]:
    """Yield the arrows between nodes in the text of a file, as far as it can be read."""
    text = b""
    try:
        for block in blocks(path):
            text += block
            last = 0
            for match in _ARROW.finditer(text):
                at = match.start()
                begin = text.rfind(b"{", max(at - _LONGEST, 0), at)
                end = text.find(b"}", at, at + _LONGEST)
                if end < 0 and at + _LONGEST > len(text):
                    break  # its end is in the next block
                last = max(end, last)
                if begin >= 0 and end >= 0 and (event := _arrow(text[begin : end + 1])):
                    yield event
            text = text[max(last, len(text) - _LONGEST) :]
    except (CutShortError, TraceFileError):
        return


def _arrow(text: bytes) -> tuple[int, str, _Point] | None:
    """Return number, side and point of an event; None if it is no arrow between nodes."""
    try:
        event = orjson.loads(text)
        number, time = int(event["id"]), round(float(event["ts"]) * 1000)
        is_arrow = event["cat"] == "ac2g" and event["ph"] in _SIDES and number >= _LEAST_ID
        point = int(event["pid"]), int(event["tid"]), time
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return (number, event["ph"], point) if is_arrow else None
