"""Find or start a Dask cluster, and keep data on its workers or in a shared directory."""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

from fastcomm.checks import MOST_WORKERS, shortened
from fastcomm.errors import ClusterError, ConfigError, FastcommError
from fastcomm.executors import WIDTH, Task
from fastcomm.executors.processes import blocked_signals, check_code, code
from fastcomm.process import safe_children, temporary_folder
from fastcomm.trace.run import Spread, one_by_one

try:
    import dask
    from distributed import Client, Nanny, Scheduler, Security, SpecCluster, Worker
    from distributed.node import ServerNode
except ImportError as error:
    raise ConfigError(
        f"--dask needs the extra: pip install 'fastcomm[dask]' ({error})"
    ) from error

if TYPE_CHECKING:
    from distributed import Future

    from fastcomm.executors.dask import Dask

S = TypeVar("S")
T = TypeVar("T")


@contextmanager
def started(workers: int) -> Iterator[SpecCluster]:
    """Start a scheduler and worker processes, and end them after the block.

    Raises `ConfigError` if the package that makes certificates is not installed.
    """
    security = _security()
    with safe_children(), temporary_folder() as folder:
        # Python imports modules from this directory: others must not be able to write to it.
        settings = {
            "distributed.scheduler.allowed-failures": 1,
            "temporary-directory": str(folder),
        }
        with dask.config.set(settings), ExitStack() as stack:
            with blocked_signals():
                cluster = stack.enter_context(_cluster(workers, security, str(folder)))
            yield cluster


def _security() -> Security:
    """Return a key and a certificate for this run, in memory."""
    try:
        security: Security = Security.temporary()
    except ImportError as error:
        raise ConfigError(
            "--dask local:N needs the extra: pip install 'fastcomm[dask]' (cryptography is not "
            "installed)"
        ) from error
    return security


class InterruptibleClient(Client):
    """A client whose connecting or closing may be interrupted by a signal."""

    def __del__(self) -> None:
        """Close the client, unless Python ends: its threads are gone, and would not answer."""
        if not sys.is_finalizing():
            super().__del__()  # type: ignore[no-untyped-call]


