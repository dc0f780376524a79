"""Data-flow graphs of frameworks: parse GML, and name operations as the uniform trace does."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro.uniform import Event, whole_text

Edges = list[tuple[str, str]]

_TOKEN = re.compile(r'"[^"]*"|[\[\]]|[^\s\[\]"]+')
_ENTITIES = {"&quot;": '"', "&#34;": '"', "&lt;": "<", "&gt;": ">", "&amp;": "&"}


def read(path: Path) -> tuple[list[str], Edges]:
    """Labels of the nodes and the edges between them, in the order of the file."""
    try:
        tokens = _TOKEN.findall(whole_text(path).decode())
    except UnicodeDecodeError as error:
        raise TraceFileError(f"{path}: {error}") from error
    labels: dict[str, str] = {}
    edges: list[tuple[str, str]] = []
    for kind, fields in _blocks(tokens):
        if kind == "node" and "id" in fields:
            labels[fields["id"]] = _text(fields.get("label", fields["id"]))
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
    found = []
    for i, token in enumerate(tokens):
        if token in {"node", "edge"} and tokens[i + 1 : i + 2] == ["["]:
            fields, depth, k = {}, 1, i + 2
            while k < len(tokens) and depth:
                depth += (tokens[k] == "[") - (tokens[k] == "]")
                if depth == 1 and tokens[k] not in "[]" and k + 1 < len(tokens):
                    fields[tokens[k]] = tokens[k + 1]
                    k += tokens[k + 1] not in "[]"
                k += 1
            found.append((token, fields))
    return found


def _text(token: str) -> str:
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
    found: dict[str, list[str]] = {name: [] for name in names}
    for a, b in edges:
        found[a].append(b)
    return found


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
    found: list[Event] = []
    for each in events_:
        last = found[-1] if found else None
        if last is not None and last.name == each.name and last.step == each.step:
            stop = max(last.start + last.dur, each.start + each.dur)
            found[-1] = replace(last, dur=stop - last.start)
        else:
            found.append(each)
    return found


def one_after_the_other(events_: Iterable[Event]) -> list[Event]:
    """Updates in the order of their ends, none beginning before the one before it has ended."""
    found = list(events_)
    updates = [i for i, each in enumerate(found) if each.name.startswith("UPDATE_")]
    updates.sort(key=lambda i: found[i].start + found[i].dur)
    free = None
    for i in updates:
        stop = found[i].start + found[i].dur
        start = found[i].start if free is None else max(found[i].start, free)
        found[i] = replace(found[i], start=start, dur=stop - start)
        free = stop
    return sorted(found, key=lambda each: each.start)
