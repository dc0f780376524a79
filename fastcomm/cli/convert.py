"""``fastcomm convert``."""

from pathlib import Path

import click


@click.command("convert")
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
def run(path: Path, form: str, rule: str, output: Path) -> None:
    """Write a dPRO trial as one uniform trace: all ranks, clocks aligned, steps numbered."""
    from fastcomm.aside import aside
    from fastcomm.errors import ConfigError
    from fastcomm.replay import inputs, uniform

    if output.exists() and output.samefile(path):
        raise ConfigError(f"{output}: an output does not overwrite its input")
    said = inputs.read(path, rule=rule)
    with aside(output) as unfinished:
        data = uniform.to_bytes(said.trace)
        unfinished.write_bytes(uniform.compressed(data) if output.suffix == ".gz" else data)
    click.echo(f"{output}: {len(said.trace)} events of {len(said.trace.pids)} ranks ({form})")
