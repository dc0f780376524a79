"""Worker processes that end with the work or with their parent, and the versions they run."""

import hashlib
import multiprocessing.util
import os
import pickle
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from types import ModuleType, TracebackType
from typing import Any, Generic, Self, TypeVar, cast
from uuid import uuid4

from fastcomm.errors import ClusterError, FastcommError
from fastcomm.process import SIGNALS, deferred, safe_children, temporary_folder
from fastcomm.trace.run_traces import one_by_one
from fastcomm.version import __version__
from fastcomm_kernels import temporary

# Packages that results depend on.
_PACKAGES = ("numpy", "pyarrow", "numba", "scipy")


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM to the end of the block.

    Processes and threads that start in the block never get them.
    """
    # Starting it later would let the signals through again.
    resource_tracker.ensure_running()
    # Threads that run already still take a signal, for this one to handle.
    with deferred():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


A = TypeVar("A")
B = TypeVar("B")
# Longest path of a folder for the socket of multiprocessing, in bytes: of 108, it appends 32.
_LONGEST_PATH = 70


def start_early(preload: str | None) -> None:
    """Start the server that workers are forked from, unless it runs.

    It imports the module `preload` once for all workers, while this process goes on.
    """
    from multiprocessing import forkserver

    if preload is not None:
        multiprocessing.set_forkserver_preload([preload])
    with safe_children(), blocked_signals():
        with temporary.used_by_libraries(_LONGEST_PATH):
            multiprocessing.util.get_temp_dir()  # kept for the life of this process
        forkserver.ensure_running()


class Processes:
    """A pool of `number` processes, started when first needed; 1 is this process itself.

    `preload` is a module that is imported once for all of them.
    """

    def __init__(self, number: int, preload: str | None = None) -> None:
        self.number, self.preload = max(1, number), preload
        self._stack = ExitStack()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def submit(self, function: Callable[[A], B], thing: A) -> Future[B]:
        """Submit a call. This or the future raises `BrokenProcessPool` if a worker dies."""
        if self.number == 1:
            return _call(function, thing)
        if self._pool is None:
            # Only functions of a user's script need the script in a worker.
            script = (
                nullcontext() if b"__main__" in pickle.dumps(function) else _without_script()
            )
            with script:
                self._pool = self._stack.enter_context(_pool(self.number, self.preload))
        return self._pool.submit(function, thing)

    def replace(self, died: BrokenProcessPool) -> None:
        """End all workers after one was killed; the next submission starts new ones."""
        # At once: the pool would wait for workers that started while it ended others.
        self._stack.__exit__(type(died), died, died.__traceback__)
        self._pool = None

    def spread(self, function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
        """Call a function on all items in parallel; `FastcommError` if a worker is killed."""
        if self.number == 1 or len(things) == 1:
            return one_by_one(function, things)
        try:
            futures = [self.submit(function, thing) for thing in things]
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise FastcommError(
                "a worker was killed while ranks were compared or scenarios replayed. Probably "
                "it ran out of memory: use fewer workers, or fewer --steps"
            ) from error


class CopiedObject(Generic[A]):
    """A `SharedObject` in this process; with several processes, each of them has a copy."""

    def __init__(self, make: Callable[[], A], processes: Processes) -> None:
        """Make the object here, so that its errors are raised here; workers make it later."""
        self.key, self.make, self.target = uuid4().hex, make, make()
        self.processes = processes

    def apply(self, functions: Sequence[Callable[[A], B]]) -> list[B]:
        """Call functions with the object in parallel, and return their results in order."""
        if self.processes.number == 1 or len(functions) == 1:
            return [function(self.target) for function in functions]
        return self.processes.spread(partial(_apply, self.key, self.make), functions)

    def close(self) -> None:
        """End the workers."""
        self.processes.__exit__(None, None, None)


_copies: dict[str, Any] = {}  # of a worker


def _apply(key: str, make: Callable[[], A], function: Callable[[A], B]) -> B:
    """Call a function with the object of a key, which a worker makes once."""
    if key not in _copies:
        _copies[key] = make()
    return function(_copies[key])


def _call(function: Callable[[A], B], thing: A) -> Future[B]:
    """Call a function, and return its result as a completed future."""
    future: Future[B] = Future()
    future.set_result(function(thing))
    return future


@contextmanager
def _pool(workers: int, preload: str | None) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose workers end as soon as the block or this process ends."""
    with safe_children(), temporary_folder() as folder:
        yield from _start(workers, folder, preload)


