"""Read a dPRO trial, a uniform trace, or a run of a profiler's traces as a uniform trace.

Times are ns.

The uniform trace of a run has the work of devices and communication, with standard names.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from fastcomm.compat.dpro import alignment, communication, mxnet, tensorflow, uniform
from fastcomm.compat.dpro.job import (
    LocalGraph,
    Parameter,
    ParameterDict,
    Topology,
    parse_parameters,
    read_topology,
    sequential_updates,
)
from fastcomm.compat.dpro.options import StepRule
from fastcomm.compat.dpro.uniform import (
    Event,
    UniformTrace,
    category,
    coarse,
    event_errors,
    event_rows,
    ns,
    of_events,
    read_json,
)
from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.formats.dpro import TRACES, claims
from fastcomm.formats.kineto import ranks
from fastcomm.ranks import clocks
from fastcomm.trace.events import EventRows
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.passes import passes
from fastcomm.trace.run_traces import ReadRanks, RunTraces, SkippedRank, warnings_of_ranks
from fastcomm.trace.schema import OPS
from fastcomm.trace.trace import Meta, Trace
from fastcomm.units import counted, plural
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NULL, Flags, Ints

_SYMBOL = "symbol_debug_str.txt"
_PIECES = "temp.json"
NONE = "none"
RULE = get_args(StepRule)[0]  # by default
# Returns the step of each event of a process from category, start and duration, by start.
_Rule = Callable[[Sequence[str], Sequence[int], Sequence[int]], list[int]]
_BEGINS = frozenset({"I/O", "operator.FW"})
_UPDATE = "operator.UPDATE"
_GAP_NS = 5_000_000
OP_CATS = ("FW", "BW", "UPDATE_")  # of the passes of `trace.passes`


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFolder:
    """Directory of one rank of a trial."""

    host: str
    pid: str
    folder: Path
    trace: Path


def rank_folders(path: Path) -> list[RankFolder]:
    """Return the directories of ranks in a trial, a host or a GPU of one, sorted."""
    for pattern in ("", "*", "*/*"):
        folders = sorted(path.glob(pattern)) if pattern else [path]
        ranks = [
            RankFolder(
                host=folder.resolve().parent.name,
                pid=f"{folder.resolve().parent.name}.rank{folder.resolve().name}",
                folder=folder,
                trace=trace,
            )
            for folder in folders
            if not any(part.startswith(".") for part in folder.relative_to(path).parts)
            for trace in [next((folder / t for t in TRACES if (folder / t).exists()), None)]
            if trace is not None
        ]
        if ranks:
            return ranks
    return []


def first(ranks: Sequence[RankFolder], name: str) -> Path | None:
    """Return the first file of a name, by host and GPU, or None."""
    return next((r.folder / name for r in ranks if (r.folder / name).exists()), None)


def content(ranks: Sequence[RankFolder], name: str) -> dict[str, Any]:
    """Return the JSON object in the first file of a name; empty if no rank has the file."""
    path = first(ranks, name)
    document = None if path is None else read_json(path)
    return document if isinstance(document, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial with aligned clocks and numbered steps."""

    trace: UniformTrace
    graph: LocalGraph
    topology: Topology | None  # None without files of NCCL
    counts: Mapping[str, Mapping[str, int]]  # see `communication.counts`
    shifts: Mapping[str, int]  # ns that were added, by pid
    parameters: ParameterDict
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Data that all ranks of a trial share, and the reader of their computations."""

    graph: LocalGraph
    parameters: ParameterDict
    events: Callable[[Path, str], list[Event]]  # by trace and pid
    coarse: bool  # read communication as one event per tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """Events of one rank."""

    events: list[Event]
    counts: Mapping[str, Mapping[str, int]]  # see `communication.counts`
    last_sync: int | None  # end, ns


def read(
    path: Path,
    *,
    rule: str = "update",
    align: str = "auto",
    merge: bool | None = None,
    clip_updates: bool = False,
    algorithm: str | None = None,
) -> Trial:
    """Read every rank of a trial.

    Parameters
    ----------
    path
        A trial, or a host or GPU of one.
    rule
        How steps are found, a key of `RULES`.
    align
        How clocks are aligned, one of `alignment.MODES`.
    merge
        Merge consecutive events of one operation; by default for MXNet and TensorFlow 1.
    clip_updates
        Shorten updates of TensorFlow so that they do not overlap.
    algorithm
        "ring", "tree", or "none" to ignore the files of NCCL; by default the ring if there is
        one.

    Raises
    ------
    TraceFileError
        If there is no rank, or a file cannot be read.
    ConfigError
        If an option is invalid.

    """
    ranks = rank_folders(path)
    if not ranks:
        raise TraceFileError(f"{path}: no <host>/<gpu>/trace.json.gz or temp.json in it")
    files = {rank.pid: rank.folder / "nccl_rank_graph.json" for rank in ranks}
    present = {pid: file for pid, file in files.items() if file.exists()}
    topology = read_topology(present, algorithm) if present and algorithm != NONE else None
    job = _job(ranks, coarse=topology is None, merge=merge, clip_updates=clip_updates)
    read_ranks = {rank.pid: _read_rank(rank, job) for rank in ranks}
    events = [event for rank in read_ranks.values() for event in rank.events]
    if (path / communication.COMM).exists():
        with event_errors(path / communication.COMM):
            events += communication.byteps_events(path, job.parameters.ids)
    hosts = {rank.pid: rank.host for rank in ranks}
    syncs = {pid: rank.last_sync for pid, rank in read_ranks.items()}
    shifts = alignment.by_sync(align, hosts, syncs)
    if shifts is None:
        unaligned = with_steps(of_events(events), rule)
        shifts = alignment.by_causality(align, unaligned, topology, hosts)
    return Trial(
        trace=with_steps(of_events(events, shifts.by_pid), rule),
        graph=job.graph,
        topology=topology,
        counts=next((rank.counts for rank in read_ranks.values() if rank.counts), {}),
        shifts=shifts.by_pid,
        parameters=job.parameters,
        warnings=shifts.warnings,
    )


def _job(
    ranks: Sequence[RankFolder], *, coarse: bool, merge: bool | None, clip_updates: bool
) -> _Job:
    """Read the graph and the tensors, and choose the reader of the framework."""
    metadata = content(ranks, "metadata.json")
    tensors = _tensors(ranks, metadata)
    if first(ranks, _SYMBOL) is not None or "opt_aggregate_num" in metadata:
        parameters = _mxnet_parameters(ranks, tensors, metadata)
        graph = mxnet.graph_of(_file(ranks, "dag.gml", _SYMBOL), parameters)
        merges = merge is not False
        return _Job(
            graph=graph,
            parameters=parameters,
            events=lambda path, pid: mxnet.events_of(path, pid, graph, merge=merges),
            coarse=coarse,
        )
    graph = tensorflow.graph_of(_file(ranks, "dag.gml"))
    with event_errors(ranks[0].folder / "metadata.json"):
        parameters = tensorflow.parameters_of(tensors, metadata, graph)

    def events(path: Path, pid: str) -> list[Event]:
        merges = path.name == _PIECES if merge is None else merge
        operations = tensorflow.events_of(path, pid, graph, merge=merges)
        return sequential_updates(operations) if clip_updates else operations

    return _Job(graph=graph, parameters=parameters, events=events, coarse=coarse)


def _mxnet_parameters(
    ranks: Sequence[RankFolder], tensors: tuple[Parameter, ...], metadata: Mapping[str, Any]
) -> ParameterDict:
    """Return the tensors of MXNet with their updates; raise if their list is missing."""
    place = first(ranks, "metadata.json") or ranks[0].folder / "metadata.json"
    if not tensors:
        raise TraceFileError(
            f"{place}: no gradient_name_list, which has the names of the tensors"
        )
    with event_errors(place):
        return mxnet.parameters_of(tensors, int(metadata.get("opt_aggregate_num") or 0))


def _file(ranks: Sequence[RankFolder], *names: str) -> Path:
    """Return the path of the first of `names` that the folder of any rank contains.

    Raises `TraceFileError` if no folder contains any.
    """
    for name in names:
        if path := first(ranks, name):
            return path
    raise TraceFileError(
        f"{ranks[0].folder}: no {' and no '.join(names)}, and none in any other rank"
    )


def _tensors(ranks: Sequence[RankFolder], metadata: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Return the tensors by id, from the first list of gradients that a rank has."""
    for document in (content(ranks, "gradient_name_list.json"), metadata):
        names = document.get("gradient_name_list")
        if isinstance(names, list | str):
            with event_errors(ranks[0].folder / "gradient_name_list"):
                return parse_parameters(names)
    older = content(ranks, "gradient_name2ID.json")
    return parse_parameters(sorted(older, key=older.__getitem__))


