"""The uniform trace: events of every framework as columns, and its JSON file."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro.names import long_name
from fastcomm.readers.kineto.stream import CutShortError, document
from fastcomm_kernels.arrays import NULL, Ints

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


Codes = NDArray[np.int32]
Integers = NDArray[np.integer[Any]]

_IDS = ("loopId", "channelId", "chunkId", "sliceId")
# Above this a float64 does not hold thousandths of its unit.
_PRECISE = 1 << 43
_LATEST = 1 << 61


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event on its way into columns."""

    name: str
    pid: str
    start: int
    dur: int
    lane: str
    cat: str
    suffix: str | None = None
    step: int | None = None
    phase: str = "X"
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTrace:
    """Columns of one trial; `key`, `lane`, `cat`, `extra` index into the tuples beside them."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    key_pid: tuple[str, ...]
    pids: tuple[str, ...]
    lanes: tuple[str, ...]
    cats: tuple[str, ...]
    extras: tuple[bytes, ...]
    phases: tuple[str, ...]
    key: Codes
    start: Ints
    dur: Ints
    step: Ints
    cnt: Ints
    lane: Codes
    cat: Codes
    extra: Codes
    phase: Codes
    counts: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.start)

    def with_times(self, start: Ints, dur: Ints) -> "UniformTrace":
        """The same events, in the same order, at other times."""
        return replace(self, start=start, dur=dur)


class _Dictionary(dict[Any, int]):
    """Numbers things in the order of their first use."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Events in any order: codes into the tuples beside them; suffix -1 is none."""

    names: tuple[str, ...]
    pids: tuple[str, ...]
    lanes: tuple[str, ...]
    cats: tuple[str, ...]
    suffixes: tuple[str, ...]
    extras: tuple[bytes, ...] = (b"{}",)
    phases: tuple[str, ...] = ("X",)
    name: Integers
    pid: Integers
    lane: Integers
    cat: Integers
    suffix: Integers
    extra: Integers | None = None
    phase: Integers | None = None
    start: Ints
    dur: Ints
    step: Ints


def of_columns(given: Columns) -> UniformTrace:
    """Sort events by time, and number their long names."""
    known = np.empty(len(given.names), np.int64)
    known[np.argsort(np.array(given.names, object), kind="stable")] = np.arange(len(known))
    order = np.lexsort((known[given.name], given.start))
    key, firsts = _keys(given, order)
    names = [given.names[given.name[at]] for at in firsts]
    pids = [given.pids[given.pid[at]] for at in firsts]
    suffixes = [given.suffixes[s] if (s := given.suffix[at]) >= 0 else None for at in firsts]
    keys = _Dictionary()
    number = [keys[long_name(*each)] for each in zip(pids, names, suffixes, strict=True)]
    if len(keys) < len(number):
        key = np.array(number, np.int32)[key]
        kept = [number.index(k) for k in range(len(keys))]
        names, pids = [names[k] for k in kept], [pids[k] for k in kept]
    nothing = np.zeros(len(order), np.int32)
    cat, phase = given.cat[order], nothing if given.phase is None else given.phase[order]
    counted = np.array([each not in {"i", "I"} for each in given.phases], bool)[phase]
    counted &= np.array([each != "debug" for each in given.cats], bool)[cat]
    return UniformTrace(
        keys=tuple(keys),
        names=tuple(names),
        key_pid=tuple(pids),
        pids=given.pids,
        lanes=given.lanes,
        cats=given.cats,
        extras=given.extras,
        phases=given.phases,
        key=key,
        start=given.start[order],
        dur=given.dur[order],
        step=given.step[order],
        cnt=occurrences(key, len(keys)),
        lane=given.lane[order].astype(np.int32),
        cat=cat.astype(np.int32),
        extra=nothing if given.extra is None else given.extra[order].astype(np.int32),
        phase=phase.astype(np.int32),
        counts=counted,
    )


