"""The command line: words in, a report out. No command computes.

Exit codes: 0 done, 1 a user's error in one line, 2 wrong usage, 3 done but ranks were left out,
4 a condition of `compare --fail-if` holds, 141 nobody reads the output any more, 143 ended by
SIGTERM.
"""

import logging
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from fastcomm.cli import settings
from fastcomm.cli.messages import OutputError, SuggestingGroup, fitted, talk, whole_output
from fastcomm.errors import FastcommError, inert_lines
from fastcomm.files import guarded
from fastcomm.process import interruptible
from fastcomm.version import __version__

# What each command is for, in a line of the main help. A command is a module of its name, - as
# _: loaded when it is called for.
COMMANDS = {
    "info": "Say what a run is: format, ranks, steps, process groups",
    "metrics": "Measure where a step's time goes, by parallelism and rank",
    "report": "Write one page of all that is measured, causes first",
    "compare": "Say what changed between two runs, by its effect",
    "critical-path": "Find the chain of work that sets the time of a step",
    "what-if": "Ask how long a step would take, were some work faster",
    "replay": "Replay a step on its devices, or with other communication",
    "stragglers": "Find what holds a production job up, from its operations",
    "stats": "Describe the operations of a run: how often, how long",
    "isp": "Find the parallel strategy that trains fastest and fits",
    "dispatch": "Simulate the all-to-all of a mixture of experts",
    "ingest": "Store a run as Parquet, which every command reads faster",
    "convert": "Write a run in another format, for other tools",
    "demo": "Write a made-up training job with a fault to find",
    "doctor": "Say what fastcomm runs on, and whether it works",
    "completion": "Print the script for completion in a shell",
}

# Commands that print tables.
_PRINTING = (
    *("info", "metrics", "compare", "critical-path", "what-if", "replay", "stragglers"),
    *("stats", "isp", "dispatch"),
)
_LOG = logging.getLogger("fastcomm")

INCOMPLETE = 3
REGRESSED = 4


class _Group(SuggestingGroup):
    """Loads commands late; here alone an error of ours becomes one line and exit code 1."""

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
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"fastcomm.cli.{cmd_name.replace('-', '_')}").run
        _let_talk(command, has_tables=cmd_name in _PRINTING)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None:
            ctx.default_map = {name: settings.defaults(command, name)}
        return name, command, rest

    def invoke(self, ctx: click.Context) -> object:
        try:
            with interruptible(), guarded():
                return super().invoke(ctx)
        except FastcommError as error:
            _LOG.debug("where this is from:", exc_info=error)
            message = fitted(inert_lines(str(error)), first=len("Error: "))
            raise click.ClickException(message) from error
        except MemoryError as error:
            raise click.ClickException(
                "out of memory; --ranks takes fewer ranks, --workers 1 one at a time"
            ) from error
        except OutputError:
            sys.exit(1)  # `whole_output` says why
        except OSError as error:
            raise click.ClickException(inert_lines(_words(error))) from error


def _let_talk(command: click.Command, *, has_tables: bool) -> None:
    """Add the options about what is printed to a command and its subcommands."""
    if not any(each.name == "quiet" for each in command.params):
        command.params += [*([_wide()] if has_tables else []), *_talking()]
    for inner in getattr(command, "commands", {}).values():
        _let_talk(inner, has_tables=has_tables)


def _wide() -> click.Parameter:
    """The option of commands that print tables."""

    def widen(ctx: click.Context, _option: click.Parameter, is_wide: bool) -> None:
        if is_wide:
            from fastcomm.report.console import WIDE

            token = WIDE.set(True)
            ctx.call_on_close(lambda: WIDE.reset(token))

    return click.Option(
        ["--wide"],
        is_flag=True,
        expose_value=False,
        callback=widen,
        help="Print every column of every table, however long the lines get.",
    )


def _talking() -> list[click.Parameter]:
    """Options of every command, about what it says beside its result."""

    def level(number: int) -> Callable[[click.Context, click.Parameter, bool], None]:
        return lambda _ctx, _option, is_said: talk(number) if is_said else None

    return [
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=level(logging.ERROR),
            help="No progress, notes and warnings on stderr; errors remain.",
        ),
        click.Option(
            ["-v", "--verbose"],
            is_flag=True,
            expose_value=False,
            callback=level(logging.DEBUG),
            help="Say on stderr what takes how long, and where errors are from.",
        ),
    ]


def _words(error: OSError) -> str:
    """What the system says of a file, or of where the result is printed to."""
    return f"{error.filename or 'output'}: {error.strerror or error}"


_CONTEXT = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "FASTCOMM"}


@click.group(cls=_Group, context_settings=_CONTEXT)
@click.version_option(__version__, package_name="fastcomm")
def main() -> None:
    """Find where a distributed training step's time goes.

    Start with `fastcomm demo`, or point `fastcomm metrics` at a directory of traces, of the
    PyTorch profiler or of Nsight Systems.
    """
    talk(logging.INFO)
