"""Open a run: directories, files or globs become one source per rank."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastcomm.checks import option_name
from fastcomm.errors import ConfigError, SchemaError, TraceFileError
from fastcomm.files import is_local, note_inputs, place
from fastcomm.formats.config import Config
from fastcomm.formats.detection import FORMATS, Detected, detect, module
from fastcomm.formats.sources import CHANGED, RankSources, rank_from_name
from fastcomm.formats.workload_cards import with_card
from fastcomm.trace.run_traces import Content, RunTraces, SkippedRank, Source, absent
from fastcomm.trace.tags import CHANGED_NOTHING
from fastcomm.trace.trace import Trace
from fastcomm.units import plural

_State = tuple[tuple[str, int, int, int], ...]


def steady(source: Source) -> Source:
    """Return the source, wrapped to raise an error if its file changes while it is read."""
    return replace(source, reader=partial(_read, source.path, source.reader))


def _read(path: Path, read: Callable[[Content], Trace], content: Content) -> Trace:
    """Read a trace; TraceFileError with the path for damaged tables and changed files."""
    before = _state(path)
    try:
        trace = read(content)
    except TraceFileError as error:
        _check(path, before, error)
        raise
    except SchemaError as error:
        _check(path, before, error)
        raise TraceFileError(f"{path}: damaged: {error}") from error
    _check(path, before, None)
    return trace


def _check(path: Path, before: _State, error: Exception | None) -> None:
    """Raise TraceFileError if the file changed since `before`."""
    if before and _state(path) != before:
        raise TraceFileError(f"{path}: {CHANGED}") from error


def _state(path: Path) -> _State:
    """Return name, inode, size and time of a file, or of the files of a directory."""
    try:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            return (_file_state(path.name, status),)
        if not is_local(path):
            return tuple(sorted(_file_state(file.name, file.stat()) for file in path.iterdir()))
        with os.scandir(path) as entries:
            return tuple(sorted(_file_state(entry.name, entry.stat()) for entry in entries))
    except OSError:
        return ()  # reading the file reports the error


def _file_state(name: str, status: os.stat_result) -> tuple[str, int, int, int]:
    return name, status.st_ino, status.st_size, status.st_mtime_ns


def open_run(
    *paths: str | Path, config: Config | None = None, use_card: bool = True
) -> RunTraces:
    """Find the traces of a run and the rank of each, without reading whole traces.

    Parameters
    ----------
    *paths
        Directories (searched recursively), files or globs.
    config
        What the user states, such as to go on without unreadable files, which are then in
        `RunTraces.skipped`.
    use_card
        Whether a workload card in a directory fills in what the configuration leaves open.

    Raises
    ------
    FastcommError
        If there is no trace, a rank is unknown or unreadable, two files have one rank, or files
        contradict the world size.

    """
    config, card_warnings = with_card(config or Config(), paths if use_card else ())
    detected = detect(paths, config)
    ignored = _ignored(detected, config)
    sources = _rank_sources(detected.format, detected.files, config)
    note_inputs(source.path for source in sources.sources if is_local(source.path))
    run = RunTraces(
        sources=tuple(map(steady, sources.sources)),
        world_size=sources.world_size,
        warnings=(
            *detected.warnings,
            *sources.warnings,
            *card_warnings,
            *ignored,
            *_assumed(config, [source.rank for source in sources.sources], sources.world_size),
        ),
        link_bandwidth=sources.link_bandwidth if config.bandwidth is None else config.bandwidth,
        scale_up=config.scale_up,
        scale_out=config.scale_out,
        keep_going=config.keep_going,
        skipped=_numbered(detected, sources),
    )
    return replace(
        run,
        warnings=(*run.warnings, *missing(run.expected, run.world_size)),
        guessed_ranks=run.expected if run.world_size is None else (),
    )


def _numbered(detected: Detected, sources: RankSources) -> tuple[SkippedRank, ...]:
    """Give a single skipped file of unknown rank the only missing rank of the world."""
    skipped = (*detected.skipped, *sources.skipped)
    unknown = [file for file in skipped if file.rank is None]
    if len(unknown) != 1 or sources.world_size is None or _is_directory(unknown[0], detected):
        return skipped
    present = {*(source.rank for source in sources.sources), *(file.rank for file in skipped)}
    absent_ranks = [rank for rank in range(sources.world_size) if rank not in present]
    rank = absent_ranks[0] if len(absent_ranks) == 1 else None
    return tuple(replace(file, rank=rank) if file is unknown[0] else file for file in skipped)


def _is_directory(file: SkippedRank, detected: Detected) -> bool:
    """Return whether a skipped file is a directory that the search for traces has found.

    Other paths are those that a store states: they may be URLs, and are never opened.
    """
    is_found = any(file is skipped for skipped in detected.skipped)
    is_found = is_found or file.path in map(str, detected.files)
    return is_found and place(file.path).is_dir()


def _ignored(detected: Detected, config: Config) -> list[str]:
    """Return warnings about standing options that the format ignores.

    Raises `ConfigError` if it ignores an option that the user states for this run.
    """
    reasons = FORMATS[detected.format].ignored
    names = [name for name in reasons if name in config.stated]
    if typed := [name for name in names if name not in config.standing]:
        problems = (f"{option_name(name)} has no effect: {reasons[name]}" for name in typed)
        raise ConfigError(f"{detected.files[0]}: {'; '.join(problems)}")
    return [f"{option_name(name)}{CHANGED_NOTHING}{reasons[name]}" for name in names]


def _assumed(config: Config, ranks: Sequence[int], world: int | None) -> Iterator[str]:
    """Warn if the sizes of the parallelism need more ranks than have a trace."""
    if world is not None or config.parallel.dp is not None:
        return
    size = config.parallel.assumed_world(ranks)
    if size is not None and size > max(ranks) + 1:
        options = config.parallel.options_text()
        yield (
            f"no trace says how many ranks there are: {options} is taken for {size} ranks. "
            "Pass --dp if there are more"
        )


def _rank_sources(name: str, files: Sequence[Path], config: Config) -> RankSources:
    """Return the ranks in files of one format, without those that may be skipped."""
    find = module(name).find
    try:
        return find(files, config)
    except TraceFileError:
        if not config.keep_going or len(files) == 1:
            raise
        failures = {path: _failure(name, path, config) for path in files}
        readable = [path for path in files if failures[path] is None]
        if not readable or len(readable) == len(files):
            raise  # the files contradict each other, or none is readable
        sources = find(readable, config)
    skipped = tuple(failure for failure in failures.values() if failure is not None)
    return replace(sources, skipped=(*sources.skipped, *skipped))


def _failure(name: str, path: Path, config: Config) -> SkippedRank | None:
    """Return why a file cannot be opened by itself, or None."""
    try:
        module(name).find([path], replace(config, by_beginnings=True))
    except TraceFileError as error:
        rank = rank_from_name(path.name)
        return SkippedRank(rank=rank, path=str(path), error=str(error))
    return None


def missing(ranks: Sequence[int], world: int | None) -> list[str]:
    """Return a warning about ranks without a trace, if there are any.

    Without a world size, the warning names the missing ranks below the last rank, without a
    total.
    """
    size = world if world is not None else max(ranks) + 1
    count, text = absent(sorted(set(ranks)), size)
    subject = "ranks" if world is None else f"{count} of {size} ranks"
    verb = "have" if world is None else plural(count, "has")
    return [f"{subject} {verb} no trace here: {text}"] if count else []


def with_world(
    warnings: Sequence[str], guessed_ranks: Sequence[int], world: int | None
) -> tuple[str, ...]:
    """Return a run's warnings once its traces are read and tell the world size.

    Parameters
    ----------
    warnings
        The warnings from opening the run.
    guessed_ranks
        The ranks of the run if its size was unknown then, else empty.
    world
        The world size that the traces state; None if unknown.

    """
    if world is None or not guessed_ranks:
        return tuple(warnings)
    guessed = missing(guessed_ranks, None)
    others = (text for text in warnings if text not in guessed)
    return (*others, *missing(guessed_ranks, world))
