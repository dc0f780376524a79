"""The command line: each command parses its options, calls an analysis, and prints a report.

Exit codes: 0 done, 1 the input or the run failed, 2 the command line or a configuration file is
wrong, 3 done but ranks were left out, 4 a condition of `--fail-if` holds, 5 `hang` has
found one, 141 nobody reads the output any more, 143 ended by SIGTERM.

Options that a user does not want to type each time are in a settings file, by command. The
command line wins over the environment, that over the file, that over the defaults.
"""

import logging
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from fastcomm.cli.messages import OutputError, exit_on_output_errors, fitted, talk
from fastcomm.errors import ConfigError, FastcommError, inert, inert_lines, shell_quoted
from fastcomm.files import guarded, toml
from fastcomm.process import interruptible
from fastcomm.version import __version__

# The line of each command in the main help.
COMMANDS = {
    "info": "Describe a run: format, ranks, steps, process groups",
    "metrics": "Measure where a step's time goes, by parallelism and rank",
    "report": "Write an HTML page of all metrics, causes first",
    "compare": "Compare two runs: what changed, and what it costs",
    "watch": "Report the profiled windows of running jobs, and what changed",
    "baseline": "Save the metrics of a run, to compare later runs with",
    "kernels": "List the kernels of a run: how long, how often, where",
    "sql": "Answer SQL queries on the ranks, steps and events of a run",
    "critical-path": "Find the chain of work that determines the step time",
    "what-if": "Predict the step time with some work made faster",
    "stragglers": "Find the stragglers of a job from a table of operations",
    "hang": "Find why a job hangs, from the dumps of its ranks",
    "plan": "Find the fastest strategy that today's trainers can run",
    "isp": "Search strategies of sequence parallelism, as InternEvo does",
    "dispatch": "Simulate the all-to-all of a mixture of experts",
    "dpro": "Read dPRO trials: stats, replay, convert",
    "ingest": "Store a run as Parquet, which every command reads faster",
    "convert": "Write a run in another format, for other tools",
    "mcp": "Serve runs to agents by the Model Context Protocol",
    "skill": "Print a skill file that teaches agents the method",
    "demo": "Write a made-up training job with a fault to find",
    "doctor": "Check the installation, a store, or a cluster",
    "completion": "Print the shell completion script",
}
# The function of a command, below fastcomm; its module is imported when it runs.
# Others are `run` of the module `command` in the package with their name.
_PLACES = {
    "compare": "comparison.command.run",
    "baseline": "comparison.command.baseline",
    "kernels": "device_work.command.run",
    "what-if": "critical_path.command.what_if",
    "plan": "planning.command.run",
    "dpro": "compat.dpro.command.run",
    "mcp": "agents.command.mcp",
    "skill": "agents.command.skill",
    "demo": "synthetic.command.run",
    "doctor": "info.command.doctor",
    "completion": "cli.completion.run",
}

_LOG = logging.getLogger("fastcomm")
INCOMPLETE = 3
REGRESSED = 4
SETTINGS = "FASTCOMM_SETTINGS"  # the environment variable that names another file


def settings_path() -> Path | None:
    """Return the path of the settings file, which need not exist; None without a home."""
    if environment_path := os.environ.get(SETTINGS):
        return Path(environment_path)
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():  # invalid, and would be one of the working directory
        try:
            folder = Path.home() / ".config"
        except RuntimeError:
            return None
    return folder / "fastcomm" / "settings.toml"


def settings(command: click.Command, name: str) -> dict[str, Any]:
    """Return the settings of one command, by the names of its parameters.

    `name` is that of the command, and of its table in the file. Raises `ConfigError` where that
    has a key that is no option of the command, or if a file that the environment names is
    absent.
    """
    file = settings_path()
    if file is None or not _is_there(file):
        if SETTINGS in os.environ:
            raise ConfigError(f"{file}: no such file; {SETTINGS} names it")
        return {}
    section = toml(file).get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: {name} is no table; begin it with [{name}]")
    return _by_parameter(command, section, f"{file}: [{name}]")


def _is_there(file: Path) -> bool:
    """Return whether a file exists; False where the user may not read its directory."""
    try:
        return file.exists()
    except OSError:  # a home that this user may not look into
        return False


def _by_parameter(command: click.Command, table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of a command by the names of its parameters.

    Those of a group are a dictionary for each of its commands. Errors begin with `where`.
    """
    commands = getattr(command, "commands", {})
    inner = {
        name: _by_parameter(commands[name], value, f"{where[:-1]}.{name}]")
        for name, value in table.items()
        if name in commands and isinstance(value, dict)
    }
    own = {key: value for key, value in table.items() if key not in inner}
    if own and isinstance(command, click.Group):
        expected = f"expected one of {', '.join(commands)}"
        raise ConfigError(f"{where}: no table {next(iter(own))}: {expected}")
    by_option = {
        word.removeprefix("--"): parameter.name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for word in parameter.opts
    }
    if unknown := [key for key in own if key not in by_option]:
        near = get_close_matches(unknown[0], by_option)
        hint = f"did you mean {near[0]!r}?" if near else "--help-all lists the options"
        raise ConfigError(f"{where}: the command has no option {unknown[0]!r}; {hint}")
    return {**inner, **{str(by_option[key]): value for key, value in own.items()}}


class SuggestingGroup(click.Group):
    """A group that names the command that was probably meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a usage error says that options follow the command."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            names = ", ".join(word for param in self.params for word in param.opts)
            raise click.UsageError(
                f"No such option {error.option_name!r} before a command; there are {names}. "
                f"Others follow the command, as in `{ctx.command_path} COMMAND "
                f"{error.option_name}`.",
                ctx,
            ) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the arguments; else a usage error names the nearest one."""
        name = args[0]
        is_option = name.startswith("-") or ctx.resilient_parsing
        if not is_option and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{self._suggestion(ctx, name)}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, ctx: click.Context, name: str) -> str:
        """Return the command that was probably meant, as a sentence; empty without one."""
        commands = self.list_commands(ctx)
        near = [command for command in commands if command.startswith(name.lower())]
        near = near or get_close_matches(name.lower(), commands, cutoff=0.5)
        if near:
            return f" Did you mean {near[0]!r}?"
        if f"--{name}" in (word for param in ctx.command.params for word in param.opts):
            return f" Did you mean '--{name}'?"
        if "metrics" in commands and Path(name).exists():
            return f" To measure {name}: {ctx.command_path} metrics {shell_quoted(name)}"
        return ""


class _ConfigException(click.ClickException):
    """A wrong command line or configuration file, in one line."""

    exit_code = 2


class _Group(SuggestingGroup):
    """Loads commands late; here alone an error of ours becomes one line and an exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        with exit_on_output_errors():
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
        place = _PLACES.get(cmd_name, f"{cmd_name.replace('-', '_')}.command.run")
        module, _, name = place.rpartition(".")
        command: click.Command = getattr(import_module(f"fastcomm.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name; take its defaults from the settings file.

        Returns the name of the command, the command, and the other arguments.
        """
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None:
            ctx.default_map = {name: settings(command, name)}
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
            sys.exit(1)  # `exit_on_output_errors` says why
        except OSError as error:
            raise click.ClickException(inert(_os_error_text(error))) from error


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
