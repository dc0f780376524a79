"""Options that commands share: how a run is measured, and where results go."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli.options import (
    NumberList,
    OutputFile,
    OutputFolder,
    Rate,
    builds,
    run_options,
    with_options,
)
from fastcomm.options import MetricsOptions, ReadOptions

if TYPE_CHECKING:
    from fastcomm.executors import Executor
    from fastcomm.metrics.result import Metrics
    from fastcomm.result import Result

F = TypeVar("F", bound=Callable[..., Any])


def measure_options(command: F) -> F:
    """Add the options that say what is measured, and `run_options`.

    The command gets them as `metrics`, `reading` and `execution`.
    """
    return with_options(_options())(builds(metrics=MetricsOptions)(run_options(command)))


def _options() -> list[Callable[[F], F]]:
    return [
        click.option(
            "--link-bandwidth",
            type=Rate(),
            metavar="RATE",
            help='Bandwidth of one GPU\'s link, one direction: "400Gbit/s", "50GB/s".',
        ),
        click.option(
            "--bytes",
            type=click.Choice(["payload", "bus", "msg"]),
            default="payload",
            show_default=True,
            help="Which bytes bandwidth and volume count.",
        ),
        click.option(
            "--steps",
            type=NumberList(),
            metavar="LIST",
            help="Only steps of these numbers: 4-6.",
        ),
        click.option(
            "--iteration-clock",
            type=click.Choice(["auto", "device", "host"]),
            default="auto",
            show_default=True,
            help="Where a step begins and ends. device: at the first GPU work launched inside "
            "its mark, and at that of the next; host: at the mark itself, which the GPU runs "
            "behind; auto: device if every rank has launches recorded.",
        ),
        click.option(
            "--clocks",
            type=click.Choice(["aligned", "raw"]),
            default="aligned",
            show_default=True,
            help="Compare the times of ranks with their clocks aligned by collectives, or as "
            "they are.",
        ),
        click.option(
            "--dask-scratch",
            type=OutputFolder(),
            metavar="DIR",
            help="With --dask: a directory that all workers share. What thousands of ranks "
            "leave goes there meanwhile, not into the memory of one worker.",
        ),
    ]


def measure(
    paths: tuple[str, ...],
    reading: ReadOptions,
    options: MetricsOptions,
    executor: "Executor",
) -> "Metrics":
    """Measure the run at the paths, with a progress bar."""
    from fastcomm.analyses import preparation
    from fastcomm.analyses.measure import compute_metrics
    from fastcomm.analyses.preparation import open_traces
    from fastcomm.report.console import progress

    run = open_traces(paths, reading, executor)
    if executor.is_here:
        preparation.compile_kernels()
    with progress(run) as advance:
        return compute_metrics(
            run, options, workers=executor, keep_going=reading.keep_going, progress=advance
        )


def print_json(found: "Result") -> None:
    """Print the JSON document of a result."""
    from fastcomm import result

    click.echo(result.dumps(found.to_dict()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """Where a result goes: the values of `result_options`."""

    as_json: bool = False
    output: Path | None = None
    xlsx: bool = False
    html: Path | None = None


def _beside_files(ctx: click.Context, _option: click.Parameter, said: bool) -> bool:
    """A workbook lies where the other files do."""
    if said and not ctx.params.get("output"):
        raise click.UsageError("--xlsx lies among the files of --output; wanted both", ctx)
    return said


def result_options(files: str, *, xlsx: bool = True, html: bool = True) -> Callable[[F], F]:
    """Add `--json`, `--output`, and where there are such, `--xlsx` and `--html`.

    `files` is what `--output` writes. The command gets `as_json`, `output`, `xlsx` and `html`,
    or with `builds(files=ResultFiles)` one object of them.
    """
    options = [
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        # Eager: known when --xlsx is looked at.
        click.option(
            "--output", "-o", type=OutputFolder(), metavar="DIR", help=files, is_eager=True
        ),
    ]
    if xlsx:
        options.append(
            click.option(
                "--xlsx",
                is_flag=True,
                callback=_beside_files,
                help="With --output: the tables as one Excel workbook, too.",
            )
        )
    if html:
        options.append(
            click.option(
                "--html",
                type=OutputFile(),
                metavar="FILE",
                help="Write a page for the browser, in one file that needs no network.",
            )
        )

    return with_options(options)
