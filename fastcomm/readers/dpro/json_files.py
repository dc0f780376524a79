"""Read JSON files of trials; read, scan and write uniform traces.

`scan` is fast, and reads what statistics need. Only `read` returns categories, and arguments
other than name and step, such as `input0`.
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
from fastcomm.readers.dpro import Columns, Event, UniformTrace, of_columns, of_events
from fastcomm.readers.kineto.chrome import Scanned, Selection, scan_file
from fastcomm.readers.stream import CutShortError, document
from fastcomm_kernels.arrays import NULL, Ints, Numbers
from fastcomm_kernels.json_events import KEEP_ALL, TEXT_LANE

SLICE_IDS = ("loopId", "channelId", "chunkId", "sliceId")
_PRECISE = 1 << 43  # above this a float64 does not hold thousandths of its unit
_LATEST = 1 << 61  # ns; the sum of two such times fits an int64

_INVALID = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


@contextmanager
def event_errors(path: Path) -> Iterator[None]:
    """Raise TraceFileError for errors inside that a missing or invalid value causes."""
    try:
        yield
    except _INVALID as error:
        raise TraceFileError(
            f"{path}: invalid event: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def read(path: Path) -> UniformTrace:
    """Read a uniform trace: an object with traceEvents, or a list of events.

    Raises TraceFileError if the file is not JSON, or an event lacks name, pid or ts.
    """
    rows = read_events(path)
    starts = (row.get("ts") for row in rows if isinstance(row, dict))
    if any(type(ts) is float and abs(ts) > _PRECISE for ts in starts):
        # A float64 does not hold absolute microseconds with a fraction.
        document = json.loads(whole_text(path), parse_float=Decimal)
        rows = document["traceEvents"] if isinstance(document, dict) else document
    return of_events(_event(row, path, i) for i, row in enumerate(rows))


def _event(row: Any, path: Path, index: int) -> Event:
    """Convert one event of a file."""
    try:
        args = dict(row.get("args") or {})
        _, tilde, suffix = str(args.pop("name", row["name"])).partition("~>")
        step = args.pop("step", None)
        args.pop("cnt", None)
        if not tilde and all(name in args for name in SLICE_IDS):
            tilde, suffix = "~>", "_".join(str(args[name]) for name in SLICE_IDS)
        return Event(
            name=_text(row["name"]),
            pid=str(row["pid"]),
            start=_integer(ns(row["ts"])),
            dur=_integer(ns(row.get("dur", 0))),
            lane=str(row.get("tid", "")),
            cat=str(row.get("cat", "")),
            suffix=suffix if tilde else None,
            step=None if step is None else _integer(step),
            phase=_text(row.get("ph", "X")),
            extra=args,
        )
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise TraceFileError(
            f"{path}: event {index}: {error!r} in {str(row)[:120]}; expected name, pid, ts "
            "and dur"
        ) from error


def _text(value: Any) -> str:
    """Return a text; raise TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not a text")
    return value


def _integer(value: Any) -> int:
    """Return an integer; raise TypeError for other values, and numbers that are too large."""
    if type(value) is not int or abs(value) > _LATEST:
        raise TypeError(f"{str(value)[:40]!r} is not a time or the number of a step")
    return value


_MOST_DIGITS = 20


def ns(microseconds: float | Decimal | str) -> int:
    """Convert microseconds, in quotes or not, to integer nanoseconds.

    Raises OverflowError if they are too large, other errors for texts that are no numbers.
    """
    if isinstance(microseconds, str):
        microseconds = Decimal(microseconds)
        if microseconds.adjusted() > _MOST_DIGITS:
            raise OverflowError(f"{microseconds} us is too large for a time")
    integer = int(microseconds)
    time = integer * 1000 + round((microseconds - integer) * 1000)
    if abs(time) > _LATEST:
        raise OverflowError(f"{microseconds} us is too large for a time")
    return time


def read_json(path: Path) -> Any:
    """Read a JSON document, gzipped or not; raise TraceFileError if it is invalid."""
    try:
        return orjson.loads(whole_text(path))
    except orjson.JSONDecodeError as error:
        raise TraceFileError(f"{path}: {error}") from error


def read_events(path: Path) -> list[Any]:
    """Read the events of an object with traceEvents, or of a list.

    Raises TraceFileError if the file has neither.
    """
    rows = event_rows(read_json(path), None)
    if not isinstance(rows, list):
        raise TraceFileError(f"{path}: no traceEvents, and no list of events")
    return rows


