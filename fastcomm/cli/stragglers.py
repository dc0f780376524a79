"""``fastcomm stragglers``."""

from pathlib import Path
from typing import Any

import click

from fastcomm.cli.html_option import html_option
from fastcomm.cli.said import warn

_EXAMPLES = """\b
Examples:
  fastcomm stragglers trace.parquet --meta meta.yaml
  fastcomm stragglers trace.parquet --steps 12,20-23 --json | jq .slowdown_by_optype
"""
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("stragglers", epilog=_EXAMPLES)
@click.argument("table", type=_FILE, metavar="TABLE.parquet")
@click.option("--meta", "meta_path", type=_FILE, metavar="META.yaml", help="Sizes of the job.")
@click.option("--steps", metavar="LIST", help="Only these steps: 12,20-23.")
@click.option(
    "--threshold",
    type=float,
    default=1.03,
    show_default=True,
    help="Slowdown from which on it is asked who brings it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write stragglers.json, and the files of the published study: result, ms, mw.",
)
@html_option
def run(
    table: Path, meta_path: Path | None, as_json: bool, output: Path | None, **words: Any
) -> None:
    """Find which ranks, stages and operations hold a production job up.

    TABLE has one row an operation (dp_rank, stage, rank, step, optype, start_ts, duration,
    seq_id, mc, gmc), as ByteDance's StragglerAnalysis publishes them. The step is replayed as
    measured, with ideal operations, and with those of one rank, stage or type as measured.
    """
    import json

    from fastcomm.cli.options import numbers
    from fastcomm.replay import operations
    from fastcomm.replay.stragglers import Model, stragglers
    from fastcomm.report import stragglers as report

    meta = None if meta_path is None else operations.meta(meta_path)
    read = operations.read(table)
    warn(read.warnings)
    found = stragglers(
        Model.of(read, shards=(meta or {}).get("dsp_size", 1)),
        steps=numbers("--steps", words["steps"]) if words["steps"] else None,
        threshold=words["threshold"],
    )
    if output is not None:
        report.write(found, meta, output)
    if words["html"] is not None:
        from fastcomm.report.html import render
        from fastcomm.report.html import stragglers as html

        render.write(html.page(found, str(table)), words["html"])
    if as_json:
        click.echo(json.dumps(report.to_dict(found), indent=2, allow_nan=False))
    else:
        report.show(found)
