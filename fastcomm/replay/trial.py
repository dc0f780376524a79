"""A dPRO trial on disk: `<trial>/<host>/<gpu>/<files>` becomes one uniform trace.

Hosts and GPUs are taken in the order of their names as text, as dPRO does.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcomm.errors import TraceFileError
from fastcomm.replay import horovod, nccl, tensorflow, uniform
from fastcomm.replay.nccl import Topology
from fastcomm.replay.steps import with_steps
from fastcomm.replay.tensorflow import LocalGraph
from fastcomm.replay.uniform import Event, UniformTrace

_TRACES = ("trace.json.gz", "temp.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFolder:
    """Where the files of one rank lie."""

    host: str
    pid: str
    folder: Path
    trace: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All that a trial says, its clocks aligned and its steps numbered."""

    trace: UniformTrace
    graph: LocalGraph
    topology: Topology | None
    counts: Mapping[str, Mapping[str, int]]
    shifts: Mapping[str, int]
    tensors: tuple[str, ...]
    tensor_bytes: Mapping[int, int]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    events: list[Event]
    counts: Mapping[str, Mapping[str, int]]
    last_sync: int | None


def claims(path: Path) -> bool:
    """Whether a folder is a trial, a host of one, or a GPU of one."""
    return path.is_dir() and bool(_ranks(path))


def read(path: Path, *, rule: str = "update", align: bool = True, merge: bool = False) -> Trial:
    """Read every rank of a trial."""
    ranks = _ranks(path)
    if not ranks:
        raise TraceFileError(f"{path}: no <host>/<gpu>/trace.json.gz below it")
    if all(rank.trace.name == "temp.json" for rank in ranks):
        raise TraceFileError(
            f"{ranks[0].trace}: trials of MXNet and TensorFlow 1 are not read yet"
        )
    graph = tensorflow.local_graph(_first(ranks, "dag.gml"))
    tensors = _tensors(ranks)
    read_ranks = {rank.pid: _read_rank(rank, graph, tensors, merge=merge) for rank in ranks}
    shifts, warnings = _alignment(ranks, read_ranks) if align else ({}, ())
    events = [event for rank in read_ranks.values() for event in rank.events]
    trace = uniform.of_events(events, shifts)
    topologies = {rank.pid: rank.folder / "nccl_rank_graph.json" for rank in ranks}
    known = {pid: file for pid, file in topologies.items() if file.exists()}
    return Trial(
        trace=with_steps(trace, rule),
        graph=graph,
        topology=nccl.topology(known) if known else None,
        counts=next((rank.counts for rank in read_ranks.values() if rank.counts), {}),
        shifts=shifts,
        tensors=tensors,
        tensor_bytes=_tensor_bytes(ranks, graph),
        warnings=warnings,
    )


def _ranks(path: Path) -> list[RankFolder]:
    """The folders of ranks, below a trial, a host, or a GPU."""
    for pattern in ("", "*", "*/*"):
        folders = sorted(path.glob(pattern)) if pattern else [path]
        found = [
            RankFolder(
                host=folder.resolve().parent.name,
                pid=f"{folder.resolve().parent.name}.rank{folder.resolve().name}",
                folder=folder,
                trace=trace,
            )
            for folder in folders
            if not any(part.startswith(".") for part in folder.relative_to(path).parts)
            for trace in [next((folder / t for t in _TRACES if (folder / t).exists()), None)]
            if trace is not None
        ]
        if found:
            return found
    return []


def _first(ranks: list[RankFolder], name: str) -> Path:
    """The first file of a name, in the order of hosts, then GPUs."""
    for rank in ranks:
        if (rank.folder / name).exists():
            return rank.folder / name
    raise TraceFileError(f"{ranks[0].folder}: no {name}, neither there nor in any other rank")


def _maybe(ranks: list[RankFolder], name: str) -> Any:
    """The content of the first file of a name; None where no rank has it."""
    found = next((rank.folder / name for rank in ranks if (rank.folder / name).exists()), None)
    return None if found is None else uniform.read_json(found)


