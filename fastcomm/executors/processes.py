"""Worker processes that end with the work or with their parent, and the versions they run."""

import hashlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import platform
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from fastcomm.errors import ClusterError, FastcommError
from fastcomm.process import SIGNALS, deferred, safe_children, temporary_folder
from fastcomm.trace.run import one_by_one
from fastcomm.version import __version__

# What numbers and their bytes depend on.
_PACKAGES = ("numpy", "pyarrow", "numba", "scipy")


@contextmanager
def held_back() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM, which come at the end of the block.

    Processes and threads that start meanwhile never get them.
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

# Bytes of the path of a directory in which multiprocessing can make its socket: of 108, 32 are
# taken by what it appends.
_LONGEST_PATH = 70
# What a worker needs; the server that they are forked from imports it once.
_PRELOAD = ["fastcomm.analyses.preload"]


def start_early() -> None:
    """Start the server that workers are forked from, so that it imports while we do."""
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload(_PRELOAD)
    with safe_children(), held_back():
        _shorten_socket_path()
        forkserver.ensure_running()


def _shorten_socket_path() -> None:
    """Let multiprocessing put its socket into /tmp where `TMPDIR` is too long for one."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_PATH:
        return
    before = tempfile.tempdir
    tempfile.tempdir = "/tmp"  # mkdtemp makes a directory of this user alone
    try:
        multiprocessing.util.get_temp_dir()  # kept for the life of this process
    finally:
        tempfile.tempdir = before


class Processes:
    """So many workers, started when they are first needed; one is this process itself."""

    def __init__(self, number: int) -> None:
        self.number = max(1, number)
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
        """Begin a call; BrokenProcessPool where a worker has died, now or later."""
        if self.number == 1:
            return _called(function, thing)
        if self._pool is None:
            self._pool = self._stack.enter_context(_pool(self.number))
        return self._pool.submit(function, thing)

    def replace(self, died: BrokenProcessPool) -> None:
        """End the workers, as one of them has died; others take their place."""
        # At once: the pool waits for those that began while it ended the others.
        self._stack.__exit__(type(died), died, died.__traceback__)
        self._pool = None

    def spread(self, function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
        """See `Executor.Spread`; FastcommError where a worker dies."""
        if self.number == 1 or len(things) == 1:
            return one_by_one(function, things)
        try:
            return [
                each.result() for each in [self.submit(function, thing) for thing in things]
            ]
        except BrokenProcessPool as error:
            raise FastcommError(
                "a worker was killed while ranks were compared; out of memory, most likely: "
                "wanted fewer workers, or some --steps alone"
            ) from error


def _called(function: Callable[[A], B], thing: A) -> Future[B]:
    """A call that is done."""
    future: Future[B] = Future()
    future.set_result(function(thing))
    return future


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end at once where the work is broken off, or where this process ends."""
    with safe_children(), temporary_folder() as folder:
        yield from _started(workers, folder)


def _started(workers: int, folder: Path) -> Iterator[ProcessPoolExecutor]:
    """The same, with a directory for temporary files of workers, which end without notice."""
    start_early()
    context = multiprocessing.get_context("forkserver")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin, initargs=(theirs, folder)
    )
    try:
        # All begin now: a pool that starts one while another dies may wait for ever.
        for _ in range(workers):
            pool.submit(int)
        yield pool
        pool.shutdown()
    finally:
        ours.close()
        _hang_up(pool)
        pool.shutdown(cancel_futures=True)
        theirs.close()


def _hang_up(pool: ProcessPoolExecutor) -> None:
    """Close our side of what workers send by: nobody waits for the rest of a half answer.

    A worker may have ended in the middle of one, and the pool, which has no such function,
    would read on for ever.
    """
    if (answers := getattr(pool, "_result_queue", None)) is not None:
        answers._writer.close()


def _begin(line: Connection, folder: Path) -> None:
    """In a worker: use a temporary directory, end when the other end of a pipe is closed."""
    tempfile.tempdir = str(folder)

    def watch() -> None:
        multiprocessing.connection.wait([line])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@cache
def code() -> str:
    """The hash of the text of fastcomm and its kernels: equal where the code is."""
    digest = hashlib.sha256()
    for package in ("fastcomm", "fastcomm_kernels"):
        found = find_spec(package)
        for folder in map(Path, (found and found.submodule_search_locations) or ()):
            for path in sorted(folder.rglob("*.py")):
                digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Versions by name; a package that is not there is "none"."""
    return {
        "fastcomm": f"{__version__} ({code()})",
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: installed(name) or "none" for name in _PACKAGES},
    }


def check_code(wanted: str) -> None:
    """On a worker: ClusterError where this fastcomm is not the caller's."""
    if code() != wanted:
        raise ClusterError(
            f"a worker runs fastcomm {versions()['fastcomm']}, wanted the text {wanted}: "
            "install it there and start the workers again"
        )


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_same(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Compare the versions of other processes, by address, with those of this one.

    Raises `ClusterError` where fastcomm differs, and gives a warning for each other difference.
    """
    ours, warnings = versions(), []
    for name, wanted in ours.items():
        differ: dict[str, list[str]] = {}
        for address, theirs in found.items():
            if theirs.get(name) != wanted:
                differ.setdefault(theirs.get(name, "none"), []).append(address)
        for other, addresses in differ.items():
            more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
            where = f"{addresses[0]}{more}"
            if name == "fastcomm":
                raise ClusterError(
                    f"{where}: fastcomm {other}, and here {wanted}; wanted the same on all: "
                    "install this one there and start the workers again"
                )
            warnings.append(f"{where}: {name} {other}, and here {wanted}: results may differ")
    return warnings
