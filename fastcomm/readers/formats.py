"""What a format offers to `open_run`, and what it gets.

A format is a module with `claims`, which looks at a file's name and first bytes, and `find`,
which tells the ranks. What it finds is read later, on any machine that sees the path.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.options import ReadOptions
from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.config import Config, Parallel
from fastcomm.readers.config import read as read_config
from fastcomm.remote import place
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.run import MOST_RANKS, SkippedRank, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """What the user said about a run as a whole."""

    config: Config = field(default_factory=Config)
    guess_tags: bool = False
    iterations: IterationRule = field(default_factory=IterationRule)
    allow_truncated: bool = False
    whole: bool = False  # read every event, not only what metrics need
    keep_going: bool = False  # skip files that cannot be read: `RunTraces.skipped`

    @classmethod
    def of(cls, options: ReadOptions, *, whole: bool = False) -> Self:
        """Return what a user's options say, with the configuration file read.

        ConfigError where the file is damaged or options contradict it.
        """
        sizes = Parallel(
            tp=options.tp,
            pp=options.pp,
            dp=options.dp,
            ep=options.ep,
            cp=options.cp,
            order=options.order,
        )
        config = Config(parallel=sizes)
        if options.config:
            config = config.over(read_config(place(options.config)))
        return cls(
            config=config,
            guess_tags=options.guess_tags,
            iterations=IterationRule(
                regex=options.iteration_regex, clock=options.step_boundary
            ),
            allow_truncated=options.allow_truncated,
            keep_going=options.keep_going,
            whole=whole,
        )

    @property
    def world(self) -> int | None:
        """The number of ranks, where the sizes of the job say it."""
        parallel = self.config.parallel
        if parallel.dp is None:
            return None
        return parallel.dp * (parallel.tp or 1) * (parallel.pp or 1) * (parallel.cp or 1)

    def reading(self, world: int | None, ranks: Collection[int] = ()) -> TraceOptions:
        """Return the options for one rank.

        Parameters
        ----------
        world
            How many ranks there are, where something says it.
        ranks
            The ranks that have a trace, by which the world goes otherwise, or where it is too
            small for them.

        """
        if world is None or max(ranks, default=0) >= world:
            world = self.config.parallel.assumed_world(ranks)
        config, rule = self.config, self.iterations
        if rule.regex is None and config.iterations is not None:
            rule = replace(rule, regex=config.iterations)
        try:
            tags = config.tag_rules(world, guess=self.guess_tags)
        except ConfigError as error:
            raise ConfigError(f"parallelism: {error}") from error
        return TraceOptions(
            allow_truncated=self.allow_truncated,
            iterations=rule,
            tags=tags,
            patterns=config.kernels,
            whole=self.whole,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSources:
    """The ranks that one format found, sorted."""

    sources: tuple[Source, ...]
    world_size: int | None = None
    warnings: tuple[str, ...] = ()
    link_bandwidth: float | None = None  # bytes per second, where the files say it
    skipped: tuple[SkippedRank, ...] = ()  # with `OpenOptions.keep_going`


class Format(Protocol):
    """A module that reads one format."""

    def claims(self, path: Path) -> bool:
        """Whether this file or directory is of the format, by its name and first bytes."""
        ...

    def is_damaged(self, path: Path) -> bool:
        """Whether a file that `claims` refuses cannot be read, so that it might be one."""
        ...

    def find(self, paths: Sequence[Path], options: OpenOptions) -> RankSources:
        """The ranks in these files; nothing is read but what tells them."""
        ...


def agreed_world(said: Mapping[Path, int | None], ranks: Mapping[int, Path]) -> int | None:
    """The world size that the files agree on; None where none says it.

    Raises `TraceFileError` where they contradict each other or a rank.
    """
    sizes: dict[int, Path] = {}
    for path, size in said.items():
        if size is not None:
            check_count(size, path, "world size")
            sizes.setdefault(size, path)
    for rank, path in ranks.items():
        check_count(rank, path, "rank")
    if len(sizes) > 1:
        words = " and ".join(f"{size} ({path})" for size, path in sizes.items())
        raise TraceFileError(f"the files contradict each other about the world size: {words}")
    world = next(iter(sizes), None)
    if world is not None and max(ranks) >= world:
        raise TraceFileError(
            f"{ranks[max(ranks)]}: rank {max(ranks)} of a world of {world} ({sizes[world]})"
        )
    return world


def check_count(number: int, path: Path, what: str) -> None:
    """TraceFileError where a rank or a number of ranks is above what any job has."""
    if number > MOST_RANKS:
        raise TraceFileError(
            f"{path}: found a {what} of more than {MOST_RANKS}; no job has so many ranks"
        )
