"""The recommended profiler of a training job, and when it records."""

import os
from collections.abc import Callable
from typing import Any

from fastcomm.errors import ConfigError
from fastcomm.torch.handler import Keep, trace_handler

_WARMUP = 1  # steps that the profiler runs before it records, as its first events are late


def profiler(
    every: int = 500,
    steps: int = 3,
    *,
    directory: str | os.PathLike[str] = "traces",
    first: int = 10,
    report: bool = True,
    keep: Keep = "trace",
    record_shapes: bool = False,
    with_stack: bool = False,
    **options: Any,
) -> Any:
    """Return a `torch.profiler.profile` with the recommended settings, to be used with `with`.

    Call its `step()` at the end of each training step. Outside of windows the profiler does
    nothing. In a window of `steps` steps, and one step before it, each operator takes some
    microseconds longer; the export at its end takes about a second for each 100 MB of trace.

    Parameters
    ----------
    every
        Steps from the beginning of a window to that of the next. With 500, the cost of a window
        is spread over 500 steps.
    steps
        Steps of a window. Three are enough to tell a straggler from chance; each adds the events
        of a step to the trace, often 10 to 100 MB.
    directory
        Directory of all runs, which all ranks share; see `trace_handler`.
    first
        Steps before the first window: the first steps of a job compile and allocate.
    report
        Whether rank 0 prints the first screen of `fastcomm metrics` for each window.
    keep
        What remains of a trace; see `trace_handler`.
    record_shapes
        Record the shapes of operators, which FLOPs are computed from. Costs a few percent of the
        window's steps, and a third more trace.
    with_stack
        Record the Python stack of operators. Makes the steps of a window several times as
        long, so that their times are no longer those of training: off.
    **options
        Further options of `trace_handler`.

    Raises
    ------
    ConfigError
        If a number of steps is invalid, or PyTorch is not installed.

    """
    try:
        import torch.profiler
    except ImportError as error:
        raise ConfigError(f"profiler: needs PyTorch, which is not importable: {error}") from error
    handler = trace_handler(directory, report, keep, **options)
    return torch.profiler.profile(
        schedule=_schedule(every, steps, first, torch.profiler.ProfilerAction),
        on_trace_ready=handler,
        record_shapes=record_shapes,
        with_stack=with_stack,
    )


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
