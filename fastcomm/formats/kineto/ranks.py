"""Find the Kineto files of a run, and tell the rank of each from its beginning, else its end.

As little as possible is read: the beginnings of all files of a run of thousands of ranks are
read.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import orjson

from fastcomm.errors import TraceFileError, inert, shell_joined
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.config import Config
from fastcomm.formats.kineto import envelope
from fastcomm.formats.kineto.categories import CATEGORIES, has_device_work
from fastcomm.formats.kineto.devices import ProcessDevice, ranks_of
from fastcomm.formats.kineto.host_groups import Assigned, assign
from fastcomm.formats.kineto.reader import RANK_KEYS, find_devices, is_count, read
from fastcomm.formats.sources import (
    NAME_PATTERNS,
    RankReader,
    RankSources,
    agreed_world,
    described,
    rank_from_name,
    unpack,
)
from fastcomm.formats.stream import BLOCK, CutShortError, blocks, tail
from fastcomm.trace.host_names import HOST_LIBRARIES
from fastcomm.trace.run_traces import SkippedRank, Source

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
_NUMBER = re.compile(r"[0-9]+")


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
        program = envelope.other(text)
        error = program or f"a JSON {name} without trace events"
        is_whole = program is not None or head.is_whole or name == "array"
        return Peek("foreign", error=error, is_whole=is_whole, is_known=program is not None)
    if (kind := _kind(text)) is None:
        return Peek("damaged", error=head.error or "no JSON, or truncated JSON")
    if kind == "foreign":
        return Peek(kind, error=envelope.chrome(text), is_whole=True, is_known=True)
    begin = envelope.events_begin(head.text, 0)
    info = _info(head.text[: max(begin if begin >= 0 else head.text.find(_KEY), 0)])
    rank, world, is_on_host = _stated_in(info)
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
        message = str(error).removeprefix(inert(f"{path}: "))
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
    return "uniform" if envelope.is_uniform(text) else "foreign"


def _info(text: bytes) -> dict[str, Any]:
    """Return the `distributedInfo` in a text before or behind the events, if it is whole."""
    match = re.search(rb'"distributedInfo"\s*:\s*(?=\{)', text)
    try:
        value = text[match.end() :].decode(errors="replace") if match else "{}"
        return dict(envelope.with_numbers(json.JSONDecoder().raw_decode(value)[0]))
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
    is_json = path.name.lower().endswith((*SUFFIXES, ".jsonl")) and not path.is_dir()
    return f"{path}: {peek(path).error}" if is_json and peek(path).is_known else None


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


def find(paths: Sequence[Path], config: Config) -> RankSources:
    """Find the rank of each file: from its contents, else its name, else 0 for a single file.

    Parameters
    ----------
    paths
        Files of one run.
    config
        Says whether unreadable files are skipped.

    Raises
    ------
    TraceFileError
        If a rank is unknown, two files have one rank, or no file is readable.

    """
    if len(paths) == 1:
        return _alone(paths[0], config)
    ranks, unknown, skipped = _by_rank(paths, config)
    if not ranks:
        workers = list(islice(filter(has_device_work, unknown), 2))
        if skipped:
            raise TraceFileError(f"no rank could be read: {skipped[0].error}")
        if len(workers) != 1:
            raise TraceFileError(
                f"{_no_rank(unknown[0])}. If the files are windows of one process (repeat in a "
                "profiler's schedule), pass one of them"
            )
        others = [path for path in unknown if path not in workers]
        return replace(_alone(workers[0], config), warnings=_not_read(others, _NO_WORK))
    world = agreed_world({path: _stated(path).world_size for path in ranks.values()}, ranks)
    is_host_run = all(_stated(path).is_on_host for path in ranks.values())
    is_whole = world is not None and len(ranks) == world
    for path in unknown:
        if not is_whole and (is_host_run or has_device_work(path)):
            skipped.append(config.skipped(path, _no_rank(path)))
    others = [path for path in unknown if str(path) not in {file.path for file in skipped}]
    reading = config.reading(world, ranks)
    assigned = assign(ranks, reading) if is_host_run else {}
    return RankSources(
        sources=tuple(
            _source(path, rank, reading, rank, assigned.get(rank))
            for rank, path in sorted(ranks.items())
        ),
        world_size=world,
        skipped=tuple(skipped),
        warnings=_not_read(others, "every rank has another trace" if is_whole else _NO_WORK),
    )


_NO_WORK = "it has no work of a device"


def _not_read(paths: Iterable[Path], reason: str) -> tuple[str, ...]:
    """Return warnings about traces of processes that are no rank, such as a coordinator."""
    return tuple(f"{path}: not read: it is of no rank, as {reason}" for path in paths)


def _alone(path: Path, config: Config) -> RankSources:
    """Return the rank of the only file, 0 if its beginning and name do not tell."""
    start = peek(path)
    _check(path, start)
    # It may state its rank behind the events, which only reading it tells.
    rank = start.rank if start.rank is not None else rank_from_name(path.name)
    world = agreed_world({path: start.world_size}, {rank or 0: path})
    reading = config.reading(world, (rank or 0,))
    if not config.by_beginnings and (devices := find_devices(path, reading)):
        return _of_devices(path, devices, config)
    return RankSources(sources=(_source(path, rank or 0, reading, rank),), world_size=world)


def _of_devices(path: Path, devices: Sequence[ProcessDevice], config: Config) -> RankSources:
    """Return a rank for each device of a file that is one."""
    ranks, warnings = ranks_of(devices, path)
    devices = [device for device in devices if device.is_rank]
    world = max(len(devices), max(ranks) + 1, _stated_world(path, devices))
    reading = config.reading(world, ranks)
    of_rank = dict(zip(ranks, devices, strict=True))
    return RankSources(
        sources=tuple(
            _source(path, rank, reading, rank, device=of_rank[rank]) for rank in sorted(ranks)
        ),
        world_size=world,
        warnings=tuple(f"{path}: {text}" for text in warnings),
    )


def _stated_world(path: Path, devices: Sequence[ProcessDevice]) -> int:
    """Return the number of ranks that a file of merged traces states, 0 if it states none.

    Of one process with several devices, it is the number of processes.
    """
    is_merged = len({device.hosts for device in devices}) == len(devices)
    return (_stated(path).world_size or 0) if is_merged else 0


def _source(
    path: Path,
    number: int,
    reading: TraceOptions,
    rank: int | None,
    assigned: Assigned | None = None,
    device: ProcessDevice | None = None,
) -> Source:
    """Return the source of a rank, which is `rank` if that is certain."""
    details = rank, assigned, device
    return RankReader(read, path, reading, details, may_have_shapes=True).source(number)


def _by_rank(
    paths: Sequence[Path], config: Config
) -> tuple[dict[int, Path], list[Path], list[SkippedRank]]:
    """Return the file of each rank, files of unknown rank, and skipped files."""
    files: dict[int, list[Path]] = {}
    unknown: list[Path] = []
    skipped: list[SkippedRank] = []
    for path in paths:
        try:
            start = peek(path)
            _check(path, start)
            if start.kind == "damaged":
                raise TraceFileError(f"{path}: cannot be read: {start.error}")
        except TraceFileError as error:
            skipped.append(config.skipped(path, error, _rank(path)))
            continue
        rank = _rank(path)
        if rank is None:
            unknown.append(path)
        else:
            files.setdefault(rank, []).append(path)
    for rank, several in files.items():
        files[rank] = _workers(several)
        unknown += [path for path in several if path not in files[rank]]
    for rank in _beyond(files):
        unknown += files.pop(rank)
    _check_windows(files)
    return {rank: path for rank, (path,) in files.items()}, unknown, skipped


def _workers(paths: list[Path]) -> list[Path]:
    """Return the only file of a rank, without those of other processes named after it.

    These have no work of a device, and state no rank, or one of another world.
    """
    if len(paths) == 1:
        return paths
    worlds = {_stated(path).world_size for path in paths}
    is_stated = len(worlds) == 1
    workers = [
        path for path in paths if has_device_work(path) or (is_stated and _states_rank(path))
    ]
    return workers if len(workers) == 1 else paths


def _states_rank(path: Path) -> bool:
    return _stated(path).rank is not None


def _beyond(files: Mapping[int, Sequence[Path]]) -> list[int]:
    """Return the ranks beyond the stated world that only names of files without work give."""
    stated = {path: _stated(path) for paths in files.values() for path in paths}
    world = max((start.world_size or 0 for start in stated.values()), default=0)
    return [
        rank
        for rank, paths in files.items()
        if rank >= world > 0
        and all(stated[path].rank is None and not has_device_work(path) for path in paths)
    ]


_MOST_WINDOWS = 8  # files that an error names


def _check_windows(files: Mapping[int, Sequence[Path]]) -> None:
    """Raise TraceFileError if a rank has several files, as of windows that were recorded.

    A profiler whose schedule has repeat=2 writes two files per rank.
    """
    several = next((rank for rank, paths in files.items() if len(paths) > 1), None)
    if several is None:
        return
    text = f"two files of rank {several}: {files[several][0]} and {files[several][1]}"
    counts = {len(paths) for paths in files.values()}
    remedy = "pass one file per rank"
    if len(counts) == 1 and len(files) <= _MOST_WINDOWS:
        first = (min(paths, key=_in_order) for _, paths in sorted(files.items()))
        remedy = f"pass those of one window: {shell_joined(map(str, first))}"
    raise TraceFileError(
        f"{text}. If they are windows of a profiler's schedule (repeat), {remedy}"
    )


def _in_order(path: Path) -> tuple[list[int], str]:
    """Return a key by which files are in the order of the numbers in their names."""
    return [int(number) for number in _NUMBER.findall(path.name)], path.name


def _check(path: Path, start: Peek) -> None:
    """Raise TraceFileError if a file is no trace of the profiler."""
    if start.is_known:
        raise TraceFileError(f"{path}: {start.error}")
    if start.kind == "uniform" or (start.kind == "foreign" and start.is_whole):
        problem = start.error or "no event of the PyTorch profiler in its beginning"
        raise TraceFileError(f"{path}: {problem}; expected a trace of the PyTorch profiler")


def _no_rank(path: Path) -> TraceFileError:
    """Return the error of a file whose rank is unknown."""
    return TraceFileError(
        f"{path}: cannot determine the rank: no distributedInfo.rank around the events, and "
        f"the names of file and folder have none of {', '.join(NAME_PATTERNS)}. Name it "
        "rank3.json, for example"
    )


def _rank(path: Path) -> int | None:
    """Return the rank that a file states around its events, else its name or its folder's."""
    ranks = (_stated(path).rank, *map(rank_from_name, (path.name, path.parent.name)))
    return next((rank for rank in ranks if rank is not None), None)


def _stated(path: Path) -> Peek:
    """Return what a file states before its events, or behind them if only these tell a rank."""
    start = peek(path)
    if start.rank is not None or rank_from_name(path.name) is not None or not start.is_trace:
        return start
    status = path.stat()
    return _with_end(path, start, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 14)
def _with_end(path: Path, start: Peek, _size: int, _changed_ns: int) -> Peek:
    """Add what the end of a file states; unused parameters are part of the cache key."""
    try:
        end = tail(path, BLOCK)
    except TraceFileError:
        return start  # reading the file reports the error
    rank, world, is_on_host = _stated_in(_info(end))
    return replace(start, rank=rank, world_size=world, is_on_host=is_on_host)


def _stated_in(info: Mapping[str, Any]) -> tuple[int | None, int | None, bool]:
    """Return rank, world size, and whether collectives are of a library for hosts alone."""
    rank, world = (info[key] if is_count(info.get(key)) else None for key in RANK_KEYS)
    return rank, world, info.get("backend") in HOST_LIBRARIES
