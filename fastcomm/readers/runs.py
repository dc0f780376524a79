"""What is in a directory, a list of files or a glob: a run, one source a rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import glob
from pathlib import Path

from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.readers import kineto
from fastcomm.readers.config import Config
from fastcomm.readers.ranks import NAME_PATTERNS, rank_from_name
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.run import Run, Source, ranges

SUFFIXES = (".json", ".json.gz")
# Execution traces lie beside Kineto traces and are none.
_NO_TRACES = ("torch_et_",)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """What the user said about a run as a whole."""

    config: Config = field(default_factory=Config)
    guess_tags: bool = False
    iterations: IterationRule = field(default_factory=IterationRule)
    allow_truncated: bool = False


def open_run(
    *paths: str | Path, options: OpenOptions | None = None, use_card: bool = True
) -> Run:
    """Find the traces of a run and the rank of each; nothing is read but the first blocks.

    A path is a directory (searched to the bottom for .json and .json.gz), a file or a glob. A
    workload card in a directory fills what the configuration leaves open, unless `use_card` is
    off. Raises `FastcommError` where there is no trace, a rank cannot be told, two files have
    one rank, or files contradict the world size.
    """
    options = options or OpenOptions()
    files, skipped = _files(paths)
    peeks = {path: kineto.peek(path) for path in files}
    found = {path: peek for path, peek in peeks.items() if peek.is_trace or path not in skipped}
    if not found:
        raise FastcommError(
            f"{_words(paths)}: no trace; wanted {' or '.join(SUFFIXES)} of Kineto"
        )
    others = [path.name for path in files if path not in found]
    warnings = [f"no traces, not read: {', '.join(others)}"] if others else []
    ranks = _ranks(found)
    alone = len(found) == 1 and all(_told(path, peek) is None for path, peek in found.items())
    world = _world(found, ranks)
    config, card_warnings = _with_card(options.config, paths if use_card else ())
    read = _read_options(replace(options, config=config), world)
    sources = tuple(
        Source(
            rank=rank,
            path=path,
            size=path.stat().st_size,
            read=partial(kineto.read, path, read, None if alone else rank),
        )
        for rank, path in sorted(ranks.items())
    )
    return Run(
        sources=sources,
        world_size=world,
        warnings=(*warnings, *card_warnings, *_missing(tuple(ranks), world)),
        link_bandwidth=config.bandwidth,
    )


def _words(paths: Iterable[str | Path]) -> str:
    return ", ".join(map(str, paths))


def _files(paths: Sequence[str | Path]) -> tuple[list[Path], set[Path]]:
    """All files that may be traces, and those of them that nobody named: they may be others."""
    named: dict[Path, None] = {}
    searched: dict[Path, None] = {}
    for word in paths:
        path = Path(word)
        if path.is_dir():
            searched |= dict.fromkeys(
                file
                for file in sorted(path.rglob("*.json*"))
                if file.name.endswith(SUFFIXES) and not file.name.startswith(_NO_TRACES)
            )
        elif path.exists():
            named[path] = None
        elif matches := sorted(glob(str(word), recursive=True)):  # noqa: PTH207 - absolute too
            named |= dict.fromkeys(map(Path, matches))
        else:
            raise FastcommError(f"{word}: no such file or directory, and no file matches it")
    return list(named | searched), set(searched) - set(named)


def _ranks(found: dict[Path, kineto.Peek]) -> dict[int, Path]:
    """The file of each rank: by what it says itself, else by its name, else if it is alone."""
    ranks: dict[int, Path] = {}
    for path, peek in found.items():
        rank = _told(path, peek)
        if rank is None and len(found) == 1:
            rank = 0  # what stands behind the events may say otherwise
        if rank is None:
            raise TraceFileError(
                f"{path}: of which rank is it? No distributedInfo.rank before the events, and "
                f"the name holds none of {', '.join(NAME_PATTERNS)}"
            )
        if rank in ranks:
            raise TraceFileError(f"two files of rank {rank}: {ranks[rank]} and {path}")
        ranks[rank] = path
    return ranks


def _told(path: Path, peek: kineto.Peek) -> int | None:
    return peek.rank if peek.rank is not None else rank_from_name(path.name)


def _world(found: dict[Path, kineto.Peek], ranks: dict[int, Path]) -> int | None:
    """The world size that the files agree on; None where none says it."""
    said: dict[int, Path] = {}
    for path, peek in found.items():
        if peek.world_size is not None:
            said.setdefault(peek.world_size, path)
    if len(said) > 1:
        words = " and ".join(f"{size} ({path})" for size, path in said.items())
        raise TraceFileError(f"the files contradict each other about the world size: {words}")
    world = next(iter(said), None)
    if world is not None and max(ranks) >= world:
        raise TraceFileError(
            f"{ranks[max(ranks)]}: rank {max(ranks)} of a world of {world} ({said[world]})"
        )
    return world


def _missing(ranks: Sequence[int], world: int | None) -> list[str]:
    size = world if world is not None else max(ranks) + 1
    absent = sorted(set(range(size)) - set(ranks))
    if not absent:
        return []
    return [f"{len(absent)} of {size} ranks have no trace here: {ranges(absent)}"]


def _with_card(config: Config, paths: Sequence[str | Path]) -> tuple[Config, tuple[str, ...]]:
    """The configuration over the workload card that lies in one of the directories."""
    for path in map(Path, paths):
        if not path.is_dir() or not any(path.glob("*.yaml")):
            continue
        from fastcomm.readers import cards  # most runs have none, and need no YAML

        if (card := cards.find_card(path)) is not None:
            read = cards.read_card(card)
            return config.over(read.config), read.warnings
    return config, ()


def _read_options(options: OpenOptions, world: int | None) -> kineto.ReadOptions:
    config = options.config
    rule = options.iterations
    if rule.regex is None and config.iterations is not None:
        rule = replace(rule, regex=config.iterations)
    try:
        tags = config.tag_rules(world, guess=options.guess_tags)
    except ConfigError as error:
        raise ConfigError(f"parallelism: {error}") from error
    return kineto.ReadOptions(
        allow_truncated=options.allow_truncated,
        iterations=rule,
        tags=tags,
        patterns=config.kernels,
    )
