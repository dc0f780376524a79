"""Signals to a group of processes reach workers, too: who started them answers for them."""

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

INTERRUPT = (signal.SIGINT,)
INTERRUPT_OR_END = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_back(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Block signals; processes and threads that start meanwhile never get them."""
    # Starting it later would let the signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
