"""What is in a directory, a list of files or a glob: a run, one source a rank."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import cast

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.readers.config import Config
from fastcomm.readers.formats import Format, OpenOptions
from fastcomm.readers.nsys.unexported import unexported
from fastcomm.readers.steady import steady
from fastcomm.remote import is_local, is_url, matches, place
from fastcomm.trace.run import Run, absent

__all__ = ["FORMATS", "OpenOptions", "open_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A format as the search sees it: `suffixes` of its files; "" is a directory."""

    words: str
    suffixes: tuple[str, ...]


# Modules of the formats, those first that are surest of themselves.
FORMATS = {
    "store": Kind(words="a directory that `fastcomm ingest` wrote", suffixes=("", ".parquet")),
    "nsys": Kind(
        words="Nsight Systems exports: .sqlite, parquetdir, arrowdir",
        suffixes=("", ".sqlite", ".sqlite3", ".db"),
    ),
    "inspector": Kind(
        words="NCCL Inspector logs: .log, .jsonl, plain or gzipped",
        suffixes=(".log", ".jsonl", ".log.gz", ".jsonl.gz"),
    ),
    "optable": Kind(
        words="tables of operations: .parquet, .csv",
        suffixes=(".parquet", ".pq", ".csv", ".csv.gz"),
    ),
    "kineto": Kind(
        words="PyTorch profiler (Kineto) traces: .json, .json.gz",
        suffixes=(".json", ".json.gz"),
    ),
}


def open_run(
    *paths: str | Path, options: OpenOptions | None = None, use_card: bool = True
) -> Run:
    """Find the traces of a run and the rank of each; nothing is read but what tells that.

    A path is a directory (searched to the bottom), a file or a glob. A workload card in a
    directory fills what the configuration leaves open, unless `use_card` is off. Raises
    `FastcommError` where there is no trace, a rank cannot be told, two files have one rank, or
    files contradict the world size.
    """
    options = options or OpenOptions()
    config, card_warnings = with_card(options.config, paths if use_card else ())
    options = replace(options, config=config)
    name, files, others = _of_one_format(paths, config)
    found = _module(name).find(files, options)
    warnings = [f"no traces, not read: {', '.join(others)}"] if others else []
    ranks = [source.rank for source in found.sources]
    return Run(
        sources=tuple(map(steady, found.sources)),
        world_size=found.world_size,
        warnings=(
            *warnings,
            *found.warnings,
            *card_warnings,
            *_assumed(config, ranks, found.world_size),
            *missing(ranks, found.world_size),
        ),
        link_bandwidth=found.link_bandwidth if config.bandwidth is None else config.bandwidth,
    )


def _assumed(config: Config, ranks: Sequence[int], world: int | None) -> Iterator[str]:
    """Warn where the sizes of the parallelism need more ranks than have a trace."""
    size = config.parallel.assumed_world(ranks) if world is None else None
    if size is not None and size > max(ranks) + 1:
        yield (
            f"no trace says how many ranks there are: {config.parallel.words()} is taken for "
            f"{size} ranks; give --dp if there are more"
        )


def _of_one_format(
    paths: Sequence[str | Path], config: Config
) -> tuple[str, list[Path], list[str]]:
    """The format of the run, its files, and the names of files that are of none."""
    by_format: dict[str, list[Path]] = {}
    strange: list[str] = []
    remedies: list[str] = []
    for (path, is_named), name in _with_formats(paths, config):
        if remedy := unexported(path):
            remedies.append(remedy)
        elif name is not None:
            by_format.setdefault(name, []).append(path)
        elif is_named:
            # Reading it says what is wrong with it.
            by_format.setdefault(_FALLBACK, []).append(path)
        elif path.name.endswith(_SUFFIXES) and not path.name.startswith(_NO_TRACES):
            strange.append(path.name)
    if not by_format and remedies:
        raise FastcommError(remedies[0])
    if not by_format:
        kinds = "; ".join(kind.words for kind in reversed(FORMATS.values()))
        raise FastcommError(f"{_words(paths)}: no trace; wanted {kinds}")
    if len(by_format) > 1:
        kinds = " and ".join(f"{name} ({found[0]})" for name, found in by_format.items())
        raise TraceFileError(
            f"{_words(paths)}: traces of several formats: {kinds}; name the files of one"
        )
    (name, files), *_ = by_format.items()
    return name, files, strange


_FALLBACK = "kineto"
# Files that look like traces; those that are none are named in a warning, but for execution
# traces, which lie beside Kineto traces.
_SUFFIXES = (".json", ".json.gz")
_NO_TRACES = ("torch_et_", "pytorch_et_")


