"""Find the Kineto files of a run, and tell the rank of each from its beginning.

As little as possible is read: the beginnings of all files of a run of thousands of ranks are
read.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import orjson

from fastcomm.errors import TraceFileError
from fastcomm.readers import (
    NAME_PATTERNS,
    OpenOptions,
    RankReader,
    RankSources,
    add_rank,
    agreed_world,
    described,
    rank_from_name,
    unpack,
)
from fastcomm.readers.kineto import envelope, programs
from fastcomm.readers.kineto.categories import CATEGORIES
from fastcomm.readers.kineto.host_groups import assign
from fastcomm.readers.kineto.reader import RANK_KEYS, is_count, read
from fastcomm.readers.stream import BLOCK, CutShortError, blocks
from fastcomm.trace.host_names import HOST_LIBRARIES
from fastcomm.trace.run import SkippedRank

# profiler: a trace of the PyTorch profiler. uniform: events as dPRO names them. events: a list
# of events, none of which is in the beginning. foreign: events of another program, and other
# JSON. damaged: a file that cannot be opened or decompressed, is empty, truncated, or not JSON.
FileKind = Literal["profiler", "uniform", "events", "foreign", "damaged"]

SUFFIXES = (".json", ".json.gz", ".json.zst")
# Execution traces have these names, and are no Kineto traces.
EXECUTION_TRACES = ("torch_et_", "pytorch_et_")

_HEAD = 1 << 15  # bytes; a job of thousands of ranks lists its groups in more
_BLANKS = b"\xef\xbb\xbf \t\r\n"
_TRACE_NAME = re.compile(r"\.pt\.trace\.json(\.gz|\.zst)?$", re.IGNORECASE)
_KEY = b'"traceEvents"'
# Keys that only the profiler writes around its events.
_MARKS = (
    *(b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"'),
    *(b'"baseTimeNanoseconds"', b'"cuda_runtime_version"'),
)
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"]{1,40})"')
# Further categories of the profiler, which metrics do not need.
_MORE_CATEGORIES = {
    *(b"Trace", b"ac2g", b"async_cpu_to_gpu", b"async_gpu", b"fwdbwd", b"forward_backward"),
    *(b"overhead", b"cpu_instant_event"),
}
_PHASE = re.compile(rb'"ph"\s*:\s*"(?!M")')
_LIST_BEGINS = re.compile(rb'"traceEvents"\s*:\s*\[')
_MOST_LISTS = 16


@dataclass(frozen=True, slots=True)
class Peek:
    """What the beginning of a file tells."""

    kind: FileKind
    rank: int | None = None
    world_size: int | None = None
    error: str = ""  # of damaged and foreign files: what the file is instead of a trace
    is_closed: bool = False  # whether the file could not be opened
    is_whole: bool = False  # whether reading on would tell nothing new
    is_on_host: bool = False  # whether its collectives are of a library for hosts alone
    is_known: bool = False  # whether the error of a foreign file says which program wrote it

    @property
    def is_trace(self) -> bool:
        """Whether the file is readable so far, and may be from the PyTorch profiler."""
        return self.kind in ("profiler", "events")


def is_rank_name(name: str) -> bool:
    """Return whether a file has the name of a rank's trace."""
    return _TRACE_NAME.search(name) is not None or rank_from_name(name) is not None


def is_trace_name(name: str) -> bool:
    """Return whether a file has a name from PyTorch's `tensorboard_trace_handler`."""
    return _TRACE_NAME.search(name) is not None


def peek(path: Path) -> Peek:
    """Return the kind of a JSON file, and its rank and world size, from its beginning.

    An unreadable file raises nothing: the result has the error.
    """
    try:
        status = path.stat()
    except OSError as error:
        return Peek("damaged", error=error.strerror or str(error), is_closed=True)
    mode = getattr(status, "st_mode", 0)  # permissions change the result
    return _peek(path, status.st_size, status.st_mtime_ns, mode)


