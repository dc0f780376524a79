"""Imported by the server that workers are forked from: they begin with all kernels loaded."""

import sys
from contextlib import suppress
from types import TracebackType

from fastcomm.analyses.preparation import run_kernels


def _print_unless_over(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print why a worker cannot begin, unless who wanted it has ended and taken all along."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_unless_over
with suppress(OSError):  # without room for a temporary file, workers load kernels themselves
    run_kernels()
