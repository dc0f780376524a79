"""The ranks of a run on the workers of a Dask cluster.

Only small messages pass through the scheduler: the path of a rank's trace, and the task.
Partial results stay on workers and are merged there; only the final result is sent to the
caller, directly from its worker.

If a worker is lost, the scheduler recomputes its partial results on others. They are equal, and
none is merged twice, since a merge names its inputs.

Importing this module raises `ConfigError` if Dask is not installed.
"""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from fastcomm.checks import shortened
from fastcomm.errors import ClusterError, ConfigError, FastcommError
from fastcomm.executors.executor import (
    SHARES,
    WIDTH,
    BatchTask,
    Progress,
    SharedObject,
    Task,
    TreeReducer,
    by_rank,
    died,
    skipped_rank,
)
from fastcomm.executors.processes import check_code, check_same, code, versions
from fastcomm.trace.run_traces import ParallelMap, RunTraces, SkippedRank, Source, one_by_one

if TYPE_CHECKING:
    from distributed import Future

S = TypeVar("S")
T = TypeVar("T")
FORMS = "file:SCHEDULER.json or the address of a scheduler (tcp://host:8786)"
WAIT_S = 60.0  # for the scheduler, and for a first worker
_LOOK_S = 1.0  # between two checks that the cluster still works
_FILE_LOOK_S = 0.1  # between two checks for a file
P = TypeVar("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
_RankErrors = list[tuple[Source, Exception]]
_Finished = tuple[list[Source], "Future[Any]", _RankErrors]
_BATCH_BYTES = 64 << 20  # of files: a batch of larger ones would take long
_Measured = tuple[P | None, list[tuple[int, FastcommError]]]


try:
    from distributed import Client
except ImportError as error:
    raise ConfigError(
        f"--dask needs the extra: pip install 'fastcomm[dask]' ({error})"
    ) from error


class InterruptibleClient(Client):
    """A client whose connecting or closing may be interrupted by a signal."""

    def __del__(self) -> None:
        """Close the client, unless Python ends: its threads are gone, and would not answer."""
        if not sys.is_finalizing():
            super().__del__()  # type: ignore[no-untyped-call]


def client_arguments(address: str, wait_s: float) -> dict[str, Any]:
    """Return the keyword arguments of `distributed.Client` for an address of --dask.

    Parameters
    ----------
    address
        ``file:PATH`` names a scheduler's file; any other is the address of a scheduler.
    wait_s
        Time in s that the scheduler's file may take to appear.

    Raises
    ------
    ConfigError
        The address is invalid, or the file does not appear.

    """
    kind, _, suffix = address.partition(":")
    if kind == "file":
        _wait_for(Path(suffix), address, wait_s)
        return {"scheduler_file": suffix}
    _check(address)
    return {"address": address}


def _check(address: str) -> None:
    """Raise `ConfigError` for an invalid address, which Dask would try until the timeout."""
    from distributed.comm.addressing import parse_address, parse_host_port
    from distributed.comm.registry import get_backend

    try:
        scheme, place = parse_address(address)
        get_backend(scheme)
        if scheme == "inproc":
            raise ValueError("a scheduler of another process cannot be reached by inproc")
        host, port = parse_host_port(place)
    except ValueError as error:
        raise ConfigError(
            f"invalid --dask {shortened(address)!r}: expected {FORMS} ({error})"
        ) from error
    if not place or not 0 < port < 1 << 16 or "/" in host:
        raise ConfigError(f"invalid --dask {shortened(address)!r}: expected {FORMS}")


def _wait_for(path: Path, address: str, wait_s: float) -> None:
    """Wait until a scheduler file exists: the job of the scheduler may still be queued.

    `address` is the value of --dask. Raises `ClusterError` after `wait_s` seconds.
    """
    until = time.monotonic() + wait_s
    while not path.is_file():
        if time.monotonic() > until:
            raise ClusterError(
                f"--dask {address}: no such file for {wait_s:g} s; `dask scheduler "
                "--scheduler-file` writes it"
            )
        time.sleep(_FILE_LOOK_S)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Dask's log and warnings: one `ClusterError` reports the problem instead."""
    import warnings

    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="distributed")
            yield
    finally:
        logger.setLevel(before)


