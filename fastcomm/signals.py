"""Ctrl-C and SIGTERM: one exception that unwinds the command, and no second while it does."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_QUIET_S = 3.0  # long enough to clean up; after it, a signal interrupts again
_AGAIN_S = 0.02  # until a signal is sent again whose exception was ignored

_last = -_QUIET_S
_deferrals = 0
_deferred: list[int] = []


def interrupt(number: int, _frame: FrameType | None) -> None:
    """Handle a signal: raise `KeyboardInterrupt` or `SystemExit`, unless one was just raised.

    Signals to a group of processes come in pairs, and the second must not stop the cleaning up.
    """
    global _last  # noqa: PLW0603 - signals are of the process
    if _deferrals:
        _deferred.append(number)
        return
    if monotonic() - _last < _QUIET_S:
        return
    _last = monotonic()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


@contextmanager
def deferred() -> Iterator[None]:
    """Handle signals that `interrupt` gets in this block at its end."""
    global _deferrals  # noqa: PLW0603
    _deferrals += 1
    try:
        yield
    finally:
        _deferrals -= 1
        if _deferred and not _deferrals:
            number = _deferred[0]
            _deferred.clear()
            signal.raise_signal(number)


def handle() -> None:
    """Handle signals by `interrupt`; one that comes inside of a destructor is not lost."""
    sys.unraisablehook = _again
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup or a shell wants it
            signal.signal(number, interrupt)


@contextmanager
def interruptible() -> Iterator[None]:
    """Handle signals in this block as `handle` does; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    unraisable = sys.unraisablehook
    handle()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = unraisable


def _again(found: "sys.UnraisableHookArgs") -> None:
    """Send a signal again whose exception Python cannot raise; print other errors."""
    global _last  # noqa: PLW0603
    if not isinstance(found.exc_value, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(found)
        return
    _last = -_QUIET_S
    is_interrupt = isinstance(found.exc_value, KeyboardInterrupt)
    number = signal.SIGINT if is_interrupt else signal.SIGTERM
    # Later: an exception that is raised in here would be ignored, too.
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
