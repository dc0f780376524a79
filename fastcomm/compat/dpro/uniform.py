"""Uniform traces: names, columns, and JSON files.

A uniform trace has events of all frameworks with names of one form.

A long name is ``[pid->]op_cat.op_name[.sub_op][~>suffix]``; the part between ``->`` and ``~>``
is the standard name. Any text is a valid name: without dots it is an operation of that name.

`scan` is fast, and reads what statistics need. Only `read` returns categories, and arguments
other than name and step, such as `input0`.
"""

import gzip
import json
import re
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
from fastcomm.formats.kineto.chrome import Scanned, Selection, scan_file
from fastcomm.formats.stream import CutShortError, document
from fastcomm.trace.schema import OPS
from fastcomm_kernels.arrays import NULL, Flags, Ints, Numbers
from fastcomm_kernels.json_events import KEEP_ALL, TEXT_LANE

SERVER = ("COPY_FIRST", "SUM", "COPY_MERGED")
REQUESTS = ("PUSH_REQ", "PUSH_RES", "PULL_REQ", "PULL_RES")
_COMPUTING = ("FW", "BW", "FW+BW", "UPDATE", "OUTPUT")
COMPUTATION = frozenset({"ServerOp", *(f"operator.{op_cat}" for op_cat in _COMPUTING)})
OTHER = "other"
# Sub-operations that transfer data; other ones of communication have the category OTHER.
TRANSFERS = frozenset({"SEND", "RECV", *(op for op in OPS if op.lower() != OTHER)})
COMMUNICATION = frozenset(f"Comm.{sub_op}" for sub_op in (*TRANSFERS, *REQUESTS))
# Stages of a group of tensors before and after the network.
IN, OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
STAGES = ("QUEUE", IN, OUT)
# Without NCCL's events: the wait of all ranks for each other, and the whole communication.
COARSE = ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")
_FUSED = re.compile(r"\+(?=(?:[^+>]*->)?(?:FW|BW|Comm|UPDATE_)\.)")
_UNDOTTED = ("UPDATE_", "OUTPUT", "I/O")
_DOTTED = 2
AnyIntegers = NDArray[np.integer[Any]]
SLICE_IDS = ("loopId", "channelId", "chunkId", "sliceId")
_PRECISE = 1 << 43  # above this a float64 does not hold thousandths of its unit
_LATEST = 1 << 61  # ns; the sum of two such times fits an int64
_INVALID = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
_MOST_DIGITS = 20
_DEBUG = 0
_SELECTION = Selection(
    kinds={b"debug": _DEBUG},
    keep=[KEEP_ALL, KEEP_ALL],
    prefixes=(),
    row_args=("step", *SLICE_IDS),
    detail_args=(),
    detail_texts=("name",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """The parts of a long name; missing parts are None."""

    pid: str | None
    standard: str
    op_cat: str
    op_name: str
    sub_op: str | None
    suffix: str | None

    @classmethod
    def of(cls, text: str) -> "Name":
        """Split a long or a standard name."""
        pid, arrow, name = text.partition("->")
        standard, tilde, suffix = (name if arrow else text).partition("~>")
        op_cat, op_name, sub_op = _parts(standard)
        return cls(
            pid=pid if arrow else None,
            standard=standard,
            op_cat=op_cat,
            op_name=op_name,
            sub_op=sub_op,
            suffix=suffix if tilde else None,
        )

    @property
    def tensors(self) -> tuple[int, ...]:
        """Ids of the tensors of communication; () for other operations."""
        ids = self.op_name.split("+") if self.op_cat == "Comm" else []
        return tuple(map(int, ids)) if all(number.isdecimal() for number in ids) else ()

    def __str__(self) -> str:
        return long_name(self.pid, self.standard, self.suffix)


def _parts(standard: str) -> tuple[str, str, str | None]:
    """Return category, operation and sub-operation of a standard name, split at the dots.

    The operation may have dots itself. A name of two parts has no sub-operation (None). A name
    without dots is the operation, and its category follows from its beginning ("" if unknown).
    """
    parts = standard.split(".")
    if len(parts) == 1:
        cat = next((cat for cat in _UNDOTTED if standard.startswith(cat)), "")
        return ("END" if standard == "END" else cat), standard, None
    if len(parts) == _DOTTED:
        return parts[0], parts[1], None
    return parts[0], ".".join(parts[1:-1]), parts[-1]


def is_rank(pid: str) -> bool:
    """Return whether a pid is a rank, not a link between two hosts or a thread of a server."""
    return bool(pid) and "::" not in pid and not pid.startswith("server_")


def long_name(pid: str | None, standard: str, suffix: str | None = None) -> str:
    """Join pid, standard name and suffix as ``pid->standard~>suffix``; None leaves one out."""
    head = "" if pid is None else f"{pid}->"
    return head + standard + ("" if suffix is None else f"~>{suffix}")


def fused(text: str) -> tuple[Name, ...]:
    """Split the name of a fused operation at "+"; all parts get the pid of the first."""
    first, *others = (Name.of(part) for part in _FUSED.split(text))
    return (first, *(Name.of(long_name(first.pid, n.standard, n.suffix)) for n in others))


def category(standard: str) -> str:  # noqa: PLR0911
    """Return the fine category of a standard name, such as "operator.FW" or "Comm.SEND"."""
    name = Name.of(standard)
    if name.sub_op in SERVER:
        return "ServerOp"
    if name.sub_op in REQUESTS:
        return f"Comm.{name.sub_op}"
    if name.op_cat == "Comm":
        return f"Comm.{name.sub_op if name.sub_op in TRANSFERS else OTHER}"
    if name.op_cat in {"FW", "BW", "COMM", "COMP"}:
        return f"operator.{name.op_cat}"
    if name.op_cat.startswith("I/O"):
        return "I/O"
    for op_cat in ("UPDATE", "OUTPUT"):
        if name.op_cat.startswith(op_cat):
            return f"operator.{op_cat}"
    return "virtual" if standard == "END" else OTHER


def coarse(fine: str) -> str:
    """Return the coarse category of a fine one: operator, Comm, I/O, ServerOp or virtual."""
    return fine.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a uniform trace; times are ns."""

    name: str  # standard name
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
    """Events by start, as columns; `key`, `lane`, `cat`, `extra`, `phase` index into tuples."""

    keys: tuple[str, ...]  # long names
    names: tuple[str, ...]  # standard name of each key
    key_pid: tuple[str, ...]  # pid of each key
    pids: tuple[str, ...]
    lanes: tuple[str, ...]
    cats: tuple[str, ...]
    extras: tuple[bytes, ...]  # JSON objects of other arguments
    phases: tuple[str, ...]
    # one value per event
    key: Numbers
    start: Ints  # ns
    dur: Ints  # ns
    step: Ints  # or NULL
    cnt: Ints  # number of earlier events with the key
    lane: Numbers
    cat: Numbers
    extra: Numbers
    phase: Numbers
    counts: Flags  # False for instant events and debug events, which are not measured

    def __len__(self) -> int:
        return len(self.start)

    @property
    def process(self) -> Ints:
        """Process of each event, an index into `pids`."""
        number = {pid: i for i, pid in enumerate(self.pids)}
        return np.array([number[pid] for pid in self.key_pid], np.int64)[self.key]

    def with_times(self, start: Ints, dur: Ints) -> "UniformTrace":
        """Return a copy with other starts and durations in ns; events keep their order."""
        return replace(self, start=start, dur=dur)


class _Dictionary(dict[Any, int]):
    """Numbers values in the order of their first use."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Events in any order, as codes into tuples of values; the suffix -1 is none."""

    names: tuple[str, ...]
    pids: tuple[str, ...]
    lanes: tuple[str, ...]
    cats: tuple[str, ...]
    suffixes: tuple[str, ...]
    extras: tuple[bytes, ...] = (b"{}",)
    phases: tuple[str, ...] = ("X",)
    name: AnyIntegers
    pid: AnyIntegers
    lane: AnyIntegers
    cat: AnyIntegers
    suffix: AnyIntegers
    extra: AnyIntegers | None = None
    phase: AnyIntegers | None = None
    start: Ints
    dur: Ints
    step: Ints


def of_columns(columns: Columns) -> UniformTrace:
    """Build a uniform trace from columns: sort by start and name, and number the long names."""
    place = np.empty(len(columns.names), np.int64)  # of each name in the sorted names
    place[np.argsort(np.array(columns.names, object), kind="stable")] = np.arange(len(place))
    order = np.lexsort((place[columns.name], columns.start))
    key, firsts = _keys(columns, order)
    names = [columns.names[columns.name[at]] for at in firsts]
    pids = [columns.pids[columns.pid[at]] for at in firsts]
    suffixes = [
        columns.suffixes[s] if (s := columns.suffix[at]) >= 0 else None for at in firsts
    ]
    keys = _Dictionary()
    number = [keys[long_name(*parts)] for parts in zip(pids, names, suffixes, strict=True)]
    if len(keys) < len(number):  # other parts may join to the same long name
        key = np.array(number, np.int32)[key]
        unique = [number.index(k) for k in range(len(keys))]
        names, pids = [names[k] for k in unique], [pids[k] for k in unique]
    zeros = np.zeros(len(order), np.int32)
    cat, phase = columns.cat[order], zeros if columns.phase is None else columns.phase[order]
    counted = np.array([name not in {"i", "I"} for name in columns.phases], bool)[phase]
    counted &= np.array([name != "debug" for name in columns.cats], bool)[cat]
    return UniformTrace(
        keys=tuple(keys),
        names=tuple(names),
        key_pid=tuple(pids),
        pids=columns.pids,
        lanes=columns.lanes,
        cats=columns.cats,
        extras=columns.extras,
        phases=columns.phases,
        key=key,
        start=columns.start[order],
        dur=columns.dur[order],
        step=columns.step[order],
        cnt=occurrences(key, len(keys)),
        lane=columns.lane[order].astype(np.int32),
        cat=cat.astype(np.int32),
        extra=zeros if columns.extra is None else columns.extra[order].astype(np.int32),
        phase=phase.astype(np.int32),
        counts=counted,
    )


def _keys(columns: Columns, order: Ints) -> tuple[Numbers, list[int]]:
    """Number the combinations of pid, name and suffix; return keys and an event of each."""
    wide = len(columns.suffixes) + 1
    joined = (columns.pid.astype(np.int64) * len(columns.names) + columns.name) * wide
    encoded = pa.array((joined + columns.suffix + 1)[order]).dictionary_encode()
    key = encoded.indices.to_numpy()
    at = np.empty(len(encoded.dictionary), np.int64)
    at[key[::-1]] = order[::-1]
    return key, at.tolist()


def of_events(events: Iterable[Event], shifts: Mapping[str, int] | None = None) -> UniformTrace:
    """Build a uniform trace from events, sorted by start and name.

    `shifts` are ns by process that are added to the starts of its events; by default none.
    """
    rows, shifts = list(events), shifts or {}
    n = len(rows)
    coded: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for one, many, column in (
        ("name", "names", (e.name for e in rows)),
        ("pid", "pids", (e.pid for e in rows)),
        ("lane", "lanes", (e.lane for e in rows)),
        ("cat", "cats", (e.cat for e in rows)),
        ("extra", "extras", (orjson.dumps(e.extra or {}) for e in rows)),
        ("phase", "phases", (e.phase for e in rows)),
    ):
        codes = _Dictionary()
        coded[one] = np.fromiter((codes[value] for value in column), np.int32, n)
        values[many] = tuple(codes)
    suffixes = _Dictionary()
    suffix = (-1 if e.suffix is None else suffixes[e.suffix] for e in rows)
    return of_columns(
        Columns(
            start=np.fromiter((e.start + shifts.get(e.pid, 0) for e in rows), np.int64, n),
            dur=np.fromiter((e.dur for e in rows), np.int64, n),
            step=np.fromiter((NULL if e.step is None else e.step for e in rows), np.int64, n),
            suffix=np.fromiter(suffix, np.int32, n),
            suffixes=tuple(suffixes),
            **coded,
            **values,
        )
    )


def occurrences(key: Ints | Numbers, size: int) -> Ints:
    """Return for each event the number of earlier events with its key.

    Keys are 0 to `size` - 1.
    """
    order = np.argsort(key, kind="stable")
    first = np.concatenate(([0], np.cumsum(np.bincount(key, minlength=size))))[:-1]
    count = np.empty(len(key), np.int64)
    count[order] = np.arange(len(key)) - first[key[order]]
    return count


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
            start=integer(ns(row["ts"])),
            dur=integer(ns(row.get("dur", 0))),
            lane=str(row.get("tid", "")),
            cat=str(row.get("cat", "")),
            suffix=suffix if tilde else None,
            step=None if step is None else integer(step),
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


def integer(value: Any) -> int:
    """Return an integer; raise TypeError for other values, and numbers that are too large."""
    if type(value) is not int or abs(value) > _LATEST:
        raise TypeError(f"{str(value)[:40]!r} is not a time or the number of a step")
    return value


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