def _keys(given: Columns, order: Ints) -> tuple[Codes, list[int]]:
    """A number for pid, name and suffix together, and an event that has each of them."""
    wide = len(given.suffixes) + 1
    joined = (given.pid.astype(np.int64) * len(given.names) + given.name) * wide
    encoded = pa.array((joined + given.suffix + 1)[order]).dictionary_encode()
    key = encoded.indices.to_numpy()
    at = np.empty(len(encoded.dictionary), np.int64)
    at[key[::-1]] = order[::-1]
    return key, at.tolist()


def of_events(events: Iterable[Event], shifts: Mapping[str, int] | None = None) -> UniformTrace:
    """Sort events into columns; `shifts` (pid to ns) is added to their starts."""
    given, shifts = list(events), shifts or {}
    n = len(given)
    coded: dict[str, Any] = {}
    words: dict[str, Any] = {}
    for one, many, values in (
        ("name", "names", (e.name for e in given)),
        ("pid", "pids", (e.pid for e in given)),
        ("lane", "lanes", (e.lane for e in given)),
        ("cat", "cats", (e.cat for e in given)),
        ("extra", "extras", (orjson.dumps(e.extra or {}) for e in given)),
        ("phase", "phases", (e.phase for e in given)),
    ):
        codes = _Dictionary()
        coded[one] = np.fromiter((codes[value] for value in values), np.int32, n)
        words[many] = tuple(codes)
    suffixes = _Dictionary()
    suffix = (-1 if e.suffix is None else suffixes[e.suffix] for e in given)
    return of_columns(
        Columns(
            start=np.fromiter((e.start + shifts.get(e.pid, 0) for e in given), np.int64, n),
            dur=np.fromiter((e.dur for e in given), np.int64, n),
            step=np.fromiter((NULL if e.step is None else e.step for e in given), np.int64, n),
            suffix=np.fromiter(suffix, np.int32, n),
            suffixes=tuple(suffixes),
            **coded,
            **words,
        )
    )


def occurrences(key: Ints | Codes, size: int) -> Ints:
    """How many events of the same key come before each."""
    order = np.argsort(key, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(key, minlength=size))))[:-1]
    out = np.empty(len(key), np.int64)
    out[order] = np.arange(len(key)) - first[key[order]]
    return out


def read(path: Path) -> UniformTrace:
    """Read a uniform trace: an object with traceEvents, or a bare list."""
    said = read_json(path)
    rows = said.get("traceEvents") if isinstance(said, dict) else said
    if not isinstance(rows, list):
        raise TraceFileError(f"{path}: no traceEvents, and no list of events")
    starts = (row.get("ts") for row in rows if isinstance(row, dict))
    if any(type(ts) is float and abs(ts) > _PRECISE for ts in starts):
        # Absolute microseconds with a fraction: a float64 has lost it.
        said = json.loads(whole_text(path), parse_float=Decimal)
        rows = said["traceEvents"] if isinstance(said, dict) else said
    return of_events(_event(row, path, i) for i, row in enumerate(rows))


def _event(row: Any, path: Path, index: int) -> Event:
    """One event of a file."""
    try:
        args = dict(row.get("args") or {})
        _, tilde, suffix = str(args.pop("name", row["name"])).partition("~>")
        step = args.pop("step", None)
        args.pop("cnt", None)
        if not tilde and all(name in args for name in _IDS):
            tilde, suffix = "~>", "_".join(str(args[name]) for name in _IDS)
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


def _word(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{str(found)[:40]!r} is no text")
    return found


def _whole(found: Any) -> int:
    """A whole number of which two can be added."""
    if type(found) is not int or abs(found) > _LATEST:
        raise TypeError(f"{str(found)[:40]!r} is no time and no number of a step")
    return found


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


def whole_text(path: Path) -> bytes:
    """The text of a file, gzipped or not."""
    try:
        return document(path)
    except CutShortError as error:
        raise TraceFileError(f"{path}: the compressed file ends before its end") from error


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
