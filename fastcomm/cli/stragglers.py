"""``fastcomm stragglers``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcomm.cli.messages import warn
from fastcomm.cli.options import FileOrUrl, OutputFile, cluster_options
from fastcomm.cli.ranges import Number, NumberList, numbers
from fastcomm.cli.results import print_json, result_options
from fastcomm.ranges import FACTOR

if TYPE_CHECKING:
    from fastcomm.analyses.stragglers import StragglerResult

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
@click.option("--meta", "meta_path", type=_FILE, metavar="META.yaml", help="Sizes of the job.")
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
    "changes",
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
@cluster_options
@result_options(
    "Write stragglers.json, and the files of the published study: result, ms, mw.", xlsx=False
)
def run(
    table: str,
    meta_path: str | None,
    changes: str | None,
    trace_path: Path | None,
    **words: Any,
) -> None:
    """Find which ranks, stages and operations hold a production job up.

    TABLE has one row an operation (dp_rank, stage, rank, step, optype, start_ts, duration,
    seq_id, mc, gmc), as ByteDance's StragglerAnalysis publishes them. The step is replayed as
    measured, with ideal operations, and with those of one rank, stage or type as measured.
    TABLE may be a URL; with --dask the workers read it.
    """
    from fastcomm.analyses.stragglers import find_stragglers
    from fastcomm.cli.options import engine_of, seen_by
    from fastcomm.remote import place
    from fastcomm.stragglers import changes as stragglers_changes
    from fastcomm.stragglers import operations

    meta = None if meta_path is None else operations.meta(place(meta_path))
    with engine_of({**words, "workers": 1}) as engine:
        found = find_stragglers(
            *seen_by((table,), words),
            shards=(meta or {}).get("dsp_size", 1),
            steps=numbers("--steps", words["steps"]) if words["steps"] else None,
            threshold=words["threshold"],
            changes=None if changes is None else stragglers_changes.read(place(changes)),
            trace=trace_path is not None,
            engine=engine,
        )
    warn(found.stragglers.warnings)
    _say(found, table, meta, trace_path, words)


def _say(
    found: "StragglerResult",
    table: str,
    meta: dict[str, Any] | None,
    trace_path: Path | None,
    words: dict[str, Any],
) -> None:
    """Write what was asked for, and print."""
    from fastcomm.report import stragglers as report

    if trace_path is not None and found.trace is not None:
        report.write_trace(found.trace, trace_path)
    if words["output"] is not None:
        report.write(found, meta, words["output"])
    if words["html"] is not None:
        from fastcomm.report.html import render
        from fastcomm.report.html import stragglers as html

        render.write(html.page(found.stragglers, table), words["html"])
    if words["as_json"]:
        print_json(found)
    else:
        report.show(found)