def _read_rank(rank: RankFolder, job: _Job) -> _Rank:
    """Read the files of one rank; events outside the span of its computation are dropped."""
    with event_errors(rank.trace):
        events = job.events(rank.trace, rank.pid)
    if not events:
        raise TraceFileError(f"{rank.trace}: no event is an operation of the data-flow graph")
    span = _span(events)
    inputs, detail, timeline = (
        rank.folder / name for name in ("io.json", "comm_detail.json", "comm.json")
    )
    if inputs.exists():
        with event_errors(inputs):
            events += _inputs(inputs, rank.pid, span)
    slices: list[Event] = []
    if detail.exists():
        with event_errors(detail):
            slices = communication.detail(detail, rank.pid, span)
    last_sync = None
    if timeline.exists():
        with event_errors(timeline):
            activities, last_sync = communication.timeline(
                timeline, rank.pid, span, job.parameters.ids, coarse=job.coarse
            )
        slices = [*slices, *activities]
    with event_errors(detail):
        counts = communication.counts(slices)
    return _Rank(events=[*events, *slices], counts=counts, last_sync=last_sync)


def _span(events: Sequence[Event]) -> tuple[int, int]:
    """Return the first start and the last end."""
    first_start = min(event.start for event in events)
    return first_start, max(event.start + event.dur for event in events)


