"""A run: the traces of many ranks, each read when somebody asks for it, and their warnings.

A rank counts its own events, whoever reads a report those of the run: warnings that differ only
in such counts are one, with the counts summed. A `Spread` works on several things of a run at
once.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from fastcomm.errors import ConfigError, TraceFileError
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
class SkippedRank:
    """A rank whose trace could not be read, and why; `rank` is None where nothing tells it."""

    rank: int | None
    path: str
    error: str

    def __str__(self) -> str:
        """Return the rank and the error, which names the file."""
        rank = "of unknown number" if self.rank is None else str(self.rank)
        return f"rank {rank}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTraces:
    """The sources of a run, sorted by rank, one a rank, and the ranks that were skipped."""

    sources: tuple[Source, ...]
    world_size: int | None
    warnings: tuple[str, ...] = ()
    link_bandwidth: float | None = None  # bytes per second, where a configuration says it
    skipped: tuple[SkippedRank, ...] = ()
    # The ranks with a file, if only reading their events tells how many ranks there are.
    untold: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a trace."""
        return tuple(source.rank for source in self.sources)

    @property
    def expected(self) -> tuple[int, ...]:
        """The ranks that have a trace, and those that were skipped, as far as known."""
        skipped = {each.rank for each in self.skipped if each.rank is not None}
        return tuple(sorted({*self.ranks, *skipped}))

    def only(self, ranks: Iterable[int], option: str = "--ranks") -> Self:
        """Return the run with these ranks alone; ConfigError where one has no trace.

        `option` is named in the error. Skipped ranks of unknown number stay: they may be among
        the wanted ones.
        """
        wanted = set(ranks)
        skipped = {each.rank for each in self.skipped if each.rank is not None}
        kept = tuple(source for source in self.sources if source.rank in wanted)
        absent = sorted(wanted - set(self.ranks) - skipped)
        if absent or (wanted and not kept):
            what = "no trace of" if absent else "no readable trace of"
            raise ConfigError(
                f"{option}: {what} {named_ranks(absent or sorted(wanted))}; the run has "
                f"{ranges(self.ranks)}"
            )
        return replace(
            self,
            sources=kept,
            skipped=tuple(
                each for each in self.skipped if each.rank is None or each.rank in wanted
            ),
        )

    def read(self, rank: int) -> Trace:
        """Read one rank's trace."""
        return self.only([rank], "--rank").sources[0].read()


def expected_ranks(
    ranks: Sequence[int], world_size: int | None, skipped: Sequence[SkippedRank] = ()
) -> int:
    """Return how many ranks the run should have: the world size, else what the ranks imply."""
    numbers = {*ranks, *(each.rank for each in skipped if each.rank is not None)}
    untold = sum(each.rank is None for each in skipped)
    implied = max(max(numbers, default=-1) + 1, len(numbers) + untold)
    return implied if world_size is None else max(world_size, len(numbers))


def agreed_size(sizes: Iterable[tuple[int, int | None]]) -> int | None:
    """Return the world size that the ranks, each with its own, agree on; None: none says it.

    Raises `TraceFileError` where they contradict each other.
    """
    told: dict[int, int] = {}
    for rank, size in sizes:
        if size is not None:
            told.setdefault(size, rank)
    if len(told) > 1:
        words = " and ".join(f"{size} (rank {rank})" for size, rank in told.items())
        raise TraceFileError(f"the files contradict each other about the world size: {words}")
    return next(iter(told), None)


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


def named_ranks(numbers: Sequence[int]) -> str:
    """Return sorted rank numbers with their noun: "rank 5", "ranks 0-3, 7"."""
    return f"rank{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"


def ranks_words(present: int, expected: int) -> str:
    """Return the number of ranks as a person says it: "8 ranks", "7 of 8 ranks"."""
    if present < expected:
        return f"{present} of {expected} ranks"
    return f"{present} rank{'' if present == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRanks:
    """The ranks of a run that were read, how many it should have, and the skipped ones."""

    ranks: tuple[int, ...]
    expected: int
    failed: tuple[SkippedRank, ...] = ()

    @classmethod
    def of(cls, run: RunTraces, ranks: Sequence[int], failed: Sequence[SkippedRank]) -> Self:
        """Return the ranks that were read beside the number that the run should have."""
        expected = expected_ranks(ranks, run.world_size, failed)
        return cls(ranks=tuple(sorted(ranks)), expected=expected, failed=tuple(failed))

    def __str__(self) -> str:
        """Return "8 ranks", or "7 of 8 ranks"."""
        return ranks_words(len(self.ranks), self.expected)

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints besides the ranks themselves."""
        return {
            "expected_ranks": self.expected,
            "failed": [asdict(each) for each in self.failed],
        }


_MOST_LINES = 8


def skipped_lines(skipped: Sequence[SkippedRank]) -> list[str]:
    """Return a line for each skipped rank; of many the first, and how many more there are."""
    lines = [str(each) for each in skipped[:_MOST_LINES]]
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
    """Return each warning once, with the ranks that it is about.

    Parameters
    ----------
    of_ranks
        The rank and its warnings.
    names_all
        Whether the ranks are named even where a warning is about all of them.

    Returns
    -------
    list of str
        In the order in which they first occur. Counts are sums over the ranks that are named;
        before a sum over all ranks stands "all 8 ranks together".

    """
    ranks: dict[tuple[str, ...], list[int]] = {}
    counts: dict[tuple[str, ...], list[int]] = {}
    number = 0
    for number, (rank, texts) in enumerate(of_ranks, 1):  # noqa: B007 - the number of ranks
        for text in texts:
            parts, own = tuple(_COUNT.split(text)), [int(each) for each in _COUNT.findall(text)]
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
    """Return the ranks that a warning is about: nothing for all of them without a count."""
    together = " together" if is_sum and len(ranks) > 1 else ""
    if len(ranks) != number:
        return f"{named_ranks(ranks)}{together}: "
    return f"all {number} ranks{together}: " if together else ""


A = TypeVar("A")
B = TypeVar("B")


class Spread(Protocol):
    """What calls a function with each of several things, which do not depend on each other."""

    def __call__(self, function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
        """The answers, in the order of the things."""
        ...


def one_by_one(function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
    """The `Spread` of one process."""
    return [function(thing) for thing in things]
