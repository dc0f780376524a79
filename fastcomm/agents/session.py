"""The runs of a server: opened and measured once, and again when their files change."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from fastcomm.agents.folders import Folders
from fastcomm.errors import ConfigError
from fastcomm.executors.executor import executor_of
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import build
from fastcomm.options import ReadOptions
from fastcomm.preparation import open_traces

if TYPE_CHECKING:
    from fastcomm.critical_path.result import CriticalPath
    from fastcomm.executors.executor import OpenedRun
    from fastcomm.metrics.result import Metrics
    from fastcomm.trace.run_traces import RunTraces, Source

T = TypeVar("T")
ReportProgress = Callable[[float, float, str], None]  # done, total, message
_MOST_RESULTS = 6  # that stay in memory
_PAUSE_S = 0.1  # between two reports of progress
_LAYOUT = ("tp", "pp", "dp", "ep", "cp", "order")


def no_progress(_done: float, _total: float, _message: str) -> None:
    """Report no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """A run as a tool names it, and the layout of its ranks: "tp=2,pp=4"; "" if traces say."""

    run: str
    layout: str = ""


@dataclass(kw_only=True)
class AgentSession:
    """The directories of a server, and the results that it has computed.

    `out` is the directory for pages; None writes none. `report` is called with progress.
    """

    folders: Folders
    out: Path | None = None
    workers: int = 1
    report: ReportProgress = no_progress
    _results: OrderedDict[Any, Any] = field(default_factory=OrderedDict)

    def path(self, choice: RunChoice) -> Path:
        """Return the path of a run; raise `ConfigError` if the server may not read it."""
        path = self.folders.path(choice.run)
        self.folders.stamp(path)
        return path

    def opened(self, choice: RunChoice) -> "OpenedRun":
        """Open the traces of a run."""
        return self._cached(choice, "traces", lambda path: self._open(path, choice))

    def _open(self, path: Path, choice: RunChoice) -> "OpenedRun":
        options = build(ReadOptions, {**_sizes(choice.layout), "keep_going": True}, "layout")
        executor = executor_of(self.workers)
        return open_traces((str(path),), options, executor, show=self._progress)

    def metrics(self, choice: RunChoice, options: MetricsOptions) -> "Metrics":
        """Measure a run."""
        from fastcomm.metrics.computation import compute_metrics

        chosen = replace(options, with_tables=False)
        traces = self.opened(choice)
        return self._cached(
            choice, ("metrics", chosen), lambda _: compute_metrics(traces, chosen)
        )

    def critical_path(
        self, choice: RunChoice, *, step: int | None, rank: int | None
    ) -> "CriticalPath":
        """Return the critical path of a step, through all ranks or one."""
        from fastcomm.critical_path.analysis import critical_path
        from fastcomm.critical_path.options import PathOptions

        options, traces = PathOptions(step=step, rank=rank), self.opened(choice)
        return self._cached(choice, ("path", options), lambda _: critical_path(traces, options))

    def result(self, choice: RunChoice, key: Any, compute: Callable[[Path], T]) -> T:
        """Return a result of a run by its key, computed unless it is in memory."""
        return self._cached(choice, key, compute)

    def _cached(self, choice: RunChoice, key: Any, compute: Callable[[Path], T]) -> T:
        path = self.folders.path(choice.run)
        whole = (self.folders.stamp(path), choice.layout, key)
        if whole not in self._results:
            self._results[whole] = compute(path)
            while len(self._results) > _MOST_RESULTS:
                self._results.popitem(last=False)
        self._results.move_to_end(whole)
        result: T = self._results[whole]
        return result

    @contextmanager
    def _progress(self, run: "RunTraces") -> "Iterator[Callable[[Source], None]]":
        """Yield a function that counts a rank as read, and reports it from time to time."""
        count, last = 0, -_PAUSE_S
        total = len(run.sources)

        def advance(_: "Source") -> None:
            nonlocal count, last
            count += 1
            if count == total or monotonic() - last >= _PAUSE_S:
                last = monotonic()
                self.report(count, total, f"read {count} of {total} ranks")

        self.report(0, total, f"reading {total} ranks")
        yield advance


def _sizes(layout: str) -> dict[str, Any]:
    """Return the options of a layout: "tp=2,order=megatron" are tp and order."""
    sizes: dict[str, Any] = {}
    for part in filter(None, (text.strip() for text in layout.split(","))):
        name, _, value = part.partition("=")
        is_number = value.isdecimal() and value.isascii() and len(value) < 10  # noqa: PLR2004
        if name not in _LAYOUT or not (is_number or (name == "order" and value)):
            raise ConfigError(f"layout {part!r}: expected sizes, as in tp=2,pp=4,dp=1")
        sizes[name] = value if name == "order" else int(value)
    return sizes
