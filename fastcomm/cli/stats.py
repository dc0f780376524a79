"""``fastcomm stats``, and the options of dPRO trials."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli import INCOMPLETE
from fastcomm.cli.messages import say, warn
from fastcomm.cli.options import COUNT, TracePath, builds, keep_going_option, with_options
from fastcomm.cli.results import print_json, result_options
from fastcomm.options import PredictionOptions, TrialOptions

if TYPE_CHECKING:
    from fastcomm.readers.dpro.inputs import Input
    from fastcomm.readers.dpro.trial import Trial

F = TypeVar("F", bound=Callable[..., Any])

align = click.option(
    "--align",
    type=click.Choice(["auto", "sync", "causality", "variance", "drift", "none"]),
    default="auto",
    show_default=True,
    help="What tells the clocks of hosts: Sync, or that no RECV ends before its SEND.",
)


def trial_options(command: F) -> F:
    """Add the options that say how to read a trial, and what else to predict of its step.

    The command gets them as `trial` and `predicted`.
    """
    grouped = builds(trial=TrialOptions, predicted=PredictionOptions)(command)
    return with_options(_options())(grouped)


def _options() -> list[Callable[[F], F]]:
    return [
        align,
        click.option(
            "--algorithm",
            type=click.Choice(["ring", "tree", "none"]),
            help="How NCCL sends: by default around its rings, where the trial has them; none: "
            "a tensor is one operation of each rank.",
        ),
        click.option(
            "--clip-updates", is_flag=True, help="Let updates begin one after the other."
        ),
        click.option(
            "--barrier", is_flag=True, help="Let updates wait for all of the communication."
        ),
        click.option(
            "--daydream",
            "with_daydream",
            is_flag=True,
            help="Predict as Daydream does: one rank, tensors at their bytes over a bandwidth.",
        ),
        click.option(
            "--hosts",
            type=click.IntRange(2, COUNT.max),
            help="Predict the step on N hosts of one GPU.",
        ),
        click.option(
            "--fuse",
            type=COUNT,
            metavar="STEPS",
            help="Search that many ways of sending tensors as one.",
        ),
    ]


def read_trial(path: Path, options: TrialOptions) -> "Trial":
    """Read a trial as the options say, and warn of what it does not tell."""
    from dataclasses import replace

    from fastcomm.errors import TraceFileError
    from fastcomm.readers.dpro import trial

    if not path.is_dir():
        raise TraceFileError(
            f"{path}: a uniform trace, or no trace at all, has no dependencies to replay; give "
            "the traces of a profiler, or a dPRO trial (a directory). `fastcomm stats` reads "
            "uniform traces"
        )
    read = trial.read(
        path,
        align=options.align,
        algorithm=options.algorithm,
        clip_updates=options.clip_updates,
    )
    warn(read.warnings)
    return replace(read, graph=read.graph.with_barrier()) if options.barrier else read


_EXAMPLES = """\b
Examples:
  fastcomm stats trial/ --sort --head 20
  fastcomm stats trial/ --compat dpro --json | jq .iteration_time_ms
  fastcomm stats trial/ --compare faster-trial/
"""


@click.command("stats", epilog=_EXAMPLES)
@click.argument("path", type=TracePath())
@click.option("--sort", "by_avg", is_flag=True, help="Longest mean first.")
@click.option("--head", type=COUNT, default=20, show_default=True, help="Operations to print.")
@click.option(
    "--steps",
    "rule",
    type=click.Choice(["update", "seed", "operator", "gap", "none"]),
    default="update",
    show_default=True,
    help="Where steps begin, if the trace does not say it.",
)
@click.option(
    "--compat", type=click.Choice(["dpro"]), help="Equal to dPRO's statistics, quirks included."
)
@align
@keep_going_option
@click.option(
    "--compare",
    "other",
    type=TracePath(),
    metavar="OTHER",
    help="Print what OTHER adds, lacks and does faster or slower.",
)
@result_options("Write stats.json, and all operations as Parquet and CSV.", html=False)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    path: Path,
    by_avg: bool,
    head: int,
    rule: str,
    compat: str | None,
    align: str,
    keep_going: bool,
    other: Path | None,
    as_json: bool,
    output: Path | None,
    xlsx: bool,
) -> None:
    """Describe the operations of a run: how often, how long, in which step, on which rank.

    PATH is a dPRO trial (hosts, in them GPUs, in them trace.json.gz, comm.json and the rest),
    a uniform trace (JSON, also gzipped), or a trace or directory of traces of a profiler.
    """
    from functools import partial

    from fastcomm.analyses.stats import RunStatistics, comparison
    from fastcomm.compat import dpro
    from fastcomm.readers.dpro import statistics
    from fastcomm.report import stats as report

    rules = statistics if compat is None else dpro
    read = partial(_read, rule=rule, align=align, keep_going=keep_going)
    source = read(path)
    measured = rules.statistics(source.trace, source.topology)
    if other is not None:
        after = read(other)
        changes = comparison(measured, rules.statistics(after.trace, after.topology))
        if as_json:
            print_json(changes)
        else:
            report.show_comparison(changes, head)
        ctx.exit(_exit_code(source, after))
    described = RunStatistics(
        operations=measured,
        time=rules.step_time(source.trace),
        tensors=None if source.trial is None else source.trial.parameters,
        read=source.read,
        is_dpro=compat is not None,
    )
    if output is not None:
        report.write(described, output, xlsx=xlsx)
    if as_json:
        print_json(described)
    else:
        rows = statistics.sort_rows(measured, by_avg=by_avg, head=head)
        report.show(described, list(rows))
    ctx.exit(_exit_code(source))


def _read(path: Path, *, rule: str, align: str, keep_going: bool) -> "Input":
    """Read PATH, and report what is to know about it."""
    from fastcomm.errors import ConfigError
    from fastcomm.readers.dpro import inputs
    from fastcomm.readers.runs import OpenOptions

    options = OpenOptions(keep_going=keep_going)
    source = inputs.read(path, rule=rule, align=align, whole=False, options=options)
    if source.read is None and keep_going:
        raise ConfigError(f"--keep-going is for traces of a profiler; {path} is none")
    warn(source.warnings)
    say(*(f"skipped: {each}" for each in (source.read.failed if source.read else ())))
    return source


def _exit_code(*read: "Input") -> int:
    """Return 3 where ranks were skipped."""
    return INCOMPLETE if any(each.read and each.read.failed for each in read) else 0