@lru_cache(maxsize=1 << 14)
def _peek(path: Path, _size: int, _changed_ns: int, _mode: int) -> Peek:
    """Classify the beginning of a file; unused parameters are part of the cache key."""
    head = _beginning(path, _HEAD)
    is_clear = _KEY in head.text and _kind(head.text) == "profiler"
    if not is_clear and not head.error and not head.is_whole:
        head = _beginning(path, BLOCK)
    text = head.text.lstrip(_BLANKS)
    if head.is_closed or not text:
        return Peek("damaged", error=head.error or "empty", is_closed=head.is_closed)
    if text[:1] not in (b"{", b"["):
        return Peek("damaged", error=unpack(head.text, path) or described(head.text))
    if _is_foreign(text, head):
        name = "array" if text[:1] == b"[" else "object"
        program = programs.other(text)
        error = program or f"a JSON {name} without trace events"
        is_whole = program is not None or head.is_whole or name == "array"
        return Peek("foreign", error=error, is_whole=is_whole, is_known=program is not None)
    if (kind := _kind(text)) is None:
        return Peek("damaged", error=head.error or "no JSON, or truncated JSON")
    if kind == "foreign":
        return Peek(kind, error=programs.chrome(text), is_whole=True, is_known=True)
    begin = envelope.events_begin(head.text, 0)
    info = _info(head.text[: max(begin if begin >= 0 else head.text.find(_KEY), 0)])
    rank, world = (info[key] if is_count(info.get(key)) else None for key in RANK_KEYS)
    is_on_host = info.get("backend") in HOST_LIBRARIES
    return Peek(kind, rank, world, is_on_host=is_on_host)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The first bytes of a text, whether they are all, and the error that ended them."""

    text: bytes
    is_whole: bool = False
    error: str = ""
    is_closed: bool = False


def _beginning(path: Path, size: int) -> _Beginning:
    """Read at least `size` bytes of a text, or all of it."""
    parts: list[bytes] = []
    try:
        for block in blocks(path, size):
            parts.append(block)
            if sum(map(len, parts)) >= size:
                return _Beginning(b"".join(parts))
    except CutShortError:
        return _Beginning(b"".join(parts), error="the compressed file is truncated")
    except TraceFileError as error:
        message = str(error).removeprefix(f"{path}: ")
        is_closed = isinstance(error.__cause__, OSError) and not parts
        return _Beginning(b"".join(parts), error=message, is_closed=is_closed)
    return _Beginning(b"".join(parts), is_whole=True)


def _is_foreign(text: bytes, head: _Beginning) -> bool:
    """Return whether the text is JSON as far as it goes, and cannot be a trace."""
    if head.error:
        return False
    is_list = text[:1] == b"["
    has_events = _PHASE.search(text) is not None
    if has_events if is_list else _KEY in text and (has_events or not _is_nested(text)):
        return False
    if not head.is_whole:
        return is_list or not any(mark in text for mark in _MARKS)
    return _is_filled(text.rstrip(_BLANKS + b"\0")) or _is_lines(text)


def _is_nested(text: bytes) -> bool:
    """Return whether every list of events in a text belongs to an inner object."""
    ends = [match.end() for match in islice(_LIST_BEGINS.finditer(text), _MOST_LISTS)]
    return bool(ends) and all(envelope.is_inner(text[:end]) for end in ends)


def _is_filled(text: bytes) -> bool:
    """Return whether a text is one JSON value that is not empty."""
    try:
        return bool(orjson.loads(text))
    except orjson.JSONDecodeError:
        return False


def _is_lines(text: bytes) -> bool:
    """Return whether a text is JSON lines, as in logs: a value, and more lines."""
    first, line_end, others = text.partition(b"\n")
    return bool(line_end and others.strip()) and _is_filled(first)


def _kind(text: bytes) -> FileKind | None:
    """Return the kind of a JSON file by the beginning of its text; None without events.

    The kinds are "profiler" (a trace of PyTorch's profiler), "uniform" (Chrome events with
    names of dPRO), "foreign" (Chrome events of another program), and "events" (a list whose
    first event is not complete).
    """
    begin = _LIST_BEGINS.search(text)
    if any(mark in text for mark in _MARKS) and (begin is not None or _KEY not in text):
        return "profiler"
    if begin is None and text[:1] != b"[":
        return None
    categories = set(_CATEGORY.findall(text))
    if categories & (CATEGORIES.keys() | _MORE_CATEGORIES):
        return "profiler"
    is_event = _PHASE.search(text, begin.end() if begin else 0) is not None
    if begin is None and not is_event:
        return None
    if not is_event:
        return "events"
    return "uniform" if programs.is_uniform(text) else "foreign"


def _info(head: bytes) -> dict[str, Any]:
    """Return the `distributedInfo` in the text before the events, if it is whole."""
    match = re.search(rb'"distributedInfo"\s*:\s*(?=\{)', head)
    try:
        text = head[match.end() :].decode(errors="replace") if match else "{}"
        return dict(envelope.with_numbers(json.JSONDecoder().raw_decode(text)[0]))
    except (ValueError, RecursionError):
        return {}


def claims(path: Path) -> bool:
    """Return whether the file is the trace of a rank, or would be if it were readable.

    Only names with a suffix of `SUFFIXES` that are not those of execution traces can be. Of
    these, it is a file that begins like a trace, that has PyTorch's name for traces, that is
    named after a rank but unreadable, or that cannot be opened.
    """
    if not _may_be_trace(path):
        return False
    if is_trace_name(path.name):
        return True
    start = peek(path)
    if start.kind == "damaged":
        return start.is_closed or is_rank_name(path.name)
    return start.is_trace


def foreign(path: Path) -> str | None:
    """Return what a file that is no trace of a rank is, if its text tells its program."""
    start = peek(path) if _may_be_trace(path) else Peek("foreign")
    return f"{path}: {start.error}" if start.is_known else None


def is_damaged(path: Path) -> bool:
    """Return whether a file named like a trace is unreadable, or is not complete JSON."""
    return _may_be_trace(path) and peek(path).kind == "damaged"


def _may_be_trace(path: Path) -> bool:
    """Return whether the name may be that of a trace, and is not a directory's."""
    return (
        path.name.lower().endswith(SUFFIXES)
        and not path.name.startswith(EXECUTION_TRACES)
        and not path.is_dir()
    )


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """Find the rank of each file: from its contents, else its name, else 0 for a single file.

    Parameters
    ----------
    paths
        Files of one run.
    options
        With `keep_going`, unreadable files are skipped.

    Raises
    ------
    TraceFileError
        If a rank is unknown, or two files have one rank; with `keep_going`, if no file is
        readable.

    """
    ranks: dict[int, Path] = {}
    skipped: list[SkippedRank] = []
    for path in paths:
        try:
            rank = _checked_rank(path, is_alone=len(paths) == 1)
        except TraceFileError as error:
            if not options.keep_going or len(paths) == 1:
                raise
            skipped.append(SkippedRank(rank=_rank(path), path=str(path), error=str(error)))
            continue
        add_rank(ranks, rank, path)
    if not ranks:
        raise TraceFileError(f"no rank could be read: {skipped[0].error}")
    # A single file may state its rank behind the events, which only reading it tells.
    is_unknown = len(paths) == 1 and _rank(paths[0]) is None
    world_sizes = {path: peek(path).world_size for path in ranks.values()}
    world = agreed_world(world_sizes, ranks)
    reading = options.reading(world, ranks)
    is_host_run = all(peek(path).is_on_host for path in ranks.values())
    assigned = assign(ranks, reading) if is_host_run else {}
    sources = []
    for rank, path in sorted(ranks.items()):
        details = None if is_unknown else rank, assigned.get(rank)
        reader = RankReader(read, path, reading, details, may_have_shapes=True)
        sources.append(reader.source(rank))
    return RankSources(sources=tuple(sources), world_size=world, skipped=tuple(skipped))


def _checked_rank(path: Path, *, is_alone: bool) -> int:
    """Return the rank of a file; TraceFileError if it is no trace, or has no rank."""
    start = peek(path)
    if start.is_known:
        raise TraceFileError(f"{path}: {start.error}")
    if start.kind == "uniform" or (start.kind == "foreign" and start.is_whole):
        problem = start.error or "no event of the PyTorch profiler in its beginning"
        raise TraceFileError(f"{path}: {problem}; expected a trace of the PyTorch profiler")
    if start.kind == "damaged" and not is_alone:
        raise TraceFileError(f"{path}: cannot be read: {start.error}")
    rank = _rank(path)
    if rank is not None or is_alone:
        return rank or 0
    raise TraceFileError(
        f"{path}: cannot determine the rank: no distributedInfo.rank before the events, and "
        f"the name has none of {', '.join(NAME_PATTERNS)}. Name it rank3.json, for example"
    )


def _rank(path: Path) -> int | None:
    """Return the rank that the beginning of a file states, else its name."""
    rank = peek(path).rank
    return rank if rank is not None else rank_from_name(path.name)
