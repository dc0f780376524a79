"""A Dask cluster: where its scheduler is, and data that workers or a shared directory hold."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

import dask
from distributed import Nanny, Scheduler, Security, SpecCluster, Worker
from distributed.node import ServerNode

from fastcomm.checks import MOST_WORKERS, shortened
from fastcomm.errors import ClusterError, ConfigError, FastcommError
from fastcomm.executors import WIDTH, Task
from fastcomm.executors.processes import check_code, code, held_back
from fastcomm.process import safe_children, temporary_folder
from fastcomm.trace.run import Spread, one_by_one

if TYPE_CHECKING:
    from distributed import Future

    from fastcomm.executors.dask import Dask

S = TypeVar("S")
T = TypeVar("T")


@contextmanager
def started(workers: int) -> Iterator[SpecCluster]:
    """Start worker processes and a scheduler, and end them with the work.

    Raises `ConfigError` where the package that makes certificates is not installed.
    """
    security = _security()
    with safe_children(), temporary_folder() as folder:
        # Modules are looked for there, too: it must not be one that others can write to.
        settings = {
            "distributed.scheduler.allowed-failures": 1,
            "temporary-directory": str(folder),
        }
        with dask.config.set(settings), ExitStack() as stack:
            with held_back():
                cluster = stack.enter_context(_cluster(workers, security, str(folder)))
            yield cluster


def _security() -> Security:
    """A key and a certificate for this run, in memory."""
    try:
        security: Security = Security.temporary()
    except ImportError as error:
        raise ConfigError(
            "--dask local:N needs the extra: pip install 'fastcomm[dask]' (cryptography is not "
            "installed)"
        ) from error
    return security


class _NoHttp(ServerNode):
    """A server that answers no HTTP: Dask opens a port even without a dashboard."""

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """Open the port, which others ask for, and close it before anybody is answered."""
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
_LOOK_S = 0.1  # between two looks for a file


def require() -> None:
    """ConfigError where Dask is not installed."""
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--dask needs the extra: pip install 'fastcomm[dask]' ({error})"
        ) from error


def where_is(address: str, wait_s: float, stack: ExitStack) -> dict[str, Any]:
    """What tells a client where the scheduler is."""
    kind, _, rest = address.partition(":")
    if kind == "local":
        is_number = rest.isdecimal() and len(rest) <= len(str(MOST_WORKERS))
        if not is_number or not 1 <= int(rest) <= MOST_WORKERS:
            raise ConfigError(
                f"--dask local:{shortened(rest)}: wanted a number of workers from 1 to "
                f"{MOST_WORKERS}, as in local:4"
            )
        # Not before `require`: it needs the extra.

        return {"address": stack.enter_context(started(int(rest)))}
    if kind == "file":
        _wait_for(Path(rest), address, wait_s)
        return {"scheduler_file": rest}
    _check(address)
    return {"address": address}


def _check(address: str) -> None:
    """Raise `ConfigError` unless this is an address: Dask would try it until its time is up."""
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
            f"--dask: found {shortened(address)!r}, wanted {FORMS} ({error})"
        ) from error
    if not place or not 0 < port < 1 << 16 or "/" in host:
        raise ConfigError(f"--dask: found {shortened(address)!r}, wanted {FORMS}")


def _wait_for(path: Path, address: str, wait_s: float) -> None:
    """Wait for a scheduler file: the scheduler may be a job that has yet to begin."""
    until = time.monotonic() + wait_s
    while not path.is_file():
        if time.monotonic() > until:
            raise ClusterError(
                f"--dask {address}: no such file for {wait_s:g} s; wanted what `dask scheduler "
                "--scheduler-file` writes"
            )
        time.sleep(_LOOK_S)


@contextmanager
def quiet() -> Iterator[None]:
    """Without Dask's log and warnings: what they are about is said in one error of ours."""
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


