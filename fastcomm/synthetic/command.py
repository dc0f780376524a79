"""``fastcomm demo``."""

from collections.abc import Collection
from itertools import count
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fastcomm.cli.commands import OptionsCommand, option, option_of
from fastcomm.cli.messages import say
from fastcomm.cli.parameter_types import COUNT, OutputFolder
from fastcomm.cli.results import json_option, print_written
from fastcomm.errors import shell_joined, shell_quoted
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import OUTPUT, WORKLOAD
from fastcomm.units import Rate

if TYPE_CHECKING:
    from pathlib import Path

# Of all ranks: these need no second one.
_IDLE_FAULTS = (
    *("launch-bound", "synchronization", "data-loading", "garbage-collection"),
    "kernel-gaps",
)
_FAULTS = (
    *("slow-gpu", "slow-link", "jittery-host", "imbalanced-stage", "hot-expert"),
    *_IDLE_FAULTS,
    "none",
)
_EXAMPLES = """\b
Examples:
  fastcomm demo
  fastcomm demo slow/ --fault slow-link --num-ranks 8
"""


@click.command("demo", cls=OptionsCommand, epilog=_EXAMPLES)
@click.argument("directory", default="fastcomm-demo", type=OutputFolder())
@option(
    "--num-ranks",
    type=COUNT,
    default=8,
    group=WORKLOAD,
    is_common=True,
    help="Number of ranks of the job.",
)
@option_of(MetricsOptions, "link_bandwidth", default="400Gbit/s", not_with=("--format table",))
@option(
    "--format",
    "format_",
    type=click.Choice(["kineto", "nsys", "table"]),
    default="kineto",
    group=OUTPUT,
    is_common=True,
    help="Format to write. PyTorch, Nsight Systems, or a table for stragglers.",
)
@option(
    "--fault",
    type=click.Choice(_FAULTS),
    default="slow-gpu",
    metavar="NAME",
    group=WORKLOAD,
    is_common=True,
    show_default=False,
    help="What is wrong with the job; the names are above. Default: slow-gpu.",
)
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    directory: str,
    num_ranks: int,
    link_bandwidth: Rate,
    format_: str,
    fault: str,
    as_json: bool,
) -> None:
    """Write a made-up training job with one fault as traces, and measure it.

    The job trains a mixture-of-experts model on tensor-, pipeline-, data- and expert-parallel
    ranks (1F1B, with overlapped and exposed communication). DIRECTORY gets one trace per rank,
    as the profiler would write it. The faults slow-gpu and jittery-host need 2 ranks, slow-link
    and hot-expert 4, imbalanced-stage 8. With launch-bound, synchronization, data-loading,
    garbage-collection and kernel-gaps, the devices of all ranks are idle for this cause; with
    none, all is well.
    """
    from pathlib import Path

    from fastcomm.metrics import command as metrics_command
    from fastcomm.synthetic.job import Job
    from fastcomm.synthetic.nsys.export import write_nsys
    from fastcomm.synthetic.traces import trace_names, write
    from fastcomm.units import counted

    if format_ == "table":
        _table(ctx, Path(directory), num_ranks, fault, as_json=as_json)
        return
    is_default = ctx.get_parameter_source("fault") is ParameterSource.DEFAULT
    if not (num_ranks == 1 and is_default) and (why := _why_not(num_ranks, fault)):
        able = next(size for size in count(num_ranks + 1) if _why_not(size, fault) is None)
        raise click.UsageError(
            f"--fault {fault}: a job of {counted(num_ranks, 'rank')} cannot show it, {why}; "
            f"pass --num-ranks {able}",
            ctx,
        )
    wrong: dict[str, Any] = (
        {"straggler": None} if fault == "none" else {"fault": fault.replace("-", "_")}
    )
    job = Job.of(ranks=num_ranks, **wrong)
    sizes = {}
    _check_unused(Path(directory), trace_names(range(num_ranks), format_))
    if format_ == "nsys":
        paths = write_nsys(job, Path(directory))
        sizes = {name: getattr(job, name) for name in ("tp", "pp", "dp", "ep")}
    else:
        paths = write(job, Path(directory))
    layout = "".join(f" --{name} {size}" for name, size in sizes.items())
    place = shell_quoted(str(directory))
    command = (
        f"fastcomm metrics {place}{layout} --link-bandwidth {shell_quoted(str(link_bandwidth))}"
    )
    if as_json:
        print_written(format_, paths, ranks=num_ranks, next_command=command)
        return
    say(f"wrote {counted(len(paths), 'trace')} to {directory}; now: {command}", "")
    ctx.invoke(
        metrics_command.run,
        paths=tuple(map(str, paths)),
        link_bandwidth=link_bandwidth,
        **sizes,
    )


def _why_not(ranks: int, fault: str) -> str | None:
    """Return why a job of this size cannot show a fault; None where it can."""
    from fastcomm.synthetic.job import Job

    job = Job.of(ranks=ranks)
    if fault not in (*_IDLE_FAULTS, "none") and ranks == 1:
        return "there is no other rank to compare with"
    if fault == "imbalanced-stage" and job.pp == 1:
        return "its pipeline has one stage"
    # Without experts a slow link slows gradients alone, which compute hides.
    if fault in ("slow-link", "hot-expert") and job.ep == 1:
        return "it has no expert parallelism"
    return None


def _check_unused(folder: "Path", names: Collection[str]) -> None:
    """Raise `FastcommError` if a directory has anything but the files to write.

    They are written again; others would be read as ranks of the job, or lost.
    """
    from fastcomm.errors import FastcommError

    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if others := [name for name in others if name not in names]:
        raise FastcommError(
            f"{folder}: has other files, such as {others[0]}; name a new directory, or empty it"
        )


def _table(
    ctx: click.Context, folder: "Path", ranks: int, fault: str, *, as_json: bool
) -> None:
    """Write the table of operations of a job with one slow GPU, or none, and analyze it."""
    from fastcomm.errors import ConfigError
    from fastcomm.stragglers import command as stragglers_command
    from fastcomm.synthetic.job import TABLE_NAMES, TableJob, write_table

    slowdown = {"slow-gpu": 0.3, "none": 0.0}.get(fault)
    if slowdown is None:
        raise ConfigError(
            f"--format table cannot show --fault {fault}: expected slow-gpu or none"
        )
    _check_unused(folder, TABLE_NAMES)
    table, meta = write_table(TableJob.of(ranks, slowdown), folder)
    command = shell_joined(["fastcomm", "stragglers", str(table), "--meta", str(meta)])
    if as_json:
        print_written("table", [table, meta], ranks=ranks, next_command=command)
        return
    say(f"wrote {table} and {meta}; now: {command}", "")
    ctx.invoke(stragglers_command.run, table=str(table), meta=str(meta))
