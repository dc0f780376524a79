"""``fastcomm convert``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.cli.commands import OUTPUT, OptionsCommand, option
from fastcomm.cli.messages import say, warn
from fastcomm.cli.options import ExecutionOptions, executor_for, open_traces, run_options
from fastcomm.cli.results import json_option, print_written, steps_option
from fastcomm.cli.values import OutputFile, RunArgument
from fastcomm.errors import ConfigError, inert, shell_joined
from fastcomm.options import ReadOptions

if TYPE_CHECKING:
    from fastcomm.readers.dpro import UniformTrace
    from fastcomm.trace.run import SkippedRank

_EXAMPLES = """\b
Examples:
  fastcomm convert traces/ all.json.gz && fastcomm dpro stats all.json.gz
  fastcomm convert traces/ run.json.gz --to perfetto --steps 12
  fastcomm convert traces/ astra/ --to chakra
"""


destination_argument = click.argument("destination", type=OutputFile(dir_okay=True))


@click.command("convert", cls=OptionsCommand, epilog=_EXAMPLES)
@click.argument("path", type=RunArgument("convert"))
@destination_argument
@option(
    "--to",
    "form",
    type=click.Choice(["uniform", "perfetto", "chakra"]),
    default="uniform",
    group=OUTPUT,
    is_common=True,
    help="Format: uniform, for Perfetto (all ranks), or Chakra execution traces.",
)
@steps_option
@json_option
@run_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    path: Path,
    form: str,
    destination: Path,
    steps: tuple[int, ...] | None,
    as_json: bool,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Write a run in another format, for other tools.

    PATH is a trace, or a directory of traces. uniform: DESTINATION is one file with all ranks,
    clocks aligned, steps numbered, for fastcomm dpro stats; .gz compresses it. It has the work
    of devices and communication, named after their operators as FW, BW or UPDATE_.

    perfetto: DESTINATION is one file with all ranks for ui.perfetto.dev and chrome://tracing;
    .gz compresses it. A rank is a process with its steps, streams and communication. Clocks are
    aligned; a wait is drawn inside its collective, with an arrow from the last arrival.

    chakra: DESTINATION is a directory of one execution trace per rank (trace.0.et, ...) and the
    groups (trace.groups.json), for simulators such as ASTRA-sim. Device work is replayed as
    measured; collectives and messages have sizes, groups and partners, and the simulator
    determines their time.
    """
    from fastcomm.cli import INCOMPLETE
    from fastcomm.files import refuse_inputs

    refuse_inputs(destination, [path] if form == "chakra" or path.is_file() else [])
    if steps is not None and form != "perfetto":
        raise ConfigError("--steps has an effect with --to perfetto only; leave it out")
    if form == "chakra":
        _refuse_file(destination)
        skipped = _chakra(path, destination, as_json, reading, execution)
    else:
        refuse_directory(destination)
        if form == "perfetto":
            paths = (path, destination)
            skipped = _perfetto(paths, steps, as_json, reading, execution)
        else:
            skipped = _uniform(path, destination, as_json, reading)
    if skipped:
        ctx.exit(INCOMPLETE)


def refuse_directory(destination: Path) -> None:
    """Raise `ConfigError` if the destination of a uniform trace is a directory."""
    if destination.is_dir():
        raise ConfigError(
            f"{destination}: a directory, and a uniform trace is one file; name a file, as in "
            f"{destination / 'run.json.gz'}"
        )


def _refuse_file(destination: Path) -> None:
    """Raise `ConfigError` if the destination of Chakra traces is a file."""
    if destination.is_file():
        raise ConfigError(
            f"{destination}: a file, and --to chakra writes a directory of one trace per rank; "
            f"name a new directory, as in {destination.with_name('chakra')}"
        )


