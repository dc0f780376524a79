"""Options that several commands have, and the objects that commands get them as."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial, wraps
from typing import Any, TypeVar, cast

import click

from fastcomm.checks import option_name
from fastcomm.cli.commands import option, option_of, options_of
from fastcomm.cli.parameter_types import (
    DURATION,
    NUMBER,
    RANK,
    RATE,
    SECONDS,
    TOKEN_COUNT,
    WORKERS,
    FileOrUrl,
    InstanceRange,
    NumberList,
    OutputFolder,
)
from fastcomm.cli.runs import ExecutionOptions
from fastcomm.errors import ConfigError
from fastcomm.option_fields import EDITS, MEASUREMENT, READING, WINDOW, WORKLOAD
from fastcomm.options import EditOptions, MetricsOptions, PathOptions, ReadOptions, Window

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

_cluster = partial(option_of, ExecutionOptions, group=READING)
_FILE = FileOrUrl(exists=True, dir_okay=False)
_READING = options_of(ReadOptions, without=("step_boundary",))


def workers_option(kind: str = "processes", **attrs: Any) -> Callable[[F], F]:
    """Return the option of parallel workers; `kind` (processes, threads) is for its help."""
    text = f"Number of workers that run in parallel. They are {kind}."
    return _cluster("workers", text, type=WORKERS, is_common=True, **attrs)


# Scripts state the number of workers for all commands: with one rank it has no effect. `info`
# reads one rank unless --all is given.
_PROCESSES = workers_option(not_with=("--dask",), needs=("--all",))
_CLUSTER: _Options = [
    _cluster(
        "dask",
        "Use a Dask cluster: tcp://host:8786 or file:scheduler.json.",
        metavar="ADDRESS",
        # With these, one rank is read, on this machine.
        not_with=("--compat", "--save", "--deps", "--to uniform"),
    ),
    _cluster(
        "dask_wait",
        "Maximum time to wait for the scheduler and its workers (with --dask).",
        type=SECONDS,
        metavar="SECONDS",
        needs=("--dask",),
    ),
]


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


# What is analyzed: steps, a window, a rank, and changes of it.

_window = partial(option_of, Window, group=WINDOW)
_edit = partial(option_of, EditOptions, group=EDITS, is_common=True)
_NAMED = {"needs": ("--annotation",), "not_with": ('--annotation ""',)}
steps_option = option(
    "--steps",
    type=NumberList(),
    group=WINDOW,
    is_common=True,
    help="Analyze only these steps, as in 4-6,12.",
)
_WINDOW: _Options = [
    _window(
        "step",
        "Number of the step. Default: the second, or the only one.",
        type=NUMBER,
        is_common=True,
    ),
    _window(
        "annotation",
        'Use the events with TEXT in their name as window; "" is the whole trace.',
        is_common=True,
    ),
    _window(
        "instance",
        "Which of the --annotation events, from 0; I:J spans I to J inclusive.",
        type=InstanceRange(),
        metavar="I[:J]",
        **_NAMED,
    ),
    _window("exact", "Match the whole name with --annotation.", **_NAMED),
    _window(
        "data_load_events",
        "Names of events that load data, instead of the usual ones.",
        metavar="REGEX",
    ),
]
_RANK = option_of(
    PathOptions,
    "rank",
    "Analyze this rank alone. Default: all ranks, joined by collectives.",
    type=RANK,
    group=WINDOW,
    is_common=True,
)
_EDITS: _Options = [
    _edit(
        "scale",
        "Multiply durations, as in comm:TP=0.5 or kernel:/gemm/=0.8.",
        metavar="WHAT=FACTOR",
    ),
    _edit(
        "set",
        "Set durations or the bandwidth of a link, as in link:TP=800Gbit/s.",
        metavar="WHAT=VALUE",
    ),
    _edit(
        "heal",
        "Make a rank or link as fast as its peers: rank:5, link:3-7.",
        metavar="WHAT",
    ),
    _edit(
        "remove",
        "Remove work or delays: op:Broadcast, wait:TP, launches, gaps.",
        metavar="WHAT",
    ),
    _edit(
        "overlap",
        "Hide the communication of a parallelism under compute.",
        metavar="TAG",
    ),
    _edit(
        "fuse_below",
        "Fuse neighboring kernels shorter than TIME, as in 5us.",
        type=DURATION,
        is_common=False,
    ),
    _edit(
        "edits",
        'Apply the edits of a TOML file first: scale = ["comm:TP=0.5"].',
        type=_FILE,
        is_common=False,
    ),
]


def window_options(command: F) -> F:
    """Add the options that select a window, fields of `Window`."""
    return with_options(_WINDOW)(command)


def path_options(command: F) -> F:
    """Add the options of a window and a rank; the command gets them as `path_options`."""
    return with_options([*_WINDOW, _RANK])(builds(path_options=PathOptions)(command))


def edit_options(command: F) -> F:
    """Add the options of what-if edits, fields of `EditOptions`."""
    return with_options(_EDITS)(command)


# What is measured.

_measured = partial(option_of, MetricsOptions, group=MEASUREMENT)


def link_bandwidth_option(**attrs: Any) -> Callable[[F], F]:
    """Return the option of the bandwidth of a GPU's link."""
    text = "Bandwidth of one GPU's link in one direction, as in 400Gbit/s or 50GB/s."
    return _measured("link_bandwidth", text, type=RATE, is_common=True, **attrs)


def cluster_option(default: str) -> Callable[[F], F]:
    """Return the option of a cluster; `default` is what holds without it."""
    text = "Cluster: a800, dgx-h100 (or h100), gb200-nvl72, ..., or a TOML file. Default: "
    return _measured("cluster", f"{text}{default}.", metavar="NAME|FILE", is_common=True)


_MEASURED: _Options = [
    link_bandwidth_option(),
    cluster_option("none"),
    _measured(
        "gpus_per_node",
        "GPUs per node. Default: by the traces' host names.",
        type=click.IntRange(1, 1 << 16),
        group=WORKLOAD,
    ),
    steps_option,
    option_of(ReadOptions, "step_boundary"),
    _measured(
        "bytes", "Bytes that bandwidth and volume count: as nccl-tests, on links, or per call."
    ),
    _measured(
        "clock_alignment", "How clocks are aligned: by collectives, or not.", group=READING
    ),
    _cluster(
        "dask_scratch",
        "Shared directory for intermediate results (with --dask).",
        type=OutputFolder(),
        needs=("--dask",),
    ),
]
_THROUGHPUT: _Options = [
    _measured("flops", "Count the FLOPs of a step; reads all events of the traces once more."),
    _measured(
        "gpu",
        "GPU whose peaks FLOPs are compared with (metrics: --flops). Default: by the traces.",
        metavar="NAME",
        needs=("--flops",),
    ),
    _measured(
        "tokens_per_step",
        "Tokens of a step of all ranks, for tokens per second.",
        type=TOKEN_COUNT,
    ),
]


def measure_options(command: F, kind: type[MetricsOptions] = MetricsOptions) -> F:
    """Add the options that say what is measured, and `run_options`.

    The command gets them as `metrics`, which is of that kind, `reading` and `execution`.
    """
    return with_options(_MEASURED)(builds(metrics=kind)(run_options(command)))


def throughput_options(command: F) -> F:
    """Add the options on FLOPs and tokens, fields of `MetricsOptions`."""
    return with_options(_THROUGHPUT)(command)
