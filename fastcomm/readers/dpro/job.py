"""What all ranks of a dPRO trial share: data-flow graph, tensors, and NCCL's topology."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.readers.dpro import Event
from fastcomm.readers.dpro.json_files import read_json, read_text, whole

Edges = list[tuple[str, str]]

_TOKEN = re.compile(r'"[^"]*"|[\[\]]|[^\s\[\]"]+')
_ENTITIES = {"&quot;": '"', "&#34;": '"', "&lt;": "<", "&gt;": ">", "&amp;": "&"}


def read_graph(path: Path) -> tuple[list[str], Edges]:
    """Labels of the nodes and the edges between them, in the order of the file."""
    tokens = _TOKEN.findall(read_text(path))
    labels: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for kind, fields in _blocks(tokens):
        if kind == "node" and "id" in fields:
            labels[fields["id"]] = _unquoted(fields.get("label", fields["id"]))
        elif kind == "edge":
            edges.append((fields.get("source", "?"), fields.get("target", "?")))
    if unknown := [end for edge in edges for end in edge if end not in labels]:
        raise TraceFileError(
            f"{path}: an edge names node {unknown[0]}, which is not in the graph"
        )
    if not labels:
        raise TraceFileError(f"{path}: no node in the graph")
    return list(labels.values()), [(labels[a], labels[b]) for a, b in edges]


def _blocks(tokens: list[str]) -> list[tuple[str, dict[str, str]]]:
    """The innermost blocks that are nodes or edges, with their plain fields."""
    blocks = []
    for i, token in enumerate(tokens):
        if token in {"node", "edge"} and tokens[i + 1 : i + 2] == ["["]:
            fields, depth, k = {}, 1, i + 2
            while k < len(tokens) and depth:
                depth += (tokens[k] == "[") - (tokens[k] == "]")
                if depth == 1 and tokens[k] not in "[]" and k + 1 < len(tokens):
                    fields[tokens[k]] = tokens[k + 1]
                    k += tokens[k + 1] not in "[]"
                k += 1
            blocks.append((token, fields))
    return blocks


def _unquoted(token: str) -> str:
    token = token.strip('"')
    for entity, letter in _ENTITIES.items():
        token = token.replace(entity, letter)
    return token


Edge = tuple[str, str]

BARRIER = "UPDATE_CAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGraph:
    """Nodes with their neighbours; `label` has the standard name of each raw one."""

    nodes: tuple[str, ...]
    successors: Mapping[str, tuple[str, ...]]
    predecessors: Mapping[str, tuple[str, ...]]
    label: Mapping[str, str]

    @classmethod
    def of(
        cls,
        nodes: Iterable[str],
        edges: Iterable[Edge],
        label: Mapping[str, str] | None = None,
    ) -> "LocalGraph":
        """Join edges; one from a node to itself and one that is there already do not count."""
        kept = list(dict.fromkeys((a, b) for a, b in edges if a != b))
        names = tuple(dict.fromkeys(nodes))
        return cls(
            nodes=names,
            successors={a: tuple(bs) for a, bs in adjacent(names, kept).items()},
            predecessors={
                b: tuple(each) for b, each in adjacent(names, [(b, a) for a, b in kept]).items()
            },
            label=label or {},
        )

    @property
    def edges(self) -> list[Edge]:
        """All edges, by their sources in the order of the nodes."""
        return [(a, b) for a in self.nodes for b in self.successors[a]]

    def with_barrier(self) -> "LocalGraph":
        """The same graph where no update begins before all communication has ended."""
        edges: list[Edge] = []
        for a, b in self.edges:
            edges += [(a, BARRIER), (BARRIER, b)] if a.startswith("Comm.") else [(a, b)]
        return LocalGraph.of([*self.nodes, BARRIER], edges, self.label)


def adjacent(names: Iterable[str], edges: Iterable[Edge]) -> dict[str, list[str]]:
    """What follows each name."""
    neighbors: dict[str, list[str]] = {name: [] for name in names}
    for a, b in edges:
        neighbors[a].append(b)
    return neighbors


def descendants(
    after: Mapping[str, Sequence[str]],
    roots: Iterable[str],
    stops: Callable[[str], bool] = lambda _: False,
) -> set[str]:
    """All that can be reached, not through nodes where `stops` holds."""
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        for name in after[waiting.pop()]:
            if name not in seen and not stops(name):
                seen.add(name)
                waiting.append(name)
    return seen


def merged(events_: Iterable[Event]) -> list[Event]:
    """Consecutive events of one name as one, from the first start to the last end."""
    events: list[Event] = []
    for each in events_:
        last = events[-1] if events else None
        if last is not None and last.name == each.name and last.step == each.step:
            stop = max(last.start + last.dur, each.start + each.dur)
            events[-1] = replace(last, dur=stop - last.start)
        else:
            events.append(each)
    return events


def one_after_the_other(events_: Iterable[Event]) -> list[Event]:
    """Updates in the order of their ends, none beginning before the one before it has ended."""
    events = list(events_)
    updates = [i for i, each in enumerate(events) if each.name.startswith("UPDATE_")]
    updates.sort(key=lambda i: events[i].start + events[i].dur)
    free = None
    for i in updates:
        stop = events[i].start + events[i].dur
        start = events[i].start if free is None else max(events[i].start, free)
        events[i] = replace(events[i], start=start, dur=stop - start)
        free = stop
    return sorted(events, key=lambda each: each.start)


_BYTES = {
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("string", "int8", "uint8", "bool"), 1),
}
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor; what the trial does not say of it is None."""

    index: int
    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    @property
    def size(self) -> int | None:
        """Bytes of it; None where its shape or the width of its type is not known."""
        width = _BYTES.get(self.dtype or "")
        return None if self.shape is None or width is None else prod(self.shape) * width

    @classmethod
    def of(cls, index: int, entry: Any) -> "Parameter":
        """One entry of a list of gradients: a name, `name;shape=(…);dtype=…`, or its parts."""
        name, *facts = entry.split(";") if isinstance(entry, str) else map(str, entry)
        shape = dtype = None
        for fact in facts:
            word, _, value = fact.partition("=")
            if word.strip() == "shape":
                shape = tuple(map(int, _DIGITS.findall(value)))
            elif word.strip() == "dtype":
                dtype = value.strip().strip("<>'\"").removeprefix("class 'numpy.")
        return cls(index=index, name=name, shape=shape, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class ParameterDict:
    """Tensors by id; `update_of` has the standard names of the updates of each."""

    parameters: tuple[Parameter, ...] = ()
    update_of: Mapping[int, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, by id."""
        return tuple(each.name for each in self.parameters)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each name."""
        return {each.name: each.index for each in self.parameters}

    def name(self, tensor: int) -> str | None:
        """The name of a tensor; None of one that the trial does not list."""
        return self.parameters[tensor].name if 0 <= tensor < len(self.parameters) else None

    @property
    def bytes_of(self) -> dict[int, int]:
        """Bytes by id, of the tensors whose size is known."""
        sizes = ((each.index, each.size) for each in self.parameters)
        return {tensor: size for tensor, size in sizes if size is not None}

    def group_bytes(self, tensors: Iterable[int]) -> int | None:
        """Bytes of tensors that are sent together; None where one is unknown."""
        known, total = self.bytes_of, 0
        for tensor in tensors:
            if tensor not in known:
                return None
            total += known[tensor]
        return total


def listed(gradients: Sequence[Any] | str) -> tuple[Parameter, ...]:
    """All entries of a list of gradients; older writers join its names by ";"."""
    entries = gradients.split(";") if isinstance(gradients, str) else gradients
    return tuple(Parameter.of(i, each) for i, each in enumerate(entries))


_HOP = re.compile(r"(\d+)\[[0-9a-fA-F]+\] -> (\d+)\[[0-9a-fA-F]+\](?: \[(send|receive)\])?")
RING, TREE = "ring", "tree"
_TREE = re.compile(r"\[(\d+)\] ([-\d/]+)->(\d+)->(-?\d+)\|(-?\d+)->(\d+)->([-\d/]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The place of a rank in the tree of a channel; up is None at the root."""

    up: int | None
    down: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Rings and trees; `ring[channel][sender]` is the receiver.

    `algorithm`, ring or tree, is what the tensors go by.
    """

    ring: Mapping[int, Mapping[int, int]]
    tree: Mapping[int, Mapping[int, Tree]]
    pid_of: Mapping[int, str]
    algorithm: str = RING

    @property
    def rank_of(self) -> dict[str, int]:
        """The rank of each pid."""
        return {pid: rank for rank, pid in self.pid_of.items()}

    def receiver(self, pid: str, channel: int) -> str | None:
        """Who receives what `pid` sends on a channel; None in a tree: it sends to many."""
        if self.algorithm != RING:
            return None
        hop = self.ring.get(channel, {}).get(self.rank_of.get(pid, -1))
        return None if hop is None else self.pid_of.get(hop)


def read_topology(files: Mapping[str, Path], algorithm: str | None = None) -> Topology:
    """Join the files of all ranks, by pid; by default for the ring, where there is one."""
    ring: dict[int, dict[int, int]] = {}
    tree: dict[int, dict[int, Tree]] = {}
    pid_of: dict[int, str] = {}
    for pid, path in files.items():
        with whole(path):
            rings, trees = _read_channels(read_json(path), path)
            rank = _rank_of(rings, trees, path)
            if rank in pid_of:
                raise TraceFileError(f"{path}: rank {rank} is that of {pid_of[rank]} already")
            pid_of[rank] = pid
            for channel, hops in rings.items():
                for sender, receiver, _ in _hops(hops, path):
                    _agree(ring.setdefault(int(channel), {}), sender, receiver, path)
            for number, own, place in trees:
                tree.setdefault(number, {})[own] = place
    chosen = algorithm or (RING if ring else TREE)
    if not (ring if chosen == RING else tree):
        raise ConfigError(
            f"{next(iter(files.values()))}: no {chosen} there, nor in other ranks; wanted "
            f"--nccl-algorithm {RING if ring else TREE}"
        )
    return Topology(ring=ring, tree=tree, pid_of=pid_of, algorithm=chosen)


def _read_channels(
    document: Any, path: Path
) -> tuple[dict[str, str], list[tuple[int, int, Tree]]]:
    """Rings as text by channel, and trees; one of the two has to be there."""
    rings = document.get("RealRing") if isinstance(document, dict) else None
    trees = _read_trees(document.get("Tree", {}), path) if isinstance(document, dict) else []
    if not isinstance(rings, dict) and not trees:
        raise TraceFileError(
            f"{path}: no RealRing, the rings that NCCL really uses, and no Tree"
        )
    return rings if isinstance(rings, dict) else {}, trees


def _rank_of(rings: Mapping[str, str], trees: list[tuple[int, int, Tree]], path: Path) -> int:
    """The receiver of the first hop that is received, else the sender of the first hop.

    Where no ring has a hop, it is the rank that the trees are told of.
    """
    hops = [hop for channel in rings.values() for hop in _hops(channel, path)]
    if not hops and not trees:
        raise TraceFileError(f"{path}: RealRing has no hop")
    if not hops:
        return trees[0][1]
    return next((to for _, to, way in hops if way == "receive"), hops[0][0])


def _hops(text: str, path: Path) -> list[tuple[int, int, str | None]]:
    matches = [_HOP.match(hop.strip()) for hop in str(text).split(",") if hop.strip()]
    if None in matches:
        raise TraceFileError(f"{path}: ring {text!r}: wanted 3[3000] -> 0[2000] [receive],...")
    return [(int(hop[1]), int(hop[2]), hop[3]) for hop in matches if hop]


def _agree(ring: dict[int, int], sender: int, receiver: int, path: Path) -> None:
    if ring.setdefault(sender, receiver) != receiver:
        raise TraceFileError(
            f"{path}: rank {sender} sends to {receiver}, and to {ring[sender]} in another file"
        )


def _read_trees(trees: Any, path: Path) -> list[tuple[int, int, Tree]]:
    """Channel, rank and place of each tree; all digits of a channel are read."""
    places = []
    for text in trees.values() if isinstance(trees, dict) else ():
        for channel, down, rank, up, up_again, rank_again, down_again in _TREE.findall(
            str(text)
        ):
            if (down, rank, up) != (down_again, rank_again, up_again):
                raise TraceFileError(f"{path}: the halves of tree {channel} disagree: {text!r}")
            below = tuple(int(each) for each in down.split("/") if int(each) >= 0)
            place = Tree(up=int(up) if int(up) >= 0 else None, down=below)
            places.append((int(channel), int(rank), place))
    return places
