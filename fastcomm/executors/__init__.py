"""Run a function on every rank and merge the results: serial, in processes, or on Dask.

The interface of executors is here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.trace.run import RunTraces, SkippedRank, Source, Spread
from fastcomm.trace.trace import Trace

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")


class Held(Protocol[S_co]):
    """What an engine holds."""

    def ask(self, questions: Sequence[Callable[[S_co], T]]) -> list[T]:
        """The answers, in the order of the questions; the first error is raised."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Here(Generic[S]):
    """What this process holds."""

    made: S

    def ask(self, questions: Sequence[Callable[[S], T]]) -> list[T]:
        """Ask them, one after another."""
        return [each(self.made) for each in questions]

    def close(self) -> None:
        """It goes with this object."""


P = TypeVar("P")
R = TypeVar("R")


Progress = Callable[[Source], None]  # of a rank that is done with, well or not

_WIDTH = 16  # what is merged at once: many small tables would pin the memory between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Generic[P, R]):
    """What is done with each rank and then with all; it goes to workers and must pickle.

    `is_narrow`: it asks a trace for no more than `trace.schema.NARROW`. `of_many`: `measure`
    takes several ranks, too, of which none fails for what another is.
    `finish` gets what is merged, the ranks that are left out, and what spreads its work.
    `put_away` moves what is large of some ranks into a file of a folder that is gone after
    `finish`; who has thousands of ranks calls it before they merge.
    """

    measure: Callable[..., P]
    merge: Callable[[Sequence[P]], P]  # of different ranks, in any order
    finish: Callable[[P, Sequence[SkippedRank], Spread], R]
    put_away: Callable[[P, Path], P] | None = None
    is_narrow: bool = False
    of_many: bool = False

    def read(self, source: Source) -> Trace:
        """Read as much of a rank as is measured."""
        return ((source.read_narrow if self.is_narrow else None) or source.read)()

    def of_source(self, source: Source) -> P:
        """Read a rank and measure it; whatever goes wrong says of which."""
        with of_rank(source):
            return self.measure(self.read(source))


class Executor(Protocol):
    """What reads ranks."""

    @property
    def is_here(self) -> bool:
        """Whether ranks are read on this machine, with the kernels that are compiled here."""
        ...

    def gather(
        self,
        run: RunTraces,
        task: Task[P, R],
        *,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> R:
        """Do a task with a run.

        Raises the first rank's error, or with `keep_going` skips the rank, and raises only if
        no rank is left. Ranks that the run itself skipped are among those that `finish` gets.
        A bug in the task is raised as it is.
        """
        ...

    def call(self, function: Callable[[], T]) -> T:
        """Call a function where the files can be seen."""
        ...

    def hold(self, make: Callable[[], T]) -> Held[T]:
        """Make something where the files can be seen, to ask it one question after another."""
        ...


class Fold(Generic[T]):
    """A tree of items that are joined as they come, so that few are held at any time."""

    def __init__(self, join: Callable[[Sequence[T]], T]) -> None:
        self.join = join
        self.levels: list[list[T]] = []

    def add(self, item: T) -> None:
        """Add one item."""
        for level in self.levels:
            level.append(item)
            if len(level) < _WIDTH:
                return
            item = self.join(list(level))
            level.clear()
        self.levels.append([item])

    def joined(self) -> T:
        """All of them in one; there is at least one."""
        return self.join([item for level in self.levels for item in level])


@contextmanager
def of_rank(source: Source) -> Iterator[None]:
    """Whatever goes wrong says with which rank."""
    try:
        yield
    except FastcommError:
        raise
    except MemoryError as error:
        raise TraceFileError(
            f"{source.path}: rank {source.rank} does not fit into memory; wanted more of it "
            "for each worker, or fewer workers"
        ) from error
    except Exception as error:
        error.add_note(f"rank {source.rank}: {source.path}")
        raise


def died(source: Source) -> TraceFileError:
    """The error of a rank that no worker survives."""
    return TraceFileError(
        f"{source.path}: the worker that read rank {source.rank} was killed, and so was the "
        "next that had nothing else to do; out of memory, most likely: wanted more for each "
        "worker, or fewer workers"
    )


def lost(source: Source, error: Exception) -> SkippedRank:
    """A rank that is left out."""
    return SkippedRank(rank=source.rank, path=str(source.path), error=str(error))


def by_rank(
    left_out: Sequence[SkippedRank], ranks: int, skipped: Sequence[SkippedRank] = ()
) -> tuple[SkippedRank, ...]:
    """Sort skipped ranks, those of unknown number last.

    `left_out` are some of the run's `ranks` sources, `skipped` ranks without a source.
    FastcommError where no rank is left.
    """
    if len(left_out) == ranks:
        first = min(left_out, key=_order)
        raise FastcommError(f"no rank could be read: {first.error}")
    return tuple(sorted([*left_out, *skipped], key=_order))


def _order(each: SkippedRank) -> tuple[bool, int, str]:
    return each.rank is None, each.rank or 0, each.path


def both(
    merged: P, left_out: Sequence[SkippedRank], _: Spread
) -> tuple[P, Sequence[SkippedRank]]:
    """A `Task.finish` that leaves the answer to the caller."""
    return merged, left_out