def _tensors(ranks: list[RankFolder]) -> tuple[str, ...]:
    """Names of the tensors, by id."""
    for name in ("gradient_name_list.json", "metadata.json"):
        said = _maybe(ranks, name)
        listed = said.get("gradient_name_list") if isinstance(said, dict) else None
        if listed is not None:
            listed = listed.split(";") if isinstance(listed, str) else listed
            return tuple(each if isinstance(each, str) else str(each[0]) for each in listed)
    said = _maybe(ranks, "gradient_name2ID.json")
    return tuple(sorted(said, key=said.__getitem__)) if isinstance(said, dict) else ()


def _read_rank(
    rank: RankFolder, graph: LocalGraph, tensors: tuple[str, ...], *, merge: bool
) -> _Rank:
    """Computation first: its span says what of the other files counts."""
    with _whole(rank.trace):
        events = tensorflow.events(rank.trace, rank.pid, graph, merge=merge)
    if not events:
        raise TraceFileError(f"{rank.trace}: no operation of the data-flow graph in it")
    span = events[0].start, max(each.start + each.dur for each in events)
    inputs, detail, timeline = (
        rank.folder / name for name in ("io.json", "comm_detail.json", "comm.json")
    )
    if inputs.exists():
        with _whole(inputs):
            events += _inputs(inputs, rank.pid, span)
    slices: list[Event] = []
    if detail.exists():
        with _whole(detail):
            slices = horovod.detail(detail, rank.pid, span)
    last_sync = None
    if timeline.exists():
        ids = {name: i for i, name in enumerate(tensors)}
        with _whole(timeline):
            said, last_sync = horovod.timeline(timeline, rank.pid, span, ids)
        slices = [*slices, *said]
    return _Rank(events=[*events, *slices], counts=horovod.counts(slices), last_sync=last_sync)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """What an event lacks is an error of its file."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceFileError(f"{path}: an event that is none: {error!r}") from error


def _inputs(path: Path, pid: str, span: tuple[int, int]) -> list[Event]:
    """Events of the data loader."""
    said = uniform.read_json(path)
    rows = said.get("traceEvents", []) if isinstance(said, dict) else said
    starts = [(uniform.ns(row["ts"]), uniform.ns(row["dur"])) for row in rows]
    return [
        Event(name="I/O", pid=pid, start=start, dur=dur, lane="I/O", cat="I/O")
        for start, dur in sorted(starts)
        if span[0] <= start < span[1]
    ]


def _alignment(
    ranks: list[RankFolder], found: Mapping[str, _Rank]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Nanoseconds to add by pid: the last Sync ends everywhere as on the first host."""
    ends: dict[str, list[int]] = {}
    for rank in ranks:
        last = found[rank.pid].last_sync
        if last is None:
            return {}, (f"{rank.pid}: no Sync in comm.json: clocks are not aligned",)
        ends.setdefault(rank.host, []).append(last)
    base = ends[ranks[0].host]
    # Exact: means of integers near 2^61 as one quotient.
    shift = {
        host: round((sum(base) * len(own) - sum(own) * len(base)) / (len(base) * len(own)))
        for host, own in ends.items()
    }
    return {rank.pid: shift[rank.host] for rank in ranks}, ()


_DTYPE_BYTES = {"float16": 2, "int16": 2, "int64": 8, "float64": 8, "string": 1}


def _tensor_bytes(ranks: list[RankFolder], graph: LocalGraph) -> dict[int, int]:
    """Bytes by tensor: the output, of its name, of the backward op before its communication."""
    said = _maybe(ranks, "metadata.json")
    names = _tensors(ranks)
    raw = {label: name for name, label in graph.label.items()}
    found = {}
    for tensor, name in enumerate(names):
        befores = graph.predecessors.get(f"Comm.{tensor}", ())
        outputs = [
            output
            for before in befores
            for output in (said or {}).get(raw[before], {}).get("output", ())
        ]
        for output in outputs:
            if output["name"] == name:
                size = _DTYPE_BYTES.get(output["dtype"], 4)
                for extent in output["shape"]:
                    size *= extent
                found[tensor] = size
    return found
