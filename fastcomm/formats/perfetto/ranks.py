"""Find the Perfetto traces of a run, and tell the rank of each.

The rank is that of the name, else the one that collectives state. As little as possible is
read: the beginning of a file of PyTorch tells the number of ranks.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from fastcomm.errors import TraceFileError
from fastcomm.formats.config import Config
from fastcomm.formats.kineto.categories import METRICS
from fastcomm.formats.perfetto.packets import SIGN, read_packets
from fastcomm.formats.perfetto.reader import distributed, read, stated_rank
from fastcomm.formats.sources import (
    NAME_PATTERNS,
    RankReader,
    RankSources,
    add_rank,
    agreed_world,
    rank_from_name,
)
from fastcomm.formats.stream import CutShortError, blocks
from fastcomm.trace.timelines import DRAWN, PROGRAM

if TYPE_CHECKING:
    from fastcomm.trace.run_traces import SkippedRank

SUFFIXES = (".pftrace", ".pftrace.gz", ".perfetto-trace", ".perfetto-trace.gz")
_HEAD = 1 << 12
_LENGTHS = 3  # of packets that are followed
# No packet begins with the second of these bytes.
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*[{\[][ \t\r\n]*[\"{}\[\]]")
_ROCPROF = re.compile(r"([0-9]{1,10})_results\.")


@dataclass(frozen=True, slots=True)
class PerfettoPeek:
    """What the beginning of a file tells, or all of it."""

    rank: int | None = None
    world_size: int | None = None
    error: str = ""


def begins_trace(head: bytes) -> bool:
    """Return whether a text begins like a Perfetto trace, and not like JSON.

    A chain of lengths leads from packet to packet; a blank of JSON may be the same byte.
    """
    if not head or head[0] != SIGN or _JSON.match(head):
        return False
    at = 0
    for _ in range(_LENGTHS):
        size, shift, at = 0, 0, at + 1
        while at < len(head) and head[at] & 128:
            size |= (head[at] & 127) << shift
            shift, at = shift + 7, at + 1
        if at >= len(head):
            return True
        at += 1 + (size | head[at] << shift)
        if at >= len(head):
            return True
        if head[at] != SIGN:
            return False
    return True


def claims(path: Path) -> bool:
    """Return whether the file is a Perfetto trace, or would be if it were readable.

    Its name must have a suffix of `SUFFIXES`; only JSON may have one, too.
    """
    if not path.name.lower().endswith(SUFFIXES) or path.is_dir():
        return False
    try:
        head = b"".join(islice(blocks(path, _HEAD), 1))
    except (CutShortError, TraceFileError):
        return True
    return begins_trace(head) or _JSON.match(head) is None


def is_damaged(path: Path) -> bool:
    """Return False: a file with a suffix of the format that `claims` rejects is JSON."""
    return False


def find(paths: Sequence[Path], config: Config) -> RankSources:
    """Find the rank of each file: from its name, else from its collectives.

    Files of rocprofv3 state none: their ranks are numbered in the order of their processes.

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
    ranks: dict[int, Path] = {}
    skipped: list[SkippedRank] = []
    by_process = _by_process(paths)
    for path in paths:
        try:
            _refuse_drawn(path)
            rank = by_process.get(path, _rank(path))
            if rank is None and len(paths) > 1:
                raise TraceFileError(peek(path).error or _no_rank(path))
        except TraceFileError as error:
            skipped.append(config.skipped(path, error))
            continue
        add_rank(ranks, rank or 0, path)
    if not ranks:
        raise TraceFileError(f"no rank could be read: {skipped[0].error}")
    world = agreed_world({path: peek(path).world_size for path in ranks.values()}, ranks)
    reading = config.reading(world, ranks)
    sources = tuple(
        RankReader(read, path, reading, (rank,), may_have_shapes=True).source(rank)
        for rank, path in sorted(ranks.items())
    )
    numbered = (
        "the files of rocprofv3 state no rank: ranks are numbered in the order of the process "
        "numbers in their names. Name them rank0.pftrace and so on if that is wrong"
    )
    return RankSources(
        sources=sources,
        world_size=world,
        skipped=tuple(skipped),
        warnings=(numbered,) if len(by_process) > 1 else (),
    )


def _refuse_drawn(path: Path) -> None:
    """Raise TraceFileError for a timeline that fastcomm wrote."""
    with suppress(CutShortError):
        if PROGRAM.encode() in b"".join(islice(blocks(path, _HEAD), 1)):
            raise TraceFileError(f"{path}: {DRAWN}")


def _by_process(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the ranks of rocprofv3's files by process number; empty for any other file."""
    matches = [_ROCPROF.match(path.name) for path in paths]
    numbers = {int(match[1]): path for match, path in zip(matches, paths, strict=True) if match}
    if len(numbers) < len(paths):
        return {}
    return {path: rank for rank, (_, path) in enumerate(sorted(numbers.items()))}


def _rank(path: Path) -> int | None:
    """Return the rank in the name of a file, else the one that its collectives state."""
    rank = rank_from_name(path.name)
    if rank is None:
        rank = peek(path).rank
    return peek(path, whole=True).rank if rank is None else rank


def _no_rank(path: Path) -> str:
    return (
        f"{path}: cannot determine the rank: no collective states it, and the name has none of "
        f"{', '.join(NAME_PATTERNS)}. Name it rank3.pftrace, for example"
    )


def peek(path: Path, *, whole: bool = False) -> PerfettoPeek:
    """Return the rank and the number of ranks that a file states, from its beginning.

    An unreadable file raises nothing: the result has the error.
    """
    try:
        status = path.stat()
    except OSError:
        return PerfettoPeek()
    changed = status.st_mtime_ns, getattr(status, "st_mode", 0)
    return _peek(path, status.st_size, changed, whole=whole)


@lru_cache(maxsize=1 << 14)
def _peek(path: Path, _size: int, _changed: tuple[int, int], *, whole: bool) -> PerfettoPeek:
    """Read a file or its beginning; unused parameters are part of the cache key."""
    try:
        packets = read_packets(path, METRICS, allow_truncated=True, most=None if whole else 1)
    except TraceFileError as error:
        return PerfettoPeek(error=str(error))
    return PerfettoPeek(stated_rank(packets), distributed(packets)[0])