def _inputs(path: Path, pid: str, span: tuple[int, int]) -> list[Event]:
    """Read the events of the data loader that begin within the span, by start."""
    rows = event_rows(read_json(path))
    starts = [(ns(row["ts"]), ns(row["dur"])) for row in rows]
    return [
        Event(name="I/O", pid=pid, start=start, dur=dur, lane="I/O", cat="I/O")
        for start, dur in sorted(starts)
        if span[0] <= start < span[1]
    ]


def _by_category(
    cats: Sequence[str],
    _start: Sequence[int],
    _dur: Sequence[int],
    *,
    ends: Callable[[str], bool],
    kinds: Sequence[str] = (),
) -> list[int]:
    """Return the step of each event by the categories of the events alone.

    A step begins at an input or forward operation after an event whose category `ends` a step.
    An update that comes after the next step has begun counts to the step before. Only events of
    the coarse categories `kinds` count as the event before the next one; by default all.
    """
    step, before, steps = 0, "", []
    for cat in cats:
        if before:
            step += int(ends(before) and cat in _BEGINS)
            step -= int(before in _BEGINS and cat == _UPDATE)
        steps.append(step)
        if not kinds or coarse(cat) in kinds:
            before = cat
    return steps


def _by_gap(cats: Sequence[str], start: Sequence[int], dur: Sequence[int]) -> list[int]:
    """Return the step of each event; one begins after a gap of 5 ms without operators.

    Such a step begins only at an input or forward operation, and if the previous step has
    backward operations and an update.
    """
    step, end, steps = 0, None, []
    backward = update = 0
    for cat, begun, length in zip(cats, start, dur, strict=True):
        late = end is not None and begun - end > _GAP_NS
        if cat in _BEGINS and late and backward > 0 and update > 0:
            step, backward, update = step + 1, 0, 0
        steps.append(step)
        backward += length if cat == "operator.BW" else 0
        update += length if cat == _UPDATE else 0
        end = begun + length if coarse(cat) == "operator" else end
    return steps


