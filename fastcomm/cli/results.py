"""Options that commands share: how a run is measured, and where results go."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli.options import OutputFile, OutputFolder, run_options, with_options
from fastcomm.cli.ranges import NumberList, Rate, numbers

if TYPE_CHECKING:
    from fastcomm.executors.executor import Executor
    from fastcomm.metrics.result import Metrics
    from fastcomm.result import Result

F = TypeVar("F", bound=Callable[..., Any])


def measure_options(command: F) -> F:
    """The options that say what is measured, and `run_options`; `compute` takes them."""
    return with_options(_options())(run_options(command))


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
            "byte_kind",
            type=click.Choice(["payload", "bus", "msg"]),
            default="payload",
            show_default=True,
            help="Which bytes bandwidth and volume count.",
        ),
        click.option(
            "--iterations",
            type=NumberList(),
            metavar="LIST",
            help="Only iterations of these numbers: 4-6.",
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


def compute(
    paths: tuple[str, ...],
    words: dict[str, Any],
    engine: "Executor",
    *,
    with_tables: bool = False,
) -> "Metrics":
    """Measure the run that the paths and the words of the options describe."""
    from fastcomm.analyses.measure import compute_metrics
    from fastcomm.cli.options import opened
    from fastcomm.executors import warm
    from fastcomm.report.console import progress

    found = opened(paths, words, engine)
    wanted = words["iterations"]
    if engine.is_here:
        warm.compile_kernels()
    with progress(found) as advance:
        return compute_metrics(
            found,
            link_bandwidth=words["link_bandwidth"],
            bytes=words["byte_kind"],
            iterations=numbers("--iterations", wanted) if wanted else None,
            workers=engine,
            keep_going=words["keep_going"],
            clocks=words["clocks"],
            with_tables=with_tables,
            progress=advance,
        )


def print_json(found: "Result") -> None:
    """Print the JSON document of a result."""
    from fastcomm.report import json_text

    click.echo(json_text.dumps(found.to_dict()))


def _beside_files(ctx: click.Context, _option: click.Parameter, said: bool) -> bool:
    """A workbook lies where the other files do."""
    if said and not ctx.params.get("output"):
        raise click.UsageError("--xlsx lies among the files of --output; wanted both", ctx)
    return said


def result_options(files: str, *, xlsx: bool = True, html: bool = True) -> Callable[[F], F]:
    """Add `--json`, `--output`, and where there are such, `--xlsx` and `--html`.

    `files` is what `--output` writes. The command gets `as_json`, `output`, `xlsx` and `html`.
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
