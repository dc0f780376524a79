"""The ranks of a run on the workers of a Dask cluster.

Only small messages pass through the scheduler: the path of a rank's trace, and the task.
Partial results stay on workers and are merged there; only the final result is sent to the
caller, directly from its worker.

If a worker is lost, the scheduler recomputes its partial results on others. They are equal, and
none is merged twice, since a merge names its inputs.

Importing this module raises `ConfigError` if Dask is not installed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from fastcomm.errors import ClusterError, FastcommError
from fastcomm.executors import (
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
    ClusterObject,
    InterruptibleClient,
    Scratch,
    client_arguments,
    make,
    quiet,
    remove,
)
from fastcomm.executors.processes import check_code, check_same, code, versions
from fastcomm.process import temporary_folder
from fastcomm.trace.run import RunTraces, SkippedRank, Source

if TYPE_CHECKING:
    from distributed import Client, Future

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")

WAIT_S = 60.0  # for the scheduler, and for a first worker
_LOOK_S = 1.0  # between two checks that the cluster still works


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
        A directory that all workers share, for spill files. Without it, partial results are
        merged in the memory of one worker.

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


@dataclass(slots=True, kw_only=True)
class Dask:
    """The executor of a connected Dask cluster."""

    client: "Client"
    address: str
    wait_s: float = WAIT_S
    scratch: Path | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def is_here(self) -> bool:
        """Whether the workers run on this machine, started by `local:N`."""
        return self.address.startswith("local:")

    def check_versions(self) -> None:
        """Compare the versions of the scheduler and all workers with those of this process."""
        with self._reaching():
            by_address = {"the scheduler": self.client.run_on_scheduler(versions)}
            answers = self.client.run(versions, on_error="return")
        for worker, answer in answers.items():
            if isinstance(answer, OSError):
                continue  # the worker left meanwhile
            if isinstance(answer, Exception):
                raise self._no_fastcomm(worker, answer)
            by_address[worker] = answer
        self.warnings = [f"--dask {self.address}: {text}" for text in check_same(by_address)]

    def gather(
        self,
        run: RunTraces,
        task: Task[P, R],
        *,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> R:
        """Run a task on all ranks of a run; see `Executor.gather`.

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
                    raise self._too_large() from error
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
        scratch = Scratch.of(self.scratch, task, len(run.sources))
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
        self.answer(self._submit(make, folder))
        try:
            yield
        except BaseException:
            # Workers may be busy for long: do not wait.
            with suppress(Exception):
                fire_and_forget(self._submit(remove, folder))
            raise
        with suppress(Exception):
            self.answer(self._submit(remove, folder))

    def _gather_into(
        self,
        run: RunTraces,
        task: Task[P, R],
        scratch: Scratch[P],
        fatal: dict[int, SkippedRank],
        keep_going: bool,
        progress: Progress | None,
    ) -> R:
        """Measure the ranks, merge partial results as they arrive, and finish the task."""
        work = _Work(self, run, task.measure_source)
        reducer: TreeReducer[Future[P]] = TreeReducer(
            lambda parts: self._submit(scratch.merge, list(parts))
        )
        left_out = list(fatal.values())
        every = len(run.sources) + len(fatal)
        try:
            for source, future, error in work.done():
                if error is None:
                    reducer.add(future)
                elif keep_going and _is_of_its_rank(error):
                    left_out.append(skipped_rank(source, error))
                    if isinstance(error.__cause__, _killed()):
                        fatal[source.rank] = left_out[-1]
                else:
                    raise error
                if progress is not None:
                    progress(source)
            failed = by_rank(left_out, every, run.skipped)
            merged = reducer.result()
            return self.answer(self._submit(task.finish, merged, failed, scratch.spread))
        finally:
            work.cancel()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a worker."""
        try:
            return self.answer(self._submit(function))
        except _killed() as error:
            raise self._too_large() from error

    def hold(self, make: Callable[[], T]) -> SharedObject[T]:
        """Create an object on a worker; other workers copy it when they need it."""
        return ClusterObject(self, make)

    def _submit(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        # Merging has priority over reading: it frees memory.
        return self.client.submit(function, *args, pure=False, priority=1)

    def answer(self, future: "Future[T]") -> T:
        """Wait for a future, and return its result. Raises the error of the future."""
        done: SimpleQueue[Any] = SimpleQueue()
        future.add_done_callback(done.put)
        self.next(done)
        if (error := self.error(future)) is not None:
            raise error
        with self._reaching():
            answer: T = self.client.gather(future, direct=True)
            return answer

    def next(self, done: "SimpleQueue[Future[Any]]") -> "Future[Any]":
        """Return the next completed future. Raises `ClusterError` if none can complete."""
        alone_since = None
        while True:
            try:
                future = done.get(timeout=_LOOK_S)
            except Empty:
                alone_since = self._check_workers(alone_since)
                continue
            if future.status not in ("pending", "lost"):
                return future
            # Its worker is lost, and another recomputes it.
            future.add_done_callback(done.put)

    def error(self, future: "Future[Any]") -> Exception | None:
        """Return the error of a done future. Raises `ClusterError` if the cluster failed."""
        if future.status == "finished":
            return None
        if future.status != "error":
            raise self._gone(str(future.status))
        with self._reaching():
            error: Exception = future.exception()
        # A worker that joined after the check may have no fastcomm.
        return self._no_fastcomm("a worker", error) if _is_import_error(error) else error

    def _check_workers(self, alone_since: float | None) -> float | None:
        """Return the time since when the scheduler has no worker; None if it has one.

        Raises `ClusterError` if the scheduler is gone, or has no worker for `wait_s`. A killed
        worker is not always replaced: a nanny gives up if its worker dies before it reports
        its start.
        """
        if self.client.status not in ("running", "newly-created"):
            raise self._gone(self.client.status)
        with self._reaching():
            if self.client.nthreads():
                return None
        alone_since = alone_since or time.monotonic()
        if time.monotonic() - alone_since > self.wait_s:
            raise ClusterError(
                f"--dask {self.address}: no worker for {self.wait_s:g} s; workers did not "
                "start, or were killed and not restarted (see their logs): start workers and "
                "run the command again"
            )
        return alone_since

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Convert connection errors of the client to `ClusterError`."""
        from asyncio import CancelledError

        try:
            yield
        except FastcommError:
            raise
        except (OSError, CancelledError, RuntimeError, ValueError) as error:
            raise self._gone(f"{type(error).__name__}: {error}") from error

    def _too_large(self) -> ClusterError:
        return ClusterError(
            f"--dask {self.address}: workers were killed repeatedly while they merged or "
            "compared ranks. Probably they ran out of memory: give each worker more"
        )

    def _gone(self, reason: str) -> ClusterError:
        return ClusterError(
            f"--dask {self.address}: the scheduler is gone, or does not answer ({reason}); "
            "there is no result: start it and run the command again"
        )

    def _no_fastcomm(self, where: str, error: Exception) -> ClusterError:
        return ClusterError(
            f"--dask {self.address}: {where} cannot run fastcomm ({error}): install fastcomm "
            f"{versions()['fastcomm']} in the environment of the scheduler and of every worker"
        )


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


def _is_import_error(error: Exception) -> bool:
    """Whether a worker could not load the task because it has no such code."""
    return isinstance(error, ModuleNotFoundError | AttributeError) and "fastcomm" in str(error)
