"""Where a Dask scheduler is: at an address, in a file, or started on this machine."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dask
from distributed import Nanny, Scheduler, Security, SpecCluster, Worker
from distributed.node import ServerNode

from fastcomm.checks import MOST_WORKERS, shortened
from fastcomm.errors import ClusterError, ConfigError
from fastcomm.executors.processes import held_back
from fastcomm.process import safe_children, temporary_folder


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