_AT_ONCE = 16


def _with_formats(
    paths: Sequence[str | Path], config: Config
) -> Iterator[tuple[tuple[Path, bool], str | None]]:
    """The candidates with the format of each."""
    candidates = list(_candidates(paths, config))
    looked = [config] * len(candidates)
    files = [path for path, _ in candidates]
    if all(map(is_local, files)):
        yield from zip(candidates, map(_format_of, files, looked), strict=True)
        return
    # Every look at a file that lies elsewhere is a wait.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from zip(candidates, pool.map(_format_of, files, looked), strict=True)


def _format_of(path: Path, config: Config) -> str | None:
    """The format of a file or directory; a module is loaded where the name may be its own."""
    is_directory = path.is_dir()
    for name, kind in FORMATS.items():
        named = "" in kind.suffixes if is_directory else _may_be(path, kind)
        if named and (_is_table(name, config, is_directory) or _module(name).claims(path)):
            return name
    return None


def _may_be(path: Path, kind: Kind) -> bool:
    ends = tuple(suffix for suffix in kind.suffixes if suffix)
    return path.name.endswith(ends) or ("" in kind.suffixes and "." not in path.name)


def _is_table(name: str, config: Config, is_directory: bool) -> bool:
    """Whether the user said what the columns of tables mean: then every table is one."""
    return name == "optable" and config.table is not None and not is_directory


def _module(name: str) -> Format:
    return cast("Format", import_module(f"fastcomm.readers.{name}"))


def _words(paths: Iterable[str | Path]) -> str:
    return ", ".join(map(str, paths))


def _candidates(paths: Sequence[str | Path], config: Config) -> Iterator[tuple[Path, bool]]:
    """All that may be a trace, once each, and whether somebody named it."""
    named: dict[Path, None] = {}
    searched: dict[Path, None] = {}
    for word in paths:
        path = place(word)
        if path.is_dir():
            searched |= dict.fromkeys(_below(path, config))
        elif path.exists():
            named[path] = None
        elif found := _matches(str(word)):
            for match in found:
                if match.is_dir():
                    searched |= dict.fromkeys(_below(match, config))
                else:
                    named[match] = None
        else:
            raise FastcommError(f"{word}: no such file or directory, and no file matches it")
    for path in named | searched:
        yield path, path in named


def _matches(word: str) -> list[Path]:
    """What a glob matches."""
    if is_url(word):
        return matches(word)
    return [Path(match) for match in sorted(glob(word, recursive=True))]  # noqa: PTH207


def _below(
    directory: Path, config: Config, above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[Path]:
    """The directory itself if it is a trace, else what is in it, to the bottom, sorted.

    A link to one of the directories `above` leads nowhere.
    """
    try:
        if _format_of(directory, config) is not None:
            yield directory
            return
        if not is_local(directory):
            yield from _below_elsewhere(directory, config)
            return
        here = directory.stat()
        with os.scandir(directory) as entries:
            found = sorted((entry.name, _is_directory(entry)) for entry in entries)
    except OSError as error:
        raise TraceFileError(f"{directory}: {error.strerror or error}") from error
    above |= {(here.st_dev, here.st_ino)}
    for name, is_directory in found:
        if name.startswith("."):
            continue
        if not is_directory:
            yield directory / name
        elif _identity(directory / name) not in above:
            yield from _below(directory / name, config, above)


def _below_elsewhere(directory: Path, config: Config) -> Iterator[Path]:
    """The same where there are no links."""
    for path in sorted(directory.iterdir(), key=lambda path: path.name):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _below(path, config)
        else:
            yield path


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def missing(ranks: Sequence[int], world: int | None) -> list[str]:
    """A warning that names the ranks without a trace, if there are any."""
    size = world if world is not None else max(ranks) + 1
    count, words = absent(sorted(ranks), size)
    return [f"{count} of {size} ranks have no trace here: {words}"] if count else []


def with_card(config: Config, paths: Sequence[str | Path]) -> tuple[Config, tuple[str, ...]]:
    """The configuration over the workload card that lies in one of the directories."""
    for path in map(place, paths):
        if not path.is_dir() or not any(path.glob("*.yaml")):
            continue
        from fastcomm.readers import cards  # most runs have none, and need no YAML

        if (card := cards.find_card(path)) is not None:
            read = cards.read_card(card)
            return config.with_given().over(read.config), read.warnings
    return config.with_given(), ()
