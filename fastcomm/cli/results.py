"""Options that commands share: how a run is measured, and where results go."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli.commands import (
    COMPAT,
    MEASUREMENT,
    OUTPUT,
    READING,
    WINDOW,
    WORKLOAD,
    of_field,
    option,
)
from fastcomm.cli.options import builds, run_options, with_options
from fastcomm.cli.values import (
    COUNT,
    TOKEN_COUNT,
    NumberList,
    OutputFile,
    OutputFolder,
    Rate,
)
from fastcomm.errors import FastcommError
from fastcomm.options import MetricsOptions, ReadOptions

if TYPE_CHECKING:
    from fastcomm.executors import Executor
    from fastcomm.metrics.result import Metrics
    from fastcomm.result import Result
    from fastcomm.trace.run import RunTraces, SkippedRank

F = TypeVar("F", bound=Callable[..., Any])


def measure_options(command: F) -> F:
    """Add the options that say what is measured, and `run_options`.

    The command gets them as `metrics`, `reading` and `execution`.
    """
    return with_options(_MEASURED)(builds(metrics=MetricsOptions)(run_options(command)))


def link_bandwidth_option(**attrs: Any) -> Callable[[F], F]:
    """Return the option of the bandwidth of a GPU's link."""
    return option(
        "--link-bandwidth",
        type=Rate(),
        metavar="RATE",
        group=MEASUREMENT,
        is_common=True,
        help="Bandwidth of one GPU's link in one direction, as in 400Gbit/s or 50GB/s.",
        **attrs,
    )


def cluster_option(default: str) -> Callable[[F], F]:
    """Return the option of a cluster; `default` is what holds without it."""
    return option(
        "--cluster",
        metavar="NAME|FILE",
        group=MEASUREMENT,
        is_common=True,
        help="Cluster: a800, dgx-a100, dgx-h100, gb200-nvl72, ..., or a TOML file. "
        f"Default: {default}.",
    )


steps_option = option(
    "--steps",
    type=NumberList(),
    metavar="LIST",
    group=WINDOW,
    is_common=True,
    help="Analyze only these steps, as in 4-6,12.",
)
_MEASURED: list[Callable[[Any], Any]] = [
    link_bandwidth_option(),
    cluster_option("none"),
    option(
        "--gpus-per-node",
        type=click.IntRange(1, 1 << 16),
        metavar="N",
        group=WORKLOAD,
        help="GPUs per node. Default: by the traces' host names.",
    ),
    steps_option,
    option(
        "--step-boundary",
        **of_field(ReadOptions, "step_boundary"),
        group=WINDOW,
        help="Where a step begins and ends: at its first GPU work, or its mark on the host.",
    ),
    option(
        "--bytes",
        **of_field(MetricsOptions, "bytes"),
        group=MEASUREMENT,
        help="Bytes that bandwidth and volume count: as nccl-tests, on links, or per call.",
    ),
    option(
        "--clock-alignment",
        **of_field(MetricsOptions, "clock_alignment"),
        group=READING,
        help="How clocks are aligned: by collectives, or not.",
    ),
    option(
        "--dask-scratch",
        type=OutputFolder(),
        metavar="DIR",
        group=READING,
        needs=("--dask",),
        help="Shared directory for intermediate results (with --dask).",
    ),
]


_THROUGHPUT: list[Callable[[Any], Any]] = [
    option(
        "--flops",
        is_flag=True,
        group=MEASUREMENT,
        help="Count the FLOPs of a step; reads all events of the traces once more.",
    ),
    option(
        "--gpu",
        metavar="NAME",
        group=MEASUREMENT,
        needs=("--flops",),
        help="GPU whose peaks FLOPs are compared with (metrics: --flops). Default: by the "
        "traces.",
    ),
    option(
        "--tokens-per-step",
        type=TOKEN_COUNT,
        metavar="N",
        group=MEASUREMENT,
        help="Tokens of a step of all ranks, for tokens per second.",
    ),
]


def throughput_options(command: F) -> F:
    """Add the options on FLOPs and tokens, fields of `MetricsOptions`."""
    return with_options(_THROUGHPUT)(command)


def measure(
    run: "RunTraces",
    reading: ReadOptions,
    options: MetricsOptions,
    executor: "Executor",
) -> "Metrics":
    """Measure a run, with a progress bar on stderr.

    Parameters
    ----------
    run
        Its ranks.
    reading, options
        Whether to skip unreadable ranks; what to measure.
    executor
        Where ranks are measured.

    Raises
    ------
    FastcommError
        As of `compute_metrics`.

    """
    from fastcomm.analyses import preparation
    from fastcomm.analyses.measure import compute_metrics
    from fastcomm.report.console import progress

    if executor.is_here:
        preparation.compile_kernels()
    with progress(run) as advance:
        return compute_metrics(
            run, options, workers=executor, keep_going=reading.keep_going, progress=advance
        )


