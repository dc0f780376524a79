"""Find the files of a run and detect their format: one search and one set of rules."""

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import cast

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.files import is_local, is_url, matches, place
from fastcomm.readers import (
    Format,
    is_packed,
    is_unpacked_beside,
    packed,
    rank_from_name,
    unexported,
)
from fastcomm.readers.config import Config
from fastcomm.trace.run import SkippedRank

_DEEPEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for candidates; a directory that is a trace by itself is not searched.

    With `keep_going` a directory that cannot be listed is among `skipped`, and no error.
    """

    is_trace: Callable[[Path], bool]  # asked of directories
    keep_going: bool = False
    skipped: list[SkippedRank] = field(default_factory=list)

    def candidates(self, paths: Sequence[str | Path]) -> list[tuple[Path, bool]]:
        """Return all that may be a trace, once each, and whether a user named it."""
        named: dict[Path, None] = {}
        searched: dict[Path, None] = {}
        for word in paths:
            refuse_standard_input(word)
            path = place(word)
            if path.is_dir():
                searched |= dict.fromkeys(self._below(path))
            elif path.exists():
                named[path] = None
            elif found := _matches(str(word)):
                for match in found:
                    if match.is_dir():
                        searched |= dict.fromkeys(self._below(match))
                    else:
                        named[match] = None
            else:
                raise FastcommError(
                    f"{word}: no such file or directory, and no file matches it"
                )
        return [(path, path in named) for path in named | searched]

    def _below(
        self, directory: Path, above: frozenset[tuple[int, int]] = frozenset()
    ) -> Iterator[Path]:
        """Yield the directory if it is a trace or empty, else what is in it, to the bottom.

        A link to one of the directories `above` leads nowhere.
        """
        try:
            if self.is_trace(directory):
                yield directory
                return
            if not is_local(directory):
                yield from self._below_elsewhere(directory)
                return
            here = directory.stat()
            with os.scandir(directory) as entries:
                found = sorted((entry.name, _is_directory(entry)) for entry in entries)
        except OSError as error:
            self._unlisted(directory, error)
            return
        if all(name.startswith(".") for name, _ in found):
            yield directory  # empty: its name may be that of a rank
        if len(above) == _DEEPEST:
            words = (
                f"more than {_DEEPEST} directories in one another; name the one of the traces"
            )
            self._unlisted(directory, OSError(errno.ELOOP, words))
            return
        above |= {(here.st_dev, here.st_ino)}
        for name, is_directory in found:
            if name.startswith("."):
                continue
            if not is_directory:
                yield directory / name
            elif _identity(directory / name) not in above:
                yield from self._below(directory / name, above)

    def _below_elsewhere(self, directory: Path) -> Iterator[Path]:
        """Yield what is in a directory of a file system that has no links."""
        for path in sorted(directory.iterdir(), key=lambda path: path.name):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                yield from self._below(path)
            else:
                yield path

    def _unlisted(self, directory: Path, error: OSError) -> None:
        words = f"{directory}: {error.strerror or error}"
        if not self.keep_going:
            raise TraceFileError(words) from error
        self.skipped.append(SkippedRank(rank=None, path=str(directory), error=words))


def refuse_standard_input(word: str | Path) -> None:
    """Raise TraceFileError for standard input, which cannot be read twice, or for no name."""
    if not str(word):
        raise TraceFileError("an empty path; wanted a trace, or a directory of traces")
    if str(word) in ("-", "/dev/stdin"):
        raise TraceFileError(
            f"{word}: standard input cannot be read, since a trace is read more than once; "
            "write it to a file first"
        )


def _matches(word: str) -> list[Path]:
    """What a glob matches."""
    if is_url(word):
        return matches(word)
    return [Path(match) for match in sorted(glob(word, recursive=True))]  # noqa: PTH207


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """A format as the search sees it: `suffixes` of its files; "" is a directory."""

    words: str
    suffixes: tuple[str, ...]


# Modules of the formats, those first that are surest of themselves.
FORMATS = {
    "store": FileFormat(
        words="a directory that `fastcomm ingest` wrote", suffixes=("", ".parquet")
    ),
    "nsys": FileFormat(
        words="Nsight Systems exports: .sqlite, parquetdir, arrowdir",
        suffixes=("", ".sqlite", ".sqlite3", ".db"),
    ),
    "inspector": FileFormat(
        words="NCCL Inspector logs: .log, .jsonl, plain or gzipped",
        suffixes=(".log", ".jsonl", ".log.gz", ".jsonl.gz"),
    ),
    "optable": FileFormat(
        words="tables of operations: .parquet, .csv",
        suffixes=(".parquet", ".pq", ".csv", ".csv.gz"),
    ),
    "kineto": FileFormat(
        words="PyTorch profiler (Kineto) traces: .json, .json.gz, .json.zst",
        suffixes=(".json", ".json.gz", ".json.zst"),
    ),
    "dpro": FileFormat(
        words="dPRO trials and uniform traces",
        suffixes=("", ".json", ".json.gz", ".json.zst"),
    ),
}
_NOT_MEASURED = "dpro"
_FALLBACK = "kineto"
# Execution traces lie beside Kineto traces: nobody misses them.
_EXPECTED = ("torch_et_", "pytorch_et_")
_AT_ONCE = 16
_MOST_NAMED = 12  # files in a warning
_MOST_REMEDIES = 2  # warnings about archives
_DIGITS = re.compile("[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """The files of a run, all of one format, and what else was found."""

    format: str
    files: tuple[Path, ...]
    warnings: tuple[str, ...] = ()
    skipped: tuple[SkippedRank, ...] = ()


def detect(
    paths: Sequence[str | Path], config: Config, *, keep_going: bool = False
) -> Detected:
    """Find the files of a run and their format.

    Raises `FastcommError` where there is no trace or there are traces of several formats, and
    `TraceFileError` where a rank's trace is packed or a directory cannot be listed; with
    `keep_going` the latter are in `skipped`.
    """
    search = Search(
        is_trace=lambda directory: format_of(directory, config) is not None,
        keep_going=keep_going,
    )
    sorting = _sorted(paths, search, config)
    sorting.claim_damaged()
    sorting.drop_others()
    if not sorting.by_format:
        raise FastcommError(_nothing(paths, sorting))
    if len(sorting.by_format) > 1:
        kinds = " and ".join(
            f"{name} ({found[0]})" for name, found in sorting.by_format.items()
        )
        raise TraceFileError(
            f"{_words(paths)}: traces of several formats: {kinds}; name the files of one"
        )
    ((name, files),) = sorting.by_format.items()
    search.skipped.extend(_packed_ranks(sorting, files, keep_going=keep_going))
    return Detected(
        format=name,
        files=tuple(files),
        warnings=tuple(_warnings(sorting, files)),
        skipped=tuple(search.skipped),
    )


@dataclass(slots=True, kw_only=True)
class _Sorting:
    """Candidates by format; `strange` have none, `packed` would after unpacking them."""

    by_format: dict[str, list[Path]]
    strange: list[Path]
    packed: dict[Path, str]  # what to do with each
    named: frozenset[Path]

    def claim_damaged(self) -> None:
        """Add files without a format that cannot be read, and are named as a trace is.

        Names are alike if they differ only in their digits.
        """
        for name, files in self.by_format.items():
            suffixes = tuple(suffix for suffix in FORMATS[name].suffixes if suffix)
            shapes = {_shape(path) for path in files}
            own = [
                path
                for path in self.strange
                if path.name.lower().endswith(suffixes)
                and _shape(path) in shapes
                and not path.is_dir()
                and module(name).is_damaged(path)
            ]
            files.extend(own)
            taken = frozenset(own)
            self.strange = [path for path in self.strange if path not in taken]

    def drop_others(self) -> None:
        """Pass over files that nobody named, where there are traces of another format.

        They are what only some commands read, and JSON files none of which can be read.
        """
        for name in (_NOT_MEASURED, _FALLBACK):
            files = self.by_format.get(name, [])
            is_other = name == _NOT_MEASURED or all(map(module(name).is_damaged, files))
            if len(self.by_format) > 1 and is_other and not self.named.intersection(files):
                self.strange += self.by_format.pop(name, [])


def _sorted(paths: Sequence[str | Path], search: Search, config: Config) -> _Sorting:
    """All candidates by their format."""
    sorting = _Sorting(by_format={}, strange=[], packed={}, named=frozenset())
    candidates = search.candidates(paths)
    for (path, is_named), name in _with_formats(candidates, config):
        if remedy := unexported(path) or packed(path):
            sorting.packed[path] = remedy
        elif name is not None:
            sorting.by_format.setdefault(name, []).append(path)
        elif is_named:
            # Reading it says what is wrong with it.
            sorting.by_format.setdefault(_FALLBACK, []).append(path)
        else:
            sorting.strange.append(path)
    sorting.named = frozenset(path for path, is_named in candidates if is_named)
    return sorting


def _shape(path: Path) -> str:
    return _DIGITS.sub("#", path.name.lower())


def _nothing(paths: Sequence[str | Path], sorting: _Sorting) -> str:
    """Why there is no trace."""
    if sorting.packed:
        return next(iter(sorting.packed.values()))
    measured = [kind.words for name, kind in FORMATS.items() if name != _NOT_MEASURED]
    kinds = "; ".join(reversed(measured))
    return f"{_words(paths)}: no trace; wanted {kinds}"


def _packed_ranks(
    sorting: _Sorting, files: Sequence[Path], *, keep_going: bool
) -> Iterator[SkippedRank]:
    """The packed files that a user named or that hold a rank; an error unless `keep_going`."""
    for path, remedy in sorting.packed.items():
        is_wanted = path in sorting.named or is_packed(path)
        if not is_wanted or is_unpacked_beside(path, files):
            continue
        if not keep_going:
            raise TraceFileError(remedy)
        yield SkippedRank(rank=rank_from_name(path.name), path=str(path), error=remedy)


def _warnings(sorting: _Sorting, files: Sequence[Path]) -> Iterator[str]:
    """Name the files that were not read and might have been meant."""
    ranks = {rank_from_name(path.name) for path in files} - {None}
    others = [path for path in sorting.strange if _is_worth_a_word(path, ranks)]
    others.sort(key=lambda path: rank_from_name(path.name) is None)
    if others:
        yield f"no traces, not read{_listed(others)}"
    remedies = [
        remedy.partition(chr(10))[0]
        for path, remedy in sorting.packed.items()
        if not (path in sorting.named or is_packed(path) or is_unpacked_beside(path, files))
    ]
    yield from (f"not read: {remedy}" for remedy in remedies[:_MOST_REMEDIES])
    if len(remedies) > _MOST_REMEDIES:
        yield f"not read: {len(remedies) - _MOST_REMEDIES} more archives or compressed files"


def _is_worth_a_word(path: Path, ranks: Collection[int | None]) -> bool:
    """Whether a file that is no trace looks as if it were one, or that of another rank."""
    name = path.name.lower()
    if name.startswith(_EXPECTED):
        return False
    if ".pt.trace" in name or (".json" in name and not path.is_dir()):
        return True
    return (rank := rank_from_name(name)) is not None and rank not in ranks


def _listed(paths: Sequence[Path]) -> str:
    """List the first of some files with their directory, and how many more there are."""
    folders = {path.parent for path in paths}
    where = f" in {folders.pop()}" if len(folders) == 1 else ""
    shown = ", ".join(path.name if where else str(path) for path in paths[:_MOST_NAMED])
    more = len(paths) - _MOST_NAMED
    return f"{where}: {shown}{f' and {more} more' if more > 0 else ''}"


def _with_formats(
    candidates: Sequence[tuple[Path, bool]], config: Config
) -> Iterator[tuple[tuple[Path, bool], str | None]]:
    """The candidates with the format of each."""
    looked = [config] * len(candidates)
    files = [path for path, _ in candidates]
    if all(map(is_local, files)):
        yield from zip(candidates, map(format_of, files, looked), strict=True)
        return
    # Every look at a file that lies elsewhere is a wait.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from zip(candidates, pool.map(format_of, files, looked), strict=True)


def format_of(path: Path, config: Config) -> str | None:
    """Return the format of a file or directory; modules are loaded where the name fits."""
    is_directory = path.is_dir()
    for name, kind in FORMATS.items():
        named = "" in kind.suffixes if is_directory else _may_be(path, kind)
        if named and (_is_table(name, config, is_directory) or module(name).claims(path)):
            return name
    return None


def _may_be(path: Path, kind: FileFormat) -> bool:
    ends = tuple(suffix for suffix in kind.suffixes if suffix)
    return path.name.lower().endswith(ends) or ("" in kind.suffixes and "." not in path.name)


def _is_table(name: str, config: Config, is_directory: bool) -> bool:
    """Whether the user said what the columns of tables mean: then every table is one."""
    return name == "optable" and config.table is not None and not is_directory


# Imported when a format is met: most runs need one.
_MODULES = {
    "inspector": "fastcomm.readers.inspector",
    "kineto": "fastcomm.readers.kineto.reader",
    "nsys": "fastcomm.readers.nsys",
    "optable": "fastcomm.readers.operation_table",
    "store": "fastcomm.store.reader",
    "dpro": "fastcomm.readers.dpro",
}


def module(name: str) -> Format:
    """Return the module of a format."""
    return cast("Format", import_module(_MODULES[name]))


def _words(paths: Iterable[str | Path]) -> str:
    return ", ".join(map(str, paths))
