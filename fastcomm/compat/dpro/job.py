"""Data that all ranks of a dPRO trial share: data-flow graph, tensors, and NCCL's topology."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from fastcomm.compat.dpro.uniform import Event, event_errors, read_json, read_text
from fastcomm.errors import ConfigError, TraceFileError

NamePair = tuple[str, str]
BARRIER = "UPDATE_CAL"
RING, TREE = "ring", "tree"
_TOKEN = re.compile(r'"[^"]*"|[\[\]]|[^\s\[\]"]+')
_ENTITIES = {"&quot;": '"', "&#34;": '"', "&lt;": "<", "&gt;": ">", "&amp;": "&"}
_BYTES = {
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("string", "int8", "uint8", "bool"), 1),
}
_DIGITS = re.compile(r"\d+")
_HOP = re.compile(r"(\d+)\[[0-9a-fA-F]+\] -> (\d+)\[[0-9a-fA-F]+\](?: \[(send|receive)\])?")
_TREE = re.compile(r"\[(\d+)\] ([-\d/]+)->(\d+)->(-?\d+)\|(-?\d+)->(\d+)->([-\d/]+)")


def read_graph(path: Path) -> tuple[list[str], list[NamePair]]:
    """Read labels of nodes, and edges between labels, from a GML file.

    Raises TraceFileError if there is no node, or an edge has an unknown node.
    """
    tokens = _TOKEN.findall(read_text(path))
    labels: dict[str, str] = {}
    edges: list[NamePair] = []
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
    """Return all blocks of nodes and edges with their simple fields."""
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
    """Return a token without quotes, with its entities replaced by characters."""
    token = token.strip('"')
    for entity, letter in _ENTITIES.items():
        token = token.replace(entity, letter)
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGraph:
    """Dependencies between the operations of one rank, by standard name."""

    nodes: tuple[str, ...]
    successors: Mapping[str, tuple[str, ...]]
    predecessors: Mapping[str, tuple[str, ...]]
    label: Mapping[str, str]  # standard name by raw name

    @classmethod
    def of(
        cls,
        nodes: Iterable[str],
        edges: Iterable[NamePair],
        label: Mapping[str, str] | None = None,
    ) -> "LocalGraph":
        """Build the data-flow graph of one rank; loops and repeated nodes or edges are dropped.

        Parameters
        ----------
        nodes
            Names of nodes.
        edges
            Pairs of names, from a node to one that needs it.
        label
            Other names of nodes, by name; None if there are none.

        """
        unique = list(dict.fromkeys((a, b) for a, b in edges if a != b))
        reverse = [(b, a) for a, b in unique]
        names = tuple(dict.fromkeys(nodes))
        return cls(
            nodes=names,
            successors={a: tuple(bs) for a, bs in adjacent(names, unique).items()},
            predecessors={b: tuple(before) for b, before in adjacent(names, reverse).items()},
            label=label or {},
        )

    @property
    def edges(self) -> list[NamePair]:
        """All edges, in the order of their sources."""
        return [(a, b) for a in self.nodes for b in self.successors[a]]

    def event(self, name: str, pid: str, times: tuple[int, int], lane: str) -> Event:
        """Return an operation as an event, with the operations before it as its inputs.

        Parameters
        ----------
        name, pid, lane
            Its name, the process of its rank, and its thread.
        times
            Its start and duration, ns.

        """
        inputs = {f"input{i}": op for i, op in enumerate(self.predecessors.get(name, ()))}
        start, dur = times
        return Event(
            name=name, pid=pid, start=start, dur=dur, lane=lane, cat="operator", extra=inputs
        )

    def with_barrier(self) -> "LocalGraph":
        """Return a copy in which every update waits for all communication."""
        edges: list[NamePair] = []
        for a, b in self.edges:
            edges += [(a, BARRIER), (BARRIER, b)] if a.startswith("Comm.") else [(a, b)]
        return LocalGraph.of([*self.nodes, BARRIER], edges, self.label)


def adjacent(names: Iterable[str], edges: Iterable[NamePair]) -> dict[str, list[str]]:
    """Return the targets of the edges of each name."""
    neighbors: dict[str, list[str]] = {name: [] for name in names}
    for a, b in edges:
        neighbors[a].append(b)
    return neighbors


def descendants(
    after: Mapping[str, Sequence[str]],
    roots: Iterable[str],
    stops: Callable[[str], bool] = lambda _: False,
) -> set[str]:
    """Return the nodes that can be reached from the roots.

    Parameters
    ----------
    after
        Successors of each node.
    roots
        Where to begin; they are in the result only if another root leads to them.
    stops
        Nodes for which this is true are neither returned nor passed.

    """
    reached: set[str] = set()
    pending = list(roots)
    while pending:
        for name in after[pending.pop()]:
            if name not in reached and not stops(name):
                reached.add(name)
                pending.append(name)
    return reached


def merged(events_: Iterable[Event]) -> list[Event]:
    """Merge consecutive events of one name and step, from the first start to the last end."""
    events: list[Event] = []
    for event in events_:
        last = events[-1] if events else None
        if last is not None and last.name == event.name and last.step == event.step:
            stop = max(last.start + last.dur, event.start + event.dur)
            events[-1] = replace(last, dur=stop - last.start)
        else:
            events.append(event)
    return events


def sequential_updates(events_: Iterable[Event]) -> list[Event]:
    """Shorten updates so that none begins before the previous one, by end, has ended.

    Returns all events by start.
    """
    events = list(events_)
    updates = [i for i, event in enumerate(events) if event.name.startswith("UPDATE_")]
    updates.sort(key=lambda i: events[i].start + events[i].dur)
    free = None
    for i in updates:
        stop = events[i].start + events[i].dur
        start = events[i].start if free is None else max(events[i].start, free)
        events[i] = replace(events[i], start=start, dur=stop - start)
        free = stop
    return sorted(events, key=lambda event: event.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor; shape and type are None if the trial does not have them."""

    index: int
    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    @property
    def size(self) -> int | None:
        """Size in bytes; None if the shape or the width of the type is unknown."""
        width = _BYTES.get(self.dtype or "")
        return None if self.shape is None or width is None else prod(self.shape) * width

    @classmethod
    def of(cls, index: int, entry: Any) -> "Parameter":
        """Parse an entry of a list of gradients: ``name``, or ``name;shape=(…);dtype=…``.

        The entry may also be a list of these parts.
        """
        name, *facts = entry.split(";") if isinstance(entry, str) else map(str, entry)
        shape = dtype = None
        for fact in facts:
            key, _, value = fact.partition("=")
            if key.strip() == "shape":
                shape = tuple(map(int, _DIGITS.findall(value)))
            elif key.strip() == "dtype":
                dtype = value.strip().strip("<>'\"").removeprefix("class 'numpy.")
        return cls(index=index, name=name, shape=shape, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class ParameterDict:
    """The tensors of a trial."""

    parameters: tuple[Parameter, ...] = ()  # by id
    update_of: Mapping[int, tuple[str, ...]]  # standard names of the updates, by id

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids of the tensors, by name."""
        return {tensor.name: tensor.index for tensor in self.parameters}

    @property
    def bytes_of(self) -> dict[int, int]:
        """Bytes of the tensors of known size, by id."""
        sizes = ((tensor.index, tensor.size) for tensor in self.parameters)
        return {tensor: size for tensor, size in sizes if size is not None}

    def group_bytes(self, tensors: Iterable[int]) -> int | None:
        """Return the sum of the bytes of tensors; None if one of them is unknown."""
        bytes_of = self.bytes_of
        sizes = [bytes_of.get(tensor) for tensor in tensors]
        return None if None in sizes else sum(filter(None, sizes))


def parse_parameters(gradients: Sequence[Any] | str) -> tuple[Parameter, ...]:
    """Parse a list of gradients, or a text of names joined by ";" as older profilers write."""
    entries = gradients.split(";") if isinstance(gradients, str) else gradients
    return tuple(Parameter.of(i, entry) for i, entry in enumerate(entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Neighbors of a rank in the tree of a channel."""

    up: int | None  # None at the root
    down: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Rings and trees of NCCL."""

    ring: Mapping[int, Mapping[int, int]]  # receiver by channel and sender
    tree: Mapping[int, Mapping[int, Tree]]  # by channel and rank
    pid_of: Mapping[int, str]  # by rank
    algorithm: str = RING  # that communicates the tensors: RING or TREE

    @property
    def rank_of(self) -> dict[str, int]:
        """Rank by pid."""
        return {pid: rank for rank, pid in self.pid_of.items()}

    def receiver(self, pid: str, channel: int) -> str | None:
        """Return the process to which `pid` sends on a channel of a ring, or None."""
        if self.algorithm != RING:
            return None
        hop = self.ring.get(channel, {}).get(self.rank_of.get(pid, -1))
        return None if hop is None else self.pid_of.get(hop)


def read_topology(files: Mapping[str, Path], algorithm: str | None = None) -> Topology:
    """Read the topology of NCCL from the files of all ranks.

    Parameters
    ----------
    files
        ``nccl_rank_graph.json`` by pid.
    algorithm
        RING or TREE; by default the ring if there is one.

    Raises
    ------
    TraceFileError
        If a file has no channels, or the files contradict each other.
    ConfigError
        If no file has the algorithm.

    """
    ring: dict[int, dict[int, int]] = {}
    tree: dict[int, dict[int, Tree]] = {}
    pid_of: dict[int, str] = {}
    for pid, path in files.items():
        with event_errors(path):
            rings, trees = _read_channels(read_json(path), path)
            rank = _rank_of(rings, trees, path)
            if rank in pid_of:
                raise TraceFileError(
                    f"{path}: rank {rank} is also the rank of {pid_of[rank]}. Each directory "
                    "needs the file of its own rank"
                )
            pid_of[rank] = pid
            for channel, hops in rings.items():
                for sender, receiver, _ in _hops(hops, path):
                    _add_hop(ring.setdefault(int(channel), {}), sender, receiver, path)
            for number, own, neighbors in trees:
                tree.setdefault(number, {})[own] = neighbors
    chosen = algorithm or (RING if ring else TREE)
    if not (ring if chosen == RING else tree):
        raise ConfigError(
            f"{next(iter(files.values()))}: no rank has a {chosen}. Use --nccl-algorithm "
            f"{RING if ring else TREE}"
        )
    return Topology(ring=ring, tree=tree, pid_of=pid_of, algorithm=chosen)


def _read_channels(
    document: Any, path: Path
) -> tuple[dict[str, str], list[tuple[int, int, Tree]]]:
    """Return the text of the ring of each channel, and the trees; raise if there is neither."""
    rings = document.get("RealRing") if isinstance(document, dict) else None
    trees = _read_trees(document.get("Tree", {}), path) if isinstance(document, dict) else []
    if not isinstance(rings, dict) and not trees:
        raise TraceFileError(f"{path}: no RealRing, the rings that NCCL uses, and no Tree")
    return rings if isinstance(rings, dict) else {}, trees


def _rank_of(rings: Mapping[str, str], trees: list[tuple[int, int, Tree]], path: Path) -> int:
    """Return the rank of a file.

    This is the receiver of the first hop marked "receive", else the sender of the first hop; in
    files without rings the rank of the trees.
    """
    hops = [hop for channel in rings.values() for hop in _hops(channel, path)]
    if not hops and not trees:
        raise TraceFileError(f"{path}: RealRing has no hop")
    if not hops:
        return trees[0][1]
    return next((to for _, to, mark in hops if mark == "receive"), hops[0][0])


def _hops(text: str, path: Path) -> list[tuple[int, int, str | None]]:
    """Return sender, receiver and mark ("send" or "receive") of each hop of a ring."""
    matches = [_HOP.match(hop.strip()) for hop in str(text).split(",") if hop.strip()]
    if None in matches:
        raise TraceFileError(
            f"{path}: invalid ring {text!r}: expected 3[3000] -> 0[2000] [receive],..."
        )
    return [(int(hop[1]), int(hop[2]), hop[3]) for hop in matches if hop]


def _add_hop(ring: dict[int, int], sender: int, receiver: int, path: Path) -> None:
    """Add a hop to a ring; raise TraceFileError if the sender has another receiver."""
    if ring.setdefault(sender, receiver) != receiver:
        raise TraceFileError(
            f"{path}: rank {sender} sends to {receiver}, and to {ring[sender]} in another file"
        )


def _read_trees(trees: Any, path: Path) -> list[tuple[int, int, Tree]]:
    """Return channel, rank and neighbors of each tree."""
    places = []
    for text in trees.values() if isinstance(trees, dict) else ():
        for channel, down, rank, up, up_again, rank_again, down_again in _TREE.findall(
            str(text)
        ):
            if (down, rank, up) != (down_again, rank_again, up_again):
                raise TraceFileError(f"{path}: the halves of tree {channel} disagree: {text!r}")
            below = tuple(int(child) for child in down.split("/") if int(child) >= 0)
            place = Tree(up=int(up) if int(up) >= 0 else None, down=below)
            places.append((int(channel), int(rank), place))
    return places
