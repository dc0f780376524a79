"""A run that is opened: its traces, the executor that reads them, and its progress."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from fastcomm.executors import Executor, Progress, Task
from fastcomm.trace.run import RunTraces

P = TypeVar("P")
R = TypeVar("R")

# Shows that ranks are read while its block runs, which gets the function that counts each.
ShowProgress = Callable[[RunTraces], AbstractContextManager[Progress | None]]


def unseen(_: RunTraces) -> AbstractContextManager[None]:
    """Show no progress."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun(RunTraces):
    """The traces of a run, and how an analysis reads them."""

    executor: Executor
    show_progress: ShowProgress = unseen

    @classmethod
    def of(cls, traces: RunTraces, executor: Executor, show: ShowProgress = unseen) -> Self:
        """Return traces together with their executor, and what shows the progress."""
        values: dict[str, Any] = {
            field.name: getattr(traces, field.name) for field in fields(RunTraces)
        }
        return cls(**values, executor=executor, show_progress=show)

    def gather(self, task: Task[P, R]) -> R:
        """Run a task on all ranks; see `Executor.gather`."""
        with self.show_progress(self) as progress:
            return self.executor.gather(self, task, progress)

    def compile(self, kernels: Callable[[], object]) -> None:
        """Compile kernels before they are needed, if this machine needs them."""
        if self.executor.is_local:
            kernels()