def _is_other(cat: str) -> bool:
    return cat not in _BEGINS


RULES: dict[str, _Rule] = {
    "update": partial(_by_category, ends=_UPDATE.__eq__, kinds=("operator", "I/O")),
    "seed": partial(_by_category, ends=_is_other),  # the first version of dPRO
    "operator": partial(_by_category, ends=_is_other, kinds=("operator",)),  # a later version
    "gap": _by_gap,
    "none": lambda cats, start, dur: [0] * len(cats),
}


def with_steps(trace: UniformTrace, rule: str = RULE) -> UniformTrace:
    """Return the trace with a step for every event.

    Processes without steps in the trace get them by a rule.

    Parameters
    ----------
    trace
        The trace.
    rule
        A key of `RULES`.

    Raises
    ------
    ConfigError
        If the rule is unknown, or another than the default and all processes have steps.

    """
    process, step = trace.process, trace.step.copy()
    has_step = trace.counts & (step != NULL)
    if rule != RULE and set(process[trace.counts]) == set(process[has_step]):
        raise ConfigError("the trace has steps; leave --step-rule out")
    if rule not in RULES:
        raise ConfigError(f"invalid step rule {rule!r}: expected one of {', '.join(RULES)}")
    cats = [category(name) for name in trace.names]
    for pid in range(len(trace.pids)):
        rows = np.flatnonzero((process == pid) & trace.counts)
        if has_step[rows].any():
            step[rows] = _filled(step[rows])
        else:
            kinds = [cats[key] for key in trace.key[rows]]
            start, dur = trace.start[rows].tolist(), trace.dur[rows].tolist()
            step[rows] = RULES[rule](kinds, start, dur)
    return replace(trace, step=step)


def _filled(steps: Ints) -> Ints:
    """Replace NULL by the last step before it, or by 0."""
    last = np.maximum.accumulate(np.where(steps == NULL, -1, np.arange(len(steps))))
    return np.where(last < 0, 0, steps[np.maximum(last, 0)])


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
        """Pass of each event, by row: an index into OP_CATS."""
        return passes(self.events, np.arange(len(self.events)), self.at)

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


@lru_cache(maxsize=1 << 16)
def plain(text: str) -> str:
    """Replace the separators of long names in a text by underscores."""
    return re.sub(r"~>|->|\.", "_", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformRun:
    """A run as a uniform trace."""

    trace: UniformTrace
    left_out: int  # operations outside of the iterations
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
    for trace in _readable(run, skipped):
        metas.append(trace.meta)
        ends.append(clocks.ends(trace))
        own = list(operations(trace))
        events += (event for event in own if event.step is not None)
        left_out += sum(event.step is None for event in own)
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
    """A uniform trace, and the trial that it was read from, if it was."""

    trace: UniformTrace
    trial: Trial | None = None
    warnings: tuple[str, ...] = ()

    @property
    def topology(self) -> Topology | None:
        """Rings or trees of NCCL, if the trial has them."""
        return None if self.trial is None else self.trial.topology


def read_input(
    path: Path, *, rule: str = RULE, align: str = "auto", whole: bool = True
) -> Input:
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
        read_trial = read(path, rule=rule, align=align)
        return Input(trace=read_trial.trace, trial=read_trial, warnings=read_trial.warnings)
    trace = uniform.read(path) if whole else uniform.scan(path)
    if not len(trace):
        raise TraceFileError(f"{path}: no events")
    return Input(trace=with_steps(trace, rule))


def is_run(path: Path) -> bool:
    """Return whether a path is a run of a profiler's traces, not a trial or a uniform trace."""
    if path.is_dir():
        return not claims(path) and any(path.iterdir())
    if not path.name.lower().endswith(ranks.SUFFIXES):
        return True
    start = ranks.peek(path)
    # A damaged file that is not named after a rank is read as a uniform trace, whose reader
    # says what is wrong.
    return start.kind == "profiler" or (
        start.kind == "damaged" and ranks.is_rank_name(path.name)
    )
