"""The command line: words in, a report out. No command computes.

Exit codes: 0 done, 1 a user's error in one line, 2 wrong usage, 3 done but ranks were left out,
4 a condition of `compare --fail-if` holds.
"""

from errno import EPIPE
from importlib import import_module

import click

from fastcomm.errors import FastcommError
from fastcomm.inert import inert_lines

# A command is a module of its name, - as _: loaded when it is called for, or its help is.
COMMANDS = (
    "info",
    "metrics",
    "report",
    "compare",
    "critical-path",
    "what-if",
    "replay",
    "stragglers",
    "stats",
    "isp",
    "dispatch",
    "ingest",
    "convert",
    "demo",
)

INCOMPLETE = 3
REGRESSED = 4


class _Group(click.Group):
    """Loads commands late; here alone an error of ours becomes one line and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"fastcomm.cli.{cmd_name.replace('-', '_')}").run
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except FastcommError as error:
            raise click.ClickException(inert_lines(str(error))) from error
        except MemoryError as error:
            raise click.ClickException(
                "out of memory; --ranks takes fewer ranks, --workers 1 one at a time"
            ) from error
        except OSError as error:
            if error.errno == EPIPE:  # whoever read our output has seen enough
                raise
            raise click.ClickException(inert_lines(_words(error))) from error


def _words(error: OSError) -> str:
    """What the system says of a file, or of where the result is printed to."""
    return f"{error.filename or 'output'}: {error.strerror or error}"


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fastcomm")
def main() -> None:
    """Find where a distributed training step's time goes.

    Start with `fastcomm demo`, or point `fastcomm metrics` at a directory of traces, of the
    PyTorch profiler or of Nsight Systems.
    """
