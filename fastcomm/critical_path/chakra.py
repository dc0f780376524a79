"""Ranks as Chakra execution traces, which ASTRA-sim simulates on networks of one's choice.

A file a rank: messages of protobuf, each behind its length. Compute is replayed with its
measured duration; a collective or a message has its size and group, and its time is what the
simulator finds. Conventions are those that ASTRA-sim reads (its workload layer, and the message
sizes of its ring: an all-gather's size is that of one rank's part).
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fastcomm.aside import aside
from fastcomm.critical_path.chakra_schema import (
    COLLECTIVE,
    COLLECTIVES,
    COMPUTE,
    RECEIVE,
    SEND,
    messages,
)
from fastcomm.critical_path.execution import Execution, execution
from fastcomm.errors import FastcommError
from fastcomm.trace.schema import OPS
from fastcomm.trace.trace import Trace

GROUPS_FILE = "groups.json"
_US = 1000  # ns
_SEVEN_BITS = 0x7F


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one rank became."""

    path: Path
    nodes: int
    groups: Mapping[int, tuple[int, ...]]  # ranks by the number that nodes name
    replayed: Mapping[str, int]  # communication that is replayed as measured, by the reason


def file_name(prefix: str, rank: int) -> str:
    """Return the name of the execution trace of a rank."""
    return f"{prefix}.{rank}.et"


def write(trace: Trace, folder: Path, prefix: str, world: int) -> Written:
    """Write `<prefix>.<rank>.et` of a trace that was read whole; errors of the system pass."""
    path = folder / file_name(prefix, trace.meta.rank)
    rank = _Rank(trace, execution(trace), world)
    with aside(path) as unfinished, unfinished.open("wb") as file:
        _append(file, messages().Metadata(version="0.0.4"))
        count = 0
        for count, node in enumerate(rank.nodes(), 1):  # noqa: B007 - the last one counts
            _append(file, node)
    return Written(path=path, nodes=count, groups=rank.groups, replayed=rank.replayed)


def write_groups(written: Sequence[Written], folder: Path, prefix: str) -> Path:
    """Write the groups of all ranks as ASTRA-sim's --comm-group-configuration takes them."""
    groups: dict[int, tuple[int, ...]] = {}
    for number, ranks in ((n, ranks) for each in written for n, ranks in each.groups.items()):
        if groups.setdefault(number, ranks) != ranks:
            raise FastcommError(
                f"groups {groups[number]} and {ranks} have one number, {number}"
            )
    path = folder / f"{prefix}.{GROUPS_FILE}"
    text = json.dumps({str(number): groups[number] for number in sorted(groups)})
    with aside(path) as unfinished:
        unfinished.write_text(text + "\n", "utf-8")
    return path


def group_number(ranks: Sequence[int]) -> int:
    """The number of a group, the same on every rank without asking: a checksum of its ranks."""
    return zlib.crc32(" ".join(map(str, ranks)).encode()) & 0x7FFF_FFFF or 1


def _append(file: BinaryIO, message: Any) -> None:
    """A message behind its length, seven bits a byte, the low ones first."""
    data = message.SerializeToString(deterministic=True)
    length, head = len(data), bytearray()
    while length > _SEVEN_BITS:
        head.append(length & _SEVEN_BITS | 0x80)
        length >>= 7
    file.write(bytes((*head, length)) + data)


