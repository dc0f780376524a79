"""Search for the files of a run and detect their format."""

import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import cast

from fastcomm.errors import ConfigError, FastcommError, TraceFileError, shell_quoted
from fastcomm.files import is_local, is_special, is_url, matches, place
from fastcomm.formats import execution_traces
from fastcomm.formats.config import Config
from fastcomm.formats.sources import (
    Format,
    is_packed,
    is_unpacked_beside,
    packed,
    rank_from_name,
    unexported,
)
from fastcomm.trace.run_traces import SkippedRank


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """What is known of a format: `suffixes` of its files; "" is a directory."""

    module: str  # imported when needed: most runs need only one
    description: str  # for messages
    suffixes: tuple[str, ...]
    ignored: Mapping[str, str] = field(default_factory=dict)  # fields of `ReadOptions`, and why


# By name, the most specific first.
FORMATS = {
    "store": FileFormat(
        module="fastcomm.formats.store.reader",
        description="a directory that `fastcomm ingest` wrote",
        suffixes=("", ".parquet"),
        ignored={
            "allow_truncated": "a store is complete; the option is for fastcomm ingest",
        },
    ),
    "nsys": FileFormat(
        module="fastcomm.formats.nsys.recognition",
        description="Nsight Systems exports: .sqlite, parquetdir, arrowdir",
        suffixes=("", ".sqlite", ".sqlite3", ".db"),
        ignored={
            "allow_truncated": "a truncated export is not readable; export the report again",
        },
    ),
    "inspector": FileFormat(
        module="fastcomm.formats.inspector",
        description="NCCL Inspector logs: .log, .jsonl, plain or gzipped",
        suffixes=(".log", ".jsonl", ".log.gz", ".jsonl.gz"),
    ),
    "optable": FileFormat(
        module="fastcomm.formats.operation_table",
        description="tables of operations: .parquet, .csv",
        suffixes=(".parquet", ".pq", ".csv", ".csv.gz"),
        ignored={
            "iteration_regex": "in a table of operations a column states the step",
            "step_boundary": "in a table of operations a column states the step",
            "allow_truncated": "a truncated table is not readable; write it again",
        },
    ),
    "perfetto": FileFormat(
        module="fastcomm.formats.perfetto.ranks",
        description="Perfetto traces of the PyTorch profiler and rocprofv3: .pftrace, "
        ".pftrace.gz, .perfetto-trace",
        suffixes=(".pftrace", ".pftrace.gz", ".perfetto-trace", ".perfetto-trace.gz"),
    ),
    "kineto": FileFormat(
        module="fastcomm.formats.kineto.ranks",
        description="PyTorch profiler (Kineto) traces: .json, .json.gz, .json.zst",
        suffixes=(".json", ".json.gz", ".json.zst"),
    ),
    "dpro": FileFormat(
        module="fastcomm.formats.dpro",
        description="dPRO trials and uniform traces",
        suffixes=("", ".json", ".json.gz", ".json.zst"),
    ),
}
_NOT_MEASURED = "dpro"
_FALLBACK = "kineto"
_NSYS, _REPORT = "nsys", ".nsys-rep"
_TABLE = "optable"
_ASCEND_TIMELINE = re.compile(r"(?:trace_view|msprof[\w-]*)\.json")  # of torch_npu
# Execution traces are expected beside Kineto traces.
_EXPECTED = ("torch_et_", "pytorch_et_")
_THREADS = 16
_DEEPEST = 100  # nested directories
_MOST_NAMED = 12  # files in a warning
_MOST_REMEDIES = 2  # warnings about archives
_DIGITS = re.compile("[0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for files that may be traces; directories that are traces are not searched.

    Directories that cannot be listed are in `skipped` if the run goes on without them.
    """

    config: Config
    skipped: list[SkippedRank] = field(default_factory=list)

    def candidates(self, paths: Sequence[str | Path]) -> dict[Path, bool]:
        """Return all paths that may be traces, and for each whether the user named it.

        Raises `ConfigError` if a path does not exist, and for standard input.
        """
        named: dict[Path, None] = {}
        searched: dict[Path, None] = {}
        for text in paths:
            refuse_standard_input(text)
            path = place(text)
            matched = [path] if path.exists() else _matches(str(text))
            if not matched:
                raise no_such_path(text)
            for match in matched:
                if match.is_dir():
                    searched |= dict.fromkeys(self._below(match))
                else:
                    named[match] = None
        return {path: path in named for path in named | searched}

    def _below(
        self, directory: Path, above: frozenset[tuple[int, int]] = frozenset()
    ) -> Iterator[Path]:
        """Yield the directory if it is a trace or empty, else its files, recursively.

        Links to one of the directories `above` are not followed.
        """
        try:
            if format_of(directory, self.config) is not None:
                yield directory
                return
            if not is_local(directory):
                yield from self._below_elsewhere(directory)
                return
            status = directory.stat()
            with os.scandir(directory) as entries:
                listing = sorted((entry.name, _is_directory(entry)) for entry in entries)
        except OSError as error:
            self._unlisted(directory, error)
            return
        if all(name.startswith(".") for name, _ in listing):
            yield directory  # empty, but its name may be that of a rank
        if len(above) == _DEEPEST:
            message = (
                f"more than {_DEEPEST} directories in one another; name the one of the traces"
            )
            self._unlisted(directory, OSError(errno.ELOOP, message))
            return
        above |= {(status.st_dev, status.st_ino)}
        for name, is_directory in listing:
            if name.startswith("."):
                continue
            if not is_directory:
                yield directory / name
            elif _identity(directory / name) not in above:
                yield from self._below(directory / name, above)

    def _below_elsewhere(self, directory: Path) -> Iterator[Path]:
        """Yield the files of a directory on a file system without links, recursively."""
        for path in sorted(directory.iterdir(), key=lambda path: path.name):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                yield from self._below(path)
            else:
                yield path

    def _unlisted(self, directory: Path, error: OSError) -> None:
        """Skip a directory that cannot be listed; TraceFileError unless the run goes on."""
        failure = TraceFileError(f"{directory}: {error.strerror or error}")
        self.skipped.append(self.config.skipped(directory, failure))


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """The files of a run, all of one format, with warnings and skipped files."""

    format: str
    files: tuple[Path, ...]
    warnings: tuple[str, ...] = ()
    skipped: tuple[SkippedRank, ...] = ()


def detect(paths: Sequence[str | Path], config: Config) -> Detected:
    """Find the files of a run and their format.

    Parameters
    ----------
    paths
        Directories, files or globs.
    config
        With a table mapping, tables of operations are a format. It says whether packed traces
        and directories that cannot be listed are skipped.

    Raises
    ------
    FastcommError
        If there is no trace.
    TraceFileError
        If there are traces of several formats, or of several windows of `fastcomm.torch`;
        unless they are skipped, if a rank's trace is packed or a directory cannot be listed.

    """
    search = Search(config=config)
    sorting = _sorted(paths, search, config)
    sorting.claim_damaged()
    sorting.drop_others()
    if not sorting.by_format:
        raise FastcommError(_nothing(paths, sorting))
    if len(sorting.by_format) > 1:
        kinds = " and ".join(
            f"{name} ({files[0]})" for name, files in sorting.by_format.items()
        )
        where = ", ".join(map(str, paths))
        raise TraceFileError(
            f"{where}: traces of several formats: {kinds}; name the files of one"
        )
    ((name, files),) = sorting.by_format.items()
    if len(windows := _profiled_windows(path.parent for path in files)) > 1:
        raise TraceFileError(_several_windows(paths, windows))
    search.skipped.extend(_packed_ranks(sorting, files, config))
    return Detected(
        format=name,
        files=tuple(files),
        warnings=tuple(_warnings(sorting, files)),
        skipped=tuple(search.skipped),
    )


@dataclass(slots=True, kw_only=True)
class _Sorting:
    """Candidates by format; `unknown` have none, and `packed` must be unpacked first."""

    named: frozenset[Path]  # paths that the user named
    by_format: dict[str, list[Path]] = field(default_factory=dict)
    unknown: list[Path] = field(default_factory=list)
    packed: dict[Path, str] = field(default_factory=dict)  # remedy for each

    def claim_damaged(self) -> None:
        """Add unreadable files of unknown format that are named like a trace of the run.

        Names are alike if they differ only in digits.
        """
        for name, files in self.by_format.items():
            suffixes = tuple(suffix for suffix in FORMATS[name].suffixes if suffix)
            shapes = {_shape(path) for path in files}
            damaged = [
                path
                for path in self.unknown
                if path.name.lower().endswith(suffixes)
                and _shape(path) in shapes
                and not path.is_dir()
                and module(name).is_damaged(path)
            ]
            files.extend(damaged)
            claimed = frozenset(damaged)
            self.unknown = [path for path in self.unknown if path not in claimed]

    def export_reports(self) -> None:
        """Put the exports of reports in their place, if there is an nsys and no other trace."""
        if self.by_format.keys() - {_NSYS}:
            return
        exports = list(self.by_format.get(_NSYS, []))
        for path in [path for path in self.packed if path.suffix.lower() == _REPORT]:
            if is_unpacked_beside(path, exports) or not is_local(path):
                continue
            from fastcomm.formats.nsys.report import exported

            try:
                export = exported(path)
            except TraceFileError as error:
                self.packed[path] = str(error)
                continue
            if export is not None:
                del self.packed[path]
                self.by_format.setdefault(_NSYS, []).append(export)

    def drop_others(self) -> None:
        """Drop files that the user did not name, if there are traces of another format.

        These are devices, pipes and sockets, files that only some commands read, and JSON files
        that are all unreadable.
        """
        for name, files in list(self.by_format.items()):
            is_dropped = not self.named.intersection(files) and all(map(is_special, files))
            if len(self.by_format) > 1 and is_dropped:
                self.unknown += self.by_format.pop(name)
        self._drop_ascend()
        for name in (_NOT_MEASURED, _FALLBACK):
            files = self.by_format.get(name, [])
            is_other = name == _NOT_MEASURED or all(map(module(name).is_damaged, files))
            if len(self.by_format) > 1 and is_other and not self.named.intersection(files):
                self.unknown += self.by_format.pop(name, [])

    def _drop_ascend(self) -> None:
        """Drop timelines of torch_npu that the user did not name, if its tables are there."""
        if _TABLE not in self.by_format:
            return
        files = self.by_format.pop(_FALLBACK, [])
        dropped = [
            path
            for path in files
            if path not in self.named and _ASCEND_TIMELINE.fullmatch(path.name)
        ]
        if others := [path for path in files if path not in dropped]:
            self.by_format[_FALLBACK] = others
        self.unknown += dropped


def partials_folder(window: Path) -> Path:
    """Return the directory of partial results in the directory of a profiled window."""
    return window / ".partials"


def _profiled_windows(folders: Iterable[Path]) -> list[Path]:
    """Return the directories that are profiled windows, in the order of their steps."""
    named = (path for path in dict.fromkeys(folders) if path.name.startswith("step-"))
    windows = [path for path in named if partials_folder(path).is_dir()]
    return sorted(windows, key=lambda path: (path.parent, len(path.name), path.name))


def _several_windows(paths: Sequence[str | Path], windows: Sequence[Path]) -> str:
    """Return the message that there are several profiled windows, which are not one run."""
    where, last = ", ".join(map(str, paths)), shell_quoted(str(windows[-1]))
    whole = f", or all with `fastcomm watch {shell_quoted(str(paths[0]))}`"
    return (
        f"{where}: {len(windows)} profiled windows, from {windows[0]} to {windows[-1]}. Pass "
        f"one of them, as in `fastcomm metrics {last}`{whole if len(paths) == 1 else ''}"
    )


def _without_traces(paths: Sequence[str | Path], windows: Sequence[Path]) -> str:
    """Return the message that profiled windows have no traces."""
    if len(windows) > 1:
        return f'{_several_windows(paths, windows)}. Other commands need traces (keep="trace")'
    return (
        f"{windows[0]}: the partial results of a profiled window, without its traces: they "
        f"have what `fastcomm metrics {shell_quoted(str(windows[0]))}` and `fastcomm watch` "
        'print; other commands need traces (keep="trace")'
    )


def _sorted(paths: Sequence[str | Path], search: Search, config: Config) -> _Sorting:
    """Return all candidates by format."""
    candidates = search.candidates(paths)
    sorting = _Sorting(named=frozenset(path for path in candidates if candidates[path]))
    for path, name in zip(candidates, _formats(candidates, config), strict=True):
        is_named = path in sorting.named
        if remedy := unexported(path) or packed(path):
            sorting.packed[path] = remedy
        elif name is not None:
            sorting.by_format.setdefault(name, []).append(path)
        elif is_named and path.name.endswith(execution_traces.SUFFIXES):
            sorting.packed[path] = f"{path}: {execution_traces.REMEDY}"
        elif is_named:
            # Reading it reports what is wrong with it.
            sorting.by_format.setdefault(_FALLBACK, []).append(path)
        else:
            sorting.unknown.append(path)
    sorting.export_reports()
    return sorting


def _shape(path: Path) -> str:
    """Return a name with its digits replaced."""
    return _DIGITS.sub("#", path.name.lower())


def _nothing(paths: Sequence[str | Path], sorting: _Sorting) -> str:
    """Return the message that there is no trace."""
    if sorting.packed:
        return next(iter(sorting.packed.values()))
    where = ", ".join(map(str, paths))
    # A directory without visible files is a candidate itself.
    folders = (folder for path in sorting.unknown for folder in (path, path.parent))
    if windows := _profiled_windows(folders):
        return _without_traces(paths, windows)
    if any(path.name.endswith(execution_traces.SUFFIXES) for path in sorting.unknown):
        return f"{where}: {execution_traces.REMEDY}"
    from fastcomm.formats.kineto import ranks

    if problem := next(filter(None, map(ranks.foreign, sorting.unknown)), None):
        return problem
    measured = [kind.description for name, kind in FORMATS.items() if name != _NOT_MEASURED]
    return f"{where}: no trace; expected {'; '.join(reversed(measured))}"


def _packed_ranks(
    sorting: _Sorting, files: Sequence[Path], config: Config
) -> Iterator[SkippedRank]:
    """Yield archives that hold a rank or were named, as skipped ranks.

    Archives whose unpacked copy is among `files` are left out. Raises `TraceFileError` for
    the first one unless the run goes on.
    """
    for path, remedy in sorting.packed.items():
        is_relevant = path in sorting.named or is_packed(path)
        if not is_relevant or is_unpacked_beside(path, files):
            continue
        yield config.skipped(path, TraceFileError(remedy), rank_from_name(path.name))


def _warnings(sorting: _Sorting, files: Sequence[Path]) -> Iterator[str]:
    """Yield warnings about files that were not read and may be traces."""
    ranks = {rank_from_name(path.name) for path in files} - {None}
    others = [path for path in sorting.unknown if _may_be_missed(path, ranks)]
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


def _may_be_missed(path: Path, ranks: Collection[int | None]) -> bool:
    """Return whether a file that is not a trace looks like one, or like another rank's."""
    name = path.name.lower()
    if is_special(path):
        return True
    if name.startswith(_EXPECTED):
        return False
    if ".pt.trace" in name or (".json" in name and not path.is_dir()):
        return True
    return (rank := rank_from_name(name)) is not None and rank not in ranks


def _listed(paths: Sequence[Path]) -> str:
    """Return the first of some files as text, and how many more there are."""
    folders = {path.parent for path in paths}
    where = f" in {folders.pop()}" if len(folders) == 1 else ""
    shown = ", ".join(path.name if where else str(path) for path in paths[:_MOST_NAMED])
    more = len(paths) - _MOST_NAMED
    return f"{where}: {shown}{f' and {more} more' if more > 0 else ''}"


def _formats(paths: Collection[Path], config: Config) -> list[str | None]:
    """Return the format of each path, or None; remote files are looked at in parallel."""
    find = partial(format_of, config=config)
    if all(map(is_local, paths)):
        return list(map(find, paths))
    # Each access to a remote file waits for the network.
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(find, paths))


