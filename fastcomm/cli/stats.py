"""``fastcomm stats``."""

from pathlib import Path
from typing import Any

import click

from fastcomm.cli.options import TracePath
from fastcomm.cli.ranges import COUNT
from fastcomm.cli.results import result_options
from fastcomm.cli.said import warn
from fastcomm.cli.trial_options import align

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
@click.option(
    "--compare",
    "other",
    type=TracePath(),
    metavar="OTHER",
    help="Print what OTHER adds, lacks and does faster or slower.",
)
@result_options("Write stats.json, and all operations as Parquet and CSV.", html=False)
def run(
    path: Path,
    other: Path | None,
    as_json: bool,
    output: Path | None,
    **words: Any,
) -> None:
    """Describe the operations of a run: how often, how long, in which step, on which rank.

    PATH is a dPRO trial (hosts, in them GPUs, in them trace.json.gz, comm.json and the rest),
    a uniform trace (JSON, also gzipped), or a trace or directory of traces of a profiler.
    """
    import json

    from fastcomm.replay import inputs
    from fastcomm.replay.comparison import comparison
    from fastcomm.replay.statistics import sort_rows, statistics
    from fastcomm.replay.step_time import step_time
    from fastcomm.report import stats as report

    compat = words["compat"] is not None
    how = {"rule": words["rule"], "align": words["align"], "whole": False}
    said = inputs.read(path, **how)
    warn(said.warnings)
    found = statistics(said.trace, said.topology, compat=compat)
    if other is not None:
        after = inputs.read(other, **how)
        warn(after.warnings)
        changes = comparison(found, statistics(after.trace, after.topology, compat=compat))
        if as_json:
            click.echo(json.dumps(report.comparison_to_dict(changes), indent=2))
        else:
            report.show_comparison(changes, words["head"])
        return
    time = step_time(said.trace, compat=compat)
    tensors = None if said.trial is None else said.trial.parameters
    if output is not None:
        report.write(found, time, output, tensors, xlsx=words["xlsx"])
    if as_json:
        click.echo(json.dumps(report.to_dict(found, time, tensors), indent=2, allow_nan=False))
    else:
        rows = sort_rows(found, by_avg=words["by_avg"], head=words["head"])
        report.show(found, time, list(rows))
