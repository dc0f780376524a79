"""The command line: each command parses its options, calls an analysis, and prints a report.

Exit codes: 0 done, 1 the input or the run failed, 2 the command line or a configuration file is
wrong, 3 done but ranks were left out, 4 a condition of `compare --fail-if` holds, 141 nobody
reads the output any more, 143 ended by SIGTERM.
"""

import logging
import sys
from importlib import import_module
from typing import Any

import click

from fastcomm.cli import settings
from fastcomm.cli.messages import OutputError, SuggestingGroup, fitted, talk, whole_output
from fastcomm.errors import ConfigError, FastcommError, inert_lines
from fastcomm.files import guarded
from fastcomm.process import interruptible
from fastcomm.version import __version__

# The line of each command in the main help. Its module, with _ for -, is imported when it runs.
COMMANDS = {
    "info": "Describe a run: format, ranks, steps, process groups",
    "metrics": "Measure where a step's time goes, by parallelism and rank",
    "report": "Write an HTML page of all metrics, causes first",
    "compare": "Compare two runs: what changed, and what it costs",
    "kernels": "List the kernels of a run: how long, how often, where",
    "critical-path": "Find the chain of work that determines the step time",
    "what-if": "Predict the step time with some work made faster",
    "replay": "Replay a step on its devices, as measured or changed",
    "stragglers": "Find the stragglers of a job from a table of operations",
    "stats": "List the operations of a run: how often, how long",
    "isp": "Find the fastest parallel strategy that fits in memory",
    "dispatch": "Simulate the all-to-all of a mixture of experts",
    "dpro": "Read dPRO trials: stats, replay, convert",
    "ingest": "Store a run as Parquet, which every command reads faster",
    "convert": "Write a run in another format, for other tools",
    "demo": "Write a made-up training job with a fault to find",
    "doctor": "Check the installation, a store, or a cluster",
    "completion": "Print the shell completion script",
}

_LOG = logging.getLogger("fastcomm")

INCOMPLETE = 3
REGRESSED = 4


class _ConfigException(click.ClickException):
    """A wrong command line or configuration file, in one line."""

    exit_code = 2


class _Group(SuggestingGroup):
    """Loads commands late; here alone an error of ours becomes one line and an exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        with whole_output():
            return super().main(*args, **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Their own first lines would be cut, and loading all commands takes 50 ms.
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"fastcomm.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.run
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name; take its defaults from the settings file.

        Returns the name of the command, the command, and the other arguments.
        """
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None:
            ctx.default_map = {name: settings.defaults(command, name)}
        return name, command, rest

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; errors become one line on stderr and exit code 1 or 2."""
        try:
            with interruptible(), guarded():
                return super().invoke(ctx)
        except FastcommError as error:
            _LOG.debug("where this is from:", exc_info=error)
            message = fitted(inert_lines(str(error)), first=len("Error: "))
            kind = _ConfigException if isinstance(error, ConfigError) else click.ClickException
            raise kind(message) from error
        except MemoryError as error:
            raise click.ClickException(
                "out of memory; --ranks takes fewer ranks, --workers 1 one at a time"
            ) from error
        except OutputError:
            sys.exit(1)  # `whole_output` says why
        except OSError as error:
            raise click.ClickException(inert_lines(_os_error_text(error))) from error


def _os_error_text(error: OSError) -> str:
    """Return the reason that the system gives for an error, after the file or "output"."""
    return f"{error.filename or 'output'}: {error.strerror or error}"


_CONTEXT = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "FASTCOMM"}


@click.group(cls=_Group, context_settings=_CONTEXT)
@click.version_option(__version__, package_name="fastcomm")
@click.help_option("-h", "--help", "--help-all")
def main() -> None:
    """Find where a distributed training step's time goes.

    Start with `fastcomm demo`, or point `fastcomm metrics` at a directory of traces, of the
    PyTorch profiler or of Nsight Systems.
    """
    talk(logging.INFO)
