"""A Dask cluster of this machine: only processes of this run can reach it.

Every connection is encrypted, and needs the certificate that was made for this run. There is no
dashboard, and nothing else that answers HTTP.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import dask
from distributed import Nanny, Scheduler, Security, SpecCluster, Worker
from distributed.node import ServerNode

from fastcomm.engine.interrupts import held_back
from fastcomm.errors import ConfigError
from fastcomm.import_path import safe_children
from fastcomm.temporary import temporary_folder


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
