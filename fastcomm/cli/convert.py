"""``fastcomm convert``."""

from pathlib import Path

import click

from fastcomm.cli.messages import say, warn
from fastcomm.cli.options import (
    ExecutionOptions,
    OutputFile,
    TracePath,
    executor_for,
    run_options,
)
from fastcomm.errors import inert
from fastcomm.options import ReadOptions

_EXAMPLES = """\b
Examples:
  fastcomm convert traces/ -o all.json.gz && fastcomm stats all.json.gz
  fastcomm convert traces/ --to chakra -o astra/
  fastcomm convert trial/ -o all.json
"""


@click.command("convert", epilog=_EXAMPLES)
@click.argument("path", type=TracePath())
@click.option(
    "--to",
    "form",
    type=click.Choice(["uniform", "chakra"]),
    default="uniform",
    show_default=True,
    help="uniform: one trace for stats and replay. chakra: execution traces for ASTRA-sim.",
)
@click.option("--steps", "rule", default="update", show_default=True, help="As for stats.")
@click.option(
    "-o",
    "--output",
    type=OutputFile(dir_okay=True),
    required=True,
    metavar="FILE",
    help="Where to write it; .gz compresses. For chakra a directory.",
)
@run_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    path: Path,
    form: str,
    rule: str,
    output: Path,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Write a run in another format, for other tools.

    uniform: one trace of all ranks, clocks aligned, steps numbered. PATH is a trace or a
    directory of traces that any command reads, a dPRO trial, or a uniform trace. Of a run come
    the work of devices and communication, by the names of operators: FW, BW or UPDATE_ as marks
    in the trace tell.

    chakra: an execution trace a rank (trace.0.et, ...) and the groups (trace.groups.json). What
    the devices do is replayed as measured, and waits for what it waited for; collectives and
    messages have sizes, groups and partners, and their time is what a simulator finds.
    """
    from fastcomm.files import refuse_inputs

    refuse_inputs(output, [path] if form == "chakra" or path.is_file() else [])
    if form == "chakra":
        _chakra(ctx, path, output, reading, execution)
    else:
        _uniform(ctx, path, rule, output, reading)


def _uniform(
    ctx: click.Context, path: Path, rule: str, output: Path, reading: ReadOptions
) -> None:
    from fastcomm.cli import INCOMPLETE
    from fastcomm.files import aside
    from fastcomm.readers import OpenOptions
    from fastcomm.readers.dpro import inputs, json_files

    said = inputs.read(path, rule=rule, options=OpenOptions.of(reading))
    warn(said.warnings)
    failed = said.read.failed if said.read else ()
    say(*(f"skipped: {each}" for each in failed))
    with aside(output) as unfinished:
        data = json_files.to_bytes(said.trace)
        unfinished.write_bytes(json_files.compressed(data) if output.suffix == ".gz" else data)
    _say_written(output, (len(said.trace), "event"), len(said.trace.pids), "uniform")
    if failed:
        ctx.exit(INCOMPLETE)


def _chakra(
    ctx: click.Context,
    path: Path,
    output: Path,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    from fastcomm.analyses import chakra, preparation
    from fastcomm.analyses.preparation import open_traces
    from fastcomm.cli import INCOMPLETE
    from fastcomm.report.console import progress

    with executor_for(execution) as engine:
        found = open_traces((path,), reading, whole=True)
        warn(found.warnings)
        if engine.is_here:
            preparation.compile_critical_path()
        with progress(found) as advance:
            written = chakra.convert(
                found,
                output.absolute(),
                engine,
                keep_going=reading.keep_going,
                progress=advance,
            )
    warn(
        f"{count} communication events are replayed as measured: {reason}"
        for reason, count in sorted(written.replayed.items())
    )
    say(*(f"skipped: {each}" for each in written.failed))
    _say_written(output, (written.nodes, "node"), written.ranks, "chakra")
    if written.failed:
        ctx.exit(INCOMPLETE)


def _say_written(output: Path, what: tuple[int, str], ranks: int, form: str) -> None:
    from fastcomm.units import counted

    said = f"{counted(*what)} of {counted(ranks, 'rank')} ({form})"
    click.echo(f"{inert(str(output))}: {said}")
