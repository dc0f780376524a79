"""Import all kernels; the server that workers are forked from imports this module."""

import sys
from contextlib import suppress
from types import TracebackType

from fastcomm.process import leave_out_pandas


def _print_unless_over(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print why a worker cannot start, unless the command that needs it has already ended."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_unless_over
leave_out_pandas()
with suppress(OSError):  # without room for a temporary file, workers load kernels themselves
    from fastcomm.analyses.preparation import run_kernels

    run_kernels()
