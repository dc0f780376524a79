"""Read a dPRO trial, ``<trial>/<host>/<gpu>/<files>``, as one uniform trace with steps.

Times are ns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.options import StepRule
from fastcomm.readers.dpro import (
    TRACES,
    Event,
    UniformTrace,
    alignment,
    category,
    coarse,
    communication,
    mxnet,
    of_events,
    tensorflow,
)
from fastcomm.readers.dpro.job import (
    LocalGraph,
    Parameter,
    ParameterDict,
    Topology,
    parse_parameters,
    read_topology,
    sequential_updates,
)
from fastcomm.readers.dpro.json_files import event_errors, event_rows, ns, read_json
from fastcomm_kernels.arrays import NULL, Ints


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


_SYMBOL = "symbol_debug_str.txt"
_PIECES = "temp.json"
NONE = "none"


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


RULE = get_args(StepRule)[0]  # by default

# Returns the step of each event of a process from category, start and duration, by start.
_Rule = Callable[[Sequence[str], Sequence[int], Sequence[int]], list[int]]

_BEGINS = frozenset({"I/O", "operator.FW"})
_UPDATE = "operator.UPDATE"
_GAP_NS = 5_000_000


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
