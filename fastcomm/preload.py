"""Import all kernels; the server that workers are forked from imports this module."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from types import TracebackType

from fastcomm.process import collect_rarely, leave_out_pandas, remove_all


def _print_unless_over(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print why a worker cannot start, unless the command that needs it has already ended."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, error, trace)


_LOOK_S = 0.2  # how often


@contextmanager
def _ending_with(parent: int) -> Iterator[None]:
    """End this process in the block if its parent ends: compiling may take a minute more."""
    is_done = Event()

    def watch() -> None:
        while not is_done.wait(_LOOK_S):
            if os.getppid() != parent:
                remove_all()
                os._exit(1)

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()  # no thread may run while workers are forked


sys.excepthook = _print_unless_over
leave_out_pandas()
collect_rarely()


# Without room for a temporary file, workers load kernels themselves.
with _ending_with(os.getppid()), suppress(OSError):
    from fastcomm.preparation import run_metric_kernels

    run_metric_kernels()