def event_rows(document: Any, default: Any = ()) -> Any:
    """Return the traceEvents of an object, or `default`; other documents are returned as is."""
    return document.get("traceEvents", default) if isinstance(document, dict) else document


def whole_text(path: Path) -> bytes:
    """Read the bytes of a file, gzipped or not; raise TraceFileError if it is truncated."""
    try:
        return document(path)
    except CutShortError as error:
        raise TraceFileError(f"{path}: the compressed file is truncated") from error


def read_text(path: Path) -> str:
    """Read a text file, gzipped or not; raise TraceFileError if it is not UTF-8."""
    try:
        return whole_text(path).decode()
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path}: {error}") from error


def to_bytes(trace: UniformTrace) -> bytes:
    """Return the JSON text of a uniform trace, in the form that dPRO reads."""
    events = orjson.dumps([_row(trace, i) for i in range(len(trace))])
    return b'{"traceEvents":' + events + b',"all_prefix":' + orjson.dumps(trace.pids) + b"}\n"


def compressed(text: bytes) -> bytes:
    """Compress with gzip, reproducibly: without a time stamp."""
    return gzip.compress(text, mtime=0)


def _row(trace: UniformTrace, i: int) -> dict[str, Any]:
    """Return one event in the form of the JSON file."""
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
    """Return microseconds for JSON, exact to the nanosecond at any size."""
    integer, fraction = divmod(time, 1000)
    return integer if not fraction else orjson.Fragment(f"{integer}.{fraction:03d}")


_DEBUG = 0
_SELECTION = Selection(
    kinds={b"debug": _DEBUG},
    keep=[KEEP_ALL, KEEP_ALL],
    prefixes=(),
    row_args=("step", *SLICE_IDS),
    detail_args=(),
    detail_texts=("name",),
)


def scan(path: Path) -> UniformTrace:
    """Read names, times and steps of every event of a uniform trace.

    Falls back to `read`, which is slower, and raises TraceFileError as it does.
    """
    try:
        scanned = scan_file(path, _SELECTION)
    except TraceFileError:
        return read(path)  # its message is about this format
    columns = scanned.columns
    is_complete = scanned.event_count == len(columns["start"]) and not scanned.warnings
    if not is_complete or any((columns[name] == NULL).any() for name in ("name", "process")):
        return read(path)
    return of_columns(_columns(scanned))


def _columns(scanned: Scanned) -> Columns:
    """Return the columns of dPRO events, with codes only for texts that occur."""
    columns, texts = scanned.columns, scanned.texts
    name, names = _used(columns["name"])
    pid, pids = _used(columns["process"])
    lane, lanes = _used(columns["thread"])
    suffix, suffixes = _suffixes(scanned)
    return Columns(
        names=tuple(texts[code] for code in names),
        name=name,
        pids=tuple(_thread_label(value, texts) for value in pids),
        pid=pid,
        lanes=tuple(_thread_label(value, texts) for value in lanes),
        lane=lane,
        cats=("debug", ""),
        cat=columns["kind"],
        suffixes=suffixes,
        suffix=suffix,
        start=columns["start"],
        dur=columns["stop"] - columns["start"],
        step=columns["step"],
    )


def _used(column: NDArray[Any]) -> tuple[Numbers, list[int]]:
    """Encode a column: codes in the order of first use, and the value of each code."""
    encoded = pa.array(column).dictionary_encode()
    return encoded.indices.to_numpy(), encoded.dictionary.to_pylist()


def _thread_label(value: int, texts: list[str]) -> str:
    """Return the label of a process or thread, which is a number or a text."""
    if value == NULL:
        return ""
    return texts[TEXT_LANE - value] if value <= TEXT_LANE else str(value)


def _suffixes(scanned: Scanned) -> tuple[Ints, tuple[str, ...]]:
    """Return the code of each event's suffix, or -1, and all suffixes.

    A suffix is the part of the argument `name` after ~>, or the four ids of NCCL.
    """
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
    codes: Ints = of_text[named]
    _add_ids(scanned, codes, numbers)
    return codes, tuple(numbers)


def _add_ids(scanned: Scanned, suffixes: Ints, numbers: dict[str, int]) -> None:
    """Add the suffixes of events that have ids but no suffix in their name, in place."""
    ids: NDArray[np.int64] = np.stack([scanned.columns[name] for name in SLICE_IDS])
    rows = np.flatnonzero((suffixes < 0) & (ids != NULL).all(axis=0))
    for row in rows.tolist():
        suffix = "_".join(map(str, ids[:, row].tolist()))
        suffixes[row] = numbers.setdefault(suffix, len(numbers))
