"""A dPRO trial on disk, `<trial>/<host>/<gpu>/<files>`, read into one uniform trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro import (
    TRACES,
    Event,
    UniformTrace,
    alignment,
    communication,
    frameworks,
    of_events,
)
from fastcomm.readers.dpro.job import (
    LocalGraph,
    Parameter,
    ParameterDict,
    Topology,
    listed,
    one_after_the_other,
    read_topology,
)
from fastcomm.readers.dpro.json_files import event_rows, ns, read_json, whole
from fastcomm.readers.dpro.statistics import with_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFolder:
    """Where the files of one rank lie."""

    host: str
    pid: str
    folder: Path
    trace: Path


def rank_folders(path: Path) -> list[RankFolder]:
    """The folders of ranks, below a trial, a host, or a GPU; [] where there are none."""
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
    """The first file of a name, in the order of hosts, then GPUs."""
    return next((r.folder / name for r in ranks if (r.folder / name).exists()), None)


def content(ranks: Sequence[RankFolder], name: str) -> dict[str, Any]:
    """The object in the first file of a name; empty where no rank has it."""
    path = first(ranks, name)
    document = None if path is None else read_json(path)
    return document if isinstance(document, dict) else {}


_SYMBOL = "symbol_debug_str.txt"
_PIECES = "temp.json"
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All that a trial says, its clocks aligned and its steps numbered."""

    trace: UniformTrace
    graph: LocalGraph
    topology: Topology | None
    counts: Mapping[str, Mapping[str, int]]
    shifts: Mapping[str, int]
    parameters: ParameterDict
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What all ranks have in common; `coarse` without files of NCCL."""

    graph: LocalGraph
    parameters: ParameterDict
    events: Callable[[Path, str], list[Event]]
    coarse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    events: list[Event]
    counts: Mapping[str, Mapping[str, int]]
    last_sync: int | None


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

    `merge` joins the pieces of an operation: by default those of MXNet and TensorFlow 1.
    `clip_updates` lets none begin before the one before it has ended. `algorithm` is ring, tree
    or none, as if NCCL had no files: by default the ring, where there is one.
    """
    ranks = rank_folders(path)
    if not ranks:
        raise TraceFileError(f"{path}: no <host>/<gpu>/trace.json.gz or temp.json below it")
    files = {rank.pid: rank.folder / "nccl_rank_graph.json" for rank in ranks}
    known = {pid: file for pid, file in files.items() if file.exists()}
    topology = read_topology(known, algorithm) if known and algorithm != NONE else None
    job = _job(ranks, coarse=topology is None, merge=merge, clip_updates=clip_updates)
    read_ranks = {rank.pid: _read_rank(rank, job) for rank in ranks}
    events = [event for rank in read_ranks.values() for event in rank.events]
    if (path / communication.COMM).exists():
        with whole(path / communication.COMM):
            events += communication.byteps_events(path, job.parameters.ids)
    hosts = {rank.pid: rank.host for rank in ranks}
    syncs = {pid: rank.last_sync for pid, rank in read_ranks.items()}
    shifts = alignment.by_sync(align, hosts, syncs)
    if shifts is None:
        plain = with_steps(of_events(events), rule)
        shifts = alignment.by_causality(align, plain, topology, hosts)
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
    """The graph, the tensors, and how to read a rank's trace, by the framework."""
    metadata = content(ranks, "metadata.json")
    tensors = _tensors(ranks, metadata)
    if first(ranks, _SYMBOL) is not None or "opt_aggregate_num" in metadata:
        known = _mxnet_parameters(ranks, tensors, metadata)
        graph = frameworks.mxnet_graph(_file(ranks, "dag.gml", _SYMBOL), known)
        joins = merge is not False
        return _Job(
            graph=graph,
            parameters=known,
            events=lambda path, pid: frameworks.mxnet_events(path, pid, graph, merge=joins),
            coarse=coarse,
        )
    graph = frameworks.tensorflow_graph(_file(ranks, "dag.gml"))
    with whole(ranks[0].folder / "metadata.json"):
        known = frameworks.tensorflow_parameters(tensors, metadata, graph)

    def events(path: Path, pid: str) -> list[Event]:
        joins = path.name == _PIECES if merge is None else merge
        operations = frameworks.tensorflow_events(path, pid, graph, merge=joins)
        return one_after_the_other(operations) if clip_updates else operations

    return _Job(graph=graph, parameters=known, events=events, coarse=coarse)


def _mxnet_parameters(
    ranks: Sequence[RankFolder], tensors: tuple[Parameter, ...], metadata: Mapping[str, Any]
) -> ParameterDict:
    """The tensors with the updates that consume them."""
    place = first(ranks, "metadata.json") or ranks[0].folder / "metadata.json"
    if not tensors:
        raise TraceFileError(
            f"{place}: no gradient_name_list: without it the ids of tensors mean nothing"
        )
    with whole(place):
        return frameworks.mxnet_parameters(tensors, int(metadata.get("opt_aggregate_num") or 0))


def _file(ranks: Sequence[RankFolder], *names: str) -> Path:
    """The first file of the first of the names that there is."""
    for name in names:
        if path := first(ranks, name):
            return path
    raise TraceFileError(
        f"{ranks[0].folder}: no {' and no '.join(names)}, neither there nor in any other rank"
    )


def _tensors(ranks: Sequence[RankFolder], metadata: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """The tensors, by id."""
    for document in (content(ranks, "gradient_name_list.json"), metadata):
        names = document.get("gradient_name_list")
        if isinstance(names, list | str):
            with whole(ranks[0].folder / "gradient_name_list"):
                return listed(names)
    older = content(ranks, "gradient_name2ID.json")
    return listed(sorted(older, key=older.__getitem__))


def _read_rank(rank: RankFolder, job: _Job) -> _Rank:
    """Computation first: its span says what of the other files counts."""
    with whole(rank.trace):
        events = job.events(rank.trace, rank.pid)
    if not events:
        raise TraceFileError(f"{rank.trace}: no operation of the data-flow graph in it")
    span = _span(events)
    inputs, detail, timeline = (
        rank.folder / name for name in ("io.json", "comm_detail.json", "comm.json")
    )
    if inputs.exists():
        with whole(inputs):
            events += _inputs(inputs, rank.pid, span)
    slices: list[Event] = []
    if detail.exists():
        with whole(detail):
            slices = communication.detail(detail, rank.pid, span)
    last_sync = None
    if timeline.exists():
        with whole(timeline):
            activities, last_sync = communication.timeline(
                timeline, rank.pid, span, job.parameters.ids, coarse=job.coarse
            )
        slices = [*slices, *activities]
    with whole(detail):
        counts = communication.counts(slices)
    return _Rank(events=[*events, *slices], counts=counts, last_sync=last_sync)


def _span(events: Sequence[Event]) -> tuple[int, int]:
    """From the first start to the last end."""
    return min(each.start for each in events), max(each.start + each.dur for each in events)


def _inputs(path: Path, pid: str, span: tuple[int, int]) -> list[Event]:
    """Events of the data loader."""
    rows = event_rows(read_json(path))
    starts = [(ns(row["ts"]), ns(row["dur"])) for row in rows]
    return [
        Event(name="I/O", pid=pid, start=start, dur=dur, lane="I/O", cat="I/O")
        for start, dur in sorted(starts)
        if span[0] <= start < span[1]
    ]
