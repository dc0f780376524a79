"""dPRO trials and uniform traces: how they are recognized, and events by name, as columns.

Names are ``[pid->]op_cat.op_name[.sub_op][~>suffix]``. Every text is a name: what has no dot is
an operation of that whole name.
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
from fastcomm.readers import OpenOptions, RankSources
from fastcomm.trace.schema import OPS
from fastcomm_kernels.arrays import NULL, Ints

SERVER = ("COPY_FIRST", "SUM", "COPY_MERGED")
REQUESTS = ("PUSH_REQ", "PUSH_RES", "PULL_REQ", "PULL_RES")
COMPUTATION = frozenset(
    {
        "operator.FW",
        "operator.BW",
        "operator.FW+BW",
        "operator.UPDATE",
        "operator.OUTPUT",
        "ServerOp",
    }
)
OTHER = "other"
# What communication does, as the last part of its name tells; all else is OTHER.
TRANSFERS = frozenset({"SEND", "RECV", *(op for op in OPS if op.lower() != OTHER)})
COMMUNICATION = frozenset(f"Comm.{each}" for each in (*TRANSFERS, *REQUESTS))
HOST = "HOST"
# What a group of tensors goes through before and behind the network.
IN, OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
STAGES = ("QUEUE", IN, OUT)
# Without NCCL's own events: the wait of all ranks for each other, and all of the communication.
COARSE = ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")

_FUSED = re.compile(r"\+(?=(?:[^+>]*->)?(?:FW|BW|Comm|UPDATE_)\.)")
_UNDOTTED = ("UPDATE_", "OUTPUT", "I/O")
_DOTTED = 2
_WITH_SUB_OP = 3

# A trial is <trial>/<host>/<gpu>/<one of these>.
TRACES = ("trace.json.gz", "temp.json")
_DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A long name in its parts; what it does not have is None."""

    pid: str | None
    standard: str
    op_cat: str
    op_name: str
    sub_op: str | None
    suffix: str | None

    @classmethod
    def of(cls, text: str) -> "Name":
        """Split a long or a standard name."""
        pid, arrow, rest = text.partition("->")
        if not arrow:
            pid, rest = "", text
        standard, tilde, suffix = rest.partition("~>")
        cat, op, sub = _parts(standard)
        return cls(
            pid=pid if arrow else None,
            standard=standard,
            op_cat=cat,
            op_name=op,
            sub_op=sub,
            suffix=suffix if tilde else None,
        )

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensor ids of a communication; () for everything else."""
        ids = self.op_name.split("+") if self.op_cat == "Comm" else []
        return tuple(map(int, ids)) if all(each.isdecimal() for each in ids) else ()

    def __str__(self) -> str:
        return long_name(self.pid, self.standard, self.suffix)


def _parts(standard: str) -> tuple[str, str, str | None]:
    """Category, operation and sub-operation of a standard name."""
    parts = standard.split(".")
    if len(parts) == 1:
        cat = next((cat for cat in _UNDOTTED if standard.startswith(cat)), "")
        return ("END" if standard == "END" else cat), standard, None
    if len(parts) == _DOTTED:
        return parts[0], parts[1], None
    return parts[0], ".".join(parts[1:-1]), parts[-1]


def is_rank(pid: str) -> bool:
    """Whether a pid is of a rank: not of a link between two hosts, nor of a server's thread."""
    return bool(pid) and "::" not in pid and not pid.startswith("server_")


def long_name(pid: str | None, standard: str, suffix: str | None = None) -> str:
    """The parts joined."""
    head = "" if pid is None else f"{pid}->"
    return head + standard + ("" if suffix is None else f"~>{suffix}")


def fused(text: str) -> tuple[Name, ...]:
    """The operations that a fused one joins by "+"; the pid is that of the first."""
    first, *rest = (Name.of(part) for part in _FUSED.split(text))
    return (first, *(Name.of(long_name(first.pid, n.standard, n.suffix)) for n in rest))


def category(standard: str) -> str:  # noqa: PLR0911
    """The fine category, by the tokens of the name."""
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
    if name.op_cat.startswith("UPDATE"):
        return "operator.UPDATE"
    if name.op_cat.startswith("OUTPUT"):
        return "operator.OUTPUT"
    return "virtual" if standard == "END" else OTHER


def coarse(fine: str) -> str:
    """The coarse category of a fine one: operator, Comm, I/O, ServerOp, virtual."""
    return fine.partition(".")[0]


Codes = NDArray[np.int32]
Integers = NDArray[np.integer[Any]]


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


def claims(path: Path) -> bool:
    """Whether this is a trial, a host or GPU of one, or a uniform trace."""
    from fastcomm.readers.kineto import head  # most runs have neither

    if path.name.lower().endswith(head.SUFFIXES) and path.is_file():
        return head.peek(path).kind == "uniform"
    traces = _traces(path)
    return bool(traces) and all(head.peek(each).kind != "profiler" for each in traces)


def is_damaged(_: Path) -> bool:
    """Return False: a file that cannot be read is no uniform trace."""
    return False


def _traces(path: Path) -> list[Path]:
    """The traces of ranks that lie where a trial has them."""
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
    """The directories in a directory, but for hidden ones; none where it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return [
                path / entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir()
            ]
    except OSError:
        return []


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """Raise `TraceFileError`: these are no traces of a profiler."""
    del options
    raise trial_error(paths[0], "stats")


def trial_error(path: Path, command: str) -> TraceFileError:
    """Return the error for a trial or a uniform trace where the traces of a run are needed.

    It names the command of `fastcomm dpro` that reads the path.
    """
    what = "dPRO trial" if path.is_dir() else "uniform trace"
    if what == "uniform trace" and command == "replay":
        command = "stats"  # it has no dependencies to replay
    line = shell_joined(["fastcomm", "dpro", command, str(path)])
    return TraceFileError(f"{path} is a {what}: {line}")