class _NoHttp(ServerNode):
    """A server without HTTP: Dask opens a port even without a dashboard."""

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Open the port, which other servers ask for, and close it before it answers."""
        super().start_http_server(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.http_server.stop()


class _Scheduler(_NoHttp, Scheduler):
    pass


class _Worker(_NoHttp, Worker):
    pass


def _cluster(workers: int, security: Security, folder: str) -> SpecCluster:
    common = {"security": security, "protocol": "tls://", "host": "127.0.0.1"}
    scheduler = {**common, "dashboard": False, "dashboard_address": "127.0.0.1:0", "port": 0}
    worker = {
        **common,
        "worker_class": _Worker,
        "nthreads": 1,
        "local_directory": folder,
        "memory_limit": 1 / workers,
        "dashboard": False,
        "silence_logs": logging.CRITICAL,
    }
    return SpecCluster(
        scheduler={"cls": _Scheduler, "options": scheduler},
        workers={number: {"cls": Nanny, "options": worker} for number in range(workers)},
        security=security,
        silence_logs=logging.CRITICAL,
    )


FORMS = "local:N, file:SCHEDULER.json or the address of a scheduler (tcp://host:8786)"
_LOOK_S = 0.1  # between two checks for a file


def client_arguments(address: str, wait_s: float, stack: ExitStack) -> dict[str, Any]:
    """Return the keyword arguments of `distributed.Client` for an address of --dask.

    For `local:N` a cluster is started, which `stack` ends. For `file:PATH` the scheduler's file
    may take up to `wait_s` seconds to appear.
    """
    kind, _, suffix = address.partition(":")
    if kind == "local":
        is_number = suffix.isdecimal() and len(suffix) <= len(str(MOST_WORKERS))
        if not is_number or not 1 <= int(suffix) <= MOST_WORKERS:
            raise ConfigError(
                f"invalid --dask local:{shortened(suffix)}: expected a number of workers from "
                f"1 to {MOST_WORKERS}, as in local:4"
            )
        return {"address": stack.enter_context(started(int(suffix)))}
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
    """Wait for a scheduler file: the job of the scheduler may still be queued."""
    until = time.monotonic() + wait_s
    while not path.is_file():
        if time.monotonic() > until:
            raise ClusterError(
                f"--dask {address}: no such file for {wait_s:g} s; `dask scheduler "
                "--scheduler-file` writes it"
            )
        time.sleep(_LOOK_S)


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


class ClusterObject(Generic[S]):
    """A `SharedObject` in the memory of the workers of a cluster."""

    def __init__(self, executor: "Dask", make: Callable[[], S]) -> None:
        self.executor, self.make = executor, make
        self.target = self._create()

    def apply(self, functions: Sequence[Callable[[S], T]]) -> list[T]:
        """Apply functions in parallel; repeat those that killed a worker one at a time."""
        from distributed import KilledWorker

        futures = [self._apply(function) for function in functions]
        answers: list[Any] = []
        again: list[int] = []
        try:
            for place, future in enumerate(futures):
                try:
                    answers.append(self.executor.answer(future))
                except KilledWorker:
                    answers.append(None)
                    again.append(place)
        finally:
            with suppress(Exception):
                self.executor.client.cancel(futures)
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
            return self.executor.answer(self._apply(function))
        except KilledWorker as error:
            raise ClusterError(
                f"--dask {self.executor.address}: a worker was killed, also in a second "
                "attempt without other work. Probably it ran out of memory: give workers more"
            ) from error

    def _create(self) -> "Future[S]":
        return self.executor.client.submit(_create, self.make, code(), pure=False)

    def _apply(self, function: Callable[[S], T]) -> "Future[T]":
        return self.executor.client.submit(_apply, self.target, function, code(), pure=False)


def _create(make: Callable[[], S], expected: str) -> S:
    """Create an object on a worker, after a check that it runs the caller's code."""
    check_code(expected)
    return make()


def _apply(target: S, function: Callable[[S], T], expected: str) -> T:
    """Apply a function on a worker, after a check that it runs the caller's code."""
    check_code(expected)
    return function(target)


A = TypeVar("A")
B = TypeVar("B")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Scratch(Generic[P]):
    """Merges the partial results of a task on workers; it is sent to them."""

    task: Task[P, Any]
    folder: Path | None  # for the spill files of this run; None: merge in memory

    @classmethod
    def of(cls, shared: Path | None, task: Task[P, Any], ranks: int) -> "Scratch[P]":
        """Use a folder in the shared directory if there is one and ranks are many."""
        if shared is None or task.spill is None or ranks <= WIDTH:
            return cls(task, None)
        return cls(task, shared / f"fastcomm-{uuid4().hex}")

    @property
    def spread(self) -> Spread:
        """The function that spreads work of `finish`; serial if data are in memory."""
        return one_by_one if self.folder is None else _spread

    def merge(self, parts: Sequence[P]) -> P:
        """Merge partial results on a worker, and spill the large tables to a file."""
        whole = self.task.merge(parts)
        if self.folder is None or self.task.spill is None:
            return whole
        with _checked_folder(self.folder):
            # A lost worker may have written the same before: names are unique.
            return self.task.spill(whole, self.folder / uuid4().hex)


def make(folder: Path) -> None:
    """Make a directory on a worker, once; late writers of a finished run then fail."""
    with _checked_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)


def remove(folder: Path) -> None:
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
            client.submit(_call, scattered, thing, code(), pure=False) for thing in things
        ]
        results: list[B] = client.gather(futures)
        return results


def _call(function: Callable[[A], B], thing: A, expected: str) -> B:
    check_code(expected)
    return function(thing)
