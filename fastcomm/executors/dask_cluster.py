"""Reach a Dask cluster, and keep objects on its workers."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from fastcomm.checks import shortened
from fastcomm.errors import ClusterError, ConfigError, FastcommError
from fastcomm.executors.processes import check_code, check_same, code, versions

try:
    from distributed import Client
except ImportError as error:
    raise ConfigError(
        f"--dask needs the extra: pip install 'fastcomm[dask]' ({error})"
    ) from error

if TYPE_CHECKING:
    from distributed import Future

S = TypeVar("S")
T = TypeVar("T")


class InterruptibleClient(Client):
    """A client whose connecting or closing may be interrupted by a signal."""

    def __del__(self) -> None:
        """Close the client, unless Python ends: its threads are gone, and would not answer."""
        if not sys.is_finalizing():
            super().__del__()  # type: ignore[no-untyped-call]


FORMS = "file:SCHEDULER.json or the address of a scheduler (tcp://host:8786)"
WAIT_S = 60.0  # for the scheduler, and for a first worker
_LOOK_S = 1.0  # between two checks that the cluster still works
_FILE_LOOK_S = 0.1  # between two checks for a file


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
        from asyncio import CancelledError

        try:
            yield
        except FastcommError:
            raise
        except (OSError, CancelledError, RuntimeError, ValueError) as error:
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
