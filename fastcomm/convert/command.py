"""``fastcomm convert``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.cli.commands import OptionsCommand, option, option_of
from fastcomm.cli.messages import warn
from fastcomm.cli.parameter_types import OutputFile, RunArgument
from fastcomm.cli.results import exit_if_skipped, json_option, print_written, say_skipped
from fastcomm.cli.run_options import ExecutionOptions, open_traces, opened_run, run_options
from fastcomm.errors import ConfigError, inert, shell_joined
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import OUTPUT
from fastcomm.options import ReadOptions
from fastcomm.units import counted

if TYPE_CHECKING:
    from fastcomm.compat.dpro.uniform import UniformTrace
    from fastcomm.trace.run_traces import SkippedRank

_EXAMPLES = """\b
Examples:
  fastcomm convert traces/ all.json.gz && fastcomm dpro stats all.json.gz
  fastcomm convert traces/ run.pftrace.gz --to perfetto --steps 12
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
@option_of(MetricsOptions, "steps")
@json_option
@run_options
def run(
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

    perfetto: DESTINATION is one file with all ranks for ui.perfetto.dev: .pftrace, or .json,
    which is larger and opens in chrome://tracing, too; .gz compresses it. A rank is a process
    with its steps, streams and communication. Clocks are aligned; a wait is drawn inside its
    collective, with an arrow from the last arrival.

    chakra: DESTINATION is a directory of one execution trace per rank (trace.0.et, ...) and the
    groups (trace.groups.json), for simulators such as ASTRA-sim. Device work is replayed as
    measured; collectives and messages have sizes, groups and partners, and the simulator
    determines their time.
    """
    from fastcomm.files import refuse_inputs

    refuse_inputs(destination, [path] if form == "chakra" or path.is_file() else [])
    if steps is not None and form != "perfetto":
        raise ConfigError("--steps has an effect with --to perfetto only; leave it out")
    if form == "chakra":
        _refuse_file(destination)
        written = _chakra(path, destination, reading, execution)
    else:
        refuse_directory(destination)
        if form == "perfetto":
            written = _perfetto(path, destination, steps, reading, execution)
        else:
            written = _uniform(path, destination, reading)
    written.tell(as_json=as_json)
    exit_if_skipped(written.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was written in another format: the path, the format, and how much it has."""

    destination: Path
    form: str
    ranks: int
    counts: dict[str, int]  # events or nodes first
    skipped: Sequence["SkippedRank"] = ()
    next_command: str | None = None

    def tell(self, *, as_json: bool) -> None:
        """Print what was written, and to stderr the skipped ranks."""
        say_skipped(self.skipped)
        if as_json:
            print_written(
                self.form,
                [self.destination],
                ranks=self.ranks,
                skipped=self.skipped,
                next_command=self.next_command,
                **self.counts,
            )
            return
        noun, count = next(iter(self.counts.items()))
        content = f"{counted(count, noun.removesuffix('s'))} of {counted(self.ranks, 'rank')}"
        click.echo(f"{inert(str(self.destination))}: {content} ({self.form})")


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


def _uniform(path: Path, destination: Path, reading: ReadOptions) -> Conversion:
    """Write a run as one uniform trace."""
    from fastcomm.compat.dpro import trial

    source = trial.converted(open_traces((path,), reading))
    warn(source.warnings)
    return write_uniform(source.trace, destination, source.read.skipped)


def write_uniform(
    trace: "UniformTrace", destination: Path, skipped: Sequence["SkippedRank"] = ()
) -> Conversion:
    """Write a uniform trace, gzipped where the name ends in .gz.

    `skipped` are the ranks that it does not have, since they could not be read.
    """
    from fastcomm.compat.dpro import uniform
    from fastcomm.files import aside

    data = uniform.to_bytes(trace)
    with aside(destination) as unfinished:
        unfinished.write_bytes(
            uniform.compressed(data) if destination.suffix == ".gz" else data
        )
    return Conversion(
        destination=destination,
        form="uniform",
        ranks=len(trace.pids),
        counts={"events": len(trace)},
        skipped=skipped,
        next_command=shell_joined(["fastcomm", "dpro", "stats", str(destination)]),
    )


def _perfetto(
    path: Path,
    destination: Path,
    steps: tuple[int, ...] | None,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> Conversion:
    """Write a run as one trace for Perfetto."""
    from fastcomm.convert import perfetto

    with opened_run((path,), reading, execution) as opened:
        warn(opened.warnings)
        written = perfetto.convert(opened, destination.absolute(), steps)
    warn(written.warnings)
    return Conversion(
        destination=destination,
        form="perfetto",
        ranks=written.ranks,
        counts={"events": written.events, "arrows": written.arrows},
        skipped=written.skipped,
    )


def _chakra(
    path: Path, destination: Path, reading: ReadOptions, execution: ExecutionOptions
) -> Conversion:
    """Write a run as Chakra traces to a directory."""
    from fastcomm.convert import chakra

    with opened_run((path,), reading, execution) as opened:
        warn(opened.warnings)
        written = chakra.convert(opened, destination.absolute())
    warn(written.warnings)
    warn(
        f"{count} communication events are replayed as measured: {reason}"
        for reason, count in sorted(written.replayed.items())
    )
    return Conversion(
        destination=destination,
        form="chakra",
        ranks=written.ranks,
        counts={"nodes": written.nodes},
        skipped=written.skipped,
    )
