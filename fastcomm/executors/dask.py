"""The ranks of a run on the workers of a Dask cluster.

Only small messages pass through the scheduler: the path of a rank's trace, and the task.
Partial results stay on workers and are merged there; only the final result is sent to the
caller, directly from its worker.

If a worker is lost, the scheduler recomputes its partial results on others. They are equal, and
none is merged twice, since a merge names its inputs.

Importing this module raises `ConfigError` if Dask is not installed.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

from fastcomm.errors import ClusterError, FastcommError
from fastcomm.executors import (
    WIDTH,
    Progress,
    SharedObject,
    Task,
    TreeReducer,
    by_rank,
    died,
    skipped_rank,
)
from fastcomm.executors.dask_cluster import (
    FORMS,
    WAIT_S,
    ClusterConnection,
    ClusterObject,
    InterruptibleClient,
    call_checked,
    client_arguments,
    quiet,
)
from fastcomm.executors.processes import check_code, code
from fastcomm.process import temporary_folder
from fastcomm.trace.run import RunTraces, SkippedRank, Source, Spread, one_by_one

if TYPE_CHECKING:
    from distributed import Future

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")

A = TypeVar("A")
B = TypeVar("B")


@contextmanager
def connected(
    address: str, *, wait_s: float = WAIT_S, scratch: Path | None = None
) -> Iterator["Dask"]:
    """Connect to a Dask cluster, and yield its executor.

    Parameters
    ----------
    address
        The address of a scheduler, ``file:PATH`` of a scheduler file, or ``local:N`` to start N
        worker processes on this machine for the time of the block.
    wait_s
        Seconds to wait for the scheduler, and for a first worker.
    scratch
        A directory that all workers share, for spill files. Without it, ``local:N`` uses a
        temporary one; on other clusters partial results are merged in one worker's memory.

    Raises
    ------
    ClusterError
        If the cluster cannot be reached, or runs another version of fastcomm.
    ConfigError
        If the address is invalid.

    """
    with ExitStack() as stack:
        stack.enter_context(quiet())
        if address.startswith("local:") and scratch is None:
            scratch = stack.enter_context(temporary_folder())
        arguments = client_arguments(address, wait_s, stack)
        try:
            client = InterruptibleClient(  # type: ignore[no-untyped-call]
                **arguments, timeout=wait_s, set_as_default=False
            )
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise ClusterError(
                f"--dask {address}: no scheduler answers ({error}); expected {FORMS}"
            ) from error
        stack.enter_context(client)
        executor = Dask(client=client, address=address, wait_s=wait_s, scratch=scratch)
        executor.check_versions()
        yield executor


@dataclass(frozen=True, slots=True)
class _Scratch(Generic[P]):
    """Merges the partial results of a task on workers; it is sent to them."""

    task: Task[P, Any]
    folder: Path | None  # for the spill files of this run; None: merge in memory

    @classmethod
    def of(cls, shared: Path | None, task: Task[P, Any], ranks: int) -> "_Scratch[P]":
        """Return where the partial results of a task are kept: on disk, or in memory.

        They are in a new folder of the directory `shared` if there is one, the task can spill,
        and there are more than `WIDTH` ranks.
        """
        if shared is None or task.spill is None or ranks <= WIDTH:
            return cls(task, None)
        return cls(task, shared / f"fastcomm-{uuid4().hex}")

    @property
    def spread(self) -> Spread:
        """The function that spreads work of `finish`; serial if data are in memory."""
        return one_by_one if self.folder is None else _spread

    def merge(self, parts: Sequence[P]) -> P:
        """Merge partial results on a worker; with a folder, spill the large tables to a file.

        Raises `FastcommError` if the folder cannot be written.
        """
        whole = self.task.merge(parts)
        if self.folder is None or self.task.spill is None:
            return whole
        with _checked_folder(self.folder):
            # A lost worker may have written the same before: names are unique.
            return self.task.spill(whole, self.folder / uuid4().hex)


def _make(folder: Path) -> None:
    """Make a directory on a worker, once; late writers of a finished run then fail."""
    with _checked_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _remove(folder: Path) -> None:
    """Remove a directory on a worker."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _checked_folder(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block into a FastcommError about the spill directory."""
    try:
        yield
    except OSError as error:
        raise FastcommError(
            f"{folder}: {error.strerror or error}; expected a directory that all workers share "
            "and can write, with space for spill files"
        ) from error


