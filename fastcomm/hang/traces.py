"""What traces of a profiler beside the dumps say of culprits: what each did last.

A trace ends when the profiler is stopped, with the host work that is open then. If that is
after the last call in the dump of the rank, the trace shows where the rank went instead.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from fastcomm.errors import FastcommError, TraceFileError, inert
from fastcomm.formats.config import Config
from fastcomm.formats.flight_recorder import is_trace
from fastcomm.formats.opening import open_run
from fastcomm.hang.calls import RankCalls
from fastcomm.trace.events import EventRows
from fastcomm.trace.run_traces import Source
from fastcomm.trace.schema import OPS
from fastcomm.trace.trace import Trace
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

_SUFFIXES = (".json", ".json.gz", ".json.zst")
_EXPORTS = (".sqlite", ".pftrace", ".pftrace.gz")  # Nsight Systems, Perfetto: by their names
# Without calls of the runtime: the last of a trace is the profiler's own synchronization.
_HOST = ("python", "annotation", "cpu_op", "host_work", "host_comm")
_DEVICE = ("kernel", "memcpy", "memset")
_MOST_FILES = 20_000
_MOST_RANKS = 4
_LARGEST = 1 << 30  # bytes of a file
_LONGEST = 120  # characters of a name


def traces_of(paths: Iterable[Path]) -> list[Path]:
    """Return the files that are traces of a profiler, by their names and first bytes."""
    some = islice(paths, _MOST_FILES)
    return [path for path in some if path.name.endswith(_EXPORTS) or _is_kineto(path)]


def _is_kineto(path: Path) -> bool:
    try:
        return path.name.endswith(_SUFFIXES) and is_trace(path)
    except TraceFileError:
        return False


def sentences(
    paths: Sequence[Path], ranks: Sequence[int], calls: Mapping[int, RankCalls]
) -> Iterator[str]:
    """Yield what traces say of the last work of some ranks.

    Parameters
    ----------
    paths
        Traces, as `traces_of` returns them.
    ranks
        Culprits; a few of them are read.
    calls
        The calls of each rank that has a dump.

    """
    if not paths or not ranks:
        return
    try:
        run = open_run(*paths, config=Config(keep_going=True), use_card=False)
    except FastcommError as error:
        yield f"the traces beside the dumps are not read: {error}"
        return
    sources = {source.rank: source for source in run.sources}
    for rank in [rank for rank in ranks if rank in sources][:_MOST_RANKS]:
        yield _of_rank(sources[rank], calls.get(rank))


def _of_rank(source: Source, calls: RankCalls | None) -> str:
    if source.size > _LARGEST:
        return f"the trace of rank {source.rank} is too large to be read here ({source.path})"
    try:
        trace = source.read("all")
    except FastcommError as error:
        return f"the trace of rank {source.rank} is not read: {error}"
    last = [*_last_work(trace)]
    ending = f": {'; '.join(last)}" if last else ""
    return f"the trace of rank {source.rank} ends{_since(trace, calls)}{ending} ({source.path})"


def _since(trace: Trace, calls: RankCalls | None) -> str:
    """Return how long after the last call in the dump a trace ends; empty if unknown."""
    created = np.zeros(0, np.int64) if calls is None else calls.calls.created
    stop = trace.events["stop"].to_numpy()
    if trace.meta.clock != "unix" or not len(stop) or not len(created):
        return ""
    if (latest := int(created.max())) == NULL:
        return ""
    later = int(stop.max()) - latest
    side = "after" if later >= 0 else "before"
    return f" {format_ns(abs(later))} {side} the last call in its dump"


def _last_work(trace: Trace) -> Iterator[str]:
    """Yield what began last on the host and on the device, and the last communication."""
    events = EventRows.of(trace)
    for where, kinds in (("host", _HOST), ("device", _DEVICE)):
        rows = events.rows(*kinds)
        if len(rows):
            at = int(rows[np.argmax(events.start[rows])])
            name = inert(events.texts[int(events.name[at])])[:_LONGEST]
            yield f"the last on its {where} is {name}"
    if len(trace.comm):
        at = int(np.argmax(trace.comm["start"].to_numpy()))
        row = trace.comm.slice(at, 1).to_pylist()[0]
        number = "" if row["seq"] is None else f" #{row['seq']}"
        yield f"its last communication is {OPS[row['op']]}{number}"
