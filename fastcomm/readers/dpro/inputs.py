"""Read a dPRO trial, a uniform trace, or a run of a profiler's traces as a uniform trace.

The uniform trace of a run has the work of devices and communication, with standard names.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.exchange import clocks
from fastcomm.readers import kineto
from fastcomm.readers.dpro import Event, UniformTrace, claims, json_files, of_events, trial
from fastcomm.readers.dpro.job import Topology
from fastcomm.readers.dpro.trial import RULE, Trial, with_steps
from fastcomm.trace.events import EventRows
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run import ReadRanks, RunTraces, SkippedRank, warnings_of_ranks
from fastcomm.trace.schema import KIND, OPS
from fastcomm.trace.trace import Meta, Trace
from fastcomm.units import counted, plural
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Flags, Ints

FORWARD, BACKWARD, UPDATE = range(3)
OP_CATS = ("FW", "BW", "UPDATE_")

_FORWARD = re.compile(r"(?i)forward|(?<![a-z])fwd")
_BACKWARD = re.compile(r"(?i)backward|(?<![a-z])bwd|^autograd::engine")
_UPDATE = re.compile(r"(?i)optimizer")
_ENGINE = "autograd::engine"
_STEP = re.compile(r"^ProfilerStep#|(?i:optimizer)")


@dataclass(frozen=True)
class Naming:
    """Names the operations of one rank's trace. All columns are by row of its events."""

    trace: Trace

    @cached_property
    def events(self) -> EventRows:
        """The events of the trace."""
        return EventRows.of(self.trace)

    @cached_property
    def is_work(self) -> Flags:
        """Whether the event is work of a device."""
        return self.events.of_kind("kernel", "memcpy", "memset")

    @cached_property
    def at(self) -> Ints:
        """Per event, the row of the call that launched it, or its own row if it has none."""
        at = np.arange(len(self.events))
        work = np.flatnonzero(self.is_work)
        launch = self.events.launch_of(work)
        at[work] = np.where(launch >= 0, launch, work)
        return at

    @cached_property
    def operator(self) -> Ints:
        """Row of the innermost operator around the event's call (or the call itself), or -1."""
        return self.events.enclosing(self.events.rows("cpu_op"), self.at)

    @cached_property
    def op_cat(self) -> Ints:
        """Phase of each event, by row: FORWARD, BACKWARD or UPDATE.

        Events outside an annotation of a phase have the category of their thread; work that
        nothing launched, as in a table of operations, has the category that its name tells.
        """
        op_cats = self._by_name(_class)
        is_op = self.events.kind == KIND["cpu_op"]
        is_mark = is_op & (op_cats == BACKWARD)
        is_mark |= (self.events.kind == KIND["annotation"]) & (op_cats >= 0)
        mark = self.events.enclosing(np.flatnonzero(is_mark), self.at)
        op_cat = np.where(mark >= 0, op_cats[mark], self._of_thread[self.events.lane[self.at]])
        is_alone = self.is_work & (self.at == np.arange(len(self.events))) & (mark < 0)
        return np.where(is_alone & (op_cats >= 0), op_cats, op_cat)

    def _by_name(self, value: Callable[[str], int]) -> Ints:
        """Return `value` of each event's name; it is called once per distinct name."""
        return np.array([value(name) for name in self.events.texts], np.int64)[self.events.name]

    @cached_property
    def _of_thread(self) -> Ints:
        """Category by lane: BACKWARD on threads of autograd's engine that run no optimizer."""
        engine = self._by_name(lambda name: name.startswith(_ENGINE)) == 1
        steps = self._by_name(lambda name: _STEP.search(name) is not None) == 1
        op_cat = np.full(self.trace.lanes.num_rows, FORWARD, np.int64)
        op_cat[self.events.lane[engine]] = BACKWARD
        op_cat[self.events.lane[steps]] = FORWARD
        return op_cat

    @cached_property
    def step(self) -> Ints:
        """Row of the iteration in which the event was called; -1 outside of all.

        All 0 if the trace has no iterations.
        """
        table = self.trace.iterations
        if not table.num_rows:
            return np.zeros(len(self.events), np.int64)
        begin = self.events.start[self.at]
        order = np.argsort(begin, kind="stable")
        step = np.empty(len(begin), np.int64)
        step[order] = intervals.segment_of(
            begin[order], table["start"].to_numpy(), table["stop"].to_numpy()
        )
        return step

    @cached_property
    def communication(self) -> dict[int, str]:
        """Standard name of each communication by row: tag, group, number in the step, type."""
        comm, groups = self.trace.comm, self.trace.groups["name"].to_pylist()
        count: dict[tuple[object, ...], int] = {}
        names = {}
        columns = (comm[name].to_pylist() for name in ("event", "op", "tag", "group"))
        for row, op, tag, group in zip(*columns, strict=True):
            key = (op, group, int(self.step[row]))
            number = count[key] = count.get(key, -1) + 1
            label = "none" if group is None else groups[group] or f"group{group}"
            names[row] = f"Comm.{TAGS[tag]}-{plain(label)}-{number}.{OPS[op]}"
        return names

    def standard(self, row: int) -> str:
        """Return dPRO's name of the event in a row, without its rank.

        Examples: "FW.aten::mm" for work, "Comm.TP-5-12.AllGather" for communication.
        """
        if row in self.communication:
            return self.communication[row]
        source = row if self.operator[row] < 0 else int(self.operator[row])
        return f"{OP_CATS[self.op_cat[row]]}.{plain(self.word(source))}"

    def word(self, row: int) -> str:
        """Return the name that the event of a row has in the trace."""
        return self.events.texts[int(self.events.name[row])]

    @cached_property
    def outermost(self) -> Flags:
        """Whether the event is an operator that no other operator of its thread encloses."""
        is_outermost = np.zeros(len(self.events), np.bool_)
        is_outermost[self.events.outermost(self.events.rows("cpu_op"))] = True
        return is_outermost


