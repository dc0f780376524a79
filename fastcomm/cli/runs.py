"""How commands read a run: the executor of its ranks, its traces, and progress on stderr."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from fastcomm.checks import MOST_WORKERS, Range
from fastcomm.cli.messages import warn
from fastcomm.option_fields import READING, option_field
from fastcomm.options import ReadOptions

if TYPE_CHECKING:
    from fastcomm.executors import Executor
    from fastcomm.executors.opened import OpenedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """Where the ranks of a run are read: in processes of this machine, or on a Dask cluster."""

    workers: int = option_field(
        "Number of workers that run in parallel. They are processes.",
        1,
        group=READING,
        limits=Range(1, MOST_WORKERS),
        is_common=True,
        not_with=("dask",),
    )
    dask: str | None = option_field(
        "Use a Dask cluster: tcp://host:8786 or file:scheduler.json.",
        group=READING,
        metavar="ADDRESS",
        # With these, one rank is read, on this machine.
        not_with=("--compat", "--save", "--deps", "--to uniform"),
    )
    dask_wait: float = option_field(
        "Maximum time to wait for the scheduler and its workers (with --dask).",
        60,
        group=READING,
        limits=Range(0, 1e6, is_open=True),
        metavar="SECONDS",
        needs=("dask",),
    )
    dask_scratch: Path | None = option_field(
        "Shared directory for intermediate results (with --dask).",
        group=READING,
        path="new directory",
        needs=("dask",),
    )


@contextmanager
def executor_for(options: ExecutionOptions) -> "Iterator[Executor]":
    """Yield the executor of --workers or --dask; processes start during other imports."""
    if options.dask is None:
        from fastcomm.analyses.workers import PRELOAD, executor_of
        from fastcomm.executors import processes

        if options.workers > 1:
            processes.start_early(PRELOAD)
        yield executor_of(options.workers)
        return
    from fastcomm.executors import dask

    scratch = options.dask_scratch and options.dask_scratch.absolute()
    with dask.connected(options.dask, wait_s=options.dask_wait, scratch=scratch) as executor:
        warn(executor.warnings)
        yield executor


def standing_options() -> list[str]:
    """Return the names of the options of this command that its command line does not give."""
    ctx = click.get_current_context()
    is_typed = ParameterSource.COMMANDLINE
    return [name for name in ctx.params if ctx.get_parameter_source(name) is not is_typed]


def open_traces(
    paths: Sequence[str | Path],
    reading: ReadOptions,
    executor: "Executor | None" = None,
    *,
    is_one_of_two: bool = False,
) -> "OpenedRun":
    """Find the traces of a run, with the options of the running command.

    Parameters
    ----------
    paths
        Files and directories.
    reading
        How to read them.
    executor
        Where ranks will be read, with a progress bar; None reads here.
    is_one_of_two
        Whether the command opens two runs. An option that this run ignores is then a warning,
        since it may be meant for the other; otherwise it is an error.

    Raises
    ------
    FastcommError
        As of `preparation.open_traces`.

    """
    from fastcomm.analyses import preparation
    from fastcomm.report.console import progress

    standing = click.get_current_context().params if is_one_of_two else standing_options()
    return preparation.open_traces(paths, reading, executor, standing=standing, show=progress)


@contextmanager
def opened_run(
    paths: Sequence[str | Path], reading: ReadOptions, execution: ExecutionOptions
) -> "Iterator[OpenedRun]":
    """Find the traces of a run, and keep its executor for the block; see `open_traces`."""
    with executor_for(execution) as executor:
        yield open_traces(paths, reading, executor)
