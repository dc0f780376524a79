"""The ranks of a run as sources, each read later in any process; devices of one process.

A format is a module with `claims`, which checks a file's name and first bytes, and `find`,
which finds the ranks. Ranks are read later, on any machine that can access the path. This
module defines the interface of formats, and what names and first bytes of files tell.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastcomm import files
from fastcomm.errors import Lines, TraceFileError, inert, shell_quoted
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.config import Config
from fastcomm.trace.run_traces import MOST_RANKS, WITH_HOST, Content, SkippedRank, Source
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import SMALL, Trace
from fastcomm.units import percent
from fastcomm_kernels.arrays import Flags, Ints

# The patterns of names below, for messages; N is the rank.
NAME_PATTERNS = ("rankN", "rank-N", "rank_N", "rank[N]", "workerN", "kineto_trace_N",
                 "torch_et_N", "nsys_N", "_rN.")  # fmt: skip
_N = r"([0-9]{1,7})(?![0-9])"
# Excludes ranks inside a node or along one parallelism.
_PART = r"(?<!local[-_ ])(?<!node[-_ ])(?<![tpcde]p[-_ ])"
# Excludes torch's default "<host>_<pid>.<time>", where worker3 is a host, not a rank.
_DEFAULT = r"(?!_[0-9]+\.[0-9]+\.pt\.trace)"
_PATTERNS = tuple(
    re.compile(text, re.IGNORECASE)
    for text in (
        rf"(?<![a-z]){_PART}rank[-_=\[ ]?{_N}",
        rf"(?<![a-z0-9-])worker_?{_N}{_DEFAULT}",
        rf"(?<![a-z])(?:kineto_trace|torch_et|nsys)_{_N}",
        rf"[-_.]r{_N}(?=\.)",
    )
)
# The end of the error about a file that differs from what was read before.
CHANGED = "changed while it was read; wait until it is written, and read it again"
_UNPACK = "unpack it ({} {{}}) and give fastcomm the directory"
# Offset of a mark, the mark, kind of the file, and remedy ({} is the file).
_KINDS = (
    (257, b"ustar", "a tar archive", _UNPACK.format("tar xf")),
    (0, b"SQLite format 3\0", "a SQLite database",
     "decompress it (gunzip -k, zstd -d) to a file named .sqlite"),
    (0, b"PK\3\4", "a ZIP archive", _UNPACK.format("unzip")),
    (0, b"PK\5\6", "a ZIP archive", _UNPACK.format("unzip")),
    (0, b"\xfd7zXZ\0", "compressed by xz", "decompress it first (xz -dk {})"),
    (0, b"BZh", "compressed by bzip2", "decompress it first (bunzip2 -k {})"),
    (0, b"7z\xbc\xaf", "a 7-Zip archive", _UNPACK.format("7z x")),
    (0, b"\x1f\x8b", "compressed twice", "decompress it once first"),
    (0, b"\x28\xb5\x2f\xfd", "compressed twice", "decompress it once first"),
    (0, b"PAR1", "a Parquet file", "name it .parquet"),
    (0, b"NCCL version ", "the answer of NCCL RAS (ncclras)", "it is no trace"),
)  # fmt: skip
_SHOWN = 16
_PRINTABLE = frozenset(range(32, 127)) | frozenset(b"\t\r\n")
_ARCHIVE = re.compile(r"\.(tar|tar\.\w+|tgz|tbz2?|txz|tzst|zip|7z)$", re.IGNORECASE)
_DATABASE = re.compile(r"\.(sqlite3?|db)\.(gz|zst|xz|bz2)$", re.IGNORECASE)
_TRACE = re.compile(r"\.(json\.(xz|bz2|lz4|br)|(jsonl|log)\.(zst|xz|bz2))$", re.IGNORECASE)
_TOOLS = {
    "gz": "gunzip -k",
    "zst": "zstd -d",
    "xz": "xz -dk",
    "bz2": "bunzip2 -k",
    "lz4": "lz4 -dk",
    "br": "brotli -d",
}
# Suffixes of unsupported exports, and the kind to export instead.
_UNREAD = {".arrows": "arrowdir", ".h5": "parquetdir", ".hdf": "parquetdir"}


def rank_from_name(name: str) -> int | None:
    """Return the rank in the last part of a path; None if it names none, or two."""
    base = re.split(r"[/\\]", name)[-1]
    for pattern in _PATTERNS:
        if ranks := {int(match[1]) for match in pattern.finditer(base)}:
            return ranks.pop() if len(ranks) == 1 else None
    return None


def unpack(head: bytes, path: Path) -> str | None:
    """Return the kind of an unsupported file, with a remedy; None for unknown kinds."""
    for offset, mark, kind, remedy in _KINDS:
        if head.startswith(mark, offset):
            return f"{kind}; {remedy.format(shell_quoted(str(path)))}"
    return None


def described(head: bytes) -> str:
    """Return how a text begins: quoted if it is printable ASCII, else "binary data"."""
    begin = head[:_SHOWN]
    if begin and _PRINTABLE.issuperset(begin):
        return f"text that begins with {begin.decode()!r}"
    return "binary data"


def packed(path: Path) -> str | None:
    """Return a message with a remedy for an archive or unsupported compression, or None."""
    name = shell_quoted(str(path))
    if _ARCHIVE.search(path.name):
        suffix = path.name.rpartition(".")[2].lower()
        tool = {"zip": "unzip", "7z": "7z x"}.get(suffix, "tar xf")
        return f"{path}: an archive; unpack it ({tool} {name}) and give fastcomm the directory"
    if _DATABASE.search(path.name) or _TRACE.search(path.name):
        tool = _TOOLS[path.name.rpartition(".")[2].lower()]
        return f"{path}: this compression is not read; decompress the file: {tool} {name}"
    return None


def is_packed(path: Path) -> bool:
    """Return whether a compressed file may be a trace.

    It may if its name is that of a database, or names a rank and its first bytes are those of a
    compression.
    """
    if _DATABASE.search(path.name):
        return True
    is_trace = ".pt.trace.json" in path.name or rank_from_name(path.name) is not None
    return is_trace and packed(path) is not None


def is_unpacked_beside(path: Path, files: Iterable[Path]) -> bool:
    """Return whether one of the files is what unpacking a file would create."""
    stem = _ARCHIVE.sub("", path.name)
    stem = path.stem if stem == path.name else stem
    return any(
        (file.parent == path.parent and file.name.startswith((f"{stem}.", f"{stem}_")))
        or file == path.with_name(stem)
        for file in files
    )


# The remedy for files of torch_npu that are not read.
ASCEND_REMEDY = (
    "give fastcomm kernel_details.csv, the table of kernels that torch_npu writes beside it "
    "with export_type Text"
)
_SCHEMA = 1 << 16  # bytes at the begin of a database, among which are names of tables
# Names of tables in databases of torch_npu, and of Nsight Systems.
_OF_TORCH_NPU = (b"STRING_IDS", b"COMPUTE_TASK_INFO", b"StepTraceTime", b"CommAnalyzerTime")
_OF_NSYS = (b"StringIds", b"CUPTI_", b"NVTX_")


def _is_of_torch_npu(path: Path) -> bool:
    """Return whether a database has tables of torch_npu; False if it cannot be read."""
    try:
        with files.opened(path) as file:
            head = file.read(_SCHEMA)
    except OSError:
        return False
    is_other = any(name in head for name in _OF_NSYS)
    return not is_other and any(name in head for name in _OF_TORCH_NPU)


def unexported(path: Path) -> str | None:
    """Return a message with a remedy for a report or an unsupported export, or None."""
    suffix = path.suffix.lower()
    if suffix == ".db" and _is_of_torch_npu(path):
        return f"{path}: a database of torch_npu (Ascend), which is not read: {ASCEND_REMEDY}"
    if suffix in _UNREAD:
        return (
            f"{path}: an unsupported kind of export; export the report as sqlite, parquetdir "
            f"or arrowdir: nsys export --type={_UNREAD[suffix]} ..."
        )
    if suffix != ".nsys-rep":
        return None
    output, report = shell_quoted(str(path.with_suffix(".sqlite"))), shell_quoted(str(path))
    return Lines(
        f"{inert(str(path))}: a report that only nsys can read. Export it, with the payloads "
        "of NCCL, and give fastcomm the new file:\n"
        f"    nsys export --type=sqlite --include-blobs=true --output={output} {report}\n"
        "(an nsys that does not know --include-blobs: --include-json=true.)"
    )


@dataclass(frozen=True, slots=True)
class RankReader:
    """Reads the trace of a rank by the function of its format."""

    read: Callable[..., Trace]
    path: Path
    options: TraceOptions
    rank: tuple[Any, ...] = ()  # further arguments: what the format knows of the rank
    may_have_shapes: bool = False  # whether the format records the shapes of operators

    def __call__(self, content: Content) -> Trace:
        """Read a part of the trace."""
        whole = content in WITH_HOST or (content == "flops" and self.may_have_shapes)
        return self.read(self.path, replace(self.options, whole=whole), *self.rank)

    def source(self, rank: int) -> Source:
        """Return this reader as the source of a rank."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0  # reading the file reports the error
        return Source(rank=rank, path=self.path, size=size, reader=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSources:
    """The ranks that one format found, in ascending order."""

    sources: tuple[Source, ...]
    world_size: int | None = None
    warnings: tuple[str, ...] = ()
    link_bandwidth: float | None = None  # bytes per second, if the files state it
    skipped: tuple[SkippedRank, ...] = ()


class Format(Protocol):
    """A module that reads one format."""

    def claims(self, path: Path) -> bool:
        """Return whether a path is of the format, by its name and first bytes."""
        ...

    def is_damaged(self, path: Path) -> bool:
        """Return whether a file that `claims` rejects is unreadable, so that it may be one."""
        ...

    def find(self, paths: Sequence[Path], config: Config) -> RankSources:
        """Find the ranks in files of the format, reading no more than needed for that."""
        ...


def add_rank(ranks: dict[int, Path], rank: int, path: Path) -> None:
    """Add the file of a rank to `ranks`; TraceFileError if another file has this rank."""
    if rank in ranks:
        raise TraceFileError(f"two files of rank {rank}: {ranks[rank]} and {path}")
    ranks[rank] = path


def agreed_world(stated: Mapping[Path, int | None], ranks: Mapping[int, Path]) -> int | None:
    """Return the world size that the files agree on; None if no file states it.

    Parameters
    ----------
    stated
        The world size that each file states, or None.
    ranks
        The file of each rank.

    Raises
    ------
    TraceFileError
        If files contradict each other, or a rank.

    """
    sizes: dict[int, Path] = {}
    for path, size in stated.items():
        if size is not None:
            check_count(size, path, "world size")
            sizes.setdefault(size, path)
    for rank, path in ranks.items():
        check_count(rank, path, "rank")
    if len(sizes) > 1:
        text = " and ".join(f"{size} ({path})" for size, path in sizes.items())
        raise TraceFileError(f"the files contradict each other about the world size: {text}")
    world = next(iter(sizes), None)
    if world is not None and max(ranks) >= world:
        raise TraceFileError(
            f"{ranks[max(ranks)]}: rank {max(ranks)} of a world of {world} ({sizes[world]})"
        )
    return world


def check_count(number: int, path: Path, name: str) -> None:
    """Raise TraceFileError if a rank, or a number of ranks, is above any job's.

    Parameters
    ----------
    number
        The value found.
    path
        File that has it.
    name
        What the value is, for the message, such as "rank".

    """
    if number > MOST_RANKS:
        raise TraceFileError(
            f"{path}: found a {name} of more than {MOST_RANKS}; no job has so many ranks"
        )


def busy(device: Ints, duration: Ints, owners: Sequence[object]) -> Ints:
    """Return the devices that are ranks.

    Those with less than `SMALL` of the work of their owner's busiest are none: a process may
    touch a device that it does not use.

    Parameters
    ----------
    device, duration
        Number of the device of each kernel or copy, and its time in ns.
    owners
        What drives each device, such as a process.

    """
    times = np.bincount(device, duration, len(owners))
    _, owner = np.unique(np.array([*map(str, owners)]), return_inverse=True)
    most = np.zeros(len(owners))
    np.maximum.at(most, owner, times)
    return np.flatnonzero(times >= SMALL * most[owner])


def unused(names: Sequence[str]) -> tuple[str, ...]:
    """Return the warning about devices that are no ranks; empty without one."""
    text = (
        f"{', '.join(names)}: less than {percent(SMALL)} of the work of the busiest device, "
        "and no rank; its work is left out"
    )
    return (text,) if names else ()


def is_for_others(
    columns: Mapping[str, NDArray[Any]], is_own: Flags, is_of_others: Flags
) -> Flags:
    """Return which events are calls that launched work of other devices alone.

    Parameters
    ----------
    columns
        Kind and correlation of each event.
    is_own, is_of_others
        Whether each event is on the device, or on others.

    """
    call = columns["correlation"]
    others = np.setdiff1d(call[is_of_others], call[is_own])
    flags: Flags = (columns["kind"] == KIND["runtime"]) & np.isin(call, others)
    return flags
