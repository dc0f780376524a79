"""Options that several commands share, and the objects that commands get them as."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from fastcomm.checks import MOST_LISTED, MOST_NUMBER, MOST_WORKERS, RANKS, Range, shortened
from fastcomm.cli.commands import LAYOUT, READING, option
from fastcomm.cli.messages import warn
from fastcomm.errors import ConfigError, TraceFileError, shell_joined
from fastcomm.options import ReadOptions

if TYPE_CHECKING:
    from fastcomm.executors import Executor

_MOST_DIGITS = len(str(MOST_NUMBER))


class Number(click.FloatRange):
    """A finite number of a range, in a unit that is `unit` times that of the range."""

    def __init__(self, within: Range, *, unit: float = 1.0) -> None:
        """Accept numbers of `within` when multiplied by `unit`: 1e-6 for us of seconds."""
        super().__init__(within.least / unit, within.most / unit, min_open=within.is_open)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; a usage error for NaN, which no comparison refuses."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Rate(click.ParamType[str]):
    """A bandwidth with its unit, kept as text."""

    name = "rate"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the text; ConfigError where it is no bandwidth."""
        from fastcomm.units import parse_bandwidth

        parse_bandwidth(value, option_name(param))
        return value


class NumberList(click.ParamType[tuple[int, ...]]):
    """Numbers as in 0-7,12."""

    name = "list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers; ConfigError where the text is no list of numbers."""
        return numbers(option_name(param), str(value))


def option_name(param: click.Parameter | None) -> str:
    """Return the long name of a parameter as a user writes it."""
    return max(param.opts, key=len) if param else "value"


def whole(text: str) -> int | None:
    """Return the number that digits write; None for other texts, or above 2^53 - 1."""
    is_number = text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) <= MOST_NUMBER
    return int(text) if is_number else None


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a text such as "0-7,12"; errors begin with `name`.

    Raises
    ------
    ConfigError
        If the text is anything else, or names more than 2^20 numbers.

    """
    values: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        least, most = whole(first), whole(last if dash else first)
        if least is None or most is None or least > most:
            raise ConfigError(
                f"{name}: found {shortened(part)!r} in {shortened(text)!r}, wanted numbers "
                f"from 0 to {MOST_NUMBER}, as in 0-7,12"
            )
        if len(values) + most - least >= MOST_LISTED:
            raise ConfigError(
                f"{name}: {shortened(text)!r} names more than {MOST_LISTED} numbers; wanted "
                "fewer, as in 0-7,12"
            )
        values.extend(range(least, most + 1))
    return tuple(values)


NUMBER = click.IntRange(0, MOST_NUMBER)
COUNT = click.IntRange(1, int(RANKS.most))
RANK = click.IntRange(0, 1 << 31)
WORKERS = click.IntRange(1, MOST_WORKERS)
STEPS = click.IntRange(1, 1 << 16)
BYTES = click.IntRange(1, 1 << 40)
SECONDS = Number(Range(0, 1e6, is_open=True))


F = TypeVar("F", bound=Callable[..., Any])


class FileOrUrl(click.Path):
    """A path that exists, or a URL, of which reading it says whether it does."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return a URL unchanged, or the path of a file that exists."""
        return value if "://" in str(value) else super().convert(value, param, ctx)


class TracePath(click.Path):
    """A trace or a directory that exists, for `command` where another one reads its like."""

    def __init__(self, command: str = "") -> None:
        super().__init__(exists=True, path_type=Path)
        self._command = command

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path; raise TraceFileError for standard input."""
        from fastcomm.readers.search import refuse_standard_input

        refuse_standard_input(value)
        return super().convert(value, param, ctx)


class RunArgument(TracePath):
    """A trace or a directory of traces; of dPRO trials, the error names `command` of dpro."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path; raise TraceFileError for a dPRO trial or a uniform trace."""
        from fastcomm.readers import dpro

        path = super().convert(value, param, ctx)
        if dpro.claims(path):
            raise dpro.trial_error(path, self._command)
        return path


class TrialPath(TracePath):
    """A dPRO trial or a uniform trace; of a run, the error names its command."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path; raise TraceFileError for traces of a profiler."""
        from fastcomm.readers.dpro import inputs

        path = super().convert(value, param, ctx)
        if inputs.is_run(path):
            line = shell_joined(["fastcomm", self._command, str(path)])
            raise TraceFileError(f"{path} is no dPRO trial; for traces of a profiler: {line}")
        return path


class Output(click.Path):
    """A file or a directory to write to, which need not exist."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path; ConfigError for a URL or an empty name, before anything is done."""
        from fastcomm.files import refuse_output

        refuse_output(option_name(param), value)
        return super().convert(value, param, ctx)


class OutputFile(Output):
    """A file to write: no device, FIFO or symbolic link, which writing would replace."""

    def __init__(self, *, dir_okay: bool = False) -> None:
        super().__init__(dir_okay=dir_okay, path_type=Path)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path; raise FastcommError where it must not be replaced."""
        from fastcomm.files import check_replaceable, note_output

        path = super().convert(value, param, ctx)
        check_replaceable(path)
        note_output(path)
        return path


class OutputFolder(Output):
    """A directory to write to."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)


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
    """Return an error message; fields of `names` at its beginning are written as options."""
    subject, colon, rest = text.partition(":")
    subject, contradict, other = subject.partition(" contradict ")
    parts = [f"--{w.replace('_', '-')}" if w in names else w for w in subject.split(" ")]
    return f"{' '.join(parts)}{contradict}{other}{colon}{rest}"


def run_options(command: F) -> F:
    """Add the options that say how the traces of a run are found and read.

    The command gets them as `reading` and `execution`.
    """
    grouped = builds(reading=ReadOptions, execution=ExecutionOptions)(command)
    return with_options([*_READING, workers_option(), keep_going_option, *_CLUSTER])(grouped)


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


def workers_option(kind: str = "processes") -> Callable[[F], F]:
    """Return the option of parallel workers; `kind` (processes, threads) is for its help."""
    return option(
        "--workers",
        type=WORKERS,
        default=1,
        group=READING,
        is_common=True,
        help=f"Number of workers that run in parallel ({kind}).",
    )


dask_wait_option = option(
    "--dask-wait",
    type=SECONDS,
    default=60,
    group=READING,
    metavar="SECONDS",
    help="Maximum time to wait for the Dask scheduler and its workers.",
)

_CLUSTER: list[Callable[[Any], Any]] = [
    option(
        "--dask",
        metavar="ADDRESS",
        group=READING,
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


@contextmanager
def executor_for(options: ExecutionOptions) -> "Iterator[Executor]":
    """Yield the executor of --workers or --dask; processes start during other imports."""
    if options.dask is None:
        if options.dask_scratch is not None:
            raise ConfigError("--dask-scratch: no cluster shares it; wanted --dask with it")
        from fastcomm import executors
        from fastcomm.executors import processes

        if options.workers > 1:
            processes.start_early()
        yield executors.Local(workers=options.workers)
        return
    if options.workers > 1:
        raise ConfigError("--workers and --dask contradict each other; wanted one")

    from fastcomm.executors import dask

    scratch = options.dask_scratch and options.dask_scratch.absolute()
    with dask.connected(options.dask, wait_s=options.dask_wait, scratch=scratch) as executor:
        warn(executor.warnings)
        yield executor
