"""``fastcomm stragglers``."""

import click

from fastcomm.cli.commands import OptionsCommand, options_of
from fastcomm.cli.messages import warn
from fastcomm.cli.results import ResultFiles, print_json, result_options, trace_option
from fastcomm.cli.run_options import (
    ExecutionOptions,
    builds,
    cluster_options,
    executor_for,
    with_options,
    workers_option,
)
from fastcomm.options import EditOptions
from fastcomm.stragglers.options import StragglerOptions

_EXAMPLES = """\b
Examples:
  fastcomm stragglers trace.parquet --meta meta.yaml
  fastcomm stragglers trace.parquet --heal rank:6 --trace replayed.json
  fastcomm stragglers trace.parquet --workers 8
  fastcomm stragglers s3://bucket/trace.parquet --dask tcp://head:8786
  fastcomm stragglers trace.parquet --steps 12 --json | jq .slowdown_by_optype
"""


@click.command("stragglers", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("table", metavar="TABLE")
@with_options(options_of(StragglerOptions, "meta", "steps", "threshold"))
@with_options(options_of(EditOptions))
@trace_option
@builds(options=StragglerOptions, execution=ExecutionOptions)
@workers_option()
@cluster_options
@result_options("stragglers.json, and the files of the published study", xlsx=False)
def run(
    *, table: str, files: ResultFiles, options: StragglerOptions, execution: ExecutionOptions
) -> None:
    """Find the straggling ranks, stages and operations of a production job.

    TABLE has one row per operation (dp_rank, stage, rank, step, optype, start_ts, duration,
    seq_id, mc, gmc), as published by ByteDance's StragglerAnalysis. Replays the steps as
    measured, with ideal operations, and with those of one rank, stage or type as measured.
    TABLE is Parquet or CSV, and may be a URL; with --dask the workers read it.

    WHAT is all, compute, comm, op:TYPE, op:TYPE_PLACE_STAGE, rank:7, dp_rank:1, stage:3 or
    step:12; + combines them. --set WHAT=ideal sets the ideal time of the type. --overlap and
    --fuse-below need traces.
    """
    from fastcomm.preparation import worker_paths
    from fastcomm.stragglers import tables
    from fastcomm.stragglers.analysis import analyse_stragglers

    with executor_for(execution) as executor:
        (path,) = worker_paths([table], executor)
        result = analyse_stragglers(
            path, options, trace=files.trace_path is not None, executor=executor
        )
    warn(result.stragglers.warnings)
    if files.trace_path is not None and result.trace is not None:
        tables.write_trace(result.trace, files.trace_path)
    if files.output is not None:
        tables.write(result, files.output)
    if files.html is not None:
        from fastcomm.show.pages import write as write_page
        from fastcomm.stragglers import page

        write_page(page.page(result.stragglers, table), files.html)
    if files.as_json:
        print_json(result)
    else:
        tables.show(result)
