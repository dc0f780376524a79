"""Options that a user does not want to type each time: a file, by command.

What the command line says wins over the environment, that over the file, that over the
defaults.
"""

import os
from pathlib import Path
from typing import Any

import click

from fastcomm.errors import ConfigError

FILE = "FASTCOMM_SETTINGS"  # the environment variable that names another file


def path() -> Path | None:
    """Return the path of the settings file, which need not exist; None without a home."""
    if environment_path := os.environ.get(FILE):
        return Path(environment_path)
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not folder.is_absolute():  # invalid, and would be one of the working directory
        try:
            folder = Path.home() / ".config"
        except RuntimeError:
            return None
    return folder / "fastcomm" / "settings.toml"


def defaults(command: click.Command, name: str) -> dict[str, Any]:
    """Return the settings of one command, by the names of its parameters.

    `name` is that of the command, and of its table in the file. Raises `ConfigError` where that
    has a key that is no option of the command, or if a file that the environment names is
    absent.
    """
    file = path()
    if file is None or not _is_there(file):
        if FILE in os.environ:
            raise ConfigError(f"{file}: no such file; {FILE} names it")
        return {}
    from fastcomm import files

    section = files.toml(file).get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: {name} is no table; begin it with [{name}]")
    return _by_parameter(command, section, f"{file}: [{name}]")


def _is_there(file: Path) -> bool:
    """Return whether a file exists; False where the user may not read its directory."""
    try:
        return file.exists()
    except OSError:  # a home that this user may not look into
        return False


def _by_parameter(
    command: click.Command, settings: dict[str, Any], where: str
) -> dict[str, Any]:
    """Return the settings of a command by the names of its parameters.

    Those of a group are a dictionary for each of its commands. Errors begin with `where`.
    """
    if isinstance(command, click.Group):
        inner = {}
        for name, options in settings.items():
            below = command.commands.get(name)
            if below is None or not isinstance(options, dict):
                raise ConfigError(
                    f"{where}: no table {name}: expected one of {', '.join(command.commands)}"
                )
            inner[name] = _by_parameter(below, options, f"{where[:-1]}.{name}]")
        return inner
    by_command = {}
    for name, below in getattr(command, "commands", {}).items():
        if isinstance(settings.get(name), dict):
            table = f"{where[:-1]}.{name}]"
            by_command[name] = _by_parameter(below, settings[name], table)
    settings = {key: value for key, value in settings.items() if key not in by_command}
    by_option = {
        word.removeprefix("--"): parameter.name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for word in parameter.opts
    }
    if unknown := [key for key in settings if key not in by_option]:
        from difflib import get_close_matches

        near = get_close_matches(unknown[0], by_option)
        hint = f"did you mean {near[0]!r}?" if near else "--help-all lists the options"
        raise ConfigError(f"{where}: the command has no option {unknown[0]!r}; {hint}")
    return {
        **by_command,
        **{str(by_option[key]): value for key, value in settings.items()},
    }
