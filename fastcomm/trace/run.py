"""A run: the traces of many ranks, each read when somebody asks for it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Self

from fastcomm.errors import ConfigError
from fastcomm.trace.trace import Trace

MOST_RANKS = 1 << 22  # far above any job: a larger number is damage


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one rank's trace is, and what reads it."""

    rank: int
    path: Path
    size: int  # bytes of the file, compressed or not
    read: Callable[[], Trace]  # goes to a worker: must pickle
    read_narrow: Callable[[], Trace] | None = None  # where less can be read for metrics alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The sources of a run, sorted by rank, one a rank."""

    sources: tuple[Source, ...]
    world_size: int | None
    warnings: tuple[str, ...] = ()
    link_bandwidth: float | None = None  # bytes per second, where a configuration says it

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a trace."""
        return tuple(source.rank for source in self.sources)

    def only(self, ranks: Iterable[int]) -> Self:
        """The same run with these ranks alone; ConfigError where one has no trace."""
        wanted = set(ranks)
        if absent := sorted(wanted - set(self.ranks)):
            raise ConfigError(
                f"--ranks: no trace of rank {ranges(absent)}; the run has {ranges(self.ranks)}"
            )
        kept = tuple(source for source in self.sources if source.rank in wanted)
        return replace(self, sources=kept)

    def read(self, rank: int) -> Trace:
        """Read one rank's trace."""
        return self.only([rank]).sources[0].read()


def absent(ranks: Sequence[int], size: int) -> tuple[int, str]:
    """How many of `size` ranks are not among the sorted ones, and which, as `ranges` says."""
    edges = [-1, *ranks, size]
    gaps = [(a + 1, b - 1) for a, b in pairwise(edges) if b - a > 1]
    words = ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in gaps)
    return sum(b - a + 1 for a, b in gaps), words


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as a person writes them: "0-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in parts)