def _class(name: str) -> int:
    """Return the category that the name of an annotation tells; -1 for none or several."""
    rules = ((_UPDATE, UPDATE), (_BACKWARD, BACKWARD), (_FORWARD, FORWARD))
    classes = [number for rule, number in rules if rule.search(name)]
    return classes[0] if len(classes) == 1 else -1


@lru_cache(maxsize=1 << 16)
def plain(text: str) -> str:
    """Replace the separators of long names in a text by underscores."""
    return re.sub(r"~>|->|\.", "_", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformRun:
    """A run as a uniform trace."""

    trace: UniformTrace
    left_out: int  # operations outside of the iterations
    steps: tuple[int, ...] | None  # numbers in the traces, by position; None if ranks differ
    warnings: tuple[str, ...]
    read: ReadRanks


def pid(rank: int) -> str:
    """Return the process name of a rank of a run."""
    return f"host0.rank{rank}"


def converted(run: RunTraces) -> UniformRun:
    """Convert a run to a uniform trace, with aligned clocks.

    Parameters
    ----------
    run
        The run. If it goes on, ranks that cannot be read are in `read`.

    Raises
    ------
    FastcommError
        If a rank cannot be read; of a run that goes on, if none can.

    """
    events: list[Event] = []
    ends, left_out, skipped = [], 0, list(run.skipped)
    warnings: list[str] = []
    metas: list[Meta] = []
    steps: list[tuple[int, ...]] = []
    for trace in _readable(run, skipped):
        metas.append(trace.meta)
        ends.append(clocks.ends(trace))
        own = list(operations(trace))
        events += (event for event in own if event.step is not None)
        left_out += sum(event.step is None for event in own)
        steps.append(_step_numbers(trace, own))
    if not ends:
        raise FastcommError(f"no rank could be read: {skipped[0].error}")
    if left_out:
        warnings.append(
            f"{counted(left_out, 'operation')} {plural(left_out, 'is')} in no iteration and "
            f"{plural(left_out, 'is')} left out"
        )
    offsets = clocks.clock_offsets(pa.concat_tables(ends))
    shifts = {pid(offset.rank): -offset.offset_ns for offset in offsets if offset.applies}
    if not events:
        raise TraceFileError(
            f"{run.sources[0].path}: no operation in any step: no device work, communication "
            "on the device, or operators of the host; `fastcomm info` says what is missing"
        )
    return UniformRun(
        trace=of_events(events, shifts),
        left_out=left_out,
        steps=_common(steps),
        warnings=(*run.warnings, *warnings_of_ranks(metas), *warnings),
        read=ReadRanks.of(run, [meta.rank for meta in metas], skipped),
    )


def _readable(run: RunTraces, skipped: list[SkippedRank]) -> Iterator[Trace]:
    """Yield the trace of each rank; a run that goes on adds unreadable ones to `skipped`."""
    for source in run.sources:
        try:
            trace = source.read("all")
        except FastcommError as error:
            if not run.keep_going or len(run.sources) == 1:
                raise
            path = str(source.path)
            skipped.append(SkippedRank(rank=source.rank, path=path, error=str(error)))
        else:
            yield trace


def _step_numbers(trace: Trace, own: Sequence[Event]) -> tuple[int, ...]:
    """Return the numbers of the iterations in which a rank has operations of the device."""
    numbers = trace.iterations["number"].to_pylist() or [0]
    places = {event.step for event in own if event.step is not None and event.cat != "Comm"}
    return tuple(numbers[place] for place in sorted(places))


def _common(steps: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the first numbers of all ranks that have steps; None if they differ."""
    present = [numbers for numbers in steps if numbers]
    fewest = min(map(len, present), default=0)
    first = {numbers[:fewest] for numbers in present}
    return first.pop() if len(first) == 1 else None


def operations(trace: Trace) -> Iterator[Event]:
    """Yield the operations of one rank by start; outside of the iterations the step is None.

    Operations are work of devices and communication; in traces without work of devices also the
    outermost operators.
    """
    naming, rank = Naming(trace), pid(trace.meta.rank)
    is_operation = naming.is_work.copy()
    is_operation[list(naming.communication)] = True
    if trace.meta.is_host_run or not naming.is_work.any():
        is_operation |= naming.outermost
    communication = _communication(trace)
    threads = trace.lanes["thread"].to_pylist()
    numbers: dict[int, int] = {}
    for row in np.flatnonzero(is_operation).tolist():
        lane, step = int(naming.events.lane[row]), int(naming.step[row])
        is_comm = row in communication
        if not is_comm:
            numbers.setdefault(lane, len(numbers))
        yield Event(
            name=naming.standard(row),
            pid=rank,
            start=int(naming.events.start[row]),
            dur=int(naming.events.stop[row] - naming.events.start[row]),
            lane="Comm" if is_comm else f"operator{numbers[lane]}",
            cat="Comm" if is_comm else "operator",
            step=None if step < 0 else step,
            extra={
                "event": naming.word(row),
                "lane": threads[lane],
                **communication.get(row, {}),
            },
        )


def _communication(trace: Trace) -> dict[int, dict[str, int]]:
    """Return sequence number and bytes of communication, where known, by row of the events."""
    columns = ("event", "seq", "payload_bytes")
    rows = zip(*(trace.comm[name].to_pylist() for name in columns), strict=True)
    return {
        event: {
            key: value for key, value in (("seq", seq), ("bytes", size)) if value is not None
        }
        for event, seq, size in rows
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A uniform trace, and the trial or the ranks that it was read from."""

    trace: UniformTrace
    trial: Trial | None = None
    warnings: tuple[str, ...] = ()
    read: ReadRanks | None = None  # None unless the input is a run
    steps: tuple[int, ...] | None = None  # numbers of the steps of a run; None if unknown

    @property
    def topology(self) -> Topology | None:
        """Rings or trees of NCCL, if the trial has them."""
        return None if self.trial is None else self.trial.topology


def of_run(run: RunTraces) -> Input:
    """Read the traces of a run as a uniform trace."""
    run_trace = converted(run)
    return Input(
        trace=run_trace.trace,
        warnings=run_trace.warnings,
        read=run_trace.read,
        steps=run_trace.steps,
    )


def read(path: Path, *, rule: str = RULE, align: str = "auto", whole: bool = True) -> Input:
    """Read a dPRO trial or a uniform trace.

    Parameters
    ----------
    path
        The input.
    rule
        How steps of trials and uniform traces are found, one of `RULES`.
    align
        How clocks of trials are aligned, one of `alignment.MODES`.
    whole
        Read all arguments of a uniform trace, not only those that statistics need.

    Raises
    ------
    FastcommError
        If the input cannot be read, or has no events.

    """
    if not path.exists():
        raise TraceFileError(f"{path}: no such file or folder")
    if path.is_dir():
        read_trial = trial.read(path, rule=rule, align=align)
        return Input(trace=read_trial.trace, trial=read_trial, warnings=read_trial.warnings)
    trace = json_files.read(path) if whole else json_files.scan(path)
    if not len(trace):
        raise TraceFileError(f"{path}: no events")
    return Input(trace=with_steps(trace, rule))


def is_run(path: Path) -> bool:
    """Return whether a path is a run of a profiler's traces, not a trial or a uniform trace."""
    if path.is_dir():
        return not claims(path) and any(path.iterdir())
    if not path.name.lower().endswith(kineto.SUFFIXES):
        return True
    start = kineto.peek(path)
    # A damaged file that is not named after a rank is read as a uniform trace, whose reader
    # says what is wrong.
    return start.kind == "profiler" or (
        start.kind == "damaged" and kineto.is_rank_name(path.name)
    )
