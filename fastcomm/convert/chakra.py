"""Convert a run to Chakra execution traces, for network simulators such as ASTRA-sim.

There is one file per rank, and one of all groups. Times are ns.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fastcomm import preparation
from fastcomm.critical_path import rules
from fastcomm.critical_path.window import TimeRange
from fastcomm.errors import FastcommError
from fastcomm.executors.executor import OpenedRun, of_each
from fastcomm.files import aside, check_no_input
from fastcomm.formats.execution_traces import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    GROUPS_FILE,
    RECEIVE,
    SEND,
    messages,
)
from fastcomm.graph.graph import EDGE_KIND
from fastcomm.trace.run_traces import RunTraces, SkippedRank, warnings_of_ranks
from fastcomm.trace.schema import OPS
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.arrays import Ints

# Collectives that ASTRA-sim simulates.
_SIMULATED = ("AllReduce", "AllGather", "Broadcast", "AllToAll", "ReduceScatter")
_US = 1000  # ns
_SEVEN_BITS = 0x7F


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraFiles:
    """Counts of the files of a conversion."""

    ranks: int
    nodes: int
    replayed: Mapping[str, int]  # communication nodes replayed as measured, by reason
    skipped: Sequence[SkippedRank]
    warnings: Sequence[str]  # of the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Summary of the execution trace that was written for one rank."""

    path: Path
    meta: Meta
    nodes: int
    groups: Mapping[int, tuple[int, ...]]  # ranks by number of the group
    replayed: Mapping[str, int]  # number of events replayed as measured, by reason


def convert(run: OpenedRun, folder: Path) -> ChakraFiles:
    """Write a run as Chakra execution traces: `trace.<rank>.et` and `trace.groups.json`.

    Parameters
    ----------
    run
        The traces.
    folder
        Directory to write to.

    Raises
    ------
    FastcommError
        A rank cannot be read, no rank has work, or a file cannot be written.

    """
    run.compile(preparation.compile_critical_path)
    world = run.world_size or max(source.rank for source in run.sources) + 1
    for source in run.sources:
        check_no_input(folder / file_name(source.rank))
    check_no_input(folder / GROUPS_FILE)
    task = of_each(partial(write, folder=folder, world=world), content="all")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written, skipped = run.gather(task)
        _refuse_empty(written, run)
        write_groups(written, folder)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    replayed: Counter[str] = Counter()
    for file in written:
        replayed.update(file.replayed)
    return ChakraFiles(
        ranks=len(written),
        nodes=sum(file.nodes for file in written),
        replayed=replayed,
        skipped=skipped,
        warnings=warnings_of_ranks(file.meta for file in written),
    )


def write_groups(written: Sequence[Written], folder: Path) -> Path:
    """Write the groups of all ranks for ASTRA-sim's --comm-group-configuration.

    Raises FastcommError if two groups have the same number.
    """
    groups: dict[int, tuple[int, ...]] = {}
    for number, ranks in (pair for rank in written for pair in rank.groups.items()):
        if groups.setdefault(number, ranks) != ranks:
            raise FastcommError(
                f"groups {groups[number]} and {ranks} have the same number, {number}"
            )
    path = folder / GROUPS_FILE
    text = json.dumps({str(number): groups[number] for number in sorted(groups)})
    with aside(path) as unfinished:
        unfinished.write_text(text + "\n", "utf-8")
    return path