def format_of(path: Path, config: Config) -> str | None:
    """Return the format of a path, or None; modules are imported only if the name fits."""
    is_directory = path.is_dir()
    is_table = config.table is not None and not is_directory  # the user mapped its columns
    for name, kind in FORMATS.items():
        has_name = "" in kind.suffixes if is_directory else _may_be(path, kind)
        if has_name and ((is_table and name == "optable") or module(name).claims(path)):
            return name
    return None


def _may_be(path: Path, kind: FileFormat) -> bool:
    ends = tuple(suffix for suffix in kind.suffixes if suffix)
    return path.name.lower().endswith(ends) or ("" in kind.suffixes and "." not in path.name)


def module(name: str) -> Format:
    """Return the module of a format."""
    return cast("Format", import_module(FORMATS[name].module))


def no_such_path(path: str | Path) -> ConfigError:
    """Return the error for a path of the user that does not exist, and that matches no file."""
    is_pattern = any(mark in str(path) for mark in "*?[")
    return ConfigError(
        f"{path}: no such file or directory{', and no file matches it' * is_pattern}"
    )


def refuse_standard_input(path: str | Path) -> None:
    """Raise ConfigError if the path is empty or standard input, which is read only once."""
    if not str(path):
        raise ConfigError("an empty path; pass a trace, or a directory of traces")
    if str(path) in ("-", "/dev/stdin"):
        raise ConfigError(
            f"{path}: standard input cannot be read, since a trace is read more than once; "
            "write it to a file first"
        )


def _matches(pattern: str) -> list[Path]:
    """Return the paths that match a glob."""
    if is_url(pattern):
        return matches(pattern)
    return [Path(match) for match in sorted(glob(pattern, recursive=True))]  # noqa: PTH207


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory; False if it cannot be resolved."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(path: Path) -> tuple[int, int]:
    """Return the device and inode of a directory, which are equal for all paths to it."""
    status = path.stat()
    return status.st_dev, status.st_ino
