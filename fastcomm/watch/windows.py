"""Profiled windows: directories with the traces of some steps, a file for each rank.

``fastcomm.torch`` writes them as ``DIRECTORY/RUN/step-N/``, N being the number of steps done
when the window ended. Beside the traces, ``.partials`` has the partial result of each rank, or
why there is none, so that a window is measured without reading traces.
"""

import re
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import orjson

from fastcomm.checks import non_default, option_name
from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.files import aside, opened
from fastcomm.formats.detection import partials_folder
from fastcomm.metrics.computation import compute_metrics, of_partials
from fastcomm.metrics.options import MetricsOptions
from fastcomm.metrics.partial_files import RankPartials
from fastcomm.metrics.partial_files import read as read_partials
from fastcomm.metrics.result import Metrics
from fastcomm.options import ReadOptions
from fastcomm.preparation import open_traces
from fastcomm.trace.run_traces import SkippedRank, ranges

_FOLDER = re.compile(r"step-(\d{1,12})(?:-(\d{1,6}))?")
_MEASURED = re.compile(r"rank(\d{1,7})\.arrow")
_TRACED = re.compile(r"rank-?(\d{1,7})(?:\..+)?\.(?:json(?:\.gz)?|parquet)")
_FAILED = re.compile(r"rank(\d{1,7})\.json")
_MOST_TEXT = 1 << 16  # bytes of the record of a failed rank
_POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)  # no slots, for cached properties
class ProfiledWindow:
    """A profiled window of a run; `number` counts windows that ended at the same step."""

    folder: Path
    step: int
    number: int = 1

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Return the window of a directory; None if its name is no window's."""
        match = _FOLDER.fullmatch(folder.name)
        if match is None:
            return None
        return cls(folder=folder, step=int(match[1]), number=int(match[2] or 1))

    @classmethod
    def with_partials(cls, paths: Sequence[str]) -> Self | None:
        """Return the window that paths are, if its traces are not all that it has."""
        window = cls.of(Path(paths[0])) if len(paths) == 1 else None
        if window is None or not (window.untraced or (window.failed and not window.traced)):
            return None
        return window

    @property
    def run_name(self) -> str:
        """Name of the run."""
        return self.folder.parent.name

    @property
    def partials_folder(self) -> Path:
        """The directory of its partial results."""
        return partials_folder(self.folder)

    @property
    def untraced(self) -> list[int]:
        """Ranks that have a partial result and no trace."""
        return sorted(self.measured.keys() - self.traced.keys())

    def check_options(self, options: MetricsOptions, reading: ReadOptions) -> None:
        """Raise `ConfigError` for options that need traces."""
        ignored = [name for name in ("flops", "steps") if getattr(options, name)]
        if options.bytes != MetricsOptions().bytes:
            ignored.append("bytes")
        if names := [*ignored, *non_default(reading)]:
            options_text = ", ".join(map(option_name, names))
            raise ConfigError(
                f"{options_text}: no effect on ranks {ranges(self.untraced)} of {self.folder}, "
                "which have no traces; leave it out"
            )

    @property
    def measured(self) -> dict[int, Path]:
        """The files of partial results, by rank."""
        return _by_rank(self.partials_folder, _MEASURED)

    @property
    def failed(self) -> dict[int, Path]:
        """The records of ranks that could not be measured, by rank."""
        return _by_rank(self.partials_folder, _FAILED)

    @property
    def traced(self) -> dict[int, Path]:
        """A file of each rank whose trace is there, by rank."""
        return _by_rank(self.folder, _TRACED)

    @cached_property
    def arrival_ns(self) -> int:
        """When the first rank was measured or failed, else left a trace, ns since 1970."""
        times = []
        for path in {**self.measured, **self.failed}.values() or self.traced.values():
            with suppress(OSError):
                times.append(path.stat().st_mtime_ns)
        return min(times, default=0)

    def is_newer_than(self, other: Self) -> bool:
        """Whether the window ended after another one; of other runs, whether it came later."""
        if self.folder.parent == other.folder.parent:
            return (self.step, self.number) > (other.step, other.number)
        return self.arrival_ns >= other.arrival_ns

    def place_of(self, rank: int) -> Path:
        """Return where the partial result of a rank belongs. Raises OSError."""
        self.partials_folder.mkdir(parents=True, exist_ok=True)
        return self.partials_folder / f"rank{rank}.arrow"

    def note_failure(self, rank: int, error: str) -> None:
        """Note that a rank could not be measured. Raises OSError or `FastcommError`."""
        with aside(self.place_of(rank).with_suffix(".json")) as path:
            path.write_bytes(orjson.dumps({"rank": rank, "error": error[:1000]}))

    def skipped(self) -> list[SkippedRank]:
        """Return the ranks that could not be measured, with the reasons."""
        measured = self.measured
        return [
            SkippedRank(rank=rank, path=str(self.folder), error=_reason(path))
            for rank, path in self.failed.items()
            if rank not in measured
        ]

    def is_whole(self, world_size: int) -> bool:
        """Whether every rank has a partial result, or a record why it has none."""
        return len(self.measured.keys() | self.failed.keys()) >= world_size

    def wait(self, world_size: int, timeout_s: float) -> bool:
        """Wait until the window is whole; return whether it is."""
        until = time.monotonic() + timeout_s
        while not self.is_whole(world_size):
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        return True

    def partials(
        self, options: MetricsOptions | None = None, reading: ReadOptions | None = None
    ) -> tuple[list[RankPartials], list[SkippedRank]]:
        """Read the partial results, and measure the traces of ranks that have only these.

        Ranks whose file is damaged are skipped.

        Parameters
        ----------
        options, reading
            What is measured of traces, and how they are read.

        Raises
        ------
        FastcommError
            If no rank has a partial result.

        """
        parts, skipped = list[RankPartials](), self.skipped()
        for rank, path in self.measured.items():
            try:
                parts.append(read_partials(path))
            except TraceFileError as error:
                skipped.append(SkippedRank(rank=rank, path=str(path), error=str(error)))
        reading, options = reading or ReadOptions(), options or MetricsOptions()
        others = self.measured.keys() | self.failed.keys()
        for rank, path in sorted(self.traced.items()):
            if rank in others:
                continue
            try:
                parts += filter(None, [self.measure(path, reading, options)])
            except FastcommError as error:
                skipped.append(SkippedRank(rank=rank, path=str(path), error=str(error)))
        if not parts:
            reason = skipped[0].error if skipped else "no trace has a whole step"
            raise FastcommError(f"{self.folder}: no rank was measured: {reason}")
        return parts, skipped

    def measure(
        self, path: Path, reading: ReadOptions, options: MetricsOptions
    ) -> RankPartials | None:
        """Measure the trace of a rank; return None if it has no whole step.

        When a profiler stops within a window, it closes the mark of a step that is not whole:
        that with the number of the steps done. It does not count.

        Raises
        ------
        FastcommError
            If the trace cannot be read.

        """
        trace = open_traces([path], reading).sources[0].read("metrics")
        steps = frozenset(trace.iterations["number"].to_pylist())
        whole = steps - {self.step}
        if steps and not whole:
            return None
        return RankPartials.of(trace, options.bytes, None if whole == steps else whole)

    def metrics(
        self, options: MetricsOptions | None = None, reading: ReadOptions | None = None
    ) -> Metrics:
        """Compute the metrics of the window from the partial results of its ranks.

        Which process group an operation on the host belongs to, only all traces together tell:
        runs without a device are measured anew where their traces are there.

        Parameters
        ----------
        options, reading
            What is computed, and how traces are read, where they are.

        Raises
        ------
        FastcommError
            If no rank was measured.

        """
        parts, skipped = self.partials(options, reading)
        if any(part.note.is_host_run for part in parts) and len(parts) > 1:
            with suppress(FastcommError):
                run = open_traces([self.folder], reading or ReadOptions())
                if len(run.ranks) == len(parts):
                    return compute_metrics(run, self._of_whole_steps(options, parts))
        return of_partials(parts, options, skipped)

    def _of_whole_steps(
        self, options: MetricsOptions | None, parts: list[RankPartials]
    ) -> MetricsOptions:
        """Return options that leave out a step in which the profiler was stopped."""
        options = options or MetricsOptions()
        steps = tuple(sorted(frozenset().union(*(part.steps for part in parts))))
        is_cut = any(part.note.steps != ranges(steps) for part in parts)
        if options.steps is not None or not is_cut:
            return options
        return replace(options, steps=steps)


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the files of a directory with a rank in their names, by rank."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return {}
    matches = ((pattern.fullmatch(path.name), path) for path in paths)
    return {int(match[1]): path for match, path in matches if match}