def _start(workers: int, folder: Path, preload: str | None) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose workers put temporary files into `folder`; they do not clean up.

    Raises FastcommError in a process that can have no workers.
    """
    if multiprocessing.current_process().daemon:
        raise FastcommError(
            "workers: this process is a daemon, such as one of a multiprocessing.Pool, and may "
            "start no others; use workers=1 in it"
        )
    try:
        start_early(preload)
    except ChildProcessError as error:
        raise FastcommError(
            "workers: this process was forked from one that has workers; use workers=1 in it, "
            "or start it by the method spawn"
        ) from error
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin, initargs=(receiver, folder)
    )
    try:
        # Start all now: a pool that starts a worker while another dies may wait forever.
        for _ in range(workers):
            pool.submit(int)
        yield pool
        pool.shutdown()
    finally:
        processes = list((getattr(pool, "_processes", None) or {}).values())
        sender.close()
        _hang_up(pool)
        _kill(processes)
        pool.shutdown(cancel_futures=True)
        receiver.close()


@contextmanager
def _without_script() -> Iterator[None]:
    """Keep processes that start in the block from running the script of this process again.

    It may have no `if __name__ == "__main__":`.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _hang_up(pool: ProcessPoolExecutor) -> None:
    """Close the parent's end of the pipe for results, so that the pool stops reading it.

    A worker may have ended within a result, and the pool would wait forever for the remainder.
    The pool has no public function for this.
    """
    if (answers := getattr(pool, "_result_queue", None)) is not None:
        answers._writer.close()


_GRACE_S = 0.5  # in which a worker notices that its parent wants no more of it


def _kill(workers: Sequence[BaseProcess]) -> None:
    """Kill the workers that do not end by themselves: one may be in a call that never ends."""
    until = monotonic() + _GRACE_S
    alive = [worker for worker in workers if worker.pid is not None]
    while alive and (remaining_s := until - monotonic()) > 0:
        ended = multiprocessing.connection.wait(
            [worker.sentinel for worker in alive], remaining_s
        )
        alive = [worker for worker in alive if worker.sentinel not in ended]
    for worker in alive:
        with suppress(ProcessLookupError):
            os.kill(cast("int", worker.pid), signal.SIGKILL)


def _begin(line: Connection, folder: Path) -> None:
    """Set up a worker: use a temporary folder, and end when the parent closes the pipe."""
    temporary.use(folder)

    def watch() -> None:
        multiprocessing.connection.wait([line])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@cache
def code() -> str:
    """Return a hash of the source code of fastcomm and its kernels."""
    digest = hashlib.sha256()
    for package in ("fastcomm", "fastcomm_kernels"):
        spec = find_spec(package)
        for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
            for path in sorted(folder.rglob("*.py")):
                digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return versions by name; "none" for a package that is not installed."""
    return {
        "fastcomm": f"{__version__} ({code()})",
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: installed(name) or "none" for name in _PACKAGES},
    }


def check_code(expected: str) -> None:
    """Raise `ClusterError` on a worker whose `code` differs from the caller's."""
    if code() != expected:
        raise ClusterError(
            f"a worker runs fastcomm {versions()['fastcomm']}, but the caller's code is "
            f"{expected}: install the same fastcomm there and restart the workers"
        )


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_same(by_address: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Compare the versions of other processes with the versions of this process.

    Parameters
    ----------
    by_address
        The `versions` of each process.

    Returns
    -------
    list of str
        A warning for each package whose version differs.

    Raises
    ------
    ClusterError
        If the code of fastcomm differs.

    """
    warnings = []
    for name, expected in versions().items():
        differ: dict[str, list[str]] = {}
        for address, other in by_address.items():
            if other.get(name) != expected:
                differ.setdefault(other.get(name, "none"), []).append(address)
        for version_there, addresses in differ.items():
            more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
            where = f"{addresses[0]}{more}"
            if name == "fastcomm":
                raise ClusterError(
                    f"{where}: fastcomm {version_there}, but this process runs {expected}: "
                    "install the same fastcomm there and restart the workers"
                )
            warnings.append(
                f"{where}: {name} {version_there}, but this process runs {expected}: results "
                "may differ"
            )
    return warnings
