"""``fastcomm stragglers``."""

from pathlib import Path

import click

from fastcomm.checks import FACTOR
from fastcomm.cli.messages import warn
from fastcomm.cli.options import (
    ExecutionOptions,
    FileOrUrl,
    Number,
    NumberList,
    OutputFile,
    builds,
    cluster_options,
    executor_for,
)
from fastcomm.cli.results import print_json, result_options
from fastcomm.options import StragglerOptions

_EXAMPLES = """\b
Examples:
  fastcomm stragglers trace.parquet --meta meta.yaml
  fastcomm stragglers trace.parquet --what-if ideal-stage.json --trace replayed.json
  fastcomm stragglers s3://bucket/trace.parquet --dask tcp://head:8786
  fastcomm stragglers trace.parquet --steps 12,20-23 --json | jq .slowdown_by_optype
"""
_FILE = FileOrUrl(exists=True, dir_okay=False)


@click.command("stragglers", epilog=_EXAMPLES)
@click.argument("table", metavar="TABLE.parquet")
@click.option("--meta", type=_FILE, metavar="META.yaml", help="Sizes of the job.")
@click.option("--steps", type=NumberList(), metavar="LIST", help="Only these steps: 12,20-23.")
@click.option(
    "--threshold",
    type=Number(FACTOR),
    default=1.03,
    show_default=True,
    help="Slowdown from which on it is asked who brings it.",
)
@click.option(
    "--what-if",
    type=_FILE,
    metavar="FILE",
    help='JSON: {"<which>": {"delay": ms, "ratio": r, "ideal": true}}.',
)
@click.option(
    "--trace",
    "trace_path",
    type=OutputFile(),
    metavar="FILE",
    help="Write the replayed steps for Perfetto; with --what-if the changed ones.",
)
@builds(options=StragglerOptions, execution=ExecutionOptions)
@cluster_options
@result_options(
    "Write stragglers.json, and the files of the published study: result, ms, mw.", xlsx=False
)
def run(
    *,
    table: str,
    trace_path: Path | None,
    as_json: bool,
    output: Path | None,
    html: Path | None,
    options: StragglerOptions,
    execution: ExecutionOptions,
) -> None:
    """Find which ranks, stages and operations hold a production job up.

    TABLE has one row an operation (dp_rank, stage, rank, step, optype, start_ts, duration,
    seq_id, mc, gmc), as ByteDance's StragglerAnalysis publishes them. The step is replayed as
    measured, with ideal operations, and with those of one rank, stage or type as measured.
    TABLE may be a URL; with --dask the workers read it.
    """
    from fastcomm.analyses.preparation import worker_paths
    from fastcomm.analyses.stragglers import analyse_stragglers
    from fastcomm.report import stragglers as report

    with executor_for(execution) as executor:
        (path,) = worker_paths([table], executor)
        result = analyse_stragglers(
            path, options, trace=trace_path is not None, executor=executor
        )
    warn(result.stragglers.warnings)
    if trace_path is not None and result.trace is not None:
        report.write_trace(result.trace, trace_path)
    if output is not None:
        report.write(result, output)
    if html is not None:
        from fastcomm.report.html import stragglers as page
        from fastcomm.report.html import write as write_page

        write_page(page.page(result.stragglers, table), html)
    if as_json:
        print_json(result)
    else:
        report.show(result)
