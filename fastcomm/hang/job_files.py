"""The files of a job that hangs: which of them are dumps, and which lie beside these."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastcomm.errors import TraceFileError
from fastcomm.executors.executor import PRELOAD
from fastcomm.executors.processes import Processes
from fastcomm.files import note_inputs
from fastcomm.files import place as place_of
from fastcomm.formats.detection import no_such_path
from fastcomm.formats.flight_recorder import ForeignError, NoDumpError, prefix_of, rank_of, read
from fastcomm.hang.calls import RankCalls, of_dump

_MOST_CALLS = 128  # of a rank that are kept, besides those that are open
_BATCH = 64  # files that a worker reads at once
_FEW = 256  # files: fewer are read by one process more quickly
_MOST_LINES = 12
_MOST_BESIDE = 20_000  # files that are no dumps
_LIKE_A_DUMP = re.compile("rank|dump")  # in names that PyTorch and its users give to dumps


@dataclass(kw_only=True)
class JobFiles:
    """The files of a job: dumps by rank, and others."""

    dumps: dict[int, list[RankCalls]] = field(default_factory=dict)
    others: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: dict[Path, str] = field(default_factory=dict)  # errors of what may be dumps
    foreign: dict[Path, str] = field(default_factory=dict)  # of what has a dump's name only

    def add(self, more: "JobFiles") -> None:
        """Add files that another worker has read."""
        for rank, dumps in more.dumps.items():
            self.dumps.setdefault(rank, []).extend(dumps)
        self.others += more.others
        self.problems += more.problems
        self.unread |= more.unread
        self.foreign |= more.foreign

    @property
    def beside(self) -> list[Path]:
        """The files that are no dumps, as many as are read."""
        return self.others[:_MOST_BESIDE]

    def settle(self, *, keep_going: bool) -> dict[Path, str]:
        """Return the errors of dumps that cannot be read; other such files are no dumps.

        A dump has a name like other dumps. Raises the first error unless `keep_going`.
        """
        doubtful = self.unread | self.foreign
        every = [dump for own in self.dumps.values() for dump in own] if doubtful else []
        names = {prefix_of(dump.path) for dump in every}
        likely = {*self._instead_of_dumps({dump.path for dump in every})}
        failed = {}
        for path, error in sorted(doubtful.items()):
            prefix = prefix_of(path)
            is_dump = prefix in names or _LIKE_A_DUMP.search(prefix) is not None
            if path in self.foreign:
                is_dump = path in likely
            if is_dump:
                if not keep_going:
                    raise TraceFileError(error)
                failed[path] = error
            else:
                self.others.append(path)
        if len(self.others) > _MOST_BESIDE:
            self.problems.append(
                f"{len(self.others) - _MOST_BESIDE} of {len(self.others)} files beside the "
                f"dumps are not read: {_MOST_BESIDE} are the most"
            )
        return failed

    def _instead_of_dumps(self, dumps: Collection[Path]) -> Iterator[Path]:
        """Yield the foreign files that stand where a dump is absent.

        They lie among dumps of such names; or are of a rank without any, and not among files
        of such names that ranks have besides their dumps.
        """
        places = {_place_of(path) for path in dumps}
        ranked = {(*_place_of(path), rank_of(path)) for path in dumps}
        names = {name for _, name in places}
        beside = {_place_of(path) for path in self.foreign if rank_of(path) in self.dumps}
        for path in self.foreign:
            place, rank = _place_of(path), rank_of(path)
            is_alone = rank not in self.dumps and place not in beside and place[1] in names
            if (*place, rank) not in ranked and (place in places or is_alone):
                yield path


def _place_of(path: Path) -> tuple[Path, str]:
    return path.parent, prefix_of(path)


def read_files(paths: Iterable[str | Path]) -> JobFiles:
    """Read all files, many of them in several processes."""
    files = JobFiles()
    names = [*_files_of(paths, files.problems)]
    note_inputs(names)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    workers = min(cores, 1 + len(names) // _FEW)
    batches = [names[at : at + _BATCH] for at in range(0, len(names), _BATCH)]
    with Processes(workers, PRELOAD) as processes:
        for part in processes.spread(_read_some, batches):
            files.add(part)
    return files


def _read_some(paths: Sequence[Path]) -> JobFiles:
    files = JobFiles()
    for path in paths:
        try:
            dump = read(path)
        except ForeignError as error:
            files.foreign[path] = str(error)
        except NoDumpError:
            files.others.append(path)
        except TraceFileError as error:
            files.unread[path] = str(error)
        else:
            files.dumps.setdefault(dump.rank, []).append(of_dump(dump).shortened(_MOST_CALLS))
            files.problems.extend(dump.problems)
    return files


def _files_of(paths: Iterable[str | Path], problems: list[str]) -> Iterator[Path]:
    for name in paths:
        path = place_of(name)
        if path.is_dir():
            yield from _files_below(path, problems)
        elif path.is_file():
            yield path
        elif path.exists():
            raise TraceFileError(f"{path}: no regular file")  # a pipe would never end
        else:
            raise no_such_path(str(name))


def _files_below(path: Path, problems: list[str]) -> list[Path]:
    """Return the files of a folder and of all below it, sorted by their text.

    What cannot be read is named in `problems`: folders, and pipes under the name of a file.
    """
    files, others, errors = list[Path](), list[Path](), list[OSError]()
    try:
        for folder, _, names in os.walk(path, onerror=errors.append):
            for name in names:
                one = Path(folder, name)
                (files if one.is_file() else others).append(one)
    except RecursionError:
        raise TraceFileError(f"{path}: folders too deep; name that of the dumps") from None
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error
    if errors and not files:
        raise TraceFileError(f"{errors[0].filename}: {errors[0].strerror}") from errors[0]
    lines = [
        *(f"{error.filename}: {error.strerror}: it is not searched" for error in errors),
        *(f"{one}: no regular file: it is left out" for one in sorted(others, key=str)),
    ]
    problems += lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        problems.append(f"{len(lines) - _MOST_LINES} more such files and folders")
    # By text: paths compare part by part.
    return sorted(files, key=str)