def _refuse_empty(written: Sequence[Written], run: RunTraces) -> None:
    """Remove the written files and raise `FastcommError` if none of them has a node."""
    if any(file.nodes for file in written):
        return
    for file in written:
        file.path.unlink(missing_ok=True)
    raise FastcommError(
        f"{run.sources[0].path}: no device work or communication on the device in any rank, so "
        "that there is nothing to convert; `fastcomm info` says what is missing"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Work of a device and its dependencies, as operations sorted by start."""

    # one value per operation; times in ns since the first start
    row: Ints  # of `trace.events`
    start: Ints
    stop: Ints
    comm: Ints  # row of `trace.comm`, or -1
    first: Ints  # position of its first predecessor in `before`; one more value for the end
    host_ns: Ints  # time from the end of its last predecessor, or 0, to its start
    # one value per dependency
    before: Ints  # operation that has to end first

    def waits_for(self, operation: int) -> Ints:
        """Return the indices of the operations that have to end before `operation` starts."""
        return self.before[self.first[operation] : self.first[operation + 1]]


def execution(trace: Trace) -> Execution:
    """Return the device work of a rank with its dependencies.

    `trace` must have all events, as read with `Source.read("all")`.
    """
    events = trace.events
    start, stop = (events[name].to_numpy() for name in ("start", "stop"))
    window = TimeRange(start=int(start.min()), stop=int(stop.max()))
    built = rules.build(trace, window)
    graph, on_device = built.graph, built.on_device
    row: Ints = np.unique(graph.event[on_device & ~graph.is_end]).astype(np.int64)
    operation = np.full(events.num_rows, -1, np.int64)
    operation[row] = np.arange(len(row))
    waits = on_device[graph.source] & graph.is_end[graph.source]
    waits &= on_device[graph.target] & ~graph.is_end[graph.target]
    waits &= graph.kind != EDGE_KIND["unexplained"]
    of, before = (operation[graph.event[side[waits]]] for side in (graph.target, graph.source))
    order = np.lexsort((before, of))
    first = np.searchsorted(of[order], np.arange(len(row) + 1))
    origin = int(start[row].min()) if len(row) else 0
    begin, end = start[row] - origin, stop[row] - origin
    ready = np.zeros(len(row), np.int64)
    np.maximum.at(ready, of, end[before])
    comm = np.full(events.num_rows, -1, np.int64)
    comm[trace.comm["event"].to_numpy()] = np.arange(trace.comm.num_rows)
    return Execution(
        row=row,
        start=begin,
        stop=end,
        comm=comm[row],
        first=first,
        before=before[order],
        host_ns=np.maximum(begin - ready, 0),
    )


def file_name(rank: int) -> str:
    """Return the name of the execution trace of a rank."""
    return f"trace.{rank}.et"


def write(trace: Trace, folder: Path, world: int) -> Written:
    """Write a rank as the execution trace ``trace.<rank>.et``.

    Parameters
    ----------
    trace
        The rank, with all events.
    folder
        Where the file is written.
    world
        Number of ranks of the run.

    Raises
    ------
    FastcommError
        If protobuf is not installed.
    OSError
        If the file cannot be written.

    """
    path = folder / file_name(trace.meta.rank)
    rank = _ChakraRank(trace, execution(trace), world)
    with aside(path) as unfinished, unfinished.open("wb") as file:
        _append(file, messages().Metadata(version="0.0.4"))
        for node in rank.nodes():
            _append(file, node)
    return Written(
        path=path,
        meta=trace.meta,
        nodes=rank.count,
        groups=rank.groups,
        replayed=rank.replayed,
    )


def group_number(ranks: Sequence[int]) -> int:
    """Return the number of a group: a checksum of its ranks, so that all ranks agree on it."""
    return zlib.crc32(" ".join(map(str, ranks)).encode()) & 0x7FFF_FFFF or 1


def _append(file: BinaryIO, message: Any) -> None:
    """Append the length of a message as a varint, and the message."""
    data = message.SerializeToString(deterministic=True)
    length, head = len(data), bytearray()
    while length > _SEVEN_BITS:
        head.append(length & _SEVEN_BITS | 0x80)
        length >>= 7
    file.write(bytes((*head, length)) + data)


@dataclass(slots=True)
class _ChakraRank:
    """Converts the operations of one rank to nodes, whose ids count from 0."""

    trace: Trace
    work: Execution
    world: int
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)  # ranks by number
    replayed: Counter[str] = field(default_factory=Counter)  # see `Written`
    last: list[list[int]] = field(default_factory=list)  # nodes of each operation
    sent: Counter[tuple[int, int]] = field(default_factory=Counter)  # messages, by pair
    count: int = 0  # nodes so far

    def nodes(self) -> Iterator[Any]:
        """Yield one node per operation, or several for one with several messages.

        If the host delayed the operation, a node of the host comes before.
        """
        names = self.trace.events["name"].take(self.work.row).to_pylist()
        comm = self.trace.comm.to_pylist()
        for place, name in enumerate(names):
            befores = self.work.waits_for(place).tolist()
            waits = [node for before in befores for node in self.last[before]]
            start, stop = int(self.work.start[place]), int(self.work.stop[place])
            if host := int(self.work.host_ns[place]):
                yield self._node("host", COMPUTE, (start - host, start), waits, is_host=True)
                waits = [self.count - 1]
            first = self.count
            if (event := int(self.work.comm[place])) < 0:
                yield self._node(name, COMPUTE, (start, stop), waits)
            else:
                yield from self._communication(comm[event], name, (start, stop), waits)
            self.last.append(list(range(first, self.count)))

    def _node(
        self,
        name: str,
        kind: int,
        time: tuple[int, int],
        waits: Sequence[int],
        attributes: Mapping[str, str | int] | None = None,
        *,
        is_host: bool = False,
    ) -> Any:
        """Return the next node; `time` is its start and stop."""
        classes = messages()
        start, stop = map(_us, time)
        node = classes.Node(
            id=self.count,
            name=name,
            type=kind,
            data_deps=sorted(set(waits)),
            start_time_micros=start,
            duration_micros=stop - start,
        )
        self.count += 1
        node.attr.append(classes.Attribute(name="is_cpu_op", bool_val=is_host))
        for key, value in (attributes or {}).items():
            width = "string_val" if isinstance(value, str) else "int64_val"
            width = "int32_val" if key in ("comm_src", "comm_dst", "comm_tag") else width
            node.attr.append(classes.Attribute(name=key, **{width: value}))
        return node

    def _communication(
        self, event: Mapping[str, Any], name: str, time: tuple[int, int], waits: Sequence[int]
    ) -> Iterator[Any]:
        """Yield the nodes of communication, for a simulator to time.

        Communication that it cannot time becomes computation as measured, and its reason is
        counted.
        """
        op, size, partners = OPS[event["op"]], event["payload_bytes"], _messages(event)
        ranks = self._members(event["group"]) or ()
        if reason := _untimed(op, size, partners, ranks):
            self.replayed[reason] += 1
            yield self._node(name, COMPUTE, time, waits)
        elif op == "SendRecv":
            own, message = self.trace.meta.rank, size // max(map(len, partners))
            for other in partners[0]:
                yield self._node(name, SEND, time, waits, self._message(own, other, message))
            for other in partners[1]:
                yield self._node(name, RECEIVE, time, waits, self._message(other, own, message))
        else:
            size = size // len(ranks) if op == "AllGather" else size
            attributes = {"comm_type": COLLECTIVES[op], "comm_size": size, **self._group(ranks)}
            yield self._node(name, COLLECTIVE, time, waits, attributes)

    def _message(self, source: int, target: int, size: int) -> dict[str, int]:
        """Return the attributes of a message; its tag counts the messages of its ranks."""
        tag = self.sent[source, target]
        self.sent[source, target] += 1
        ends = {"comm_src": source, "comm_dst": target}
        return {"comm_size": size, **ends, "comm_tag": tag & 0x7FFF_FFFF}

    def _members(self, group: int | None) -> tuple[int, ...] | None:
        """Return the ranks of a group, or None; a group as large as the world has all ranks."""
        if group is None:
            return None
        row = self.trace.groups.slice(group, 1).to_pylist()[0]
        if row["ranks"] is not None:
            return tuple(row["ranks"])
        return tuple(range(self.world)) if row["size"] == self.world else None

    def _group(self, ranks: tuple[int, ...]) -> dict[str, str]:
        """Return the attribute that names a group, and record the group; none for the world."""
        if len(ranks) == self.world:
            return {}
        number = group_number(ranks)
        self.groups[number] = ranks
        return {"pg_name": str(number)}


def _us(ns: int) -> int:
    """Round ns to us. Both ends of an interval are rounded, so that errors do not add up."""
    return (ns + _US // 2) // _US


def _messages(event: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ranks that an event sends to, and the ranks that it receives from."""
    return event.get("sends_to") or (), event.get("receives_from") or ()


def _untimed(
    op: str, size: int | None, partners: tuple[Sequence[int], ...], ranks: Sequence[int]
) -> str | None:
    """Return the reason why a simulator cannot time an event; None if it can."""
    if size is None:
        return "its size is unknown"
    if op == "SendRecv":
        return None if any(partners) else "the other rank of the message is unknown"
    if op not in _SIMULATED:
        return f"ASTRA-sim does not simulate {op}"
    return None if ranks else "the ranks of its group are unknown"
