"""JSON files of trials, and the uniform trace in one: read it, scan it, write it.

A scan goes at the speed of the text and reads what statistics need: categories, and arguments
that say neither name nor step (`input0` and the like), stay in the file; `read` has them.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro import (
    Codes,
    Columns,
    Event,
    UniformTrace,
    of_columns,
    of_events,
)
from fastcomm.readers.kineto.chrome import Scanned, Selection, scan_file
from fastcomm.readers.kineto.stream import CutShortError, document
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.json_scan import WORD
from fastcomm_kernels.words import KEEP_ALL

SLICE_IDS = ("loopId", "channelId", "chunkId", "sliceId")
# Above this a float64 does not hold thousandths of its unit.
_PRECISE = 1 << 43
_LATEST = 1 << 61

_STRANGE = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """TraceFileError where an event lacks something, or has a value of another kind."""
    try:
        yield
    except _STRANGE as error:
        raise TraceFileError(
            f"{path}: an event that is none: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def read(path: Path) -> UniformTrace:
    """Read a uniform trace: an object with traceEvents, or a bare list."""
    rows = read_events(path)
    starts = (row.get("ts") for row in rows if isinstance(row, dict))
    if any(type(ts) is float and abs(ts) > _PRECISE for ts in starts):
        # Absolute microseconds with a fraction: a float64 has lost it.
        document = json.loads(whole_text(path), parse_float=Decimal)
        rows = document["traceEvents"] if isinstance(document, dict) else document
    return of_events(_event(row, path, i) for i, row in enumerate(rows))


def _event(row: Any, path: Path, index: int) -> Event:
    """One event of a file."""
    try:
        args = dict(row.get("args") or {})
        _, tilde, suffix = str(args.pop("name", row["name"])).partition("~>")
        step = args.pop("step", None)
        args.pop("cnt", None)
        if not tilde and all(name in args for name in SLICE_IDS):
            tilde, suffix = "~>", "_".join(str(args[name]) for name in SLICE_IDS)
        return Event(
            name=_word(row["name"]),
            pid=str(row["pid"]),
            start=_whole(ns(row["ts"])),
            dur=_whole(ns(row.get("dur", 0))),
            lane=str(row.get("tid", "")),
            cat=str(row.get("cat", "")),
            suffix=suffix if tilde else None,
            step=None if step is None else _whole(step),
            phase=_word(row.get("ph", "X")),
            extra=args,
        )
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise TraceFileError(
            f"{path}: event {index}: {error!r} in {str(row)[:120]}, "
            "wanted name, pid, ts and dur"
        ) from error


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _whole(value: Any) -> int:
    """A whole number of which two can be added."""
    if type(value) is not int or abs(value) > _LATEST:
        raise TypeError(f"{str(value)[:40]!r} is no time and no number of a step")
    return value


def ns(microseconds: float | Decimal) -> int:
    """Whole nanoseconds."""
    whole = int(microseconds)
    time = whole * 1000 + round((microseconds - whole) * 1000)
    if abs(time) > _LATEST:
        raise OverflowError(f"{microseconds} us is no time of a trace")
    return time


def read_json(path: Path) -> Any:
    """A whole JSON document, gzipped or not."""
    try:
        return orjson.loads(whole_text(path))
    except orjson.JSONDecodeError as error:
        raise TraceFileError(f"{path}: {error}") from error


def read_events(path: Path) -> list[Any]:
    """Return the events of an object with traceEvents, or of a bare list."""
    rows = event_rows(read_json(path), None)
    if not isinstance(rows, list):
        raise TraceFileError(f"{path}: no traceEvents, and no list of events")
    return rows


def event_rows(document: Any, default: Any = ()) -> Any:
    """Return the traceEvents of a document, `default` without any; a bare list as it is."""
    return document.get("traceEvents", default) if isinstance(document, dict) else document


def whole_text(path: Path) -> bytes:
    """The text of a file, gzipped or not."""
    try:
        return document(path)
    except CutShortError as error:
        raise TraceFileError(f"{path}: the compressed file ends before its end") from error


def read_text(path: Path) -> str:
    """Return the text of a file, gzipped or not; TraceFileError where it is not UTF-8."""
    try:
        return whole_text(path).decode()
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path}: {error}") from error


def to_bytes(trace: UniformTrace) -> bytes:
    """The JSON text of it, as dPRO reads it."""
    events = orjson.dumps([_row(trace, i) for i in range(len(trace))])
    return b'{"traceEvents":' + events + b',"all_prefix":' + orjson.dumps(trace.pids) + b"}\n"


def compressed(text: bytes) -> bytes:
    """The same text gzipped, and the same bytes at any time of day."""
    return gzip.compress(text, mtime=0)


def _row(trace: UniformTrace, i: int) -> dict[str, Any]:
    """One event as JSON has it."""
    key = trace.key[i]
    name = trace.names[key]
    args: dict[str, Any] = {"name": trace.keys[key].partition("->")[2]}
    if trace.step[i] != NULL:
        args["step"] = int(trace.step[i])
    args |= orjson.loads(trace.extras[trace.extra[i]])
    return {
        "name": name,
        "ph": trace.phases[trace.phase[i]],
        "ts": _us(int(trace.start[i])),
        "dur": _us(int(trace.dur[i])),
        "pid": trace.key_pid[key],
        "tid": trace.lanes[trace.lane[i]],
        "cat": trace.cats[trace.cat[i]],
        "args": {**args, "cnt": int(trace.cnt[i])},
    }


def _us(time: int) -> Any:
    """Microseconds to the nanosecond, whatever their size."""
    whole, rest = divmod(time, 1000)
    return whole if not rest else orjson.Fragment(f"{whole}.{rest:03d}")


_DEBUG = 0
_WANTED = Selection(
    kinds={b"debug": _DEBUG},
    keep=[KEEP_ALL, KEEP_ALL],
    prefixes=(),
    row_args=("step", *SLICE_IDS),
    detail_args=(),
    detail_texts=("name",),
)


def scan(path: Path) -> UniformTrace:
    """Read names, times and steps of every event."""
    try:
        scanned = scan_file(path, _WANTED)
    except TraceFileError:
        return read(path)  # whose message is about this format
    columns = scanned.columns
    whole = scanned.event_count == len(columns["start"]) and not scanned.warnings
    if not whole or any((columns[each] == NULL).any() for each in ("name", "process")):
        return read(path)
    return of_columns(_columns(scanned))


def _columns(scanned: Scanned) -> Columns:
    columns, texts = scanned.columns, scanned.texts
    name, names = _used(columns["name"])
    pid, pids = _used(columns["process"])
    lane, lanes = _used(columns["thread"])
    suffix, suffixes = _suffixes(scanned)
    return Columns(
        names=tuple(texts[code] for code in names),
        name=name,
        pids=tuple(_thread_word(value, texts) for value in pids),
        pid=pid,
        lanes=tuple(_thread_word(value, texts) for value in lanes),
        lane=lane,
        cats=("debug", ""),
        cat=columns["kind"],
        suffixes=suffixes,
        suffix=suffix,
        start=columns["start"],
        dur=columns["stop"] - columns["start"],
        step=columns["step"],
    )


def _used(column: NDArray[Any]) -> tuple[Codes, list[int]]:
    """Small codes in order of first use, and what they stand for."""
    encoded = pa.array(column).dictionary_encode()
    return encoded.indices.to_numpy(), encoded.dictionary.to_pylist()


def _thread_word(value: int, texts: list[str]) -> str:
    """The text of a process or thread."""
    if value == NULL:
        return ""
    return texts[WORD - value] if value <= WORD else str(value)


def _suffixes(scanned: Scanned) -> tuple[Ints, tuple[str, ...]]:
    """The part of the argument `name` behind ~>, or the four ids of NCCL."""
    detail, names = scanned.columns["detail"], scanned.details["name"]
    named = np.full(len(detail), -1, np.int64)
    own = np.flatnonzero(detail >= 0)
    named[own] = np.maximum(names[detail[own]], -1)  # no text, no suffix
    numbers: dict[str, int] = {}
    of_text = np.full(len(scanned.texts) + 1, -1, np.int64)
    for code in np.unique(named[named >= 0]).tolist():
        _, tilde, suffix = scanned.texts[code].partition("~>")
        if tilde:
            of_text[code] = numbers.setdefault(suffix, len(numbers))
    found: Ints = of_text[named]
    _from_ids(scanned, found, numbers)
    return found, tuple(numbers)


def _from_ids(scanned: Scanned, suffixes: Ints, numbers: dict[str, int]) -> None:
    """Fill in suffixes that only the ids tell; writes into both."""
    ids: NDArray[np.int64] = np.stack([scanned.columns[name] for name in SLICE_IDS])
    rows = np.flatnonzero((suffixes < 0) & (ids != NULL).all(axis=0))
    for row in rows.tolist():
        suffix = "_".join(map(str, ids[:, row].tolist()))
        suffixes[row] = numbers.setdefault(suffix, len(numbers))
