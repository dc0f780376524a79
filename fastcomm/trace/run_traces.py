"""A run: the traces of many ranks, each read on demand, and their warnings.

Warnings of ranks that differ only in counts of events are merged, with the counts added up. A
`ParallelMap` maps a function over several items of a run at once.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

import pyarrow as pa

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.trace.tags import without_effect
from fastcomm.trace.trace import Trace

MOST_RANKS = 1 << 22  # far above any job: a larger number is damage


# Which part of a trace is read: all events; device work and communication; or of these the
# columns that metrics or sums of kernels need; or of all events those that link launches.
# "flops" are those too if the format records the shapes of operators, and else "kernels". Where
# a format cannot leave out columns (`schema.COLUMN_SETS`), it reads all.
Content = Literal["all", "work", "metrics", "kernels", "launches", "flops"]
WITH_HOST = ("all", "launches")  # with events of the host
# Returns the named columns of a rank's events, of at least these kinds (None: all). The table
# lacks columns that no event has; it is None if the options of reading change them.
ColumnReader = Callable[[Sequence[str], Collection[str] | None], pa.Table | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The trace of one rank: its file, and the function that reads it."""

    rank: int
    path: Path
    size: int  # bytes of the file, compressed or not
    reader: Callable[[Content], Trace]  # has to be picklable, for workers
    # Of a stored rank: reads some columns of `store.layout.COLUMNS` and `ARGS` alone.
    column_reader: ColumnReader | None = None

    def read(self, content: Content = "work") -> Trace:
        """Read the part of the trace that an analysis needs. Raises `FastcommError`."""
        return self.reader(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRank:
    """A rank whose trace could not be read, and the error; `rank` is None if unknown."""

    rank: int | None
    path: str
    error: str

    def __str__(self) -> str:
        """Return the rank and the error, which names the file."""
        rank = "of unknown number" if self.rank is None else str(self.rank)
        return f"rank {rank}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTraces:
    """The sources of a run, one per rank, sorted by rank; and the skipped ranks."""

    sources: tuple[Source, ...]
    world_size: int | None
    warnings: tuple[str, ...] = ()
    link_bandwidth: float | None = None  # bytes per second, if configured
    scale_up: float | None = None  # of a GPU inside its node, bytes per second
    scale_out: float | None = None  # of a GPU between nodes
    keep_going: bool = False  # whether ranks that cannot be read are skipped
    skipped: tuple[SkippedRank, ...] = ()
    # The ranks with a file, if the number of ranks is known only after reading their events.
    guessed_ranks: tuple[int, ...] = ()
    unselected: tuple[int, ...] = ()  # ranks with a file that `only` left out

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a trace."""
        return tuple(source.rank for source in self.sources)

    @property
    def expected(self) -> tuple[int, ...]:
        """The ranks that have a trace, and the skipped ranks of known number."""
        skipped = {item.rank for item in self.skipped if item.rank is not None}
        return tuple(sorted({*self.ranks, *skipped}))

    def only(self, ranks: Iterable[int]) -> Self:
        """Return the run with some of its ranks.

        Skipped ranks of unknown number stay, as they may be among the requested ones.

        Parameters
        ----------
        ranks
            Numbers of ranks.

        Raises
        ------
        ConfigError
            If a rank has no readable trace.

        """
        requested = set(ranks)
        if not requested:
            raise ConfigError(f"ranks: an empty list; the run has {named_ranks(self.ranks)}")
        skipped = {item.rank for item in self.skipped if item.rank is not None}
        selected = tuple(source for source in self.sources if source.rank in requested)
        absent = sorted(requested - set(self.ranks) - skipped)
        if not selected or absent:
            state = "not in the run" if absent else "not readable"
            raise ConfigError(
                f"{named_ranks(absent or sorted(requested))}: {state}; its ranks: "
                f"{ranges(self.ranks)}"
            )
        return replace(
            self,
            sources=selected,
            skipped=tuple(
                item for item in self.skipped if item.rank is None or item.rank in requested
            ),
            unselected=tuple(sorted({*self.unselected, *self.expected} - requested)),
        )

    def read(self, rank: int, content: Content = "work") -> Trace:
        """Read the part of one rank's trace that an analysis needs.

        Raises `ConfigError` if the run does not have the rank, else as `Source.read`.
        """
        return self.only([rank]).sources[0].read(content)


def expected_ranks(
    ranks: Sequence[int], world_size: int | None, skipped: Sequence[SkippedRank] = ()
) -> int:
    """Return the number of ranks a run should have.

    This is the world size if a trace states it, but at least the number of known ranks. Else it
    is the highest rank + 1 or the number of ranks that are present or skipped, whichever is
    larger.

    Parameters
    ----------
    ranks
        Ranks that are present.
    world_size
        As a trace states it; None if none does.
    skipped
        Ranks that could not be read.

    """
    numbers = {*ranks, *(item.rank for item in skipped if item.rank is not None)}
    unnumbered = sum(item.rank is None for item in skipped)
    implied = max(max(numbers, default=-1) + 1, len(numbers) + unnumbered)
    return implied if world_size is None else max(world_size, len(numbers))


def agreed_size(sizes: Iterable[tuple[int, int | None]]) -> int | None:
    """Return the world size on which all ranks agree; None if none has one.

    Parameters
    ----------
    sizes
        Rank and world size.

    Raises
    ------
    TraceFileError
        If world sizes differ.

    """
    rank_by_size: dict[int, int] = {}
    for rank, size in sizes:
        if size is not None:
            rank_by_size.setdefault(size, rank)
    if len(rank_by_size) > 1:
        sizes_text = " and ".join(
            f"{size} (rank {rank})" for size, rank in rank_by_size.items()
        )
        raise TraceFileError(
            f"the files contradict each other about the world size: {sizes_text}"
        )
    return next(iter(rank_by_size), None)


def absent(ranks: Sequence[int], size: int) -> tuple[int, str]:
    """Return how many of `size` ranks are not in `ranks` (sorted), and which: "3, 5-7"."""
    edges = [-1, *ranks, size]
    gaps = [(a + 1, b - 1) for a, b in pairwise(edges) if b - a > 1]
    text = ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in gaps)
    return sum(b - a + 1 for a, b in gaps), text


def ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers: "0-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in parts)


def named_ranks(numbers: Sequence[int]) -> str:
    """Format sorted ranks with their noun: "rank 5", "ranks 0-3, 7"."""
    return f"rank{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"


def ranks_words(present: int, expected: int) -> str:
    """Format a number of ranks: "8 ranks", "7 of 8 ranks"."""
    if present < expected:
        return f"{present} of {expected} ranks"
    return f"{present} rank{'' if present == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRanks:
    """The ranks of a run that were read, the expected number, and the skipped ranks."""

    ranks: tuple[int, ...]
    expected: int
    skipped: tuple[SkippedRank, ...] = ()

    @classmethod
    def of(cls, run: RunTraces, ranks: Sequence[int], skipped: Sequence[SkippedRank]) -> Self:
        """Return which ranks of a run were read, and how many it should have.

        Parameters
        ----------
        run
            States the world size, if known.
        ranks
            Ranks that were read, in any order.
        skipped
            Ranks that could not be read.

        """
        expected = expected_ranks(ranks, run.world_size, skipped)
        return cls(ranks=tuple(sorted(ranks)), expected=expected, skipped=tuple(skipped))

    def __str__(self) -> str:
        """Return "8 ranks", or "7 of 8 ranks"."""
        return ranks_words(len(self.ranks), self.expected)

    def to_dict(self) -> dict[str, Any]:
        """Return the part of the JSON document."""
        return {
            "expected_ranks": self.expected,
            "failed": [asdict(rank) for rank in self.skipped],
        }


_MOST_LINES = 8


def skipped_lines(skipped: Sequence[SkippedRank]) -> list[str]:
    """Return a line per skipped rank; of many ranks the first few, and the number of others."""
    lines = [str(rank) for rank in skipped[:_MOST_LINES]]
    more = len(skipped) - len(lines)
    return [*lines, f"and {more} more ranks"] if more > 0 else lines


# Counts of one rank: "3 of 40 communication events", "12: their launch is not recorded".
_COUNT = re.compile(
    r"\b\d+(?= (?:of \d+ )?(?:(?:communication|device) events"
    r"|communication kernels|gloo: annotations|launches of CUDA graphs"
    r"|rows are neither|events that look like|calls of the device's runtime)\b)"
    r"|(?<= of )\d+(?= (?:communication|device) events\b)"
    r"|(?<=[:;] )\d+(?=: )|(?<=' \()\d+(?=\))"
)


def warnings_of_run(
    of_ranks: Iterable[tuple[int, Sequence[str]]], *, names_all: bool = False
) -> list[str]:
    """Return each warning once, with the ranks that have it.

    Parameters
    ----------
    of_ranks
        Rank and its warnings.
    names_all
        Whether to name the ranks even if all of them have the warning.

    Returns
    -------
    list of str
        In order of first appearance. Counts are sums over the named ranks; a sum over all ranks
        starts with "all 8 ranks together".

    """
    ranks: dict[tuple[str, ...], list[int]] = {}
    counts: dict[tuple[str, ...], list[int]] = {}
    number = 0
    for number, (rank, texts) in enumerate(of_ranks, 1):  # noqa: B007 - the number of ranks
        for text in texts:
            parts, own = (
                tuple(_COUNT.split(text)),
                [int(count) for count in _COUNT.findall(text)],
            )
            ranks.setdefault(parts, []).append(rank)
            sums = counts.setdefault(parts, [0] * len(own))
            counts[parts] = [a + b for a, b in zip(sums, own, strict=True)]
    return [
        _subject(own, None if names_all else number, is_sum=bool(counts[parts]))
        + "".join(
            f"{part}{count}" for part, count in zip(parts, [*counts[parts], ""], strict=True)
        )
        for parts, own in ranks.items()
    ]


def _subject(ranks: Sequence[int], number: int | None, *, is_sum: bool) -> str:
    """Name the ranks of a warning; empty for all ranks if it has no count."""
    together = " together" if is_sum and len(ranks) > 1 else ""
    if len(ranks) != number:
        return f"{named_ranks(ranks)}{together}: "
    return f"all {number} ranks{together}: " if together else ""


class RankNotes(Protocol):
    """What is doubtful about one rank: its warnings, and options without effect on it."""

    @property
    def rank(self) -> int:
        """The number of the rank."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the rank."""
        ...

    @property
    def unused(self) -> tuple[str, ...]:
        """Rules and options without effect on the rank, and why."""
        ...


def warnings_of_ranks(ranks: Iterable[RankNotes], *, names_all: bool = False) -> list[str]:
    """Return the options without effect on any rank, then each warning of the ranks once.

    `names_all` is whether to name the ranks of a warning even if all of them have it.
    """
    notes = tuple(ranks)
    return [
        *without_effect([note.unused for note in notes]),
        *warnings_of_run(((note.rank, note.warnings) for note in notes), names_all=names_all),
    ]


A = TypeVar("A")
B = TypeVar("B")


class ParallelMap(Protocol):
    """A function that maps another over independent items, maybe in other processes."""

    def __call__(self, function: Callable[[A], B], items: Sequence[A], /) -> list[B]:
        """Return the results in the order of the items."""
        ...


def one_by_one(function: Callable[[A], B], items: Sequence[A], /) -> list[B]:
    """Map in this process, one item after the other."""
    return [function(item) for item in items]