@dataclass(slots=True)
class _Rank:
    """One rank on its way into nodes; ids begin with 0 and are in the order of the starts."""

    trace: Trace
    work: Execution
    world: int
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    replayed: dict[str, int] = field(default_factory=dict)
    last: list[list[int]] = field(default_factory=list)  # the nodes of each operation
    sent: dict[tuple[int, int], int] = field(default_factory=dict)  # messages so far, by pair
    count: int = 0

    def nodes(self) -> Iterator[Any]:
        """A node an operation, or one a message; before it one for the host, if it waited."""
        names = self.trace.events["name"].take(self.work.row).to_pylist()
        comm = self.trace.comm.to_pylist()
        for place, name in enumerate(names):
            waits = [
                node
                for before in self.work.waits_for(place).tolist()
                for node in self.last[before]
            ]
            start, stop = int(self.work.start[place]), int(self.work.stop[place])
            if host := int(self.work.host_ns[place]):
                yield self._compute("host", start - host, start, waits, on_host=True)
                waits = [self.count - 1]
            first = self.count
            event = int(self.work.comm[place])
            if event < 0:
                yield self._compute(name, start, stop, waits)
            else:
                yield from self._communication(comm[event], name, start, stop, waits)
            self.last.append(list(range(first, self.count)))

    def _node(self, name: str, kind: int, start: int, waits: Sequence[int], **more: Any) -> Any:
        made = messages()
        node = made.Node(
            id=self.count,
            name=name,
            type=kind,
            data_deps=sorted(set(waits)),
            start_time_micros=_us(start),
            duration_micros=_us(more.pop("stop", start)) - _us(start),
        )
        self.count += 1
        node.attr.append(made.Attribute(name="is_cpu_op", bool_val=more.pop("on_host", False)))
        for key, value in more.items():
            width = "string_val" if isinstance(value, str) else "int64_val"
            width = "int32_val" if key in ("comm_src", "comm_dst", "comm_tag") else width
            node.attr.append(made.Attribute(name=key, **{width: value}))
        return node

    def _compute(
        self, name: str, start: int, stop: int, waits: Sequence[int], *, on_host: bool = False
    ) -> Any:
        return self._node(name, COMPUTE, start, waits, stop=stop, on_host=on_host)

    def _communication(
        self, event: Mapping[str, Any], name: str, start: int, stop: int, waits: Sequence[int]
    ) -> Iterator[Any]:
        """What the simulator is to time; as measured where it could not, with the reason."""
        op, size, partners = OPS[event["op"]], event["payload_bytes"], _messages(event)
        ranks = self._members(event["group"]) or ()
        if reason := _untimed(op, size, partners, ranks):
            self.replayed[reason] = self.replayed.get(reason, 0) + 1
            yield self._compute(name, start, stop, waits)
        elif op == "SendRecv":
            each = size // max(map(len, partners))
            for sends, others in zip((True, False), partners, strict=True):
                for other in others:
                    pair = (self.trace.meta.rank, other)
                    pair = pair if sends else pair[::-1]
                    yield self._message(name, pair, each, (start, stop), waits)
        else:
            yield self._node(
                name,
                COLLECTIVE,
                start,
                waits,
                stop=stop,
                comm_type=COLLECTIVES[op],
                comm_size=size // len(ranks) if op == "AllGather" else size,
                **self._group(ranks),
            )

    def _message(
        self,
        name: str,
        pair: tuple[int, int],
        size: int,
        time: tuple[int, int],
        waits: Sequence[int],
    ) -> Any:
        """A message of a pair of ranks; its tag is its number among theirs."""
        tag = self.sent.get(pair, 0)
        self.sent[pair] = tag + 1
        kind = SEND if pair[0] == self.trace.meta.rank else RECEIVE
        return self._node(
            name,
            kind,
            time[0],
            waits,
            stop=time[1],
            comm_size=size,
            comm_src=pair[0],
            comm_dst=pair[1],
            comm_tag=tag & 0x7FFF_FFFF,
        )

    def _members(self, group: int | None) -> tuple[int, ...] | None:
        """The ranks of a group; the whole world where only the size says so."""
        if group is None:
            return None
        said = self.trace.groups.slice(group, 1).to_pylist()[0]
        if said["ranks"] is not None:
            return tuple(said["ranks"])
        return tuple(range(self.world)) if said["size"] == self.world else None

    def _group(self, ranks: tuple[int, ...]) -> dict[str, str]:
        """The attribute that names a group; the world needs no name."""
        if len(ranks) == self.world:
            return {}
        number = group_number(ranks)
        self.groups[number] = ranks
        return {"pg_name": str(number)}


def _us(ns: int) -> int:
    """Whole us: both ends of an interval are rounded, so that errors do not add up."""
    return (ns + _US // 2) // _US


def _messages(event: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
    """The ranks that an event sends to, and those that it receives from."""
    return event.get("sends_to") or (), event.get("receives_from") or ()


def _untimed(
    op: str, size: int | None, partners: tuple[Sequence[int], ...], ranks: Sequence[int]
) -> str | None:
    """Why a simulator cannot time an event; None if it can."""
    if size is None:
        return "its size is unknown"
    if op == "SendRecv":
        return None if any(partners) else "the other rank of the message is unknown"
    if op not in COLLECTIVES:
        return f"ASTRA-sim simulates no {op}"
    return None if ranks else "the ranks of its group are unknown"
