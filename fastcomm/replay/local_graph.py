"""The data-flow graph of one rank under standard names; the same serves every rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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