def _reason(path: Path) -> str:
    """Return the error in the record of a failed rank."""
    try:
        with opened(path) as file:
            return str(orjson.loads(file.read(_MOST_TEXT))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return "could not be measured, and the record of the reason is damaged"


def windows_below(
    directory: Path, reported: Container[Path] = frozenset()
) -> Iterator[ProfiledWindow]:
    """Yield the windows of all runs in a directory, or the one that it is, in any order.

    A window in which no rank was measured, nor failed, nor left a trace is not there yet.

    Parameters
    ----------
    directory
        A directory of runs, the one of a run, or a window.
    reported
        Directories of windows to leave out.

    Raises
    ------
    FastcommError
        If the directory cannot be listed.

    """
    for folder in _candidates(directory):
        window = None if folder in reported else ProfiledWindow.of(folder)
        if window is not None and (window.measured or window.failed or window.traced):
            yield window


def _candidates(directory: Path) -> Iterator[Path]:
    """Yield the directory and those below it, two levels deep."""
    yield directory
    try:
        for path in _folders(directory):
            yield path
            with suppress(FileNotFoundError):  # removed meanwhile
                yield from _folders(path)
    except OSError as error:
        raise FastcommError(f"{directory}: {error.strerror or error}") from error


def _folders(directory: Path) -> list[Path]:
    paths = (path for path in directory.iterdir() if not path.name.startswith("."))
    return sorted(path for path in paths if path.is_dir())
