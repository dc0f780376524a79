"""Options that say which part of a run is looked at, and the words behind them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli.options import engine_of, open_options, with_options
from fastcomm.cli.ranges import NUMBER, numbers, whole
from fastcomm.errors import ConfigError
from fastcomm.ranges import shortened

if TYPE_CHECKING:
    from fastcomm.critical_path.ranks import Joined
    from fastcomm.critical_path.window import Window
    from fastcomm.executors.executor import Executor
    from fastcomm.trace.run import RunTraces, SkippedRank
    from fastcomm.trace.trace import Trace

F = TypeVar("F", bound=Callable[..., Any])


def window_options(command: F) -> F:
    """The options that say which window is meant; `wanted_window` takes them."""
    return with_options(_options())(command)


def _options() -> list[Callable[[F], F]]:
    return [
        click.option(
            "--iteration",
            type=NUMBER,
            metavar="N",
            help="Number of the iteration; by default the second, or the only one.",
        ),
        click.option(
            "--annotation",
            metavar="TEXT",
            help='Events with TEXT in their name are the window; "" is the whole trace.',
        ),
        click.option(
            "--instance",
            metavar="I[:J]",
            help="Which of these events, from 0 on; I:J is from I to J inclusive.",
        ),
        click.option("--exact", is_flag=True, help="TEXT is the whole name."),
        click.option(
            "--data-load-events",
            multiple=True,
            metavar="REGEX",
            help="Events that load data; may be given several times.",
        ),
    ]


def wanted_window(words: dict[str, Any]) -> "Window":
    """The window that the words of `window_options` describe."""
    from fastcomm.critical_path.window import Window

    if words["iteration"] is not None and words["annotation"] is not None:
        raise ConfigError("--iteration and --annotation contradict each other; wanted one")
    if words["instance"] is not None and words["annotation"] is None:
        raise ConfigError("--instance counts the events of --annotation; wanted both")
    return Window(
        iteration=words["iteration"],
        annotation=words["annotation"],
        instance=_instance(words["instance"]),
        exact=words["exact"],
    )


def window_words(words: dict[str, Any]) -> list[str]:
    """Return the options of `window_options` as words of a command line, but defaults."""
    line = []
    for name in ("iteration", "annotation", "instance"):
        if words[name] is not None:
            line += [f"--{name}", str(words[name])]
    line += ["--exact"] if words["exact"] else []
    for regex in words["data_load_events"]:
        line += ["--data-load-events", regex]
    return line


def _instance(text: str | None) -> int | tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    begin, end = whole(first), whole(last if colon else first)
    if begin is None or end is None:
        raise ConfigError(
            f"--instance: found {shortened(text)!r}, wanted a number, or two as in 0:3"
        )
    return (begin, end) if colon else begin


def opened_whole(
    paths: tuple[str, ...], words: dict[str, Any], engine: "Executor | None" = None
) -> "RunTraces":
    """The run that the paths and the words of `run_options` describe, with every event."""
    from fastcomm.cli.options import found

    run = found(paths, words, replace(open_options(words), whole=True), engine)
    return run.only(numbers("--ranks", words["ranks"])) if words["ranks"] else run


def joined_run(
    paths: tuple[str, ...], words: dict[str, Any]
) -> tuple["Joined", "Sequence[SkippedRank]"]:
    """Return the path of the window through all ranks, and the skipped ranks.

    Warnings of the run and the skipped ranks are printed to stderr.
    """
    from fastcomm.analyses.critical_path import join
    from fastcomm.cli.messages import say, warn
    from fastcomm.executors import warm
    from fastcomm.report.console import progress

    with engine_of(words) as engine:
        if engine.is_here:
            warm.compile_critical_path()
        run = opened_whole(paths, words, engine)
        warn(run.warnings)
        with progress(run) as advance:
            found, left_out = join(
                run,
                wanted_window(words),
                words["data_load_events"],
                workers=engine,
                keep_going=words["keep_going"],
                progress=advance,
            )
    say(*(f"skipped: {each}" for each in left_out))
    return found, left_out


def one_rank(
    paths: tuple[str, ...], words: dict[str, Any]
) -> tuple["Trace", "Sequence[SkippedRank]"]:
    """Return the trace of --rank, or of the first rank, and the skipped ranks.

    With --keep-going, files that cannot be opened are skipped; without --rank, also ranks
    that cannot be read, up to the first that can. Warnings of the run and the skipped ranks
    are printed to stderr.

    Raises
    ------
    ConfigError
        If an option of many machines is given.
    FastcommError
        If the rank, or with --keep-going every rank, cannot be read.

    """
    from fastcomm.cli.messages import say, warn

    if words["dask"] is not None:
        raise ConfigError("--dask: one rank is one worker's work; wanted --all-ranks with it")
    run = opened_whole(paths, words)
    warn((*_without_effect(words, run), *run.warnings))
    if words["rank"] is None and words["keep_going"]:
        trace, left_out = _first_readable(run)
        say(*(f"skipped: {each}" for each in left_out))
        return trace, left_out
    say(*(f"skipped: {each}" for each in run.skipped))
    rank = run.ranks[0] if words["rank"] is None else words["rank"]
    return run.read(rank), run.skipped


def _first_readable(run: "RunTraces") -> tuple["Trace", "Sequence[SkippedRank]"]:
    """Return the trace of the first rank that can be read, and the skipped ranks.

    Raises
    ------
    FastcommError
        If no rank can be read.

    """
    from fastcomm.errors import FastcommError
    from fastcomm.executors.executor import by_rank, lost

    left_out: list[SkippedRank] = []
    for source in run.sources:
        try:
            trace = source.read()
        except FastcommError as error:
            left_out.append(lost(source, error))
            continue
        return trace, by_rank(left_out, len(run.sources), run.skipped)
    raise FastcommError(f"no rank could be read: {left_out[0].error}")


def _without_effect(words: dict[str, Any], run: "RunTraces") -> list[str]:
    """Return warnings of the options that change nothing where one rank is read."""
    warnings = []
    if words["workers"] > 1:
        warnings.append(
            "--workers changes nothing: one rank is read; with --all-ranks it reads several at "
            "the same time"
        )
    if words["keep_going"] and words["rank"] is not None and not run.skipped:
        warnings.append(
            "--keep-going changes nothing: only the rank of --rank is read; without --rank it "
            "goes on to the next rank, and with --all-ranks it leaves bad ranks out"
        )
    return warnings
