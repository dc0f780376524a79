"""What a file of a trial has that cannot be: an error of that file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastcomm.errors import TraceFileError

_STRANGE = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


@contextmanager
def whole(path: Path) -> Iterator[None]:
    """TraceFileError where an event lacks something, or has a value of another kind."""
    try:
        yield
    except _STRANGE as error:
        raise TraceFileError(
            f"{path}: an event that is none: {type(error).__name__}: {str(error)[:200]}"
        ) from error
