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


_RankErrors = list[tuple[Source, Exception]]
_Finished = tuple[list[Source], "Future[Any]", _RankErrors]


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


_BATCH_BYTES = 64 << 20  # of files: a batch of larger ones would take long
_Measured = tuple[P | None, list[tuple[int, FastcommError]]]


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
