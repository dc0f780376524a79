"""dPRO trials and uniform traces: recognition, and uniform traces as columns.

A uniform trace has events of all frameworks with names of one form.

A long name is ``[pid->]op_cat.op_name[.sub_op][~>suffix]``; the part between ``->`` and ``~>``
is the standard name. Any text is a valid name: without dots it is an operation of that name.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError, shell_joined
from fastcomm.files import is_local
from fastcomm.readers import RankSources
from fastcomm.readers.config import Config
from fastcomm.trace.schema import OPS
from fastcomm_kernels.arrays import NULL, Flags, Ints, Numbers

SERVER = ("COPY_FIRST", "SUM", "COPY_MERGED")
REQUESTS = ("PUSH_REQ", "PUSH_RES", "PULL_REQ", "PULL_RES")
_COMPUTING = ("FW", "BW", "FW+BW", "UPDATE", "OUTPUT")
COMPUTATION = frozenset({"ServerOp", *(f"operator.{op_cat}" for op_cat in _COMPUTING)})
OTHER = "other"
# Sub-operations that transfer data; other ones of communication have the category OTHER.
TRANSFERS = frozenset({"SEND", "RECV", *(op for op in OPS if op.lower() != OTHER)})
COMMUNICATION = frozenset(f"Comm.{sub_op}" for sub_op in (*TRANSFERS, *REQUESTS))
HOST = "HOST"
# Stages of a group of tensors before and after the network.
IN, OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
STAGES = ("QUEUE", IN, OUT)
# Without NCCL's events: the wait of all ranks for each other, and the whole communication.
COARSE = ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")

_FUSED = re.compile(r"\+(?=(?:[^+>]*->)?(?:FW|BW|Comm|UPDATE_)\.)")
_UNDOTTED = ("UPDATE_", "OUTPUT", "I/O")
_DOTTED = 2

# A trial is <trial>/<host>/<gpu>/<one of these>.
TRACES = ("trace.json.gz", "temp.json")
_DEPTH = 2


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
    if name.op_cat == HOST:
        return "host"
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


AnyIntegers = NDArray[np.integer[Any]]


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


def claims(path: Path) -> bool:
    """Return whether a path is a trial, a host or GPU of one, or a uniform trace."""
    from fastcomm.readers import kineto  # most runs have neither

    if path.name.lower().endswith(kineto.SUFFIXES) and path.is_file():
        return kineto.peek(path).kind == "uniform"
    traces = _traces(path)
    return bool(traces) and all(kineto.peek(file).kind != "profiler" for file in traces)


def is_damaged(_: Path) -> bool:
    """Return False: files that cannot be read are not claimed as uniform traces."""
    return False


def _traces(path: Path) -> list[Path]:
    """Return the traces of ranks in the directories where a trial has them."""
    if not is_local(path) or not path.is_dir():
        return []
    folders = [path]
    for depth in range(_DEPTH + 1):
        files = [folder / name for folder in folders for name in TRACES]
        if traces := [file for file in files if os.path.lexists(file)]:
            return traces
        if depth < _DEPTH:
            folders = [inner for folder in folders for inner in _folders(folder)]
    return []


def _folders(path: Path) -> list[Path]:
    """Return the directories in a directory that are not hidden; none if it is unreadable."""
    try:
        with os.scandir(path) as entries:
            return [
                path / entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir()
            ]
    except OSError:
        return []


def find(paths: Sequence[Path], config: Config) -> RankSources:
    """Raise TraceFileError: trials and uniform traces are no traces of a profiler."""
    del config
    raise trial_error(paths[0], "stats")


def trial_error(path: Path, command: str) -> TraceFileError:
    """Return the error for a trial or a uniform trace where the traces of a run are needed.

    It names the command of `fastcomm dpro` that reads the path: `command`, but "stats" instead
    of "replay" for a uniform trace, which has no dependencies.
    """
    is_trial = path.is_dir()
    command = "stats" if command == "replay" and not is_trial else command
    line = shell_joined(["fastcomm", "dpro", command, str(path)])
    kind = "dPRO trial" if is_trial else "uniform trace"
    return TraceFileError(f"{path} is a {kind}: {line}")