def _spread(function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
    """Call a function on each item, from a worker on all workers; a `Spread`."""
    from distributed import worker_client

    with worker_client() as client:
        # The function has large arguments: send it once to a worker, not with each item.
        scattered = client.scatter(function, hash=False)
        futures = [
            client.submit(call_checked, code(), scattered, thing, pure=False)
            for thing in things
        ]
        results: list[B] = client.gather(futures)
        return results


@dataclass(slots=True, kw_only=True)
class Dask(ClusterConnection):
    """The executor of a connected Dask cluster."""

    scratch: Path | None = None

    def gather(
        self,
        run: RunTraces,
        task: Task[P, R],
        *,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> R:
        """Run a task on all ranks of a run, with parameters and errors of `Executor.gather`.

        A rank that kills its workers destroys the work of others repeatedly, so that Dask may
        give up on them, too. Once such a rank is identified, the others are done without it.
        """
        fatal: dict[int, SkippedRank] = {}
        while True:
            before = len(fatal)
            others = replace(
                run,
                sources=tuple(source for source in run.sources if source.rank not in fatal),
            )
            try:
                return self._gather_once(others, task, fatal, keep_going, progress)
            except _killed() as error:
                if len(fatal) == before:
                    raise self.too_large() from error
            progress = None  # it was called with all ranks already

    def _gather_once(
        self,
        run: RunTraces,
        task: Task[P, R],
        fatal: dict[int, SkippedRank],
        keep_going: bool,
        progress: Progress | None,
    ) -> R:
        """Run a task on ranks, and add those that kill their workers to `fatal`."""
        scratch = _Scratch.of(self.scratch, task, len(run.sources))
        with self._run_folder(scratch.folder):
            return self._gather_into(run, task, scratch, fatal, keep_going, progress)

    @contextmanager
    def _run_folder(self, folder: Path | None) -> Iterator[None]:
        """Make `folder`, the spill directory of a run, and remove it after the block.

        Without a folder, do nothing.
        """
        from distributed import fire_and_forget

        if folder is None:
            yield
            return
        self.answer(self.submit(_make, folder))
        try:
            yield
        except BaseException:
            # Workers may be busy for long: do not wait.
            with suppress(Exception):
                fire_and_forget(self.submit(_remove, folder))
            raise
        with suppress(Exception):
            self.answer(self.submit(_remove, folder))

    def _gather_into(
        self,
        run: RunTraces,
        task: Task[P, R],
        scratch: _Scratch[P],
        fatal: dict[int, SkippedRank],
        keep_going: bool,
        progress: Progress | None,
    ) -> R:
        """Measure the ranks, merge partial results as they arrive, and finish the task."""
        work = _Work(self, run, task.measure_source)
        reducer: TreeReducer[Future[P]] = TreeReducer(
            lambda parts: self.submit(scratch.merge, list(parts))
        )
        unread = list(fatal.values())
        every = len(run.sources) + len(fatal)
        try:
            for source, future, error in work.done():
                if error is None:
                    reducer.add(future)
                elif keep_going and _is_of_its_rank(error):
                    unread.append(skipped_rank(source, error))
                    if isinstance(error.__cause__, _killed()):
                        fatal[source.rank] = unread[-1]
                else:
                    raise error
                if progress is not None:
                    progress(source)
            failed = by_rank(unread, every, run.skipped)
            merged = reducer.result()
            return self.answer(self.submit(task.finish, merged, failed, scratch.spread))
        finally:
            work.cancel()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a worker. Raises its error, or `ClusterError`."""
        try:
            return self.answer(self.submit(function))
        except _killed() as error:
            raise self.too_large() from error

    def hold(self, make: Callable[[], T]) -> SharedObject[T]:
        """Create an object on a worker; other workers copy it when they need it."""
        return ClusterObject(self, make)


class _Work:
    """The ranks of a run that are being measured on a cluster."""

    def __init__(
        self, executor: Dask, run: RunTraces, measure: Callable[[Source], Any]
    ) -> None:
        self.executor, self.measure = executor, measure
        self.completed: SimpleQueue[Future[Any]] = SimpleQueue()
        self.sources: dict[Any, Source] = {}
        self.futures: dict[Any, Future[Any]] = {}
        self._start(run.sources)

    def done(self) -> Iterator[tuple[Source, "Future[Any]", Exception | None]]:
        """Yield each finished rank with its future and its error.

        If workers are killed repeatedly, their ranks are read again one at a time. This tells
        which rank is at fault, and other ranks are not affected.
        """
        suspects = []
        while self.futures:
            source, future, error = self._next()
            if isinstance(error, _killed()):
                suspects.append(source)
            else:
                yield source, future, error
        for source in suspects:
            self._start([source])
            _, future, error = self._next()
            if isinstance(error, _killed()):
                killed, error = error, died(source)
                error.__cause__ = killed
            yield source, future, error

    def cancel(self) -> None:
        """Cancel the ranks that are not finished."""
        with suppress(Exception):
            self.executor.client.cancel(list(self.futures.values()))
        self.futures.clear()

    def _start(self, sources: Sequence[Source]) -> None:
        client = self.executor.client
        futures = client.map(
            _measure, sources, measure=self.measure, expected=code(), pure=False
        )
        for source, future in zip(sources, futures, strict=True):
            self.sources[future.key], self.futures[future.key] = source, future
            future.add_done_callback(self.completed.put)

    def _next(self) -> tuple[Source, "Future[Any]", Exception | None]:
        future = self.executor.next(self.completed)
        error = self.executor.error(future)
        del self.futures[future.key]
        return self.sources.pop(future.key), future, error


def _measure(source: Source, *, measure: Callable[[Source], P], expected: str) -> P:
    """Measure one rank on a worker, after a check that it runs the caller's code."""
    check_code(expected)
    return measure(source)


def _is_of_its_rank(error: Exception) -> bool:
    return isinstance(error, FastcommError) and not isinstance(error, ClusterError)


def _killed() -> type[Exception]:
    from distributed import KilledWorker

    killed: type[Exception] = KilledWorker
    return killed
