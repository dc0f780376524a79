"""A run of any format as a uniform trace: what devices did, and communication.

A rank is `host0.rank<N>`. Of a trace without work of a device, as of a job on CPUs, outermost
operators count. Times are on the clock of the run's first rank, where it is known how the
others go. What lies outside of the iterations is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.errors import FastcommError
from fastcomm.replay.naming import Naming
from fastcomm.replay.uniform import Event, UniformTrace, of_events
from fastcomm.trace import clocks, rank_warnings
from fastcomm.trace.run import ReadRanks, Run, SkippedRank
from fastcomm.trace.trace import Trace
from fastcomm.units import counted, plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A run as a uniform trace, and how many of its operations are in no iteration."""

    trace: UniformTrace
    left_out: int
    warnings: tuple[str, ...]
    read: ReadRanks


def pid(rank: int) -> str:
    """What a rank is called."""
    return f"host0.rank{rank}"


def converted(run: Run, *, keep_going: bool = False) -> Converted:
    """Read every rank of a run as operations.

    Raises the error of the first rank that cannot be read; with `keep_going` such ranks are in
    `read.failed`, and it is raised only if no rank is left.
    """
    events: list[Event] = []
    ends, left_out, skipped = [], 0, list(run.skipped)
    warnings: list[str] = []
    own_warnings: list[tuple[int, tuple[str, ...]]] = []
    for source in run.sources:
        try:
            trace = source.read()
        except FastcommError as error:
            if not keep_going or len(run.sources) == 1:
                raise
            path = str(source.path)
            skipped.append(SkippedRank(rank=source.rank, path=path, error=str(error)))
            continue
        own_warnings.append((source.rank, trace.meta.warnings))
        ends.append(clocks.ends(trace))
        own = list(operations(trace))
        events += (each for each in own if each.step is not None)
        left_out += sum(each.step is None for each in own)
    if not ends:
        raise FastcommError(f"no rank could be read: {skipped[0].error}")
    if left_out:
        warnings.append(
            f"{counted(left_out, 'operation')} {plural(left_out, 'is')} in no iteration and "
            f"{plural(left_out, 'is')} left out"
        )
    found = clocks.clock_offsets(pa.concat_tables(ends))
    shifts = {pid(each.rank): -each.offset_ns for each in found if each.applies}
    trace_ = of_events(events, shifts)
    return Converted(
        trace=trace_,
        left_out=left_out,
        warnings=(*run.warnings, *rank_warnings.of_run(own_warnings), *warnings),
        read=ReadRanks.of(run, [rank for rank, _ in own_warnings], skipped),
    )


def operations(trace: Trace) -> Iterator[Event]:
    """One rank's operations in order of time; the step is None outside of the iterations."""
    named, rank = Naming(trace), pid(trace.meta.rank)
    kept = named.is_work.copy()
    kept[list(named.communication)] = True
    if not named.is_work.any():
        kept |= named.outermost
    said = _communication(trace)
    threads = trace.lanes["thread"].to_pylist()
    numbers: dict[int, int] = {}
    for row in np.flatnonzero(kept).tolist():
        lane, step = int(named.lane[row]), int(named.step[row])
        is_comm = row in said
        if not is_comm:
            numbers.setdefault(lane, len(numbers))
        yield Event(
            name=named.standard(row),
            pid=rank,
            start=int(named.start[row]),
            dur=int(named.stop[row] - named.start[row]),
            lane="Comm" if is_comm else f"operator{numbers[lane]}",
            cat="Comm" if is_comm else "operator",
            step=None if step < 0 else step,
            extra={
                "event": named.words[named.code[row]],
                "lane": threads[lane],
                **said.get(row, {}),
            },
        )


def _communication(trace: Trace) -> dict[int, dict[str, int]]:
    """What is known of each piece of communication, by row of the events."""
    columns = ("event", "seq", "payload_bytes")
    rows = zip(*(trace.comm[name].to_pylist() for name in columns), strict=True)
    return {
        event: {
            key: value for key, value in (("seq", seq), ("bytes", size)) if value is not None
        }
        for event, seq, size in rows
    }
