"""Options that several commands share, and the words behind them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli.messages import warn
from fastcomm.cli.ranges import COUNT, SECONDS, WORKERS, NumberList, numbers, option_name
from fastcomm.errors import ConfigError

if TYPE_CHECKING:
    from fastcomm.executors.executor import Executor
    from fastcomm.readers.formats import OpenOptions
    from fastcomm.trace.run import RunTraces

F = TypeVar("F", bound=Callable[..., Any])

_SIZES = ("tp", "pp", "dp", "ep", "cp")


class FileOrUrl(click.Path):
    """A path that exists, or a URL, of which reading it says whether it does."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """The word itself where it is a URL."""
        return value if "://" in str(value) else super().convert(value, param, ctx)


class TracePath(click.Path):
    """A trace or a directory that exists."""

    def __init__(self) -> None:
        super().__init__(exists=True, path_type=Path)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path; raise TraceFileError for standard input."""
        from fastcomm.readers.detection import refuse_standard_input

        refuse_standard_input(value)
        return super().convert(value, param, ctx)


class Output(click.Path):
    """A file or a directory to write to, which need not exist."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path; ConfigError for a URL or an empty name, before anything is done."""
        from fastcomm.remote import refuse_output

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
        from fastcomm.aside import check_replaceable
        from fastcomm.guard import note_output

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
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def run_options(command: F) -> F:
    """The options that say what a run is and how to read it; `opened` takes them."""
    return with_options([*_reading(), *_going_on()])(command)


def reading_options(command: F) -> F:
    """The same without those of commands that go on without bad files, or read in parallel."""
    return with_options(_reading())(command)


def _reading() -> list[Callable[[F], F]]:
    sizes = [
        click.option(f"--{name}", type=COUNT, help=f"Size of {name.upper()}.")
        for name in _SIZES
    ]
    return [
        click.option(
            "--ranks", type=NumberList(), metavar="LIST", help="Only these ranks: 0-7,12."
        ),
        *sizes,
        click.option(
            "--order",
            metavar="ORDER",
            help="Dimensions, adjacent ranks first, or a name: megatron (tp-cp-ep-dp-pp, the "
            "default), deepspeed, torchtitan, vllm.",
        ),
        click.option(
            "--config",
            "config_path",
            type=FileOrUrl(exists=True, dir_okay=False),
            help="TOML file: parallelism, tags, kernel patterns, iterations, link.",
        ),
        click.option(
            "--guess-tags",
            is_flag=True,
            help="Guess the parallelism of untagged process groups from their traffic.",
        ),
        click.option(
            "--iteration-regex",
            metavar="REGEX",
            help="Annotations that mark iterations; the first group is the number.",
        ),
        click.option(
            "--allow-truncated", is_flag=True, help="Read the whole events of a cut file."
        ),
    ]


keep_going_option = click.option(
    "--keep-going",
    is_flag=True,
    help="Skip ranks whose files cannot be read, list them, and exit with 3.",
)


def _going_on() -> list[Callable[[F], F]]:
    return [
        keep_going_option,
        click.option(
            "--workers",
            type=WORKERS,
            default=1,
            show_default=True,
            help="Processes that read ranks at the same time.",
        ),
        *_cluster(),
    ]


def cluster_options(command: F) -> F:
    """The options of those alone that name a cluster."""
    return with_options(_cluster())(command)


def _cluster() -> list[Callable[[F], F]]:
    return [
        click.option(
            "--dask",
            metavar="ADDRESS",
            help="Read ranks on a Dask cluster: tcp://host:8786, file:scheduler.json, or "
            "local:4 for one of 4 processes here.",
        ),
        click.option(
            "--dask-wait",
            type=SECONDS,
            default=60,
            show_default=True,
            metavar="SECONDS",
            help="How long to wait for the scheduler, and for workers while there are none.",
        ),
    ]


@contextmanager
def engine_of(words: dict[str, Any]) -> "Iterator[Executor]":
    """The engine that the words of `run_options` name; processes start while others import."""
    named: Path | None = words.get("dask_scratch")
    if words["dask"] is None:
        if named is not None:
            raise ConfigError("--dask-scratch: no cluster shares it; wanted --dask with it")
        from fastcomm.executors import local, processes

        if words["workers"] > 1:
            processes.start_early()
        yield local.Local(workers=words["workers"])
        return
    if words["workers"] > 1:
        raise ConfigError("--workers and --dask contradict each other; wanted one")

    from fastcomm.executors import dask

    scratch = named and named.absolute()
    with dask.connected(words["dask"], wait_s=words["dask_wait"], scratch=scratch) as engine:
        warn(engine.warnings)
        yield engine


def opened(
    paths: tuple[str, ...], words: dict[str, Any], engine: "Executor | None" = None
) -> "RunTraces":
    """The run that the paths and the words of `run_options` describe."""
    run = found(paths, words, open_options(words), engine)
    return run.only(numbers("--ranks", words["ranks"])) if words["ranks"] else run


def found(
    paths: tuple[str, ...],
    words: dict[str, Any],
    options: "OpenOptions",
    engine: "Executor | None",
) -> "RunTraces":
    """The run at the paths; one at URLs is looked for where it is read."""
    from functools import partial

    from fastcomm.readers.runs import open_run
    from fastcomm.remote import is_url

    look = partial(open_run, *seen_by(paths, words), options=options)
    return engine.call(look) if engine is not None and any(map(is_url, paths)) else look()


def seen_by(paths: tuple[str, ...], words: dict[str, Any]) -> tuple[str, ...]:
    """The paths as every worker understands them: those of a cluster begin elsewhere."""
    from fastcomm.remote import is_url

    if not words["dask"]:
        return paths
    return tuple(path if is_url(path) else str(Path(path).absolute()) for path in paths)


# Options that change which events are read, or what parallelism they have. Not the clock of
# iterations: a critical path is cut at host marks.
_REPEATED = ("ranks", *_SIZES, "order", "config_path", "guess_tags", "iteration_regex")


def reading_words(words: dict[str, Any]) -> list[str]:
    """Return the options of `reading_options` as words of a command line, but defaults."""
    line = []
    for name in (*_REPEATED, "allow_truncated"):
        value = words.get(name)
        if value is None or value is False:
            continue
        line.append("--config" if name == "config_path" else f"--{name.replace('_', '-')}")
        line += [] if value is True else [str(value)]
    return line


def open_options(words: dict[str, Any]) -> "OpenOptions":
    """What the words of `run_options` say about how to read."""
    from fastcomm.readers import config as config_
    from fastcomm.readers.formats import OpenOptions
    from fastcomm.remote import place
    from fastcomm.trace.iterations import IterationRule

    said = config_.Config(
        parallel=config_.Parallel(
            order=words["order"], **{name: words[name] for name in _SIZES}
        )
    )
    if words["config_path"]:
        said = said.over(config_.read(place(words["config_path"])))
    return OpenOptions(
        config=said,
        guess_tags=words["guess_tags"],
        iterations=IterationRule(
            regex=words["iteration_regex"], clock=words.get("iteration_clock", "auto")
        ),
        allow_truncated=words["allow_truncated"],
        keep_going=words.get("keep_going", False),
    )