class There(Generic[S]):
    """What the workers of a cluster hold."""

    def __init__(self, engine: "Dask", make: Callable[[], S]) -> None:
        self.engine, self.make = engine, make
        self.made = self._made()

    def ask(self, questions: Sequence[Callable[[S], T]]) -> list[T]:
        """Ask all at once; those that a worker died of are asked again, one at a time."""
        from distributed import KilledWorker

        futures = [self._asked(each) for each in questions]
        answers: list[Any] = []
        again: list[int] = []
        try:
            for place, future in enumerate(futures):
                try:
                    answers.append(self.engine.answer(future))
                except KilledWorker:
                    answers.append(None)
                    again.append(place)
        finally:
            with suppress(Exception):
                self.engine.client.cancel(futures)
        for place in again:
            answers[place] = self._once_more(questions[place])
        return answers

    def close(self) -> None:
        """Let the workers forget it."""
        with suppress(Exception):
            self.made.release()

    def _once_more(self, question: Callable[[S], T]) -> T:
        """The answer of a question that has the cluster for itself."""
        from distributed import KilledWorker

        if self.made.status == "error":
            self.made = self._made()
        try:
            return self.engine.answer(self._asked(question))
        except KilledWorker as error:
            raise ClusterError(
                f"--dask {self.engine.address}: a worker died, and so did the next that had "
                "nothing else to do; out of memory, most likely: wanted more for each worker"
            ) from error

    def _made(self) -> "Future[S]":
        return self.engine.client.submit(_made, self.make, code(), pure=False)

    def _asked(self, question: Callable[[S], T]) -> "Future[T]":
        return self.engine.client.submit(_asked, self.made, question, code(), pure=False)


def _made(make: Callable[[], S], wanted: str) -> S:
    """On a worker: what is held, by the same fastcomm as the caller's."""
    check_code(wanted)
    return make()


def _asked(made: S, question: Callable[[S], T], wanted: str) -> T:
    """On a worker: one answer."""
    check_code(wanted)
    return question(made)


A = TypeVar("A")
B = TypeVar("B")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Scratch(Generic[P]):
    """How the ranks of a task come together on the workers; it goes to them."""

    task: Task[P, Any]
    folder: Path | None  # of this run alone; None: in memory

    @classmethod
    def of(cls, shared: Path | None, task: Task[P, Any], ranks: int) -> "Scratch[P]":
        """In a shared directory where there is one, and where ranks are many."""
        if shared is None or task.put_away is None or ranks <= WIDTH:
            return cls(task, None)
        return cls(task, shared / f"fastcomm-{uuid4().hex}")

    @property
    def spread(self) -> Spread:
        """How questions of the answer are asked: what is in memory would have to travel."""
        return one_by_one if self.folder is None else _spread

    def merge(self, parts: Sequence[P]) -> P:
        """On a worker: some ranks in one, and what is large of them in a file."""
        whole = self.task.merge(parts)
        if self.folder is None or self.task.put_away is None:
            return whole
        with _wanted(self.folder):
            # A worker that is lost may have written the same before: no name comes twice.
            return self.task.put_away(whole, self.folder / uuid4().hex)


def make(folder: Path) -> None:
    """On a worker, once: who writes too late, when all is over, finds no directory."""
    with _wanted(folder):
        folder.mkdir(parents=True, exist_ok=True)


def remove(folder: Path) -> None:
    """On a worker: the directory is gone."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _wanted(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FastcommError(
            f"{folder}: {error.strerror or error}; wanted a directory that all workers share "
            "and can write, with room for what is measured of the ranks"
        ) from error


def _spread(function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
    """On a worker: a `Spread` over all workers; this one does other work meanwhile."""
    from distributed import worker_client

    with worker_client() as client:
        # It knows all pieces: it travels once to a worker, not with each question.
        held = client.scatter(function, hash=False)
        asked = [
            client.submit(_scratch_dask_asked, held, thing, code(), pure=False)
            for thing in things
        ]
        answers: list[B] = client.gather(asked)
        return answers


def _scratch_dask_asked(function: Callable[[A], B], thing: A, wanted: str) -> B:
    check_code(wanted)
    return function(thing)