def _uniform(
    path: Path, destination: Path, as_json: bool, reading: ReadOptions
) -> Sequence["SkippedRank"]:
    """Write a run as one uniform trace; return the skipped ranks."""
    from fastcomm.readers.dpro import inputs

    run = open_traces((path,), reading)
    source = inputs.converted(run, keep_going=reading.keep_going)
    warn(source.warnings)
    say(*(f"skipped: {skipped}" for skipped in source.read.skipped))
    write_uniform(source.trace, destination, as_json, source.read.skipped)
    return source.read.skipped


def write_uniform(
    trace: "UniformTrace",
    destination: Path,
    as_json: bool,
    skipped: Sequence["SkippedRank"] = (),
) -> None:
    """Write a uniform trace, gzipped where the name ends in .gz, and print what was written."""
    from fastcomm.files import aside
    from fastcomm.readers.dpro import json_files

    data = json_files.to_bytes(trace)
    with aside(destination) as unfinished:
        unfinished.write_bytes(
            json_files.compressed(data) if destination.suffix == ".gz" else data
        )
    ranks = len(trace.pids)
    if as_json:
        command = shell_joined(["fastcomm", "dpro", "stats", str(destination)])
        print_written(
            "uniform",
            [destination],
            ranks=ranks,
            skipped=skipped,
            next_command=command,
            events=len(trace),
        )
    else:
        _report_written(destination, (len(trace), "event"), ranks, "uniform")


def _perfetto(
    paths: tuple[Path, Path],
    steps: tuple[int, ...] | None,
    as_json: bool,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> Sequence["SkippedRank"]:
    """Write a run as one trace for Perfetto; return the skipped ranks."""
    from fastcomm.analyses import perfetto, preparation
    from fastcomm.report.console import progress

    source, destination = paths
    with executor_for(execution) as executor:
        traces = open_traces((source,), reading)
        warn(traces.warnings)
        if executor.is_here:
            preparation.compile_kernels()
        with progress(traces) as advance:
            written = perfetto.convert(
                traces,
                destination.absolute(),
                executor,
                steps=steps,
                keep_going=reading.keep_going,
                progress=advance,
            )
    warn(written.warnings)
    say(*(f"skipped: {skipped}" for skipped in written.skipped))
    if as_json:
        print_written(
            "perfetto",
            [destination],
            ranks=written.ranks,
            skipped=written.skipped,
            events=written.events,
            arrows=written.arrows,
        )
    else:
        _report_written(destination, (written.events, "event"), written.ranks, "perfetto")
    return written.skipped


def _chakra(
    path: Path,
    output: Path,
    as_json: bool,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> Sequence["SkippedRank"]:
    """Write a run as Chakra traces to a directory; return the skipped ranks."""
    from fastcomm.analyses import chakra, preparation
    from fastcomm.report.console import progress

    with executor_for(execution) as executor:
        traces = open_traces((path,), reading)
        warn(traces.warnings)
        if executor.is_here:
            preparation.compile_critical_path()
        with progress(traces) as advance:
            written = chakra.convert(
                traces,
                output.absolute(),
                executor,
                keep_going=reading.keep_going,
                progress=advance,
            )
    warn(written.warnings)
    warn(
        f"{count} communication events are replayed as measured: {reason}"
        for reason, count in sorted(written.replayed.items())
    )
    say(*(f"skipped: {skipped}" for skipped in written.skipped))
    if as_json:
        ranks, nodes = written.ranks, written.nodes
        print_written("chakra", [output], ranks=ranks, skipped=written.skipped, nodes=nodes)
    else:
        _report_written(output, (written.nodes, "node"), written.ranks, "chakra")
    return written.skipped


def _report_written(output: Path, content: tuple[int, str], ranks: int, form: str) -> None:
    """Print what was written; `content` is a count and its noun, as in (12, "event")."""
    from fastcomm.units import counted

    summary = f"{counted(*content)} of {counted(ranks, 'rank')} ({form})"
    click.echo(f"{inert(str(output))}: {summary}")
