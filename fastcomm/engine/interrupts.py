"""Signals to a group of processes reach workers, too: who started them answers for them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from fastcomm.signals import SIGNALS, deferred


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
