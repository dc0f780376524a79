"""The ranks of a run on the workers of a Dask cluster.

What travels by the scheduler is small: where a rank's trace is, and what to do with it. What
is measured of a rank stays with its worker until it is merged, on a worker as well; the answer
alone comes here, from the worker that has it.

A worker that goes away takes its partials along, and the scheduler lets others make them again:
they are the same, and none is merged twice, since a merge names its parts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from fastcomm.errors import ClusterError, FastcommError
from fastcomm.executors import Fold, Held, Progress, Task, by_rank, died, lost
from fastcomm.executors.dask_cluster import (
    FORMS,
    Scratch,
    There,
    make,
    quiet,
    remove,
    require,
    where_is,
)
from fastcomm.executors.processes import check_code, check_same, code, versions
from fastcomm.process import temporary_folder
from fastcomm.trace.run import RunTraces, SkippedRank, Source

if TYPE_CHECKING:
    from distributed import Client, Future

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")

WAIT_S = 60.0  # for the scheduler, and for a worker where there is none
_LOOK_S = 1.0  # between two looks at whether anything can still come


@contextmanager
def connected(
    address: str, *, wait_s: float = WAIT_S, scratch: Path | None = None
) -> Iterator["Dask"]:
    """The engine of a cluster: at an address, in a scheduler file, or started here.

    `local:N` starts N worker processes on this machine, and ends them. `scratch` is a directory
    that all workers share, for what ranks leave; without it, that comes into the memory of one
    of them. Raises `ClusterError` where the cluster cannot be reached, or runs another
    fastcomm.
    """
    require()
    import distributed

    with ExitStack() as stack:
        stack.enter_context(quiet())
        if address.startswith("local:") and scratch is None:
            scratch = stack.enter_context(temporary_folder())
        where = where_is(address, wait_s, stack)
        try:
            client = distributed.Client(**where, timeout=wait_s, set_as_default=False)
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise ClusterError(
                f"--dask {address}: no scheduler answers ({error}); wanted {FORMS}"
            ) from error
        stack.enter_context(client)
        engine = Dask(client=client, address=address, wait_s=wait_s, scratch=scratch)
        engine.check_versions()
        yield engine


@dataclass(slots=True, kw_only=True)
class Dask:
    """The engine of a cluster, connected."""

    client: "Client"
    address: str
    wait_s: float = WAIT_S
    scratch: Path | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def is_here(self) -> bool:
        """Whether the workers were started here."""
        return self.address.startswith("local:")

    def check_versions(self) -> None:
        """Compare fastcomm, Python and the packages of the scheduler and of every worker."""
        with self._reaching():
            found = {"the scheduler": self.client.run_on_scheduler(versions)}
            answers = self.client.run(versions, on_error="return")
        for worker, answer in answers.items():
            if isinstance(answer, OSError):
                continue  # it went away meanwhile
            if isinstance(answer, Exception):
                raise self._no_fastcomm(worker, answer)
            found[worker] = answer
        self.warnings = [f"--dask {self.address}: {each}" for each in check_same(found)]

    def gather(
        self,
        run: RunTraces,
        task: Task[P, R],
        *,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> R:
        """Do a task with a run; see `executor.Executor`.

        A rank that no worker survives takes others' work along again and again, so that Dask
        may give that up, too. Once it is known, the others are done without it.
        """
        fatal: dict[int, SkippedRank] = {}
        while True:
            known = len(fatal)
            others = replace(
                run, sources=tuple(each for each in run.sources if each.rank not in fatal)
            )
            try:
                return self._gathered(others, task, fatal, keep_going, progress)
            except _killed() as error:
                if len(fatal) == known:
                    raise self._too_large() from error
            progress = None  # it has seen them all

    def _gathered(
        self,
        run: RunTraces,
        task: Task[P, R],
        fatal: dict[int, SkippedRank],
        keep_going: bool,
        progress: Progress | None,
    ) -> R:
        """Do a task with ranks none of which is known as `fatal`; those that are, are added."""
        where = Scratch.of(self.scratch, task, len(run.sources))
        with self._made(where.folder):
            return self._answered(run, task, where, fatal, keep_going, progress)

    @contextmanager
    def _made(self, folder: Path | None) -> Iterator[None]:
        """The directory of a run, while there is work in it."""
        from distributed import fire_and_forget

        if folder is None:
            yield
            return
        self.answer(self._submit(make, folder))
        try:
            yield
        except BaseException:
            # Workers may be long in what they do: nobody waits for it.
            with suppress(Exception):
                fire_and_forget(self._submit(remove, folder))
            raise
        with suppress(Exception):
            self.answer(self._submit(remove, folder))

    def _answered(
        self,
        run: RunTraces,
        task: Task[P, R],
        where: Scratch[P],
        fatal: dict[int, SkippedRank],
        keep_going: bool,
        progress: Progress | None,
    ) -> R:
        """The answer of the task, from the ranks as they come."""
        work = _Work(self, run, task.of_source)
        fold: Fold[Future[P]] = Fold(lambda parts: self._submit(where.merge, list(parts)))
        left_out = list(fatal.values())
        every = len(run.sources) + len(fatal)
        try:
            for source, future, error in work.done():
                if error is None:
                    fold.add(future)
                elif keep_going and _is_of_its_rank(error):
                    left_out.append(lost(source, error))
                    if isinstance(error.__cause__, _killed()):
                        fatal[source.rank] = left_out[-1]
                else:
                    raise error
                if progress is not None:
                    progress(source)
            failed = by_rank(left_out, every, run.skipped)
            return self.answer(self._submit(task.finish, fold.joined(), failed, where.spread))
        finally:
            work.cancel()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a worker."""
        try:
            return self.answer(self._submit(function))
        except _killed() as error:
            raise self._too_large() from error

    def hold(self, make: Callable[[], T]) -> Held[T]:
        """Make it on a worker, from which others get it."""
        return There(self, make)

    def _submit(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        # Merging goes before reading on: it makes room.
        return self.client.submit(function, *args, pure=False, priority=1)

    def answer(self, future: "Future[T]") -> T:
        """What a future holds, from its worker; its error is raised."""
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
            # The worker that had it is gone, and others do it again.
            future.add_done_callback(done.put)

    def error(self, future: "Future[Any]") -> Exception | None:
        """What went wrong with a future that is done; ClusterError where the cluster is."""
        if future.status == "finished":
            return None
        if future.status != "error":
            raise self._gone(str(future.status))
        with self._reaching():
            error: Exception = future.exception()
        # A worker that joined later may lack what those had that were checked.
        return self._no_fastcomm("a worker", error) if _is_lack(error) else error

    def _check_workers(self, alone_since: float | None) -> float | None:
        """Return since when the scheduler has had no worker; None if it has one.

        Raises `ClusterError` if the scheduler is gone, or without a worker for `wait_s`. A
        killed worker is not always replaced: a nanny gives up if its worker dies before the
        nanny has heard that it started.
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
                "start, or died and were not restarted (their logs tell): start workers and "
                "run the command again"
            )
        return alone_since

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """What the client raises where it reaches nobody, as an error of ours."""
        from asyncio import CancelledError

        try:
            yield
        except FastcommError:
            raise
        except (OSError, CancelledError, RuntimeError, ValueError) as error:
            raise self._gone(f"{type(error).__name__}: {error}") from error

    def _too_large(self) -> ClusterError:
        return ClusterError(
            f"--dask {self.address}: workers died one after another while they merged or "
            "compared ranks; out of memory, most likely: wanted more of it for each worker"
        )

    def _gone(self, found: str) -> ClusterError:
        return ClusterError(
            f"--dask {self.address}: the scheduler is gone, or does not answer ({found}); "
            "no result was made: start it and run the command again"
        )

    def _no_fastcomm(self, where: str, error: Exception) -> ClusterError:
        return ClusterError(
            f"--dask {self.address}: {where} cannot run fastcomm ({error}); wanted fastcomm "
            f"{versions()['fastcomm']} in the environment of every worker and of the scheduler"
        )


class _Work:
    """The ranks of a run on their way through a cluster."""

    def __init__(self, engine: Dask, run: RunTraces, measure: Callable[[Source], Any]) -> None:
        self.engine, self.measure = engine, measure
        self.done_: SimpleQueue[Future[Any]] = SimpleQueue()
        self.sources: dict[Any, Source] = {}
        self.futures: dict[Any, Future[Any]] = {}
        self._start(run.sources)

    def done(self) -> Iterator[tuple[Source, "Future[Any]", Exception | None]]:
        """Each rank that is done, and what went wrong.

        Where a worker dies again and again, all that it had is suspect: it is read again, one
        rank at a time, so that the one at fault is known and costs no other.
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
        """Forget what has not begun."""
        with suppress(Exception):
            self.engine.client.cancel(list(self.futures.values()))
        self.futures.clear()

    def _start(self, sources: Sequence[Source]) -> None:
        client = self.engine.client
        futures = client.map(
            _measured, sources, measure=self.measure, wanted=code(), pure=False
        )
        for source, future in zip(sources, futures, strict=True):
            self.sources[future.key], self.futures[future.key] = source, future
            future.add_done_callback(self.done_.put)

    def _next(self) -> tuple[Source, "Future[Any]", Exception | None]:
        future = self.engine.next(self.done_)
        error = self.engine.error(future)
        del self.futures[future.key]
        return self.sources.pop(future.key), future, error


def _measured(source: Source, *, measure: Callable[[Source], P], wanted: str) -> P:
    """On a worker: what is measured of one rank, by the same fastcomm as the caller's."""
    check_code(wanted)
    return measure(source)


def _is_of_its_rank(error: Exception) -> bool:
    return isinstance(error, FastcommError) and not isinstance(error, ClusterError)


def _killed() -> type[Exception]:
    from distributed import KilledWorker

    killed: type[Exception] = KilledWorker
    return killed


def _is_lack(error: Exception) -> bool:
    """Whether a worker could not even take the task, since it has no such code."""
    return isinstance(error, ModuleNotFoundError | AttributeError) and "fastcomm" in str(error)
