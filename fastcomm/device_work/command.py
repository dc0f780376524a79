"""``fastcomm kernels``."""

import click

from fastcomm.cli.commands import OptionsCommand, options_of
from fastcomm.cli.messages import say, warn
from fastcomm.cli.results import (
    PrintedRows,
    ResultFiles,
    exit_if_skipped,
    result_options,
    rows_options,
    say_skipped,
)
from fastcomm.cli.run_options import (
    ExecutionOptions,
    builds,
    opened_run,
    run_options,
    with_options,
)
from fastcomm.device_work.options import KernelOptions
from fastcomm.options import ReadOptions

_EXAMPLES = """\b
Examples:
  fastcomm kernels traces/
  fastcomm kernels traces/ --by operator --match 'mm$' --step 12
  fastcomm kernels traces/ --by layer --rank 0 --format csv > layers.csv
  fastcomm kernels traces/ --by pass
  fastcomm kernels traces/ --by stream --html kernels.html
"""
_ROWS = 20  # of a printed table, unless --top says otherwise


@click.command("kernels", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@with_options(options_of(KernelOptions))
@rows_options(_ROWS)
@builds(kernels=KernelOptions)
@run_options
@result_options("kernels.json, and rows of all and of each rank as CSV and Parquet")
def run(
    *,
    paths: tuple[str, ...],
    shown: PrintedRows,
    files: ResultFiles,
    kernels: KernelOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """List the kernels of a run: how long, how often, on which rank longer.

    PATH is a directory, file or glob of traces, or a store of fastcomm ingest. Sums up kernels,
    copies and communication over ranks and steps, the longest first. The share is that of the
    step; times on different streams overlap, so shares may add up to more than 100 %.

    The slowest rank is the one with the longest total among ranks with equally many such
    kernels. Runs without a device have operators of the host instead of kernels.
    """
    from fastcomm import result
    from fastcomm.device_work import tables
    from fastcomm.device_work.analysis import sum_kernels
    from fastcomm.show.files import csv_text, write_tables

    with opened_run(paths, reading, execution) as opened:
        summed = sum_kernels(opened, kernels)
    warn(summed.warnings)
    say_skipped(summed.skipped)
    if files.output is not None:
        columns = {"kernels": summed.to_arrow(), "kernels_by_rank": summed.by_rank()}
        texts = {"kernels.json": result.json_text(summed)}
        write_tables(files.output, texts, columns, "kernels" if files.xlsx else None)
    if files.html is not None:
        from fastcomm.device_work import page as pages
        from fastcomm.show.pages import write as write_page

        write_page(pages.page(summed, ", ".join(paths)), files.html)
    rows = _ROWS if shown.top is None else shown.top
    if files.as_json or shown.format_ == "json":
        document = summed.to_dict()
        click.echo(result.text({**document, "rows": document["rows"][: shown.top]}))
    elif shown.format_ == "csv":
        click.echo(csv_text(summed.to_arrow()[: shown.top]), nl=False)
        say(*(f"note: {note}" for note in summed.notes))
    elif shown.format_ == "markdown":
        click.echo(tables.markdown(summed, rows))
    else:
        tables.show(summed, rows)
    exit_if_skipped(summed.skipped)
