"""Where a Dask scheduler is: at an address, in a file, or started here."""

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastcomm.engine.interrupts import held_back
from fastcomm.errors import ClusterError, ConfigError
from fastcomm.ranges import MOST_WORKERS, shortened

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
        return {"address": stack.enter_context(_here(rest))}
    if kind == "file":
        _wait_for(Path(rest), address, wait_s)
        return {"scheduler_file": rest}
    _check(address)
    return {"address": address}


def _check(address: str) -> None:
    """Raise `ConfigError` for what can be no address of a scheduler, before any wait."""
    from distributed.comm.registry import backends

    scheme, _, place = address.rpartition("://")
    try:
        has_port = bool(urlsplit(f"//{place}").port)
    except ValueError:
        has_port = False
    # In this process, there are no ports.
    if (scheme or "tcp") not in backends or not (has_port or scheme == "inproc"):
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
def _here(number: str) -> Iterator[Any]:
    """A cluster of so many processes, that ends with the work."""
    import dask
    from distributed import LocalCluster

    is_number = number.isdecimal() and len(number) <= len(str(MOST_WORKERS))
    if not is_number or not 1 <= int(number) <= MOST_WORKERS:
        raise ConfigError(
            f"--dask local:{shortened(number)}: wanted a number of workers from 1 to "
            f"{MOST_WORKERS}, as in local:4"
        )
    settings = {"distributed.scheduler.allowed-failures": 1}
    with (
        dask.config.set(settings),
        tempfile.TemporaryDirectory(prefix="fastcomm-") as folder,
    ):
        with held_back():
            cluster = LocalCluster(
                n_workers=int(number),
                threads_per_worker=1,
                dashboard_address=None,
                local_directory=folder,
                silence_logs=logging.CRITICAL,
            )
        with cluster:
            yield cluster


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
