"""How commands read a run: options that several have, the executor, progress on stderr."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from fastcomm.checks import MOST_WORKERS, Range, option_name
from fastcomm.cli.commands import option_of, options_of
from fastcomm.cli.messages import warn
from fastcomm.critical_path.options import PathOptions
from fastcomm.errors import ConfigError
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import READING, option_field
from fastcomm.options import ReadOptions, Window

if TYPE_CHECKING:
    from fastcomm.executors.executor import Executor, OpenedRun

F = TypeVar("F", bound=Callable[..., Any])
_Options = list[Callable[[Any], Any]]
_READING = options_of(ReadOptions, without=("step_boundary",))


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
        from fastcomm.executors import processes
        from fastcomm.executors.executor import PRELOAD, executor_of

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
    from fastcomm import preparation
    from fastcomm.show.console import progress

    standing = click.get_current_context().params if is_one_of_two else standing_options()
    return preparation.open_traces(paths, reading, executor, standing=standing, show=progress)


@contextmanager
def opened_run(
    paths: Sequence[str | Path], reading: ReadOptions, execution: ExecutionOptions
) -> "Iterator[OpenedRun]":
    """Find the traces of a run, and keep its executor for the block; see `open_traces`."""
    with executor_for(execution) as executor:
        yield open_traces(paths, reading, executor)


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    """Return a decorator that adds options to a command; its help lists them in this order."""

    def decorate(command: F) -> F:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


def builds(**kinds: type) -> Callable[[F], F]:
    """Return a decorator that gives a command its options as objects.

    Each class takes the parameters of the command that are named as its fields.
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def call(*args: Any, **values: Any) -> Any:
            for name, kind in kinds.items():
                own = [field.name for field in fields(kind) if field.name in values]
                try:
                    values[name] = kind(**{name: values.pop(name) for name in own})
                except ConfigError as error:
                    raise ConfigError(_as_options(str(error), own)) from error
            return command(*args, **values)

        built = {**getattr(command, "option_classes", {}), **kinds}
        call.option_classes = built  # type: ignore[attr-defined]
        return cast("F", call)

    return decorate


def _as_options(text: str, names: Sequence[str]) -> str:
    """Write the fields that begin an error message as options of the command line.

    Of the words before the colon, those among `names` are fields: "fuse_below" becomes
    "--fuse-below".
    """
    subject, colon, rest = text.partition(":")
    subject, contradict, other = subject.partition(" contradict ")
    parts = [option_name(w) if w in names else w for w in subject.split(" ")]
    return f"{' '.join(parts)}{contradict}{other}{colon}{rest}"


def workers_option(kind: str = "processes", **attrs: Any) -> Callable[[F], F]:
    """Return the option of parallel workers; `kind` (processes, threads) is for its help."""
    text = f"Number of workers that run in parallel. They are {kind}."
    return option_of(ExecutionOptions, "workers", help=text, **attrs)


# Scripts state the number of workers for all commands: with one rank it has no effect. `info`
# reads one rank unless --all is given.
_PROCESSES = workers_option(needs=("--all",))
_CLUSTER: _Options = options_of(ExecutionOptions, "dask", "dask_wait")


def run_options(command: F) -> F:
    """Add the options that say how the traces of a run are found and read.

    The command gets them as its parameters `reading`, a `ReadOptions`, and `execution`, an
    `ExecutionOptions`.
    """
    grouped = builds(reading=ReadOptions, execution=ExecutionOptions)(command)
    return with_options([*_READING, _PROCESSES, *_CLUSTER])(grouped)


def cluster_options(command: F) -> F:
    """Add the options of a Dask cluster."""
    return with_options(_CLUSTER)(command)


def path_options(command: F) -> F:
    """Add the options of a window and a rank; the command gets them as `path_options`."""
    options = [*options_of(Window), option_of(PathOptions, "rank")]
    return with_options(options)(builds(path_options=PathOptions)(command))


_MEASURED: _Options = [
    *options_of(MetricsOptions, "link_bandwidth", "cluster", "gpus_per_node", "steps"),
    option_of(ReadOptions, "step_boundary"),
    *options_of(MetricsOptions, "bytes", "clock_alignment"),
    option_of(ExecutionOptions, "dask_scratch"),
]


def measure_options(command: F, kind: type[MetricsOptions] = MetricsOptions) -> F:
    """Add the options that say what is measured, and `run_options`.

    The command gets them as `metrics`, which is of that kind, `reading` and `execution`.
    """
    return with_options(_MEASURED)(builds(metrics=kind)(run_options(command)))


def throughput_options(command: F) -> F:
    """Add the options on FLOPs and tokens, fields of `MetricsOptions`."""
    return with_options(options_of(MetricsOptions, "flops", "gpu", "tokens_per_step"))(command)
