"""``fastcomm stragglers``."""

from pathlib import Path
from typing import Any

import click

from fastcomm.cli.results import result_options
from fastcomm.cli.said import warn

_EXAMPLES = """\b
Examples:
  fastcomm stragglers trace.parquet --meta meta.yaml
  fastcomm stragglers trace.parquet --what-if ideal-stage.json --trace replayed.json
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
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the replayed steps for Perfetto; with --what-if the changed ones.",
)
@result_options(
    "Write stragglers.json, and the files of the published study: result, ms, mw.", xlsx=False
)
def run(
    table: Path,
    meta_path: Path | None,
    changes: Path | None,
    trace_path: Path | None,
    as_json: bool,
    output: Path | None,
    **words: Any,
) -> None:
    """Find which ranks, stages and operations hold a production job up.

    TABLE has one row an operation (dp_rank, stage, rank, step, optype, start_ts, duration,
    seq_id, mc, gmc), as ByteDance's StragglerAnalysis publishes them. The step is replayed as
    measured, with ideal operations, and with those of one rank, stage or type as measured.
    """
    import json

    from fastcomm.cli.options import numbers
    from fastcomm.replay import operations, straggler_changes
    from fastcomm.replay.stragglers import Model, chosen, stragglers
    from fastcomm.report import straggler_trace
    from fastcomm.report import stragglers as report

    meta = None if meta_path is None else operations.meta(meta_path)
    read = operations.read(table)
    warn(read.warnings)
    model = Model.of(read, shards=(meta or {}).get("dsp_size", 1))
    if words["steps"]:
        model = chosen(model, numbers("--steps", words["steps"]))
    times, changed = model.measured, None
    if changes is not None:
        times = straggler_changes.times(model, straggler_changes.read(changes))
        changed = model.replay(times)
    found = stragglers(model, threshold=words["threshold"])
    if trace_path is not None:
        report.write_trace(straggler_trace.trace(model, times), trace_path)
    if output is not None:
        report.write(found, meta, output)
    if words["html"] is not None:
        from fastcomm.report.html import render
        from fastcomm.report.html import stragglers as html

        render.write(html.page(found, str(table)), words["html"])
    if as_json:
        click.echo(json.dumps(report.to_dict(found, changed), indent=2, allow_nan=False))
    else:
        report.show(found, changed)
