"""What a command says beside its result: on stderr, with names that do nothing."""

import click

from fastcomm.inert import inert_lines


def say(*lines: str) -> None:
    """Print lines to stderr."""
    for line in lines:
        click.echo(inert_lines(line), err=True)


def warn(warnings: tuple[str, ...]) -> None:
    """Print warnings to stderr."""
    say(*(f"warning: {warning}" for warning in warnings))