def print_json(result: "Result") -> None:
    """Print the JSON document of a result."""
    from fastcomm.result import dumps

    click.echo(dumps(result.to_dict()))


def print_written(
    format_: str,
    paths: Sequence[Path | str],
    *,
    ranks: int,
    skipped: "Sequence[SkippedRank]" = (),
    next_command: str | None = None,
    **counts: int,
) -> None:
    """Print the JSON document of a command that writes files: which, and of how much.

    Parameters
    ----------
    format_
        What the files are, such as "uniform".
    paths
        The files and directories, as the user named them.
    ranks
        Number of ranks in them.
    skipped
        Ranks that are not, since they could not be read.
    next_command
        The command that reads the files.
    **counts
        Numbers of what the files have, such as `events`.

    """
    from fastcomm.result import SCHEMA_VERSION, dumps

    document = {
        "schema_version": SCHEMA_VERSION,
        "format": format_,
        "paths": [str(path) for path in paths],
        "ranks": ranks,
        "counts": counts,
        "failed": [asdict(rank) for rank in skipped],
        "next_command": next_command,
    }
    click.echo(dumps(document))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """Where a result goes: the values of `result_options`, and of `trace_option`."""

    as_json: bool = False
    output: Path | None = None
    xlsx: bool = False
    html: Path | None = None
    trace_path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFiles:
    """Files of the path of one rank: the trace with the path drawn into it, and the graph."""

    overlay: Path | None = None
    all_events: bool = False
    all_edges: bool = False
    save: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Which operations are printed, and the path of a run to compare with."""

    sort: bool = False
    top: int | None = None
    against: Path | None = None


json_option = option(
    "--json",
    "as_json",
    is_flag=True,
    group=OUTPUT,
    is_common=True,
    help="Print the result as one JSON object.",
)


def result_options(
    files: str, *, xlsx: bool = True, html: bool = True, **attrs: Any
) -> Callable[[F], F]:
    """Return a decorator that adds the options of output to a command.

    The command gets their values as `as_json`, `output`, `xlsx` and `html`, or with
    `builds(files=ResultFiles)` as one object.

    Parameters
    ----------
    files
        Description of the files of `--output`, for its help.
    xlsx, html
        Whether the command has `--xlsx` and `--html`.
    **attrs
        Further attributes of `--output`.

    """
    options = [json_option, output_option(f"Files: {files}", **attrs)]
    if xlsx:
        options.append(
            option(
                "--xlsx",
                is_flag=True,
                callback=_check_xlsx,
                group=OUTPUT,
                needs=("--output",),
                help="Write all tables into one Excel workbook, too (with --output).",
            )
        )
    if html:
        options.append(html_option())
    return with_options(options)


def _check_xlsx(_ctx: click.Context, _option: click.Parameter, is_given: bool) -> bool:
    """Return the value of --xlsx; FastcommError without the package that writes workbooks."""
    if is_given and find_spec("xlsxwriter") is None:
        raise FastcommError("--xlsx needs XlsxWriter: pip install 'fastcomm[xlsx]'")
    return is_given


def output_option(content: str, **attrs: Any) -> Callable[[F], F]:
    """Return the option of a directory to write to; `content` is a sentence on its content."""
    return option(
        "--output",
        "-o",
        metavar="DIR",
        group=OUTPUT,
        is_common=True,
        help=f"Directory to write to. {content}.",
        **{"type": OutputFolder(), **attrs},
    )


def html_option(**attrs: Any) -> Callable[[F], F]:
    """Return the option of an HTML page."""
    return option(
        "--html",
        type=OutputFile(),
        metavar="FILE",
        group=OUTPUT,
        is_common=True,
        help="Write a self-contained HTML page.",
        **attrs,
    )


def compat_option(*tools: str, of: str) -> Callable[[F], F]:
    """Return the option that reproduces another tool; `of` describes that in the help."""
    return option(
        "--compat",
        type=click.Choice(tools),
        metavar="|".join(tools),
        group=COMPAT,
        help=f"Reproduce the results of another tool exactly. It is {of}.",
    )


def top_option(default: int, *, all_in_json: bool = False, **attrs: Any) -> Callable[[F], F]:
    """Return the option of the number of rows to print.

    With `all_in_json`, the default is None, and the command prints `default` rows, or all as
    JSON.
    """
    return option(
        "--top",
        type=COUNT,
        default=None if all_in_json else default,
        show_default=False,
        group=OUTPUT,
        is_common=True,
        help="Number of rows to print, also with --json. "
        f"Default: {default}{', with --json all' if all_in_json else ''}.",
        **attrs,
    )


trace_option = option(
    "--trace",
    "trace_path",
    type=OutputFile(),
    metavar="FILE",
    group=OUTPUT,
    is_common=True,
    help="Write the replayed steps for Perfetto, changed ones if there are changes.",
)