@dataclass(slots=True, kw_only=True)
class ClusterConnection:
    """A client of a Dask cluster, whose failures are `ClusterError`s."""

    client: "Client"
    address: str
    wait_s: float = WAIT_S
    is_local: ClassVar[bool] = False
    warnings: list[str] = field(default_factory=list)

    def check_versions(self) -> None:
        """Compare the versions of the scheduler and all workers with those of this process.

        Differences become `warnings`. Raises `ClusterError` for a worker without fastcomm.
        """
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

    def submit(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Start a call of a function on a worker, and return its future.

        The call comes before ranks that wait to be read, since it merges results, which frees
        memory.
        """
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
        import asyncio
        import concurrent.futures

        # Of a lost connection, one is of the client's own tasks and one of futures of results.
        canceled = asyncio.CancelledError, concurrent.futures.CancelledError
        try:
            yield
        except FastcommError:
            raise
        except (OSError, *canceled, RuntimeError, ValueError) as error:
            raise self._gone(f"{type(error).__name__}: {error}") from error

    def too_large(self) -> ClusterError:
        """Return the error that workers were killed repeatedly."""
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


def _is_import_error(error: Exception) -> bool:
    """Whether a worker could not load the task because it has no such code."""
    return isinstance(error, ModuleNotFoundError | AttributeError) and "fastcomm" in str(error)


class ClusterObject(Generic[S]):
    """A `SharedObject` in the memory of the workers of a cluster."""

    def __init__(self, cluster: ClusterConnection, make: Callable[[], S]) -> None:
        self.cluster, self.make = cluster, make
        self.target = self._create()

    def apply(self, functions: Sequence[Callable[[S], T]]) -> list[T]:
        """Call functions with the shared object on workers in parallel, and return the results.

        Results are in the order of the functions. Functions whose worker died are called again,
        one at a time.
        """
        from distributed import KilledWorker

        futures = [self._apply(function) for function in functions]
        answers: list[Any] = []
        again: list[int] = []
        try:
            for place, future in enumerate(futures):
                try:
                    answers.append(self.cluster.answer(future))
                except KilledWorker:
                    answers.append(None)
                    again.append(place)
        finally:
            with suppress(Exception):
                self.cluster.client.cancel(futures)
        for place in again:
            answers[place] = self._apply_alone(functions[place])
        return answers

    def close(self) -> None:
        """Release the object on the workers."""
        with suppress(Exception):
            self.target.release()

    def _apply_alone(self, function: Callable[[S], T]) -> T:
        """Apply a function while the cluster has no other work."""
        from distributed import KilledWorker

        if self.target.status == "error":
            self.target = self._create()
        try:
            return self.cluster.answer(self._apply(function))
        except KilledWorker as error:
            raise ClusterError(
                f"--dask {self.cluster.address}: a worker was killed, also in a second "
                "attempt without other work. Probably it ran out of memory: give workers more"
            ) from error

    def _create(self) -> "Future[S]":
        return self.cluster.client.submit(call_checked, code(), self.make, pure=False)

    def _apply(self, function: Callable[[S], T]) -> "Future[T]":
        return self.cluster.client.submit(
            call_checked, code(), function, self.target, pure=False
        )


def call_checked(expected: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function on a worker whose code is that of the caller.

    `expected` identifies the caller's code. Raises `ClusterError` if the worker has other code.
    """
    check_code(expected)
    return function(*args)


@contextmanager
def connected(
    address: str, *, wait_s: float = WAIT_S, scratch: Path | None = None
) -> Iterator["Dask"]:
    """Connect to a Dask cluster, and yield its executor.

    Parameters
    ----------
    address
        The address of a scheduler, or ``file:PATH`` of a scheduler file.
    wait_s
        Seconds to wait for the scheduler, and for a first worker.
    scratch
        A directory that all workers share, for spill files. Without it, partial results are
        merged in one worker's memory.

    Raises
    ------
    ClusterError
        If the cluster cannot be reached, or runs another version of fastcomm.
    ConfigError
        If the address is invalid.

    """
    with ExitStack() as stack:
        stack.enter_context(quiet())
        arguments = client_arguments(address, wait_s)
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
    def parallel_map(self) -> ParallelMap:
        """The function that spreads work of `finish`; serial if data are in memory."""
        return one_by_one if self.folder is None else _parallel_map

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


def _parallel_map(function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
    """Call a function on each item, from a worker on all workers; a `ParallelMap`."""
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

    def gather(self, run: RunTraces, task: Task[P, R], progress: Progress | None = None) -> R:
        """Run a task on all ranks of a run, with parameters and errors of `Executor.gather`.

        A rank that kills its workers destroys the work of others repeatedly, so that Dask may
        give up on them, too. Once such a rank is identified, the others are done without it.
        """
        fatal: dict[int, SkippedRank] = {}
        while True:
            before = len(fatal)
            sources = tuple(source for source in run.sources if source.rank not in fatal)
            scratch = _Scratch.of(self.scratch, task, len(sources))
            others = replace(run, sources=sources)
            try:
                with self._run_folder(scratch.folder):
                    return self._gather_once(others, task, scratch, fatal, progress)
            except _killed() as error:
                if len(fatal) == before:
                    raise self.too_large() from error
            progress = None  # it was called with all ranks already

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

    def _gather_once(
        self,
        run: RunTraces,
        task: Task[P, R],
        scratch: _Scratch[P],
        fatal: dict[int, SkippedRank],
        progress: Progress | None,
    ) -> R:
        """Measure the ranks, merge partial results as they arrive, and finish the task.

        Ranks that kill their workers are added to `fatal`.
        """
        work = _Work(self, run, task)
        reducer: TreeReducer[Future[P]] = TreeReducer(
            lambda parts: self.submit(scratch.merge, list(parts))
        )
        unread = list(fatal.values())
        every = len(run.sources) + len(fatal)
        try:
            for batch, partial, errors in work.done():
                for source, error in errors:
                    if not (run.keep_going and _is_of_its_rank(error)):
                        raise error
                    unread.append(skipped_rank(source, error))
                    if isinstance(error.__cause__, _killed()):
                        fatal[source.rank] = unread[-1]
                if len(errors) < len(batch):
                    reducer.add(partial)
                if progress is not None:
                    for source in batch:
                        progress(source)
            failed = by_rank(unread, every, run.skipped)
            merged = reducer.result()
            return self.answer(self.submit(task.finish, merged, failed, scratch.parallel_map))
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
    """The ranks of a run that are being measured on a cluster, in batches."""

    def __init__(self, executor: Dask, run: RunTraces, task: Task[Any, Any]) -> None:
        self.executor, self.task = executor, task
        self.completed: SimpleQueue[Future[Any]] = SimpleQueue()
        # By the key of the future of its errors: a batch, that future, and the partial result.
        self.batches: dict[Any, tuple[list[Source], Future[Any], Future[Any]]] = {}
        threads = sum(self.executor.client.nthreads().values())
        for batch in _batches(run.sources, threads):
            self._start(batch)

    def done(self) -> Iterator[_Finished]:
        """Yield each finished batch with its partial result and the errors of its ranks.

        If workers are killed repeatedly, their ranks are read again one at a time. This tells
        which rank is at fault, and other ranks are not affected.
        """
        suspects = []
        while self.batches:
            batch, partial, outcome = self._next()
            if isinstance(outcome, _killed()):
                suspects += batch
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                yield batch, partial, outcome
        for source in suspects:
            self._start([source])
            batch, partial, outcome = self._next()
            if isinstance(outcome, _killed()):
                error = died(source)
                error.__cause__ = outcome
                outcome = [(source, error)]
            elif isinstance(outcome, Exception):
                raise outcome
            yield batch, partial, outcome

    def cancel(self) -> None:
        """Cancel the ranks that are not finished."""
        futures = [future for _, *pair in self.batches.values() for future in pair]
        with suppress(Exception):
            self.executor.client.cancel(futures)
        self.batches.clear()

    def _start(self, batch: list[Source]) -> None:
        client = self.executor.client
        measured = client.submit(_measure, batch, task=self.task, expected=code(), pure=False)
        errors, partial = (
            client.submit(part_of, measured, pure=False, priority=1)
            for part_of in (_errors, _partial)
        )
        self.batches[errors.key] = batch, errors, partial
        errors.add_done_callback(self.completed.put)

    def _next(self) -> tuple[list[Source], "Future[Any]", _RankErrors | Exception]:
        """Return a finished batch, its partial result, and the errors of ranks or of all."""
        future = self.executor.next(self.completed)
        error = self.executor.error(future)
        batch, _, partial = self.batches.pop(future.key)
        if error is not None:
            return batch, partial, error
        errors = self.executor.answer(future)
        return batch, partial, [(batch[place], own) for place, own in errors]


def _batches(sources: Sequence[Source], threads: int) -> Iterator[list[Source]]:
    """Divide ranks into batches: of small ranks several, so that all threads have work."""
    width = max(1, min(WIDTH, len(sources) // (SHARES * max(1, threads))))
    batch: list[Source] = []
    for source in sources:
        size = sum(other.size for other in (*batch, source))
        if batch and (len(batch) == width or size > _BATCH_BYTES):
            yield batch
            batch = []
        batch.append(source)
    if batch:
        yield batch


def _measure(sources: Sequence[Source], *, task: Task[P, Any], expected: str) -> _Measured[P]:
    """Measure ranks on a worker, after a check that it runs the caller's code.

    Returns their merged partial result, and the place and error of ranks that failed. All ranks
    are read, however long it takes: if a worker is lost, another one returns the same.
    """
    check_code(expected)
    done, errors, parts = 0, list[tuple[int, FastcommError]](), list[P]()
    work = BatchTask(task=task, has_limit=False)
    while done < len(sources):
        count, partial, error = work(sources[done:])
        done += count
        if partial is not None:
            parts.append(partial)
        if error is not None:
            errors.append((done - 1, error))
    return task.merge(parts) if parts else None, errors


def _errors(measured: _Measured[P]) -> list[tuple[int, FastcommError]]:
    return measured[1]


def _partial(measured: _Measured[P]) -> P | None:
    return measured[0]


def _is_of_its_rank(error: Exception) -> bool:
    return isinstance(error, FastcommError) and not isinstance(error, ClusterError)


def _killed() -> type[Exception]:
    from distributed import KilledWorker

    killed: type[Exception] = KilledWorker
    return killed
