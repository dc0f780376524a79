"""The recommended profiler of a training job, and when it records."""

import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

from fastcomm.errors import ConfigError
from fastcomm.torch.handler import is_failure, own_process, trace_handler
from fastcomm_kernels import temporary

_LOG = logging.getLogger("fastcomm")
_WARMUP = 1  # steps that the profiler runs before it records, as its first events are late


def profiler(
    every: int = 500,
    steps: int = 3,
    *,
    directory: str | os.PathLike[str] = "traces",
    first: int = 10,
    record_shapes: bool = False,
    with_stack: bool = False,
    execution_trace: bool = False,
    **options: Any,
) -> Any:
    """Return a `torch.profiler.profile` with the recommended settings, to be used with `with`.

    Call its `step()` at the end of each training step. Outside of windows the profiler does
    nothing. In a window of `steps` steps, and one step before it, each operator takes some
    microseconds longer; the export at its end takes some seconds for 100 MB of trace.

    Parameters
    ----------
    every
        Steps from the beginning of a window to that of the next. With 500, the cost of a window
        is spread over 500 steps.
    steps
        Steps of a window. Three tell a straggler from chance; each adds the events of a step to
        the trace, often 10 to 100 MB.
    directory
        Directory of all runs, which all ranks share; see `trace_handler`.
    first
        Steps before the first window: the first steps of a job compile and allocate.
    record_shapes
        Record the shapes of operators, which FLOPs are computed from. The steps of a window get
        a few percent longer, and the trace a third larger.
    with_stack
        Record the Python stack of operators. The steps of a window take several times as long,
        so that their times are no longer those of the training.
    execution_trace
        Record the tensors of operators, too, for the critical path: `torch_et_R.json.gz`. It is
        about as large as the trace.
    **options
        Further options of `trace_handler`; `report` is on unless it is False.

    Raises
    ------
    ConfigError
        If a number of steps is invalid, or PyTorch is not installed.

    """
    try:
        import torch.profiler
    except ImportError as error:
        raise ConfigError(
            f"profiler: needs PyTorch, and it cannot be imported: {error}"
        ) from error
    handler = trace_handler(directory, **{"report": True, **options})
    observer = _observer(torch.profiler.ExecutionTraceObserver) if execution_trace else None
    return _profile(torch.profiler.profile)(
        schedule=_schedule(every, steps, first, torch.profiler.ProfilerAction),
        on_trace_ready=handler,
        record_shapes=record_shapes,
        with_stack=with_stack,
        execution_trace_observer=observer,
    )


def _profile(kind: Any) -> Any:
    """Return a kind of PyTorch's `profile` that notes whether an exception ends its block."""

    class Profile(kind):  # type: ignore[misc]
        """Notes it also outside of windows: at the end, nothing tells of `sys.exit(1)`."""

        def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
            own_process().is_failing = is_failure(error)
            super().__exit__(kind, error, traceback)

    return Profile


def _observer(kind: Any) -> Any:
    """Return an observer that writes a whole file for each window.

    `kind` is PyTorch's `ExecutionTraceObserver`, which writes one file for all of them.
    """

    class WindowObserver(kind):  # type: ignore[misc]
        """Finishes its file whenever it stops."""

        finished = ""
        _is_finishing = False

        def start(self) -> None:
            if not self.is_registered:
                try:
                    path = temporary.root() / f"fastcomm-{secrets.token_hex(8)}.et.json"
                except OSError as error:  # nothing may disturb the training
                    _LOG.warning("fastcomm: no execution trace: %s", error)
                    return
                self.register_callback(str(path))
            super().start()

        def stop(self) -> None:
            super().stop()
            if self.is_registered and not self._is_finishing:
                self._is_finishing = True  # finishing the file stops once more
                self.finished = self.get_output_file_path() or ""
                self.unregister_callback()
                self._is_finishing = False

    return WindowObserver()


def _schedule(every: int, steps: int, first: int, actions: Any) -> Callable[[int], Any]:
    """Return the action of each step. Raises `ConfigError` for invalid numbers."""
    numbers = {"every": every, "steps": steps, "first": first}
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError(f"profiler: {name} {number!r}: expected a whole number above 0")
    if steps + _WARMUP >= every:
        raise ConfigError(
            f"profiler: every {every} steps a window of {steps}, and a step before it, leave "
            "none without; raise every"
        )

    def action(step: int) -> Any:
        place = (step - first) % every
        if step < first - _WARMUP:
            return actions.NONE
        if place >= every - _WARMUP:
            return actions.WARMUP
        if place >= steps:
            return actions.NONE
        return actions.RECORD_AND_SAVE if place == steps - 1 else actions.RECORD

    return action
