"""``fastcomm convert``."""

from pathlib import Path
from typing import Any

import click

from fastcomm.cli.options import open_options, run_options

_EXAMPLES = """\b
Examples:
  fastcomm convert traces/ -o all.json.gz && fastcomm stats all.json.gz
  fastcomm convert trial/ -o all.json
"""


@click.command("convert", epilog=_EXAMPLES)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--to", "form", type=click.Choice(["uniform"]), default="uniform", show_default=True
)
@click.option("--steps", "rule", default="update", show_default=True, help="As for stats.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where to write it; .gz compresses.",
)
@run_options
def run(path: Path, form: str, rule: str, output: Path, **words: Any) -> None:
    """Write a run or a dPRO trial as one uniform trace, clocks aligned, steps numbered.

    PATH is a trace or a directory of traces that any command reads, a dPRO trial, or a uniform
    trace. Of a run come the work of devices and communication, by the names of operators:
    FW, BW or UPDATE_ as marks in the trace tell.
    """
    from fastcomm.errors import ConfigError
    from fastcomm.replay import inputs, uniform
    from fastcomm.store.aside import aside

    if output.exists() and output.samefile(path):
        raise ConfigError(f"{output}: an output does not overwrite its input")
    said = inputs.read(path, rule=rule, options=open_options(words))
    for warning in said.warnings:
        click.echo(f"warning: {warning}", err=True)
    with aside(output) as unfinished:
        data = uniform.to_bytes(said.trace)
        unfinished.write_bytes(uniform.compressed(data) if output.suffix == ".gz" else data)
    click.echo(f"{output}: {len(said.trace)} events of {len(said.trace.pids)} ranks ({form})")
