"""The processes of this machine that read and analyze ranks."""

from fastcomm.checks import MOST_WORKERS, Range, invalid_value
from fastcomm.executors import Executor, Local

PRELOAD = "fastcomm.analyses.preload"  # has the kernels ready before workers need them


def executor_of(workers: int | Executor) -> Executor:
    """Return the executor for a number of local processes; executors are returned as is.

    Raises ConfigError for anything else.
    """
    if not isinstance(workers, int) and hasattr(workers, "gather"):
        return workers
    valid = Range(1, MOST_WORKERS)
    if not isinstance(workers, int) or not valid.holds(workers):
        raise invalid_value("workers", workers, f"{valid} (of processes), or an executor")
    return Local(workers=workers, preload=PRELOAD)
