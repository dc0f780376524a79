"""``fastcomm ingest``."""

from typing import TYPE_CHECKING

import click

from fastcomm.cli.commands import OptionsCommand
from fastcomm.cli.messages import say, warn
from fastcomm.cli.parameter_types import Output
from fastcomm.cli.results import (
    exit_if_skipped,
    json_option,
    output_option,
    print_written,
    say_skipped,
)
from fastcomm.cli.run_options import (
    ExecutionOptions,
    executor_for,
    run_options,
    standing_options,
)
from fastcomm.errors import shell_joined
from fastcomm.options import ReadOptions

if TYPE_CHECKING:
    from fastcomm.executors.executor import Executor
    from fastcomm.ingest.ingest import Ingested

_EXAMPLES = """\b
Examples:
  fastcomm ingest traces/ -o store/ --workers 8
  fastcomm metrics store/
  duckdb -c "SELECT tag, count(*) FROM 'store/rank-*.parquet' GROUP BY tag"
"""


@click.command("ingest", cls=OptionsCommand, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@output_option("A new directory, or a store of the same run", type=Output(), required=True)
@json_option
@run_options
def run(
    *,
    paths: tuple[str, ...],
    output: str,
    as_json: bool,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Store a run as Parquet, one file per rank, which every command reads like traces.

    PATH is as for fastcomm metrics. The store keeps all events, is a tenth of the size of
    gzipped traces, and is read many times faster. DuckDB, Polars and pandas read its files.

    An interrupted command continues where it stopped when it is run again; ranks whose source
    and options have not changed are not read again. Exit codes: 0 done, 1 error, 2 wrong usage,
    3 done without some ranks (--keep-going).
    """
    from fastcomm.files import unguarded

    # A store reads its own ranks when it goes on; `plan` keeps it apart from the traces.
    with unguarded(), executor_for(execution) as executor:
        ingested = _stored(paths, output, reading, executor)
    warn(ingested.unused)
    _show(ingested)
    if as_json:
        entries = ingested.manifest.ranks
        print_written(
            "store",
            [output],
            ranks=len(entries),
            skipped=[rank.skipped() for rank in ingested.manifest.failed],
            next_command=shell_joined(["fastcomm", "metrics", output]),
            events=sum(entry.events for entry in entries),
            bytes=sum(entry.size for entry in entries),
            unchanged_ranks=len(ingested.kept),
        )
    exit_if_skipped(ingested.manifest.failed)


def _stored(
    paths: tuple[str, ...], output: str, reading: ReadOptions, executor: "Executor"
) -> "Ingested":
    """Store the run at the paths in the directory or URL `output`; show the progress."""
    from functools import partial

    from fastcomm.files import is_url
    from fastcomm.formats.config import Config
    from fastcomm.ingest.ingest import ingest, plan
    from fastcomm.preparation import worker_paths
    from fastcomm.show.console import progress

    folder, *traces = worker_paths((output, *paths), executor)
    config = Config.of(reading, standing=standing_options())
    planning = partial(plan, traces, folder, config=config, ranks=reading.ranks)
    planned = executor.call(planning) if any(map(is_url, traces)) else planning()
    warn(planned.run.warnings)
    return ingest(planned, executor, progress)


def _show(ingested: "Ingested") -> None:
    """Print the size of the store, and its reused and skipped ranks, to stderr."""
    from fastcomm.trace.run_traces import (
        expected_ranks,
        named_ranks,
        ranks_words,
        warnings_of_run,
    )
    from fastcomm.units import counted, format_bytes

    manifest, entries = ingested.manifest, ingested.manifest.ranks
    warn(warnings_of_run((entry.rank, entry.warnings) for entry in entries))
    ranks = [entry.rank for entry in entries]
    unread = [rank.skipped() for rank in manifest.failed]
    expected = expected_ranks(ranks, manifest.world_size, unread)
    size = sum(entry.size for entry in entries)
    # Several ranks may be in one file.
    source = sum({entry.source: entry.fingerprint.size for entry in entries}.values())
    events = sum(entry.events for entry in entries)
    lines = [
        f"{ingested.folder}: {ranks_words(len(ranks), expected)}, {counted(events, 'event')}, "
        f"{format_bytes(size)} "
        f"(the traces: {format_bytes(source)})"
    ]
    if ingested.kept:
        lines.append(
            f"unchanged since the last ingest, not stored again: {named_ranks(ingested.kept)}"
        )
    say(*lines)
    say_skipped(unread)
