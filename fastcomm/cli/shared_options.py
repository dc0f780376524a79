"""Options that several commands have, and the objects that commands get them as."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, cast

from fastcomm.checks import option_name
from fastcomm.cli.commands import option_of, options_of
from fastcomm.cli.runs import ExecutionOptions
from fastcomm.errors import ConfigError
from fastcomm.options import MetricsOptions, PathOptions, ReadOptions, Window

F = TypeVar("F", bound=Callable[..., Any])
_Options = list[Callable[[Any], Any]]


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


# How a run is read.

_READING = options_of(ReadOptions, without=("step_boundary",))


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


def reading_options(command: F) -> F:
    """Add the options of `run_options` without those of parallel reading, as `reading`."""
    return with_options(_READING)(builds(reading=ReadOptions)(command))


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
