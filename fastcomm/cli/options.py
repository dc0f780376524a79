"""Options that several commands share, and the objects that commands get them as."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from fastcomm.checks import option_name
from fastcomm.cli.commands import EDITS, LAYOUT, READING, option
from fastcomm.cli.messages import warn
from fastcomm.cli.values import COUNT, SECONDS, WORKERS, Duration, FileOrUrl, NumberList
from fastcomm.errors import ConfigError
from fastcomm.options import ReadOptions

if TYPE_CHECKING:
    from fastcomm.executors import Executor
    from fastcomm.trace.run import RunTraces

F = TypeVar("F", bound=Callable[..., Any])


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


def run_options(command: F) -> F:
    """Add the options that say how the traces of a run are found and read.

    The command gets them as its parameters `reading`, a `ReadOptions`, and `execution`, an
    `ExecutionOptions`.
    """
    grouped = builds(reading=ReadOptions, execution=ExecutionOptions)(command)
    return with_options([*_READING, _PROCESSES, keep_going_option, *_CLUSTER])(grouped)


def reading_options(command: F) -> F:
    """Add the options of `run_options` without those of parallel reading, as `reading`."""
    grouped = builds(reading=ReadOptions)(command)
    return with_options([*_READING, keep_going_option])(grouped)


_SIZES = {
    "tp": "Tensor-parallel size.",
    "pp": "Pipeline-parallel size.",
    "dp": "Data-parallel size.",
    "ep": "Expert-parallel size.",
    "cp": "Context-parallel size.",
}
_SIZES_ROW = (
    "--tp, --pp, --dp, --ep, --cp N",
    "Sizes of the parallelisms, where traces do not name their process groups.",
)


def _sizes() -> list[Callable[[Any], Any]]:
    """Return the options of the sizes, which the help shows in one row."""
    return [
        option(
            f"--{name}",
            type=COUNT,
            group=LAYOUT,
            is_common=True,
            help=text,
            row=_SIZES_ROW if name == "tp" else ("", ""),
        )
        for name, text in _SIZES.items()
    ]


_READING: list[Callable[[Any], Any]] = [
    option(
        "--ranks",
        type=NumberList(),
        metavar="LIST",
        group=LAYOUT,
        is_common=True,
        help="Read only these ranks, as in 0-7,12.",
    ),
    *_sizes(),
    option(
        "--order",
        metavar="ORDER",
        group=LAYOUT,
        help="Rank order: megatron (default), deepspeed, torchtitan, vllm, or as in "
        "tp-cp-ep-dp-pp.",
    ),
    option(
        "--config",
        type=FileOrUrl(exists=True, dir_okay=False),
        metavar="FILE",
        group=LAYOUT,
        help="Read settings of the run (parallelism, tags, kernels, link) from a TOML file.",
    ),
    option(
        "--guess-tags",
        is_flag=True,
        group=LAYOUT,
        help="Guess the parallelism of untagged process groups from their traffic.",
    ),
    option(
        "--iteration-regex",
        metavar="REGEX",
        group=READING,
        help="Names of the events that mark steps. The first group is the step number.",
    ),
    option(
        "--allow-truncated",
        is_flag=True,
        group=READING,
        help="Read truncated traces up to the last complete event.",
    ),
]


keep_going_option = option(
    "--keep-going",
    is_flag=True,
    group=READING,
    help="Skip ranks that cannot be read, list them, and exit with code 3.",
)


def workers_option(kind: str = "processes", **attrs: Any) -> Callable[[F], F]:
    """Return the option of parallel workers; `kind` (processes, threads) is for its help."""
    return option(
        "--workers",
        type=WORKERS,
        default=1,
        group=READING,
        is_common=True,
        help=f"Number of workers that run in parallel. They are {kind}.",
        **attrs,
    )


dask_wait_option = option(
    "--dask-wait",
    type=SECONDS,
    default=60,
    group=READING,
    metavar="SECONDS",
    needs=("--dask",),
    help="Maximum time to wait for the scheduler and its workers (with --dask).",
)

# With these, one rank is read, on this machine.
_ONE_RANK = ("--compat", "--save", "--deps", "--to uniform")
# Scripts state the number of workers for all commands: with one rank it has no effect. `info`
# reads one rank unless --all is given.
_PROCESSES = workers_option(not_with=("--dask",), needs=("--all",))
_CLUSTER: list[Callable[[Any], Any]] = [
    option(
        "--dask",
        metavar="ADDRESS",
        group=READING,
        not_with=_ONE_RANK,
        help="Use a Dask cluster: tcp://host:8786, file:scheduler.json, or local:4.",
    ),
    dask_wait_option,
]


def cluster_options(command: F) -> F:
    """Add the options of a Dask cluster."""
    return with_options(_CLUSTER)(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """Where the ranks of a run are read: in processes of this machine, or on a Dask cluster."""

    workers: int = 1
    dask: str | None = None
    dask_wait: float = 60
    dask_scratch: Path | None = None


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
) -> "RunTraces":
    """Find the traces of a run, with the options of the running command.

    Parameters
    ----------
    paths
        Files and directories.
    reading
        How to read them.
    executor
        Where ranks will be read; None reads here.
    is_one_of_two
        Whether the command opens two runs. An option that this run ignores is then a warning,
        since it may be meant for the other; otherwise it is an error.

    Raises
    ------
    FastcommError
        As of `preparation.open_traces`.

    """
    from fastcomm.analyses import preparation

    standing = click.get_current_context().params if is_one_of_two else standing_options()
    return preparation.open_traces(paths, reading, executor, standing=standing)


@contextmanager
def executor_for(options: ExecutionOptions) -> "Iterator[Executor]":
    """Yield the executor of --workers or --dask; processes start during other imports."""
    if options.dask is None:
        from fastcomm import executors
        from fastcomm.executors import processes

        if options.workers > 1:
            processes.start_early()
        yield executors.Local(workers=options.workers)
        return
    from fastcomm.executors import dask

    scratch = options.dask_scratch and options.dask_scratch.absolute()
    with dask.connected(options.dask, wait_s=options.dask_wait, scratch=scratch) as executor:
        warn(executor.warnings)
        yield executor


def edit_options(command: F) -> F:
    """Add the options of what-if edits, fields of `EditOptions`."""
    return with_options(_EDITS)(command)


_EDITS: list[Callable[[Any], Any]] = [
    option(
        "--scale",
        multiple=True,
        group=EDITS,
        is_common=True,
        metavar="WHAT=FACTOR",
        help="Multiply durations, as in comm:TP=0.5 or kernel:/gemm/=0.8. Repeatable.",
    ),
    option(
        "--set",
        multiple=True,
        group=EDITS,
        is_common=True,
        metavar="WHAT=VALUE",
        help="Set durations or the bandwidth of a link, as in link:TP=800Gbit/s. Repeatable.",
    ),
    option(
        "--heal",
        multiple=True,
        group=EDITS,
        is_common=True,
        metavar="WHAT",
        help="Make a rank or link as fast as its peers: rank:5, link:3-7. Repeatable.",
    ),
    option(
        "--remove",
        multiple=True,
        group=EDITS,
        is_common=True,
        metavar="WHAT",
        help="Remove work or delays: op:Broadcast, wait:TP, launches, gaps. Repeatable.",
    ),
    option(
        "--overlap",
        multiple=True,
        group=EDITS,
        is_common=True,
        metavar="TAG",
        help="Hide the communication of a parallelism under compute. Repeatable.",
    ),
    option(
        "--fuse-below",
        metavar="TIME",
        type=Duration(),
        group=EDITS,
        help="Fuse neighboring kernels shorter than TIME, as in 5us.",
    ),
    option(
        "--edits",
        type=FileOrUrl(exists=True, dir_okay=False),
        metavar="FILE",
        group=EDITS,
        help='Apply the edits of a TOML file first: scale = ["comm:TP=0.5"].',
    ),
]
